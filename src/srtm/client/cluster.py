"""The link to a controller: where to publish, and which brokers a topic has.

In: publishers that ask, topics that are watched. Out: addresses of brokers. All that publishers of one loop ask within
a few milliseconds goes into one request, so that a thousand whose broker died are one question. What the controller
said last is kept: while it is away, its list of brokers serves.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol
from urllib.parse import quote
from zlib import crc32

from srtm.errors import ClientError, ControllerAway
from srtm.net.backoff import Backoff

try:
    import httpx
except ImportError:
    raise ImportError("srtm.client needs httpx: pip install 'srtm[client]'", name="httpx") from None

DEFAULT_CONTROLLER = "http://127.0.0.1:4161"
_TOGETHER_S = 0.003  # how long a question waits for others
_ANSWER_S = 5.0
_SILENCE_S = 25.0  # a watch says something every 10 s


@dataclass(frozen=True, slots=True)
class PublisherSpec:
    """What a publisher tells the controller about itself; `rate` is in messages a second."""

    id: str
    group: str | None = None
    rate: float | None = None
    process: Literal["poisson", "periodic"] | None = None
    batch: int = 1
    jitter_ms: float = 0.0


class Home(Protocol):
    """Who knows where a publisher belongs."""

    async def places(self, lost: Iterable[str]) -> list[str]:
        """Addresses of brokers, the best first; `lost` are addresses that could not be reached."""


class Fixed:
    """A broker that was named, and no controller."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = list(addresses)

    async def places(self, lost: Iterable[str]) -> list[str]:
        """Always the same: it may be back."""
        del lost
        return self._addresses


class Assigned:
    """A publisher's broker, as the controller assigns it; while that is away, any that the topic had."""

    def __init__(self, cluster: Cluster, topic: str, spec: PublisherSpec, known: str | None = None) -> None:
        self._cluster = cluster
        self._topic = topic
        self._spec = spec
        self._known = known  # what the controller said already

    async def places(self, lost: Iterable[str]) -> list[str]:
        """The assigned broker, or every fall-back, those first that were not lost."""
        lost = set(lost)
        known, self._known = self._known, None
        if known is not None:
            return [known]
        try:
            return [await self._cluster.where(self._topic, self._spec, lost)]
        except ControllerAway:
            brokers = self._cluster.brokers(self._topic)
            if not brokers:
                raise
            # Publishers of a dead broker spread over the others, and each tries them in an order of its own.
            return sorted(brokers.values(), key=lambda at: (at in lost, crc32(f"{self._spec.id} {at}".encode())))


