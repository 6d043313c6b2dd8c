"""nsqlookupd's V1, both sides: brokers register themselves, their topics and channels.

In: bytes from the other side, in reads of any size. Out: a list of commands (server) or responses (client), in order.

    magic       "  V1"
    command     VERB [SP param]... LF             surrounding white space is dropped
    IDENTIFY    [size 4][JSON]
    response    [size 4][data]                    no type: an error is data that starts with its code

A broker sends IDENTIFY once, REGISTER and UNREGISTER as topics and channels come and go, and PING every 15 s. All
errors are fatal, and last in the server's list. A body's size is checked before the body is kept; at most one
incomplete command is kept.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final, NamedTuple

from srtm.errors import InputError, ProtocolError
from srtm.protocol import gojson
from srtm.protocol.names import MAGIC_V1, MAX_LINE, Settings, quoted, valid_name

PING: Final = b"PING\n"
MAX_BODY: Final = 64 * 1024  # an address, two ports, a version
MAX_RESPONSE: Final = Settings().max_body_size  # nsqd's own limit

_LEN: Final = Struct(">i")
_SPACE: Final = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_FIELDS: gojson.Fields = {
    "broadcast_address": "",
    "hostname": "",
    "tcp_port": 0,
    "http_port": 0,
    "version": "",
    "https_port": 0,  # nsqd and nsqlookupd do not know it
}
_TOKEN: Final = "srtm_token"


class PeerInfo(NamedTuple):
    """Addresses of a broker or a lookup service."""

    broadcast_address: str
    hostname: str
    tcp_port: int
    http_port: int
    version: str
    https_port: int = 0  # 0 if it serves no HTTPS, or does not say


class Ping(NamedTuple):
    """A sign of life; answer OK."""


class Identify(NamedTuple):
    """The broker's addresses and its token, if any; answer with the `PeerInfo` of the lookup service."""

    peer: PeerInfo
    token: str = ""


class Register(NamedTuple):
    """The broker has this topic, or this channel of it; answer OK."""

    topic: str
    channel: str | None


class Unregister(NamedTuple):
    """The broker lost this channel, or the topic with all its channels; answer OK."""

    topic: str
    channel: str | None


Command = Ping | Identify | Register | Unregister
Event = Command | ProtocolError


class LookupServer:
    """One broker's connection, as the lookup service reads it."""

    __slots__ = ("_greeted", "_need", "_pending", "closed", "peer")

    def __init__(self) -> None:
        self.peer: PeerInfo | None = None
        self.closed = False
        self._greeted = False
        self._pending = bytearray()
        self._need = 0

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete command."""
        return len(self._pending)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Return all commands that these bytes complete; an error, always fatal, comes last."""
        out: list[Event] = []
        if self.closed:
            return out
        self._pending += data
        if len(self._pending) < self._need:
            return out
        whole = bytes(self._pending)
        try:
            pos = self._read(whole, out)
        except ProtocolError as problem:
            self.closed = True
            self._pending.clear()
            out.append(problem.bare())
            return out
        del self._pending[:pos]
        return out

    def end(self) -> ProtocolError | None:
        """End the stream; return the error of a truncated body, or None."""
        if self.closed:
            return None
        self.closed = True
        _, newline, rest = bytes(self._pending).partition(b"\n")
        if not newline or not self._greeted:
            return None
        return ProtocolError("E_BAD_BODY", f"IDENTIFY failed to read body{' size' if len(rest) < _LEN.size else ''}")

    def _read(self, data: bytes, out: list[Event]) -> int:
        pos, end = 0, len(data)
        if not self._greeted:
            if end < len(MAGIC_V1):
                self._need = len(MAGIC_V1)
                return 0
            if not data.startswith(MAGIC_V1):
                raise ProtocolError("E_BAD_PROTOCOL", magic=data[: len(MAGIC_V1)])
            self._greeted = True
            pos = len(MAGIC_V1)
        while pos < end:
            newline = data.find(b"\n", pos, pos + MAX_LINE)
            if newline < 0:
                if end - pos >= MAX_LINE:
                    raise ProtocolError("E_INVALID", f"line is longer than {MAX_LINE} bytes")
                break
            verb, *params = data[pos:newline].decode("utf-8", "surrogateescape").strip(_SPACE).split(" ")
            after = newline + 1
            if verb == "IDENTIFY":
                stop = self._body(data, after)
                if stop > end:
                    self._need = stop - pos
                    return pos
                self.peer, token = _peer(data[after + 4 : stop])
                out.append(Identify(self.peer, token))
                after = stop
            elif verb == "PING":
                out.append(Ping())
            elif verb in ("REGISTER", "UNREGISTER"):
                if self.peer is None:
                    raise ProtocolError("E_INVALID", "client must IDENTIFY")
                topic, channel = _names(verb, params)
                out.append(Register(topic, channel) if verb == "REGISTER" else Unregister(topic, channel))
            else:
                raise ProtocolError("E_INVALID", f"invalid command {verb}")
            pos = after
        self._need = end - pos + 1
        return pos

    def _body(self, data: bytes, at: int) -> int:
        """Return the offset where IDENTIFY ends, or where its size does if that is incomplete."""
        if self.peer is not None:
            raise ProtocolError("E_INVALID", "cannot IDENTIFY again")
        if at + 4 > len(data):
            return at + 4
        (size,) = _LEN.unpack_from(data, at)
        if size < 0:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY invalid body size {size}", size=size)
        if size > MAX_BODY:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY body too big {size} > {MAX_BODY}", size=size, limit=MAX_BODY)
        return at + 4 + int(size)


