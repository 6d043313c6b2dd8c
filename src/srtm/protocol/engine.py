"""Addresses of delivery engines, and the topics that an engine cannot have.

In: text of flags, names of topics. Out: an `EngineAddress`, or an InputError that shows the syntax; the reason why an
engine cannot have a topic. Broker and controller share these rules, so the controller refuses to create a topic that a
broker would refuse (docs/engines.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import parse_qsl, unquote

from srtm.errors import InputError
from srtm.protocol.names import ephemeral

KINDS: Final = ("local", "nsqd", "nats")
_PORTS: Final = {"nsqd": 4150, "nats": 4222}
_SCHEMES: Final = {  # the engine, and whether it uses TLS
    "nsqd": ("nsqd", False),
    "nsqd+tls": ("nsqd", True),
    "nats": ("nats", False),
    "nats+tls": ("nats", True),
    "tls": ("nats", True),  # as NATS writes it
}
_OPTIONS: Final = {"nsqd": (), "nats": ("creds", "handshake_first", "replicas")}
_FILES: Final = ("ca", "cert", "key")  # options of any engine with TLS
_MOST_REPLICAS: Final = 5  # JetStream's limit
_SYNTAX: Final = (
    "write local, nsqd://host:4150, nsqd:///path/of/socket or nats://host:4222,host:4222?replicas=3,"
    " with TLS nsqd+tls:// or nats+tls://"
)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of an engine: `servers` are (host, port), or (path, 0) for a unix socket."""

    kind: str
    servers: tuple[tuple[str, int], ...]
    replicas: int = 1  # of streams that we create
    user: str | None = field(default=None, repr=False)  # or a NATS token, or the secret of nsqd's AUTH
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None  # CA file that verifies servers; the system's CAs by default
    cert: str | None = None  # client certificate file
    key: str | None = None  # key file, unless `cert` contains the key
    creds: str | None = None  # NATS credentials file
    handshake_first: bool = False  # TLS begins before NATS' INFO, as the server's option of that name asks
    variable: str = field(default="SRTM_ENGINE", compare=False)  # of the environment, by which users set the address

    def __str__(self) -> str:
        """Return the address without secrets, and without files, which exist only on this host."""
        places = ",".join(written(*each) for each in self.servers)
        return f"{self.scheme}://{places}{'?handshake_first=true' if self.handshake_first else ''}"

    @property
    def scheme(self) -> str:
        """The scheme of the URL."""
        return f"{self.kind}+tls" if self.tls else self.kind

    @property
    def login(self) -> dict[str, str]:
        """The login fields of NATS' CONNECT: none, a token, or user and password."""
        if not self.user:
            return {}
        return {"user": self.user, "pass": self.password} if self.password else {"auth_token": self.user}


def parse(text: str) -> EngineAddress | None:
    """Return the engine that a flag names; None for `local`."""
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
    replicas, first = int(options.pop("replicas", "1")), options.pop("handshake_first", "false") == "true"
    user, _, password = login.partition(":") if kind == "nats" else (login, "", "")
    if kind == "nsqd" and place.startswith("/"):
        servers: tuple[tuple[str, int], ...] = ((unquote(place), 0),)
    else:
        servers = tuple(server(each.removeprefix(f"{scheme}://"), kind) for each in place.split(","))
    if kind == "nsqd" and len(servers) > 1:
        raise InputError(f"invalid engine {hidden(text)!r}: an nsqd has exactly one host:port", engine=kind)
    login_parts = unquote(user) or None, unquote(password) or None
    return EngineAddress(kind, servers, replicas, *login_parts, tls, handshake_first=first, **options)


def _objection(kind: str, options: dict[str, str], *, tls: bool, login: str) -> str | None:
    """Return what is wrong with the options of an address."""
    allowed = (*_OPTIONS[kind], *(_FILES if tls else ()))
    for name, value in options.items():
        if name in _FILES and not tls:
            return f"option {name} requires TLS: write {kind}+tls://"
        if name not in allowed:
            return f"unknown option {name!r} for {kind}; known options: {', '.join((*_OPTIONS[kind], *_FILES))}"
        if name == "replicas" and not (value.isdecimal() and 1 <= int(value) <= _MOST_REPLICAS):
            return f"replicas must be 1 to {_MOST_REPLICAS}, not {value!r}"
        if name == "handshake_first" and value not in ("true", "false"):
            return f"handshake_first must be true or false, not {value!r}"
        if name == "handshake_first" and value == "true" and not tls:
            return f"option {name} requires TLS: write {kind}+tls://"
        if not value:
            return f"option {name} is empty: give the path of a file"
    if "key" in options and "cert" not in options:
        return "option key requires a certificate: give cert, too"
    if "creds" in options and login:
        return "give a login or creds, not both"
    return None


def written(host: str, port: int) -> str:
    """Return a server as written in an address."""
    if not port:  # a unix socket
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server(place: str, kind: str) -> tuple[str, int]:
    """Return host and port of one server."""
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, port = place, str(_PORTS[kind])
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"invalid engine address {place!r}: {_SYNTAX}", address=place)
    return host.strip("[]"), int(port)


def is_local(host: str) -> bool:
    """Whether a host is a loopback address."""
    return host == "localhost" or host == "::1" or (host.startswith("127.") and host.replace(".", "").isdecimal())


def seen_from_elsewhere(address: EngineAddress, host: str) -> EngineAddress:
    """Return an engine's address for clients on other machines, which reach its broker at `host`."""
    here = ("0.0.0.0", "::")
    servers = ((host if is_local(name) or name in here else name, port) for name, port in address.servers)
    return replace(address, servers=tuple(servers))


def refusal(kind: str, topic: str) -> str | None:
    """Return why an engine cannot have a topic, with the remedy; None if it can."""
    if kind == "nats" and ephemeral(topic):
        return f"topic {topic!r} cannot be ephemeral: the engine nats keeps its streams; leave out #ephemeral"
    if kind == "nats" and not all(topic.split(".")):
        return f"topic {topic!r} is not a subject of the engine nats: no part between its dots may be empty"
    return None


def hidden(text: str) -> str:
    """Return the text of a flag or option without its login, for a message."""
    kind, scheme, rest = text.partition("://")
    return f"{kind}{scheme}{'…@' if '@' in rest else ''}{rest.rpartition('@')[2]}"