class Cluster:
    """A controller, as clients see it. `async with` closes it; publishers of one loop share one by its address."""

    _shared: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str, str | None], Cluster]] = {}

    def __init__(
        self, controller: str = DEFAULT_CONTROLLER, *, token: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.controller = (controller if "://" in controller else f"http://{controller}").rstrip("/")
        self.tls = tls
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            # No proxy of the environment: a controller is near, and a watch is long.
            self._http = httpx.AsyncClient(
                base_url=self.controller, headers=headers, timeout=_ANSWER_S, trust_env=False, verify=tls or True
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ClientError(f"{controller!r} is no address of a controller: {error}") from None
        self._brokers: dict[str, dict[str, str]] = {}
        self._names: dict[str, str] = {}  # of brokers, by address
        self._delivery: dict[str, set[str]] = {}
        self._asking: dict[str, list[tuple[PublisherSpec, set[str], asyncio.Future[str]]]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._users = 0

    @classmethod
    def shared(cls, controller: str, token: str | None = None) -> Cluster:
        """The cluster that all clients of this loop use; give it back with `release`."""
        key = (asyncio.get_running_loop(), controller, token)
        cluster = cls._shared.get(key)
        if cluster is None:
            cluster = cls._shared[key] = cls(controller, token=token)
        cluster._users += 1
        return cluster

    async def release(self) -> None:
        """One client of a shared cluster is done; with the last one it is closed."""
        self._users -= 1
        if self._users > 0:
            return
        for key in [key for key, cluster in self._shared.items() if cluster is self]:
            del self._shared[key]
        await self.close()

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ask nothing more."""
        for request in list(self._requests):
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        await self._http.aclose()

    def brokers(self, topic: str) -> dict[str, str]:
        """Addresses of the topic's brokers by name, as the controller said last."""
        return self._brokers.get(topic, {})

    def delivery(self, topic: str) -> set[str]:
        """Where the topic's messages are delivered, as the controller said last: brokers, or addresses of engines."""
        found = self._delivery.get(topic)
        return set(self.brokers(topic).values()) if found is None else found

    async def where(self, topic: str, publisher: PublisherSpec, lost: Iterable[str] = ()) -> str:
        """The address of the publisher's broker; asking registers it. `lost` are addresses that it cannot reach."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._asking[topic] = []
            loop.call_later(_TOGETHER_S, self._ask, topic)
        asking.append((publisher, {self._names.get(address, address) for address in lost}, answer))
        return await answer

    def _ask(self, topic: str) -> None:
        task = asyncio.get_running_loop().create_task(self._asked(topic, self._asking.pop(topic)))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _asked(self, topic: str, asking: list[tuple[PublisherSpec, set[str], asyncio.Future[str]]]) -> None:
        publishers = {spec.id: asdict(spec) for spec, _, _ in asking}
        document = {
            "publishers": list(publishers.values()),
            "lost": sorted(set().union(*(lost for _, lost, _ in asking))),
        }
        problem: ClientError | None = None
        places: dict[str, str] = {}
        try:
            answer = await self.request("POST", topic_path(topic, "publishers"), document)
            self._remember(topic, answer)
            for name, place in answer["publishers"].items():
                places[name] = place["address"]
                self._names[place["address"]] = place["broker"]
        except ClientError as error:
            problem = error
        except (KeyError, TypeError, AttributeError) as error:
            problem = ControllerAway(f"the answer of {self.controller} makes no sense: {error!r}")
        finally:
            problem = problem or ControllerAway(f"{self.controller} was not asked to the end")
            for spec, _, waiting in asking:
                if waiting.done():
                    continue
                if spec.id in places:
                    waiting.set_result(places[spec.id])
                else:  # an exception for each: one that is raised in many places collects all of their frames
                    waiting.set_exception(type(problem)(str(problem), **problem.facts))

    def _remember(self, topic: str, said: dict[str, Any]) -> None:
        brokers: dict[str, str] = said["brokers"]
        self._brokers[topic] = dict(brokers)
        self._names |= {address: name for name, address in brokers.items()}
        if (places := _places(said.get("delivery"))) is not None:
            self._delivery[topic] = places

    async def remove(self, topic: str, publisher: str) -> None:
        """The publisher is gone for good."""
        await self.request("DELETE", topic_path(topic, "publishers", publisher))

    async def request(self, method: str, path: str, document: Any = None) -> Any:
        """The controller's answer; ControllerAway if there is none, ClientError with its words if it refuses."""
        try:
            answer = await self._http.request(method, path, json=document)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            raise ControllerAway(
                f"no controller answers at {self.controller} ({str(error) or type(error).__name__}): start one with"
                " srtm up, or say where it is"
            ) from None
        if answer.status_code >= 500:
            raise ControllerAway(f"{self.controller}: {_detail(answer)}", status=answer.status_code)
        if answer.status_code >= 400:
            raise ClientError(f"{self.controller}: {_detail(answer)}", status=answer.status_code)
        try:
            return answer.json() if answer.content else None
        except ValueError:
            raise ControllerAway(f"{self.controller} is no controller: {answer.text[:100]!r}") from None

    async def watch(self, topic: str) -> AsyncGenerator[dict[str, str], None]:
        """The topic's brokers, address by name: now and at every change, for as long as anybody asks."""
        backoff = Backoff()
        while True:
            try:
                async with aclosing(self._events(topic)) as events:
                    async for name, data in events:
                        if name == "brokers":
                            self._remember(topic, data)
                            backoff = Backoff()
                            yield self.brokers(topic)
            except (httpx.HTTPError, ControllerAway, ValueError, KeyError):
                pass  # what was known last goes on
            await asyncio.sleep(backoff.next_s())

    async def _events(self, topic: str) -> AsyncGenerator[tuple[str, Any], None]:
        timeout = httpx.Timeout(_ANSWER_S, read=_SILENCE_S)
        async with self._http.stream("GET", topic_path(topic, "watch"), timeout=timeout) as answer:
            if answer.status_code != 200:
                await answer.aread()
                kind = ControllerAway if answer.status_code >= 500 else ClientError
                raise kind(f"{self.controller}: {_detail(answer)}", status=answer.status_code)
            name, data = "", ""
            async for line in answer.aiter_lines():
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if field == "event":
                    name = value
                elif field == "data":
                    data += value
                elif not line and data:
                    yield name, json.loads(data)
                    name, data = "", ""


def _places(delivery: Any) -> set[str] | None:
    """The places of a controller's answer; None of one that does not tell them."""
    if not isinstance(delivery, list):
        return None
    return {str(address) for each in delivery for address in each["addresses"]}


def topic_path(topic: str, *more: str) -> str:
    """The path of a topic at a controller, or of something that belongs to it, whatever the names hold."""
    return "/".join(["/v1/topics", *map(_segment, (topic, *more))])


def _segment(name: str) -> str:
    # Dots are quoted by hand: the topics "." and ".." would be steps within the path.
    return name.replace(".", "%2E") if name in (".", "..") else quote(name, safe="", errors="surrogateescape")


def _detail(answer: httpx.Response) -> str:
    try:
        said = refusal(answer.json())
    except ValueError:
        said = None
    return said or f"{answer.status_code} {answer.reason_phrase}"


def _field(problem: dict[str, Any]) -> str:
    return ".".join(str(at) for at in problem["loc"][1:])


def _said(problem: dict[str, Any]) -> str:
    return str(problem["msg"]).removeprefix("Value error, ")


def refusal(answer: Any) -> str | None:
    """The sentence in a controller's answer that refuses; None if there is none that it would write."""
    detail = answer.get("detail", answer.get("message")) if isinstance(answer, dict) else None
    if isinstance(detail, list):  # of fields that cannot be
        return "; ".join(": ".join(filter(None, (_field(each), _said(each)))) for each in detail)
    return detail if isinstance(detail, str) else None