class LookupClient:
    """A connection to a lookup service, as a broker reads it: one response to each command, in order."""

    __slots__ = ("_max_response", "_pending", "closed")

    def __init__(self, max_response: int = MAX_RESPONSE) -> None:
        self.closed = False
        self._max_response = max_response
        self._pending = bytearray()

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete response."""
        return len(self._pending)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes | ProtocolError]:
        """Return all responses that these bytes complete; a refusal is a ProtocolError in place of the response."""
        out: list[bytes | ProtocolError] = []
        if self.closed:
            return out
        pending = self._pending
        pending += data
        pos = 0
        while pos + 4 <= len(pending):
            (size,) = _LEN.unpack_from(pending, pos)
            if not 0 <= size <= self._max_response:
                problem = ProtocolError("E_INVALID", f"response size {size} out of range 0-{self._max_response}")
                self.closed = True
                pending.clear()
                out.append(problem)
                return out
            stop = pos + 4 + size
            if stop > len(pending):
                break
            found = bytes(pending[pos + 4 : stop])
            out.append(_problem(found) if found.startswith(b"E_") else found)
            pos = stop
        del pending[:pos]
        return out


def response(data: bytes = b"OK") -> bytes:
    """Return a response of the lookup service."""
    return _LEN.pack(len(data)) + data


def peer_response(peer: PeerInfo) -> bytes:
    """Return the answer to IDENTIFY: the addresses of the lookup service."""
    return response(_peer_json(peer))


def error(problem: ProtocolError) -> bytes:
    """Return an error of the lookup service."""
    return response(problem.wire)


def identify(peer: PeerInfo, token: str | None = None) -> bytes:
    """Identify the broker, to a controller with a token."""
    body = _peer_json(peer, {_TOKEN: token} if token else {})
    return b"IDENTIFY\n" + _LEN.pack(len(body)) + body


def register(topic: str, channel: str | None = None) -> bytes:
    """Register a topic, or a channel of it."""
    return _line("REGISTER", topic, channel)


def unregister(topic: str, channel: str | None = None) -> bytes:
    """Unregister a channel, or a topic with all its channels."""
    return _line("UNREGISTER", topic, channel)


def read_peer(data: bytes) -> PeerInfo:
    """Decode the lookup service's answer to IDENTIFY."""
    try:
        return PeerInfo(**gojson.read(data, _FIELDS))
    except ValueError as problem:
        raise ProtocolError("E_BAD_BODY", "cannot decode the response to IDENTIFY", cause=str(problem)) from None


def _peer_json(peer: PeerInfo, more: dict[str, str] | None = None) -> bytes:
    fields = peer._asdict() | (more or {})
    if not peer.https_port:
        del fields["https_port"]
    return gojson.write(dict(sorted(fields.items())))  # nsqlookupd's order


def _peer(body: bytes) -> tuple[PeerInfo, str]:
    try:
        found = gojson.read(body, {**_FIELDS, _TOKEN: ""})
        token = found.pop(_TOKEN)
        peer = PeerInfo(**found)
    except ValueError as problem:
        raise ProtocolError("E_BAD_BODY", "IDENTIFY failed to decode JSON body", cause=str(problem)) from None
    if not (peer.broadcast_address and peer.tcp_port and peer.http_port and peer.version):
        raise ProtocolError("E_BAD_BODY", "IDENTIFY missing fields", peer=peer)
    return peer, token


def _names(verb: str, params: list[str]) -> tuple[str, str | None]:
    if not params:
        raise ProtocolError("E_INVALID", f"{verb} insufficient number of params")
    topic, channel = params[0], params[1] if len(params) > 1 else ""
    if not valid_name(topic):
        raise ProtocolError("E_BAD_TOPIC", f"{verb} topic name '{topic}' is not valid")
    if channel and not valid_name(channel):
        raise ProtocolError("E_BAD_CHANNEL", f"{verb} channel name '{channel}' is not valid")
    return topic, channel or None


def _line(verb: str, topic: str, channel: str | None) -> bytes:
    names: list[Any] = [topic] if channel is None else [topic, channel]
    for name in names:
        if not valid_name(name):
            raise InputError(f"invalid topic or channel name {quoted(name.encode('utf-8', 'replace'))}", name=name)
    return " ".join([verb, *names]).encode() + b"\n"


def _problem(data: bytes) -> ProtocolError:
    code, _, text = data.decode("utf-8", "surrogateescape").partition(" ")
    return ProtocolError(code, text)
