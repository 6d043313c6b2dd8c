"""The link to a controller: where to publish, and which brokers a topic has.

In: publishers that ask for a broker, topics to watch. Out: addresses of brokers. Publishers of one loop that ask within
a few milliseconds share one request, so a broker's death does not cause a thousand of them. The cluster remembers the
controller's last answer and uses its list of brokers while the controller is away.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol
from urllib.parse import quote
from zlib import crc32

from srtm.errors import ClientError, ControllerAway
from srtm.net.backoff import Backoff
from srtm.net.several import resolved_urls, urls
from srtm.net.tls import context_of_environment

try:
    import httpx
except ImportError:
    raise ImportError("srtm.client needs httpx: pip install 'srtm[client]'", name="httpx") from None

DEFAULT_CONTROLLER = "http://127.0.0.1:4161"
_TOGETHER_S = 0.003  # how long a request waits for more publishers
_ANSWER_S = 5.0
_KEPT_S = 2.0  # a controller closes idle connections after 5 s, and a request that crosses with that would fail
_SILENCE_S = 25.0  # a watch sends something every 10 s


@dataclass(frozen=True, slots=True)
class PublisherSpec:
    """What a publisher tells the controller about itself; `rate` is in messages per second."""

    id: str
    group: str | None = None
    rate: float | None = None
    process: Literal["poisson", "periodic"] | None = None
    batch: int = 1
    jitter_ms: float = 0.0
    split: bool = False

    def document(self) -> dict[str, Any]:
        """Return the declaration as JSON; older controllers do not know `split`."""
        found = asdict(self)
        if not self.split:
            del found["split"]
        return found


class Place(NamedTuple):
    """The broker of a publisher, or of one of its parts, and the id to connect with."""

    id: str
    address: str


class Home(Protocol):
    """Knows which broker a publisher belongs to."""

    async def places(self, lost: Iterable[str]) -> list[str]:
        """Return addresses of brokers, the best first; `lost` are addresses that could not be reached."""


class Fixed:
    """Given brokers, without a controller."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = list(addresses)

    async def places(self, lost: Iterable[str]) -> list[str]:
        """Return the given brokers: a lost one may be back."""
        del lost
        return self._addresses


