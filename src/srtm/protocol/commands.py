"""The commands of V2 as values, and nsqd's rules for their lines: states in which a verb is allowed, and limits.

In: the words of a line. Out: a command, or nsqd's error. `server` reads the bodies, after it has checked their sizes.
"""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple

from srtm.errors import ProtocolError
from srtm.protocol.identify import Identity
from srtm.protocol.names import ID_SIZE, Settings, base10, quoted, signed64, valid_name

_NS_PER_MS: Final = 1_000_000


class Identify(NamedTuple):
    """What was negotiated with the client; answer with `identify.response`."""

    identity: Identity


class Auth(NamedTuple):
    """A secret for the auth server."""

    secret: bytes


class Sub(NamedTuple):
    """Subscribe to a channel."""

    topic: str
    channel: str


class Pub:
    """Publish one message: of all commands the most frequent, and so no tuple but a class that mypyc makes native."""

    __slots__ = ("body", "topic")
    __match_args__: ClassVar = ("topic", "body")

    def __init__(self, topic: str, body: bytes) -> None:
        self.topic = topic
        self.body = body

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pub) and self.topic == other.topic and self.body == other.body

    def __hash__(self) -> int:
        return hash((self.topic, self.body))

    def __repr__(self) -> str:
        return f"Pub(topic={self.topic!r}, body={self.body!r})"


class Mpub(NamedTuple):
    """Publish several messages, all or none."""

    topic: str
    bodies: list[bytes]


class Dpub(NamedTuple):
    """Publish one message, to be delivered after a delay."""

    topic: str
    delay_ms: int
    body: bytes


class Rdy(NamedTuple):
    """Set how many messages may be in flight to this client."""

    ready: int


class Fin(NamedTuple):
    """Acknowledge messages: FINs in a row are one command, for consumers finish many at once."""

    ids: list[bytes]


class Req(NamedTuple):
    """Requeue a message; the delay is already within the limit."""

    id: bytes
    delay_ms: int


class Touch(NamedTuple):
    """Restart the timeout of a message."""

    id: bytes


class Cls(NamedTuple):
    """Send no more messages; answer CLOSE_WAIT."""


class Nop(NamedTuple):
    """A sign of life, without an answer."""


Command = Identify | Auth | Sub | Pub | Mpub | Dpub | Rdy | Fin | Req | Touch | Cls | Nop
Event = Command | ProtocolError

# The states of a connection, and those in which each verb is allowed. A closing consumer may still finish its messages;
# its RDY is ignored. As in nsqd, PUB, MPUB, DPUB and NOP are always allowed, and IDENTIFY may be repeated before SUB.
INIT: Final = 0
SUBSCRIBED: Final = 1
CLOSING: Final = 2
NSQD_STATES: Final = {INIT: 0, SUBSCRIBED: 3, CLOSING: 4}  # its own numbers, in its statistics

ALLOWED: Final = {
    b"IDENTIFY": (INIT,),
    b"AUTH": (INIT,),
    b"SUB": (INIT,),
    b"RDY": (SUBSCRIBED, CLOSING),
    b"FIN": (SUBSCRIBED, CLOSING),
    b"REQ": (SUBSCRIBED, CLOSING),
    b"TOUCH": (SUBSCRIBED, CLOSING),
    b"CLS": (SUBSCRIBED,),
    b"PUB": (INIT, SUBSCRIBED, CLOSING),
    b"MPUB": (INIT, SUBSCRIBED, CLOSING),
    b"DPUB": (INIT, SUBSCRIBED, CLOSING),
    b"NOP": (INIT, SUBSCRIBED, CLOSING),
}


def check_allowed(verb: bytes, state: int) -> None:
    """Raise nsqd's error for an unknown verb, or one that this state does not allow."""
    allowed = ALLOWED.get(verb)
    if allowed is None:
        raise ProtocolError("E_INVALID", f"invalid command {raw(verb)}")
    if state not in allowed:
        raise ProtocolError("E_INVALID", f"cannot {raw(verb)} in current state")


