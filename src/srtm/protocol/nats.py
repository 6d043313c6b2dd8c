"""The client's side of NATS' protocol, as far as JetStream needs it: commands to bytes, bytes to events.

In: commands, and bytes from the server in reads of any size. Out: bytes to write; a list of events, in order.

    INFO {json}                                       after the connection, and when the cluster changes
    MSG subject sid [reply] size CRLF body CRLF
    HMSG subject sid [reply] header-size size CRLF header body CRLF
    PING   PONG   +OK   -ERR 'text'

A broker's messages have their origin in headers: `Srtm-Broker`, `Srtm-Publisher` (both percent-encoded, because names
may contain any character) and `Srtm-Arrival`, nanoseconds since 1970.

Always holds: the same bytes give the same events, however they are split; a line longer than MAX_LINE or a message
longer than MAX_BODY is a ProtocolError before it is kept.
"""

from __future__ import annotations

from functools import lru_cache
from string import punctuation
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from srtm.errors import ProtocolError

MAX_LINE: Final = 64 * 1024  # INFO of a large cluster
MAX_BODY: Final = 8 * 1024 * 1024
NO_RESPONDERS: Final = 503
ACK_PREFIX: Final = b"$JS.ACK."  # of the reply subjects of delivered messages
PING: Final = b"PING\r\n"
PONG: Final = b"PONG\r\n"
_CRLF: Final = b"\r\n"
_MSG_ID: Final = b"Nats-Msg-Id"
BROKER: Final = b"Srtm-Broker"
PUBLISHER: Final = b"Srtm-Publisher"
ARRIVAL: Final = b"Srtm-Arrival"
_PLAIN: Final = punctuation.replace("%", "")


class Info(NamedTuple):
    """The server's description of itself and its cluster."""

    fields: dict[str, Any]


class Msg(NamedTuple):
    """A message of our subscription; `status` is that of its header, or 0."""

    subject: bytes
    status: int
    body: bytes
    header: bytes = b""
    reply: bytes = b""

    @property
    def message_id(self) -> bytes:
        """The id that it was published with; empty if none."""
        return self.value(_MSG_ID)

    def value(self, name: bytes) -> bytes:
        """Return a value of its header; empty if the header lacks it."""
        return self.header.partition(b"\r\n%b: " % name)[2].partition(_CRLF)[0]


class Delivered(NamedTuple):
    """The contents of the reply subject of a message that a consumer delivered."""

    times: int  # how often it was delivered, including now
    sequence: int  # in the stream
    number: int  # in this consumer's deliveries
    stored_ns: int
    pending: int  # messages that this consumer has yet to deliver

    @classmethod
    def by(cls, reply: bytes) -> Delivered:
        """Read `$JS.ACK.[domain.account.]stream.consumer.times.sequence.number.time.pending[.random]`."""
        words = reply.split(b".")
        at = 4 if len(words) == 9 else 6
        return cls(*map(int, words[at : at + 5]))


class Ping(NamedTuple):
    """The server asks for a sign of life: answer with PONG."""


class Pong(NamedTuple):
    """The server answered our PING."""


class Err(NamedTuple):
    """The server refused something; often it also closes the connection."""

    text: str


Event = Info | Msg | Ping | Pong | Err


class NatsProtocol:
    """One connection to a NATS server, as the client reads it."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Event]:
        """Return all events that these bytes complete; ProtocolError if they are not NATS' protocol."""
        if self._pending:
            data = self._pending + data
        out: list[Event] = []
        at = 0
        while (end := data.find(_CRLF, at)) >= 0:
            line = data[at:end]
            body_at = end + 2
            if line.startswith((b"MSG ", b"HMSG ")):
                after = _message(line, data, body_at, out)
                if not after:
                    break
                at = after
            else:
                event = _control(line)
                if event is not None:
                    out.append(event)
                at = body_at
        self._pending = data[at:]
        if len(self._pending) > MAX_LINE and _CRLF not in self._pending:
            raise ProtocolError("E_INVALID", f"line is longer than {MAX_LINE} bytes")
        return out