class Assigned:
    """The broker that the controller assigns; while the controller is away, any broker that the topic had.

    `part` is the id of one part of a split publisher; `told` is called with all of its parts at each answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        spec: PublisherSpec,
        known: str | None = None,
        part: str | None = None,
        told: Callable[[list[Place]], None] | None = None,
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._spec = spec
        self._known = known  # the controller's first answer, if there is one already
        self._part = part or spec.id
        self._told = told

    async def places(self, lost: Iterable[str]) -> list[str]:
        """Return the assigned broker, or all fall-backs with the lost ones last."""
        lost = set(lost)
        known, self._known = self._known, None
        if known is not None:
            return [known]
        try:
            parts = await self._cluster.parts(self._topic, self._spec, lost)
        except ControllerAway:
            brokers = self._cluster.brokers(self._topic)
            if not brokers:
                raise
            # Each publisher has its own order, so those of a dead broker spread over the others.
            return sorted(brokers.values(), key=lambda at: (at in lost, crc32(f"{self._part} {at}".encode())))
        if self._told is not None:
            self._told(parts)
        # A part that is not needed any more sends its last messages beside another.
        return [next((part.address for part in parts if part.id == self._part), parts[0].address)]


class Cluster:
    """A controller, as clients see it, or several; `async with` closes it. Clients of one loop share one per address.

    `controller` may list several addresses, as in `http://a:4161,b:4161`, or be a name with several records. Any of
    them answers for the one that leads, so if one does not answer, another is asked.
    """

    _shared: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str, str | None], Cluster]] = {}

    def __init__(
        self, controller: str = DEFAULT_CONTROLLER, *, token: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.urls = urls(controller)
        self.controller = ",".join(self.urls)
        self.tls = tls
        self._resolved: list[str] = []  # the same with names resolved; the one to ask first is the first
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Loading certificates takes 50 ms.
        verify = tls or (context_of_environment() if "https:" in self.controller else False)
        try:
            # Ignore proxies of the environment: a controller is near, and a watch lasts long.
            for url in self.urls:
                httpx.URL(url)
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=_ANSWER_S,
                trust_env=False,
                verify=verify,
                limits=httpx.Limits(keepalive_expiry=_KEPT_S),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ClientError(f"invalid controller address {controller!r}: {error}") from None
        self._brokers: dict[str, dict[str, str]] = {}
        self._names: dict[str, str] = {}  # of brokers, by address
        self._delivery: dict[str, set[str]] = {}
        self._asking: dict[str, list[tuple[PublisherSpec, set[str], asyncio.Future[list[Place]]]]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._users = 0
        self._failed = 0  # controllers in a row

    @classmethod
    def shared(cls, controller: str, token: str | None = None) -> Cluster:
        """Return the cluster that all clients of this loop share; give it back with `release`."""
        key = (asyncio.get_running_loop(), controller, token)
        cluster = cls._shared.get(key)
        if cluster is None:
            cluster = cls._shared[key] = cls(controller, token=token)
        cluster._users += 1
        return cluster

    async def release(self) -> None:
        """Give a shared cluster back; the last client closes it."""
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
        """Cancel all requests, and close the connections."""
        for request in list(self._requests):
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        await self._http.aclose()

    def brokers(self, topic: str) -> dict[str, str]:
        """Return the addresses of the topic's brokers by name, as the controller last said."""
        return self._brokers.get(topic, {})

    def delivery(self, topic: str) -> set[str]:
        """Return where the topic's messages are delivered, as the controller last said: brokers, or engines."""
        found = self._delivery.get(topic)
        return set(self.brokers(topic).values()) if found is None else found

    async def where(self, topic: str, publisher: PublisherSpec, lost: Iterable[str] = ()) -> str:
        """Register a publisher and return its broker's address; `lost` are addresses that it cannot reach."""
        return (await self.parts(topic, publisher, lost))[0].address

    async def parts(self, topic: str, publisher: PublisherSpec, lost: Iterable[str] = ()) -> list[Place]:
        """Register a publisher and return the places of its parts; one that is not split has one."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Place]] = loop.create_future()
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

    async def _asked(
        self, topic: str, asking: list[tuple[PublisherSpec, set[str], asyncio.Future[list[Place]]]]
    ) -> None:
        publishers = {spec.id: spec.document() for spec, _, _ in asking}
        document = {
            "publishers": list(publishers.values()),
            "lost": sorted(set().union(*(lost for _, lost, _ in asking))),
        }
        problem: ClientError | None = None
        places: dict[str, list[Place]] = {}
        refused: dict[str, str] = {}
        try:
            answer = await self.request("POST", topic_path(topic, "publishers"), document)
            self._remember(topic, answer)
            for name, place in answer["publishers"].items():
                parts = (answer.get("parts") or {}).get(name) or [{"id": name, **place}]
                places[name] = [Place(part["id"], part["address"]) for part in parts]
                self._names |= {part["address"]: part["broker"] for part in parts}
            refused = answer.get("refused") or {}
        except ClientError as error:
            problem = error
        except (KeyError, TypeError, AttributeError) as error:
            problem = ControllerAway(f"unexpected answer from {self.controller}: {error!r}")
        finally:
            problem = problem or ControllerAway(f"the request to {self.controller} was cancelled")
            for spec, _, waiting in asking:
                if waiting.done():
                    continue
                if spec.id in places:
                    waiting.set_result(places[spec.id])
                elif spec.id in refused:
                    waiting.set_exception(ClientError(f"{self.controller}: {refused[spec.id]}"))
                else:  # one exception each: a shared one would collect the frames of all who raise it
                    waiting.set_exception(type(problem)(str(problem), **problem.facts))

    def _remember(self, topic: str, said: dict[str, Any]) -> None:
        brokers: dict[str, str] = said["brokers"]
        self._brokers[topic] = dict(brokers)
        self._names |= {address: name for name, address in brokers.items()}
        if (places := _places(said.get("delivery"))) is not None:
            self._delivery[topic] = places

    async def remove(self, topic: str, publisher: str) -> None:
        """Tell the controller that a publisher is gone for good."""
        await self.request("DELETE", topic_path(topic, "publishers", publisher))

    async def request(self, method: str, path: str, document: Any = None) -> Any:
        """Return the controller's answer; ControllerAway if none answers, ClientError if it refuses."""
        problem: ControllerAway | None = None
        for url in await self._in_turn():
            try:
                answer = await self._http.request(method, url + path, json=document)
            except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
                problem = ControllerAway(
                    f"no controller answers at {self.controller} ({str(error) or type(error).__name__}): start one with"
                    " srtm up, or give its address"
                )
                self._avoid(url)
                continue
            if answer.status_code < 500:
                self._failed = 0
                return self._read(url, answer)
            problem = ControllerAway(f"{url}: {_detail(answer)}", status=answer.status_code)
            self._avoid(url)
        assert problem is not None
        raise problem

    def _read(self, url: str, answer: httpx.Response) -> Any:
        if answer.status_code >= 400:
            raise ClientError(f"{url}: {_detail(answer)}", status=answer.status_code)
        try:
            return answer.json() if answer.content else None
        except ValueError:
            raise ControllerAway(f"{url} is not a controller: it answers {answer.text[:100]!r}") from None

    async def _in_turn(self) -> list[str]:
        """Return the controllers to ask, the best first; all of them answer for the one that leads."""
        if not self._resolved:
            self._resolved = await resolved_urls(self.controller)
        return list(self._resolved)

    def _avoid(self, url: str) -> None:
        """Ask this controller last from now on; if all failed in turn, resolve their names again."""
        if self._resolved[:1] == [url]:
            self._resolved = [*self._resolved[1:], url]
        self._failed += 1
        if self._failed >= len(self._resolved):
            self._resolved, self._failed = [], 0

    async def watch(self, topic: str) -> AsyncGenerator[dict[str, str], None]:
        """Yield the addresses of the topic's brokers by name: now, and at every change."""
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
                if self._resolved:  # the last answer stays in use
                    self._avoid(self._resolved[0])
            await asyncio.sleep(backoff.next_s())

    async def _events(self, topic: str) -> AsyncGenerator[tuple[str, Any], None]:
        timeout = httpx.Timeout(_ANSWER_S, read=_SILENCE_S)
        url = (await self._in_turn())[0]
        async with self._http.stream("GET", url + topic_path(topic, "watch"), timeout=timeout) as answer:
            if answer.status_code != 200:
                await answer.aread()
                kind = ControllerAway if answer.status_code >= 500 else ClientError
                raise kind(f"{url}: {_detail(answer)}", status=answer.status_code)
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
    """Return the places in a controller's answer; None if it names none."""
    if not isinstance(delivery, list):
        return None
    return {str(address) for each in delivery for address in each["addresses"]}


def topic_path(topic: str, *more: str) -> str:
    """Return the path of a topic, or of something below it, at a controller; any name is quoted."""
    return "/".join(["/v1/topics", *map(_segment, (topic, *more))])


def _segment(name: str) -> str:
    # Quote dots by hand: "." and ".." would be steps within the path.
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
    """Return the reason in a controller's refusal; None if the answer has none."""
    detail = answer.get("detail", answer.get("message")) if isinstance(answer, dict) else None
    if isinstance(detail, list):  # one problem per invalid field
        return "; ".join(": ".join(filter(None, (_field(each), _said(each)))) for each in detail)
    return detail if isinstance(detail, str) else None
