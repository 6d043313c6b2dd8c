"""The client's side of V2: commands to bytes, bytes of the server to events.

In: commands, and bytes from the server in reads of any size. Out: bytes to write; a list of events, in order. `server`
documents the layout of commands, `frames` that of frames. Begin a connection with `MAGIC_V2`.

Always holds: the same bytes give the same events, however they are split; at most one incomplete frame is kept, and a
frame's size is checked before its data is kept; an invalid stream ends with a ProtocolError as the last event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import Struct
from typing import Any, Final, NamedTuple

from srtm.errors import InputError, ProtocolError
from srtm.protocol import gojson, orders
from srtm.protocol.frames import ERROR, FRAME_HEAD, MESSAGE, MESSAGE_HEAD, RESPONSE
from srtm.protocol.names import ID_SIZE, Settings, quoted, valid_name
from srtm.protocol.orders import Order

MAX_FRAME: Final = (
    4 + MESSAGE_HEAD.size + Settings().max_body_size
)  # the largest frame of a server with default settings

_LEN: Final = Struct(">i")
_HEARTBEAT: Final = b"_heartbeat_"
_new = tuple.__new__
_frame_at = FRAME_HEAD.unpack_from
_message_at = MESSAGE_HEAD.unpack_from


class Response(NamedTuple):
    """The answer to a command: OK, CLOSE_WAIT or JSON."""

    data: bytes


class Error(NamedTuple):
    """The server refused a command; `problem.fatal` if it also closes the connection."""

    problem: ProtocolError


class Message(NamedTuple):
    """A message of the subscribed channel."""

    timestamp_ns: int
    attempts: int
    id: bytes
    body: bytes


class Heartbeat(NamedTuple):
    """The server asks for a sign of life: answer with `nop`."""


Event = Response | Error | Message | Heartbeat | Order | ProtocolError


class ClientProtocol:
    """One connection to a broker, as the client reads it.

    A server may compress everything after its answer to IDENTIFY, even within the same read. So call
    `pause_after_response()` when an IDENTIFY asks for that. After the answer, decode `take_unparsed()` with the
    compression that was settled, if any, and feed the result.
    """

    __slots__ = ("_max_frame", "_need", "_pause", "_pending", "closed", "paused")

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.closed = False
        self._max_frame = max_frame
        self._pending = bytearray()
        self._need = 0
        self._pause = False
        self.paused = False

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._pending)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Return all events that these bytes complete."""
        out: list[Event] = []
        if self.closed:
            return out
        assert not self.paused, "take_unparsed comes before the next feed"
        pending = self._pending
        if pending:
            pending += data
            if len(pending) < self._need:
                return out
            data = bytes(pending)
            pending.clear()
        elif type(data) is not bytes:
            data = bytes(data)
        try:
            pos = self._read(data, out)
        except ProtocolError as problem:
            self.closed = True
            out.append(problem.bare())
            return out
        if pos < len(data):
            pending += memoryview(data)[pos:]
        return out

    def pause_after_response(self) -> None:
        """Stop after the next response."""
        self._pause = True

    def take_unparsed(self) -> bytes:
        """Return the bytes after the response that reading paused at; `feed` may be called again."""
        data = bytes(self._pending)
        self._pending.clear()
        self.paused = False
        return data

    def _read(self, data: bytes, out: list[Event]) -> int:
        pos, end, max_frame = 0, len(data), self._max_frame
        while pos + 8 <= end:
            size, kind = _frame_at(data, pos)
            if not 4 <= size <= max_frame:
                raise ProtocolError("E_INVALID", f"frame size {size} out of range 4-{max_frame}", size=size)
            start, stop = pos + 8, pos + 4 + size
            if stop > end:
                self._need = stop - pos
                return pos
            if kind == MESSAGE:
                if size < 4 + MESSAGE_HEAD.size:
                    raise ProtocolError("E_INVALID", f"message frame of {size} bytes is too short", size=size)
                timestamp_ns, attempts, message_id = _message_at(data, start)
                out.append(_new(Message, (timestamp_ns, attempts, message_id, data[start + MESSAGE_HEAD.size : stop])))
            elif kind == RESPONSE:
                if _respond(data[start:stop], out) and self._pause:
                    self._pause, self.paused = False, True
                    return int(stop)
            elif kind == ERROR:
                out.append(Error(_problem(data[start:stop])))
            else:
                raise ProtocolError("E_INVALID", f"frame type {kind} is unknown", kind=kind)
            pos = stop
        self._need = 8
        return pos


def identify(fields: Mapping[str, Any]) -> bytes:
    """IDENTIFY with a JSON body of these fields."""
    return _with_body(b"IDENTIFY\n", gojson.write(fields))


def auth(secret: bytes) -> bytes:
    """AUTH with a secret."""
    return _with_body(b"AUTH\n", secret)


def sub(topic: str, channel: str) -> bytes:
    """Subscribe this connection to a channel."""
    return b"SUB %b %b\n" % (_name(topic), _name(channel))


def pub(topic: str, body: bytes) -> bytes:
    """Publish one message."""
    return b"PUB %b\n%b%b" % (_name(topic), _LEN.pack(len(body)), body)


def mpub(topic: str, bodies: Iterable[bytes]) -> bytes:
    """Publish several messages, all or none."""
    parts = [_LEN.pack(len(body)) + body for body in bodies]
    return _with_body(b"MPUB %b\n" % _name(topic), _LEN.pack(len(parts)) + b"".join(parts))


def dpub(topic: str, delay_ms: int, body: bytes) -> bytes:
    """Publish one message, to be delivered after a delay."""
    return _with_body(b"DPUB %b %d\n" % (_name(topic), delay_ms), body)


def rdy(count: int) -> bytes:
    """Accept up to this many messages in flight."""
    return b"RDY %d\n" % count


def fin(message_id: bytes) -> bytes:
    """Acknowledge a message."""
    return b"FIN %b\n" % _id(message_id)


def req(message_id: bytes, delay_ms: int) -> bytes:
    """Requeue a message, to be delivered again after a delay."""
    return b"REQ %b %d\n" % (_id(message_id), delay_ms)


def touch(message_id: bytes) -> bytes:
    """Restart the timeout of a message."""
    return b"TOUCH %b\n" % _id(message_id)


def cls() -> bytes:
    """Send no more messages."""
    return b"CLS\n"


def nop() -> bytes:
    """Answer a heartbeat."""
    return b"NOP\n"


def _respond(data: bytes, out: list[Event]) -> bool:
    """Append the event of a response frame; return whether it answers a command."""
    if data == _HEARTBEAT:
        out.append(Heartbeat())
    elif data.startswith(orders.PREFIX):
        order = orders.decode(data)
        if order is not None:
            out.append(order)
    else:
        out.append(Response(data))
        return True
    return False


def _problem(data: bytes) -> ProtocolError:
    code, _, text = data.decode("utf-8", "surrogateescape").partition(" ")
    return ProtocolError(code, text)


def _with_body(line: bytes, body: bytes) -> bytes:
    return line + _LEN.pack(len(body)) + body


@lru_cache(maxsize=1024)
def _name(name: str) -> bytes:
    raw = name.encode("utf-8", "surrogateescape")
    if not valid_name(raw):
        raise InputError(f"invalid topic or channel name {quoted(raw)}: use 1 to 64 of . _ - a-z A-Z 0-9", name=name)
    return raw


def _id(message_id: bytes) -> bytes:
    if len(message_id) != ID_SIZE or b"\n" in message_id or b" " in message_id:
        raise InputError(f"invalid message id {message_id!r}", id=message_id)
    return message_id