def _message(line: bytes, data: bytes, at: int, out: list[Event]) -> int:
    """Append the message that a line announces; return the offset after it, or 0 if it is incomplete."""
    parts = line.split()
    head, fixed = 0, 4
    try:
        size = int(parts[-1])
        if parts[0] == b"HMSG":
            head, fixed = int(parts[-2]), 5
    except ValueError:
        size = -1
    if not 0 <= head <= size <= MAX_BODY or not 0 <= len(parts) - fixed <= 1:
        raise ProtocolError("E_INVALID", f"invalid message line {line[:80]!r}")
    if len(data) < at + size + 2:
        return 0
    reply = parts[3] if len(parts) > fixed else b""
    header = data[at : at + head]
    out.append(Msg(parts[1], _status(header) if head else 0, data[at + head : at + size], header, reply))
    return at + size + 2


def _status(header: bytes) -> int:
    code = header[:12].removeprefix(b"NATS/1.0").strip()
    return int(code) if code.isdigit() else 0


def _control(line: bytes) -> Event | None:
    verb = line[:5].upper()
    if verb.startswith(b"PING"):
        return Ping()
    if verb.startswith(b"PONG"):
        return Pong()
    if verb.startswith(b"INFO"):
        return Info(fields(line[4:]))
    if verb.startswith(b"-ERR"):
        return Err(line[4:].decode("utf-8", "backslashreplace").strip().strip("'"))
    if verb.startswith(b"+OK"):
        return None
    raise ProtocolError("E_INVALID", f"unknown line {line[:80]!r}: the peer is not a NATS server")


def fields(body: bytes) -> dict[str, Any]:
    """Decode a JSON object from the server."""
    try:
        found: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise ProtocolError("E_INVALID", f"invalid JSON from the server: {problem}") from None
    return found


def connect(**told: Any) -> bytes:
    """CONNECT with these fields."""
    return b"CONNECT %b\r\n" % msgspec.json.encode(told)


def unsubscribe(sid: int) -> bytes:
    """End a subscription."""
    return b"UNSUB %d\r\n" % sid


def tell(subject: bytes, body: bytes) -> bytes:
    """Publish a message without a reply subject."""
    return b"PUB %b %d\r\n%b\r\n" % (subject, len(body), body)


def subscribe(subject: bytes, sid: int) -> bytes:
    """Subscribe to a subject."""
    return b"SUB %b %d\r\n" % (subject, sid)


def publish(subject: bytes, reply: bytes, body: bytes) -> bytes:
    """Publish a message with a reply subject."""
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body)


def publish_once(subject: bytes, reply: bytes, message_id: bytes, body: bytes, lines: bytes = b"") -> bytes:
    """Publish a message that JetStream stores once, however often it is sent; `lines` go into its header."""
    return tell_with(subject, reply, body, b"%b: %b\r\n%b" % (_MSG_ID, message_id, lines))


def tell_with(subject: bytes, reply: bytes, body: bytes, lines: bytes) -> bytes:
    """Publish a message with these lines in its header; `reply` may be empty."""
    head = b"NATS/1.0\r\n%b\r\n" % lines
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, len(head), len(head) + len(body), head, body)


def expecting(last: int) -> bytes:
    """Return the header line by which JetStream refuses a message unless the stream's last message has this number."""
    return b"Nats-Expected-Last-Sequence: %d\r\n" % last


def batched(batch: bytes, number: int, *, commit: bool) -> bytes:
    """Return the header lines of a message of an atomic batch, counted from 1; `commit` ends and stores the batch."""
    lines = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n" % (batch, number)
    return lines + b"Nats-Batch-Commit: 1\r\n" if commit else lines


def origin(broker: str, publisher: str, arrival_ns: int) -> bytes:
    """Return the header lines with a message's origin and arrival time."""
    return b"%bSrtm-Arrival: %d\r\n" % (_names(broker, publisher), arrival_ns)


@lru_cache(maxsize=4096)
def _names(*names: str) -> bytes:
    coded = (quote(name, _PLAIN, errors="replace").encode() for name in names)
    return b"Srtm-Broker: %b\r\nSrtm-Publisher: %b\r\n" % tuple(coded)