def sub(params: list[bytes], identity: Identity) -> Sub:
    """Read the line of a SUB."""
    if identity.heartbeat_ms <= 0:
        raise ProtocolError("E_INVALID", "cannot SUB with heartbeats disabled")
    if len(params) < 3:
        raise ProtocolError("E_INVALID", "SUB insufficient number of parameters")
    topic = topic_of("SUB", params)
    if not valid_name(params[2]):
        raise ProtocolError("E_BAD_CHANNEL", f"SUB channel name {quoted(params[2])} is not valid")
    return Sub(topic, params[2].decode())


def topic_of(verb: str, params: list[bytes], least: int = 2) -> str:
    """Read the topic of a SUB, PUB, MPUB or DPUB that has `least` words."""
    if len(params) < least:
        raise ProtocolError("E_INVALID", f"{verb} insufficient number of parameters")
    if not valid_name(params[1]):
        code = "E_BAD_TOPIC " if verb == "MPUB" else ""  # nsqd says it twice there
        raise ProtocolError("E_BAD_TOPIC", f"{code}{verb} topic name {quoted(params[1])} is not valid")
    return params[1].decode()


def dpub_delay_ms(params: list[bytes], settings: Settings) -> int:
    """Read the delay of a DPUB."""
    delay_ms = base10(params[2])
    if delay_ms is None:
        raise ProtocolError("E_INVALID", f"DPUB could not parse timeout {raw(params[2])}")
    limit_ms = settings.max_req_timeout_ms
    if not 0 <= (delay_ns := signed64(delay_ms * _NS_PER_MS)) <= limit_ms * _NS_PER_MS:
        raise ProtocolError("E_INVALID", f"DPUB timeout {delay_ms} out of range 0-{limit_ms}")
    return delay_ns // _NS_PER_MS


def rdy(params: list[bytes], settings: Settings) -> Rdy:
    """Read the line of a RDY."""
    number = base10(params[1]) if len(params) > 1 else 1
    if number is None:
        raise ProtocolError("E_INVALID", f"RDY could not parse count {raw(params[1])}")
    count, limit = signed64(number), settings.max_rdy_count
    if not 0 <= count <= limit:
        raise ProtocolError("E_INVALID", f"RDY count {count} out of range 0-{limit}", count=count, limit=limit)
    return Rdy(count)


def fin(params: list[bytes]) -> Fin:
    """Read the line of a FIN."""
    return Fin([_id("FIN", params, 2)])


def req(params: list[bytes], settings: Settings) -> Req:
    """Read the line of a REQ; its delay is cut to the limit."""
    message_id = _id("REQ", params, 3)
    delay_ms = base10(params[2])
    if delay_ms is None:
        raise ProtocolError("E_INVALID", f"REQ could not parse timeout {raw(params[2])}")
    delay_ns = signed64(delay_ms * _NS_PER_MS)
    return Req(message_id, min(max(delay_ns // _NS_PER_MS, 0), settings.max_req_timeout_ms))


def touch(params: list[bytes]) -> Touch:
    """Read the line of a TOUCH."""
    return Touch(_id("TOUCH", params, 2))


def auth_first(verb: str) -> ProtocolError:
    """Return the error of a command that came before the AUTH that it requires."""
    return ProtocolError("E_AUTH_FIRST", f"AUTH required before {verb}")


def unauthorized(verb: str, topic: str, channel: str = "") -> ProtocolError:
    """Return the error of a command that the auth server does not permit."""
    return ProtocolError("E_UNAUTHORIZED", f'AUTH failed for {verb} on "{topic}" "{channel}"')


def failed(verb: str, message_id: bytes, why: str) -> ProtocolError:
    """Return the error of a FIN, REQ or TOUCH of a message that is not in flight to this client."""
    return ProtocolError(f"E_{verb}_FAILED", f"{verb} {raw(message_id)} failed {why}", id=message_id)


def _id(verb: str, params: list[bytes], least: int) -> bytes:
    if len(params) < least:
        raise ProtocolError("E_INVALID", f"{verb} insufficient number of params")
    if len(params[1]) != ID_SIZE:
        raise ProtocolError("E_INVALID", "invalid message ID")
    return params[1]


def too_big(code: str, what: str, size: int, limit: int) -> ProtocolError:
    """Return the error of a body that exceeds its limit."""
    return ProtocolError(code, f"{what} too big {size} > {limit}", size=size, limit=limit)


def raw(data: bytes) -> str:
    """Return a client's words as text for an error."""
    return data.decode("utf-8", "surrogateescape")
