"""Discovery over HTTP, as nsqlookupd does it: consumers, nsqd and nsqadmin ask for brokers, topics and channels.

In: requests. Out: the answers of nsqlookupd 1.3.0, with its errors: `{"message": "TOPIC_NOT_FOUND"}` and its status.
Each page is a function of the query alone; `_Endpoint` has what they share.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from srtm.control.clock import now_ns
from srtm.errors import RegistryFull
from srtm.protocol import gojson
from srtm.protocol.names import VERSION, valid_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from srtm.control.discovery.registry import Entry, Producer, Registry

_NSQ = {"X-NSQ-Content-Type": "nsq; version=1.0"}
_NO_TIME_NS = -6795364578871345152  # nsqlookupd's value for "no time"
_BROKEN_QUERY = re.compile(rb";|%(?![0-9a-fA-F]{2})")


def routes(registry: Registry, clock: Callable[[], int] = now_ns) -> list[Route]:
    """All endpoints of nsqlookupd except Go's profiler."""
    pages = _Pages(registry, clock)
    gets = ("ping", "info", "debug", "lookup", "topics", "channels", "nodes")
    posts = ("topic/create", "topic/delete", "topic/tombstone", "channel/create", "channel/delete")
    return [
        Route(f"/{path}", _Endpoint(method, getattr(pages, path.replace("/", "_"))))
        for method, paths in (("GET", gets), ("POST", posts))
        for path in paths
    ]


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer for unknown paths."""
    await _error(404, "NOT_FOUND")(scope, receive, send)


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Query:
    """The arguments of a request. As in nsqlookupd, a query may be broken as long as no page asks for one."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __getitem__(self, name: str) -> str:
        """The first value of this name."""
        if _BROKEN_QUERY.search(self._raw):
            raise _Refused(400, "INVALID_REQUEST")
        values = parse_qs(self._raw.decode("latin-1"), keep_blank_values=True).get(name)
        if values is None:
            raise _Refused(400, f"MISSING_ARG_{name.upper()}")
        return values[0]

    def name(self, name: str) -> str:
        """The first value, which must be a valid topic or channel name."""
        value = self[name]
        if not valid_name(value):
            raise _Refused(400, f"INVALID_ARG_{name.upper()}")
        return value


class _Endpoint:
    """A page for one HTTP method; its result becomes JSON, and None an empty answer."""

    def __init__(self, method: str, page: Callable[[_Query], Any]) -> None:
        self._method = method
        self._page = page
        self._allow = {"Allow": ", ".join(sorted([method, "OPTIONS"]))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        if scope["method"] == "OPTIONS":
            return Response(headers=self._allow)
        if scope["method"] != self._method:
            return _error(405, "METHOD_NOT_ALLOWED", self._allow)
        try:
            found = self._page(_Query(scope["query_string"]))
        except _Refused as problem:
            return _error(problem.status, str(problem))
        except RegistryFull as problem:
            return _error(507, f"REGISTRY_FULL: {problem}")
        if isinstance(found, Response):
            return found
        return Response(headers=_NSQ) if found is None else _json(200, found)


class _Pages:
    """One method per endpoint, named after its path."""

    def __init__(self, registry: Registry, clock: Callable[[], int]) -> None:
        self._registry = registry
        self._clock = clock

    def ping(self, _: _Query) -> Response:
        """The health check."""
        return PlainTextResponse("OK")

    def info(self, _: _Query) -> Any:
        """The version of nsqlookupd that these answers match."""
        return {"version": VERSION}

    def lookup(self, query: _Query) -> Any:
        """A topic's producers and channels."""
        topic = query["topic"]
        if not self._registry.knows(topic):
            raise _Refused(404, "TOPIC_NOT_FOUND")
        producers = self._registry.producers(topic, self._clock())
        return {"channels": self._registry.channels(topic), "producers": [_described(each) for each in producers]}

    def topics(self, _: _Query) -> Any:
        """All topics."""
        return {"topics": self._registry.topics()}

    def channels(self, query: _Query) -> Any:
        """A topic's channels."""
        return {"channels": self._registry.channels(query["topic"])}

    def nodes(self, _: _Query) -> Any:
        """All producers with their topics and tombstones."""
        now = self._clock()
        return {
            "producers": [
                _described(producer)
                | {
                    "tombstones": [self._registry.tombstoned(producer, topic, now) for topic in producer.topics],
                    "topics": list(producer.topics),
                }
                for producer in self._registry.nodes(now)
            ]
        }

    def debug(self, _: _Query) -> Any:
        """Every registration."""
        found: dict[str, list[dict[str, Any]]] = {}
        for entry in self._registry.registrations():
            found.setdefault(f"{entry.category}:{entry.topic}:{entry.channel}", []).append(_debugged(entry))
        return found

    def topic_create(self, query: _Query) -> None:
        """Make a topic known."""
        self._registry.create(query.name("topic"))

    def topic_delete(self, query: _Query) -> None:
        """Forget a topic and its channels."""
        self._registry.delete_topic(query["topic"])

    def topic_tombstone(self, query: _Query) -> None:
        """Omit a producer from a topic for a while."""
        self._registry.tombstone(query["topic"], query["node"], self._clock())

    def channel_create(self, query: _Query) -> None:
        """Make a channel, and its topic, known."""
        self._registry.create(query.name("topic"), query.name("channel"))

    def channel_delete(self, query: _Query) -> None:
        """Forget a channel."""
        if not self._registry.delete_channel(query.name("topic"), query.name("channel")):
            raise _Refused(404, "CHANNEL_NOT_FOUND")


def _described(producer: Producer) -> dict[str, Any]:
    peer = producer.peer
    return {
        "remote_address": producer.address,
        "hostname": peer.hostname,
        "broadcast_address": peer.broadcast_address,
        "tcp_port": peer.tcp_port,
        "http_port": peer.http_port,
        "version": peer.version,
    }


def _debugged(entry: Entry) -> dict[str, Any]:
    producer, tombstoned_ns = entry.producer, entry.tombstoned_ns
    return {
        "broadcast_address": producer.peer.broadcast_address,
        "hostname": producer.peer.hostname,
        "http_port": producer.peer.http_port,
        "id": producer.address,
        "last_update": producer.seen_ns,
        "tcp_port": producer.peer.tcp_port,
        "tombstoned": tombstoned_ns is not None,
        "tombstoned_at": _NO_TIME_NS if tombstoned_ns is None else tombstoned_ns,
        "version": producer.peer.version,
    }


def _json(status: int, document: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(gojson.write(document), status, {**_NSQ, **(headers or {})}, "application/json; charset=utf-8")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return _json(status, {"message": message}, headers)
