"""The logs of a `disk` topic at its brokers, over HTTP: where they are, their extents, their rows.

In: a controller or the addresses of brokers. Out: extents by broker, and the Arrow batches of an offset range; the same
range always gives the same rows. A broker that does not respond raises `Away`; `patiently` tries again.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from srtm.errors import InputError, LogError, LogReplaced, OffsetTrimmed, PipelineError
from srtm.net.backoff import Backoff
from srtm.net.tls import context_of_environment
from srtm.pipeline.streaming.positions import Extent

if TYPE_CHECKING:
    import pyarrow as pa

    from srtm.pipeline.streaming.positions import Position
    from srtm.pipeline.streaming.settings import Settings

T = TypeVar("T")

_ANSWER_S = 10.0
_ROWS = 10_000  # per request; a broker sends at most a megabyte
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # for plain HTTP


class Away(Exception):
    """A broker, controller or engine does not respond, or cannot serve the request now."""


class Refused(Exception):
    """A request was refused: the HTTP status and the text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Contract(NamedTuple):
    """A topic's bucket: r tokens a second, b tokens at most."""

    r: float
    b: float


def ask(url: str, method: str = "GET", **query: object) -> bytes:
    """The body of an HTTP response."""
    return send(url, method, query)


def _opener(url: str) -> urllib.request.OpenerDirector:
    if not url.startswith("https:"):
        return _DIRECT
    secured = urllib.request.HTTPSHandler(context=context_of_environment())
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), secured)


def send(
    url: str,
    method: str = "GET",
    query: Mapping[str, object] | None = None,
    *,
    bearer: str | None = None,
    body: bytes | None = None,
) -> bytes:
    """The body of an HTTP response; `bearer` is a token to show, `body` JSON to send.

    A URL may list several hosts, as in `http://a:4161,b:4161/path`; the first that is there answers.
    """
    scheme, _, rest = url.partition("://")
    hosts, slash, path = rest.partition("/")
    first, comma, others = hosts.partition(",")
    if comma:
        try:
            return send(f"{scheme}://{first}{slash}{path}", method, query, bearer=bearer, body=body)
        except Away:
            more = others.removeprefix(f"{scheme}://")
            return send(f"{scheme}://{more}{slash}{path}", method, query, bearer=bearer, body=body)
    request = urllib.request.Request(f"{url}?{urlencode(query)}" if query else url, body, method=method)
    if bearer is not None:
        request.add_header("Authorization", f"Bearer {bearer}")
    if body is not None:
        request.add_header("Content-Type", "application/json")
    try:
        with _opener(url).open(request, timeout=_ANSWER_S) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace").strip()
        if error.code >= 500:
            raise Away(f"{url} replies {error.code}: {text[:200]}") from None
        raise Refused(error.code, text) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise Away(f"{url} does not respond ({str(reason) or type(reason).__name__})") from None


def patiently(request: Callable[[], T], timeout_s: float) -> T:
    """The result of a request, repeated with back-off for `timeout_s` while it raises `Away`."""
    backoff, until = Backoff(), time.monotonic() + timeout_s
    while True:
        try:
            return request()
        except Away as problem:
            wait_s = backoff.next_s()
            if time.monotonic() + wait_s > until:
                remedy = "start it, or wait longer with option timeout"
                raise PipelineError(f"{problem}, for {timeout_s:g} s: {remedy}") from None
            time.sleep(wait_s)


class Logs:
    """Where a topic's logs are. It remembers brokers that are no longer listed, as they may return."""

    noun = "broker"  # whose name an offset has

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._urls: dict[str, str] = {}
        self._names: dict[str, str] = {}  # of configured brokers, by URL

    def look(self, *, strict: bool = False) -> dict[str, str]:
        """URLs of the current brokers, by name; with `strict`, raises `Away` if a configured one does not respond."""
        settings = self._settings
        if settings.brokers:
            found = [(name, url) for url in settings.brokers if (name := self._name(url, strict=strict))]
        else:
            found = self._listed(settings.controller)
        names = [name for name, _ in found]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two brokers are named {twice!r}: start each with its own --name")
        now = dict(found)
        self._urls |= now
        return now

    def url(self, broker: str, timeout_s: float) -> str:
        """The URL of a broker."""
        if broker not in self._urls:
            patiently(lambda: self._find(broker), timeout_s)
        return self._urls[broker]

    def adopt(self, broker: str, url: str) -> None:
        """Add a broker without looking it up."""
        self._urls[broker] = url

    def _find(self, broker: str) -> None:
        if broker not in self.look():
            raise Away(f"broker {broker!r}, which holds messages of topic {self._settings.topic!r}, is not listed")

    def _name(self, url: str, *, strict: bool) -> str | None:
        if url not in self._names:
            try:
                self._names[url] = str(json.loads(ask(f"{url}/info"))["hostname"])
            except Away:
                if strict:
                    raise
            except (Refused, ValueError, KeyError, TypeError):
                raise InputError(f"{url} is not a broker: give its HTTP address, for example 127.0.0.1:4151") from None
        return self._names.get(url)

    def _listed(self, controller: str) -> list[tuple[str, str]]:
        try:
            listed = json.loads(ask(f"{controller}/lookup", topic=self._settings.topic))["producers"]
            return [(each["hostname"], _http(each["broadcast_address"], each["http_port"])) for each in listed]
        except Refused as refused:
            if "TOPIC_NOT_FOUND" in str(refused):  # no broker has it yet
                return []
            raise InputError(f"{controller} is not a controller: {_CONTROLLER}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{controller} is not a controller: {_CONTROLLER}") from None

    def part(self, name: str) -> tuple[str, str]:
        """The topic and the broker of an offset's name."""
        return self._settings.topic, name

    def unknown(self, brokers: dict[str, str]) -> list[str]:
        """The topic, if it exists neither at a broker nor under contract."""
        listed = not self._settings.brokers and bool(brokers)
        return [] if listed or self._document() is not None else [self._settings.topic]

    def contract(self) -> Contract | None:
        """The topic's bucket, from the controller or as the sum of its brokers' shares; None if it has none."""
        return self._contract(self.look())

    def _contract(self, brokers: dict[str, str]) -> Contract | None:
        if (document := self._document()) is not None:
            return Contract(document["r"], document["b"])
        topic, shares = self._settings.topic, []
        for url in brokers.values():
            found = json.loads(ask(f"{url}/stats", format="json", topic=topic, include_clients="false"))["topics"]
            shares += [each["srtm"] for each in found if each.get("srtm", {}).get("r") is not None]
        return Contract(sum(each["r"] for each in shares), sum(each["b"] for each in shares)) if shares else None

    def _document(self) -> Any:
        """The controller's document of a topic under contract."""
        if self._settings.brokers or not self._settings.controller:
            return None
        try:
            return json.loads(ask(f"{self._settings.controller}/v1/topics/{quote(self._settings.topic, safe='')}"))
        except (Refused, ValueError):
            return None  # not under contract, or a stock nsqlookupd

    def extent(self, broker: str) -> Extent | None:
        """The extent of a broker's log; None if it does not have the topic."""
        topic = self._settings.topic
        try:
            document = json.loads(ask(f"{self._urls[broker]}/srtm/log", topic=topic))
            return Extent(document["begin"], document["end"], document.get("log"))
        except Refused as refused:
            if "TOPIC_NOT_FOUND" in str(refused):
                return None
            raise _explained(refused, topic, broker) from None

    def trim(self, broker: str, before: Position) -> None:
        """Delete older messages at a broker, as far as its channels have finished them."""
        topic, url = self._settings.topic, f"{self._urls[broker]}/srtm/log/trim"
        try:
            ask(url, "POST", topic=topic, before=before.offset, finished="true", **_named(before.log))
        except Refused as refused:
            raise _explained(refused, topic, broker) from None


