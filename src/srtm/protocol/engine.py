"""Delivery engines as they are named: how an address is written, and what an engine cannot take.

In: text of flags, names of topics. Out: an `EngineAddress`, or an InputError that says how to write one; why a topic
cannot be had with an engine. Broker and controller ask the same rules, so that what a broker would refuse is refused
when the topic is created (docs/engines.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import parse_qsl, unquote

from srtm.errors import InputError
from srtm.protocol.names import ephemeral

KINDS: Final = ("local", "nsqd", "nats")
_PORTS: Final = {"nsqd": 4150, "nats": 4222}
_SCHEMES: Final = {  # what they mean: the engine, and whether TLS is spoken
    "nsqd": ("nsqd", False),
    "nsqd+tls": ("nsqd", True),
    "nats": ("nats", False),
    "nats+tls": ("nats", True),
    "tls": ("nats", True),  # as NATS writes it
}
_OPTIONS: Final = {"nsqd": (), "nats": ("creds", "replicas")}
_FILES: Final = ("ca", "cert", "key")  # options of any that speaks TLS
_MOST_REPLICAS: Final = 5  # that JetStream takes
_SYNTAX: Final = (
    "write local, nsqd://host:4150, nsqd:///path/of/socket or nats://host:4222,host:4222?replicas=3,"
    " with TLS nsqd+tls:// or nats+tls://"
)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is: `servers` are (host, port), or (path, 0) for a unix socket."""

    kind: str
    servers: tuple[tuple[str, int], ...]
    replicas: int = 1  # of streams that we make
    user: str | None = field(default=None, repr=False)  # or a token of NATS', or the secret of nsqd's AUTH
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None  # a file: who vouches for servers; those whom this system trusts, without
    cert: str | None = None  # a file: what servers are shown
    key: str | None = None  # a file: its key, if that is not in `cert`
    creds: str | None = None  # a file of NATS': who we are

    def __str__(self) -> str:
        """Without what is secret, and without files, which are of this host alone."""
        return f"{self.scheme}://{','.join(written(*each) for each in self.servers)}"

    @property
    def scheme(self) -> str:
        """What stands before the servers."""
        return f"{self.kind}+tls" if self.tls else self.kind

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
    scheme, found, rest = text.partition("://")
    place, _, query = rest.partition("?")
    if scheme not in _SCHEMES or not found or not place:
        raise InputError(f"invalid engine {hidden(text)!r}: {_SYNTAX}", engine=hidden(text))
    kind, tls = _SCHEMES[scheme]
    options = dict(parse_qsl(query, keep_blank_values=True))
    login, _, place = place.rpartition("@")
    if problem := _objection(kind, options, tls=tls, login=login):
        raise InputError(f"invalid engine {hidden(text)!r}: {problem}", engine=hidden(text))
    replicas = int(options.pop("replicas", "1"))
    user, _, password = login.partition(":") if kind == "nats" else (login, "", "")
    if kind == "nsqd" and place.startswith("/"):
        servers: tuple[tuple[str, int], ...] = ((unquote(place), 0),)
    else:
        servers = tuple(server(each.removeprefix(f"{scheme}://"), kind) for each in place.split(","))
    if kind == "nsqd" and len(servers) > 1:
        raise InputError(f"invalid engine {hidden(text)!r}: an nsqd has exactly one host:port", engine=kind)
    return EngineAddress(kind, servers, replicas, unquote(user) or None, unquote(password) or None, tls, **options)


def _objection(kind: str, options: dict[str, str], *, tls: bool, login: str) -> str | None:
    """What is wrong with the options of an address."""
    allowed = (*_OPTIONS[kind], *(_FILES if tls else ()))
    for name, value in options.items():
        if name in _FILES and not tls:
            return f"option {name} requires TLS: write {kind}+tls://"
        if name not in allowed:
            return f"unknown option {name!r} for {kind}; known options: {', '.join((*_OPTIONS[kind], *_FILES))}"
        if name == "replicas" and not (value.isdecimal() and 1 <= int(value) <= _MOST_REPLICAS):
            return f"replicas must be 1 to {_MOST_REPLICAS}, not {value!r}"
        if not value:
            return f"option {name} is empty: give the path of a file"
    if "key" in options and "cert" not in options:
        return "option key requires a certificate: give cert, too"
    if "creds" in options and login:
        return "give a login or creds, not both"
    return None


def written(host: str, port: int) -> str:
    """A server as addresses name it."""
    if not port:  # a unix socket
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server(place: str, kind: str) -> tuple[str, int]:
    """Host and port of one server."""
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, port = place, str(_PORTS[kind])
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"invalid engine address {place!r}: {_SYNTAX}", address=place)
    return host.strip("[]"), int(port)


def is_local(host: str) -> bool:
    """Whether a host is the machine that names it, and no other."""
    return host == "localhost" or host == "::1" or (host.startswith("127.") and host.replace(".", "").isdecimal())


def seen_from_elsewhere(address: EngineAddress, host: str) -> EngineAddress:
    """An engine as clients on other machines reach it, if its broker is reached at `host`."""
    here = ("0.0.0.0", "::")
    servers = ((host if is_local(name) or name in here else name, port) for name, port in address.servers)
    return replace(address, servers=tuple(servers))


def refusal(kind: str, topic: str) -> str | None:
    """Why an engine cannot have a topic, with the remedy; None where it can."""
    if kind == "nats" and ephemeral(topic):
        return f"topic {topic!r} cannot be ephemeral: the engine nats keeps its streams; leave out #ephemeral"
    if kind == "nats" and not all(topic.split(".")):
        return f"topic {topic!r} is not a subject of the engine nats: no part between its dots may be empty"
    return None


def hidden(text: str) -> str:
    """The text of a flag or option for a message: a login in it is nobody's business."""
    kind, scheme, rest = text.partition("://")
    return f"{kind}{scheme}{'…@' if '@' in rest else ''}{rest.rpartition('@')[2]}"
