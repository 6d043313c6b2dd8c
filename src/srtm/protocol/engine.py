"""Delivery engines as they are named: how an address is written, and what an engine cannot take.

In: text of flags, names of topics. Out: an `EngineAddress`, or an InputError that says how to write one; why a topic
cannot be had with an engine. Broker and controller ask the same rules, so that what a broker would refuse is refused
when the topic is created (docs/engines.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote

from srtm.errors import InputError
from srtm.protocol.names import ephemeral

KINDS: Final = ("local", "nsqd", "nats")
_PORTS: Final = {"nsqd": 4150, "nats": 4222}
_MOST_REPLICAS: Final = 5  # that JetStream takes
_SYNTAX: Final = "write local, nsqd://host:4150, nsqd:///path/of/socket or nats://host:4222,host:4222?replicas=3"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is: `servers` are (host, port), or (path, 0) for a unix socket."""

    kind: str
    servers: tuple[tuple[str, int], ...]
    replicas: int = 1  # of streams that we make
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Without what is secret."""
        places = (f"{host}:{port}" if port else host for host, port in self.servers)
        return f"{self.kind}://{','.join(places)}"

    @property
    def login(self) -> dict[str, str]:
        """What NATS' CONNECT says of who we are: nothing, a token, or a user."""
        if not self.user:
            return {}
        return {"user": self.user, "pass": self.password} if self.password else {"auth_token": self.user}


def parse(text: str) -> EngineAddress | None:
    """The engine that a flag names; None for `local`."""
    if text == "local":
        return None
    kind, scheme, rest = text.partition("://")
    place, _, query = rest.partition("?")
    if kind not in _PORTS or not scheme or not place:
        raise InputError(f"{hidden(text)!r} is no engine: {_SYNTAX}", engine=hidden(text))
    options = dict(parse_qsl(query, keep_blank_values=True))
    replicas = options.pop("replicas", "1")
    if options or (kind != "nats" and query) or not (replicas.isdecimal() and 1 <= int(replicas) <= _MOST_REPLICAS):
        problem = f"the only option is replicas, 1 to {_MOST_REPLICAS}, of nats"
        raise InputError(f"{hidden(text)!r} is no engine: {problem}", engine=hidden(text))
    login, _, place = place.rpartition("@")
    if kind == "nsqd" and place.startswith("/"):
        return EngineAddress(kind, ((unquote(place), 0),))
    user, _, password = login.partition(":")
    servers = tuple(server(each.removeprefix(f"{kind}://"), kind) for each in place.split(","))
    if kind == "nsqd" and (len(servers) > 1 or login):
        raise InputError(f"{hidden(text)!r} is no engine: an nsqd is one host:port, without a login", engine=kind)
    return EngineAddress(kind, servers, int(replicas), unquote(user) or None, unquote(password) or None)


def server(place: str, kind: str) -> tuple[str, int]:
    """Host and port of one server."""
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, port = place, str(_PORTS[kind])
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{place!r} is no address of an engine: {_SYNTAX}", address=place)
    return host.strip("[]"), int(port)


def refusal(kind: str, topic: str) -> str | None:
    """Why an engine cannot have a topic, with the remedy; None where it can."""
    if kind == "nats" and ephemeral(topic):
        return f"topic {topic!r} cannot be ephemeral: a stream of the engine nats stays; leave out #ephemeral"
    if kind == "nats" and not all(topic.split(".")):
        return f"topic {topic!r} is no subject of the engine nats: no part between its dots may be empty"
    return None


def hidden(text: str) -> str:
    """The text of a flag or option for a message: a login in it is nobody's business."""
    kind, scheme, rest = text.partition("://")
    return f"{kind}{scheme}{'…@' if '@' in rest else ''}{rest.rpartition('@')[2]}"