class Spools(Logs):
    """Logs of brokers in front of an nsqd, which itself keeps nothing to read again."""

    def __init__(self, settings: Settings, brokers: dict[str, str]) -> None:
        super().__init__(settings)
        self._members = brokers

    def _listed(self, controller: str) -> list[tuple[str, str]]:
        del controller
        return list(self._members.items())

    def extent(self, broker: str) -> Extent | None:
        """The extent of a broker's log; InputError if it deletes what nsqd has acknowledged."""
        topic, where = self._settings.topic, f"topic {self._settings.topic!r} at broker {broker!r}"
        try:
            document = json.loads(ask(f"{self._urls[broker]}/srtm/log", topic=topic))
        except Refused as refused:
            if "TOPIC_NOT_FOUND" in str(refused):
                return None
            if "NOT_ON_DISK" in str(refused):
                raise InputError(
                    f"{where} is kept in memory until nsqd has it, and nsqd cannot be read again: {_ON_DISK}"
                ) from None
            raise _explained(refused, topic, broker) from None
        if not document["retention"]["retain_acknowledged"]:
            raise InputError(f"{where} deletes messages that its nsqd has: {_RETAIN}")
        return Extent(document["begin"], document["end"], document.get("log"))


def read(
    url: str, broker: str, topic: str, begin: int, end: int, timeout_s: float, log: str | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of an offset range of a broker's log; a LogError if the broker does not have them all.

    The broker prepares the next rows while Spark takes the last ones.
    """

    def fetch(at: int) -> pa.Table:
        import pyarrow as pa

        limit = min(_ROWS, end - at)
        some = partial(ask, f"{url}/srtm/log/read", topic=topic, begin=at, limit=limit, **_named(log))
        try:
            data = patiently(some, timeout_s)
        except Refused as refused:
            raise _explained(refused, topic, broker) from None
        with pa.ipc.open_stream(data) as stream:
            return stream.read_all()

    at = begin
    ahead = ThreadPoolExecutor(1, "srtm-read-ahead")
    try:
        coming = ahead.submit(fetch, at)
        while at < end:
            table = coming.result()
            if not table.num_rows:
                raise LogError(f"the log of topic {topic!r} at broker {broker!r} ends at {at}, before {end}")
            at += table.num_rows
            if at < end:
                coming = ahead.submit(fetch, at)
            yield from table.to_batches()
    finally:
        ahead.shutdown(wait=False, cancel_futures=True)


def _named(log: str | None) -> dict[str, str]:
    return {} if log is None else {"log": log}


def _explained(refused: Refused, topic: str, broker: str) -> Exception:
    text, where = str(refused), f"topic {topic!r} at broker {broker!r}"
    if "LOG_REPLACED" in text:
        return LogReplaced(f"{where}: {_message(text)}")
    if refused.status == 410:
        return OffsetTrimmed(f"{where}: {_message(text)}")
    if "NOT_ON_DISK" in text:
        remedy = "Spark can only read a disk topic; create it with durability=disk"
        return InputError(f"{where} is in memory: {remedy}")
    return LogError(f"{where}: {_message(text)}")


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def _http(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


_CONTROLLER = "give its HTTP address, for example http://127.0.0.1:4161, or list brokers in option brokers"
_RETAIN = "start its brokers with --retain-acknowledged and a limit by size or age, so that Spark can read them"
_ON_DISK = f"create it with durability=disk, and {_RETAIN}"
