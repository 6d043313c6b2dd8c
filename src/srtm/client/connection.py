"""One connection to a broker, or to a stock nsqd.

In: commands as bytes. Out: the server's answers and messages, passed to a listener in order. Opening a connection
negotiates everything: IDENTIFY, TLS, deflate or snappy, AUTH. The connection answers heartbeats itself, and gives up on
a server that stays silent for two and a half heartbeat intervals.

Everything said in one turn of the loop goes out in one write; `writable` says whether there is room for more. `finish`
closes our side alone, through TLS as well, so that a broker can close its own side once it is done with what it got.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from srtm.errors import ClientError, InputError, ProtocolError
from srtm.net.compression import HAS_SNAPPY, BadStream, Codec, Deflate, Snappy
from srtm.net.explain import explained
from srtm.net.layers import Layers
from srtm.net.sockets import connect, split_address
from srtm.net.tls import Tls
from srtm.net.watchdog import Watchdog
from srtm.net.writer import Writer
from srtm.protocol import client as say
from srtm.protocol import frames
from srtm.protocol.client import ClientProtocol, Error, Heartbeat, Message, Response
from srtm.protocol.names import MAGIC_V2
from srtm.protocol.orders import Order

_READ: Final = 256 * 1024
_UNSENT: Final = 256 * 1024  # bytes that the kernel has not taken, beyond which callers should wait
_SILENCE: Final = 2.5  # heartbeat intervals


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What every connection of a client asks for."""

    tls: ssl.SSLContext | None = None
    server_name: str | None = None  # expected in the certificate; defaults to the host
    deflate: bool = False
    snappy: bool = False
    auth_secret: bytes | None = None
    auth_if_asked: bool = False  # send the secret only to a server that requires AUTH
    heartbeat_ms: int = 10_000
    timeout_s: float = 5.0  # for opening as a whole
    identity: Mapping[str, Any] = field(default_factory=dict)  # further fields of IDENTIFY, such as msg_timeout

    def __post_init__(self) -> None:
        """Reject impossible combinations here, not at the first connection."""
        if self.deflate and self.snappy:
            raise InputError("deflate and snappy exclude each other: choose one")
        if self.snappy and not HAS_SNAPPY:
            raise InputError("snappy needs cramjam: pip install cramjam")


class Listener(Protocol):
    """Receives what a server says."""

    def answered(self, data: bytes) -> None:
        """The oldest unanswered command succeeded."""

    def refused(self, problem: ProtocolError) -> None:
        """The server refused a command; after a fatal refusal, `ended` follows."""

    def delivered(self, message: Message) -> None:
        """A message of the subscribed channel arrived."""

    def ordered(self, connection: Connection, order: Order) -> None:
        """An SRTM broker gave an order."""

    def writable(self) -> None:
        """A backlog of unsent bytes is gone."""

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """The server closed the connection, or it broke."""


class Connection:
    """One connection, from its opening to its end."""

    __slots__ = (
        "_finishing",
        "_greeting",
        "_layers",
        "_listener",
        "_loop",
        "_opened",
        "_plain",
        "_protocol",
        "_queue",
        "_sock",
        "_watchdog",
        "_writer",
        "address",
        "closed",
        "settled",
    )

    def __init__(self, address: str, sock: socket.socket, listener: Listener) -> None:
        self.address = address
        self.closed = False
        self.settled: dict[str, Any] = {}  # the server's answer to IDENTIFY
        self._sock = sock
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._protocol = ClientProtocol()
        self._layers = Layers()
        self._plain = False  # open, and without layers: the hot path
        self._queue: list[bytes] = []  # said in this turn
        # The server's last words are still to be read after a failed write, and say why it failed.
        self._writer = Writer(self._loop, sock, self._drained, lambda _: None)
        self._finishing = False
        self._greeting: Generator[None, bytes, None] | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._watchdog = Watchdog(self._loop, self._silent)

    @classmethod
    async def open(
        cls,
        address: str,
        listener: Listener,
        options: ConnectionOptions,
        srtm: Mapping[str, Any] | None = None,
    ) -> Connection:
        """Connect and negotiate; ClientError or ProtocolError says why that failed."""
        host, port = split_address(address)
        connection: Connection | None = None
        ready = False
        try:
            async with asyncio.timeout(options.timeout_s):
                connection = cls(address, await connect(host, port), listener)
                connection._greet(options, host, srtm)
                await connection._opened
            ready = True
        except TimeoutError:
            problem = f"{address} did not answer within {options.timeout_s:g} s"
            raise ClientError(problem, address=address) from None
        except OSError as error:
            raise ClientError(f"cannot connect to {address}: {explained(error)}", address=address) from None
        finally:
            if connection is not None and not ready:
                connection.close()
        return connection

    @property
    def writable(self) -> bool:
        """Whether callers may say more."""
        writer = self._writer
        return not self.closed and (not writer.waiting or writer.unsent < _UNSENT)

    def say(self, data: bytes) -> None:
        """Write this at the end of the loop's turn, together with everything else said in it."""
        if not self._queue:
            self._loop.call_soon(self._flush)
        self._queue.append(data)

    def send(self, data: bytes) -> None:
        """Write this now."""
        self._queue.append(data)
        self._flush()

    def finish(self) -> None:
        """Close our side after what was said; the listener still hears the server until it closes its own."""
        self._finishing = True
        self._flush()

    def close(self) -> None:
        """Close the connection; the listener hears nothing more."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._writer.close()
        self._sock.close()
        self._watchdog.stop()

    def detach(self) -> socket.socket:
        """Close the connection but return its socket, for a caller that reads it differently; requires no layers."""
        assert self._plain
        assert not self._protocol.buffered
        found = self._sock.dup()
        found.setblocking(False)
        self.close()
        return found

    def _greet(self, options: ConnectionOptions, host: str, srtm: Mapping[str, Any] | None) -> None:
        self._greeting = self._greetings(options, host, srtm)
        next(self._greeting)
        self._loop.add_reader(self._sock, self._readable)

    def _greetings(
        self, options: ConnectionOptions, host: str, srtm: Mapping[str, Any] | None
    ) -> Generator[None, bytes, None]:
        """Negotiate: each step receives the answer to the previous one."""
        fields: dict[str, Any] = {
            "client_id": socket.gethostname(),
            "hostname": socket.gethostname(),
            "user_agent": "srtm",
            "feature_negotiation": True,
            "heartbeat_interval": options.heartbeat_ms,
            "tls_v1": options.tls is not None,
            "deflate": options.deflate,
            "snappy": options.snappy,
            **({} if srtm is None else {"srtm": srtm}),
            **options.identity,
        }
        self._protocol.pause_after_response()
        self.send(MAGIC_V2 + say.identify(fields))
        answer = yield
        self.settled = settled = _settled(answer)
        codec = _codec(settled)
        if options.tls is not None:
            if not settled.get("tls_v1"):
                raise ClientError(f"{self.address} offers no TLS: start it with a certificate, or connect without TLS")
            self._layers.start_tls(Tls(options.tls, options.server_name or host))
            self._writer.write(self._layers.pending())
            if codec is not None:
                self._protocol.pause_after_response()
            yield
        if codec is not None:
            self._layers.start_codec(codec)
            yield
        asked = not options.auth_if_asked or settled.get("auth_required")
        if options.auth_secret is not None and asked:
            self.send(say.auth(options.auth_secret))
            yield
        self._plain = self._layers.plain
        self._watchdog.start(_SILENCE * fields["heartbeat_interval"] / 1000)

    def _silent(self) -> None:
        self._end(ClientError(f"{self.address} is silent", address=self.address))

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if not data:
            self._end(None)
            return
        self._watchdog.heard = True
        if self._plain:
            if data == frames.OK and not self._protocol.buffered:
                self._listener.answered(b"OK")
            else:
                self._take(data)
            return
        self._take_through(self._layers.decode, data)

    def _take_through(self, decode: Callable[[bytes], bytes], data: bytes) -> None:
        """Take what the layers make of bytes; TLS may have to answer by itself."""
        try:
            found = decode(data)
        except BadStream as problem:
            self._end(ClientError(f"{self.address}: {problem}", address=self.address))
            return
        self._writer.write(self._layers.pending())
        self._take(found)

    def _take(self, data: bytes) -> None:
        for event in self._protocol.feed(data):
            kind = type(event)
            if kind is Message:
                self._listener.delivered(event)  # type: ignore[arg-type]
            elif kind is Response:
                self._answered(event.data)  # type: ignore[union-attr]
            elif kind is Heartbeat:
                if not self._finishing:
                    self.say(say.nop())
            elif kind is Error:
                self._refused(event.problem)  # type: ignore[union-attr]
            elif isinstance(event, ProtocolError):
                self._end(event)
            else:
                self._listener.ordered(self, event)  # type: ignore[arg-type]
            if self.closed:
                return
        if self._protocol.paused:
            self._take_through(self._layers.rest, self._protocol.take_unparsed())

    def _answered(self, data: bytes) -> None:
        if self._greeting is None:
            self._listener.answered(data)
            return
        try:
            self._greeting.send(data)
        except StopIteration:
            self._greeting = None
            if not self._opened.done():
                self._opened.set_result(None)
        except ClientError as problem:
            self._end(problem)

    def _refused(self, problem: ProtocolError) -> None:
        if self._greeting is None:
            self._listener.refused(problem)
        if self._greeting is not None or problem.fatal:
            # The server closes after it. Its reset may have come with these bytes, and libuv tells of that only once.
            self._end(problem)

    def _flush(self) -> None:
        if self.closed:
            return
        data = b"".join(self._queue)
        self._queue.clear()
        if data and not self._plain:
            data = self._layers.encode(data)
        if self._finishing:
            data += self._layers.end()
        self._writer.write(data)
        if self._finishing:
            self._shut()

    def _drained(self) -> None:
        self._shut()
        self._listener.writable()

    def _shut(self) -> None:
        """Close our side of the socket once everything said before is written."""
        if self._finishing and not self._writer.waiting and not self.closed:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def _end(self, problem: Exception | None) -> None:
        if self.closed:
            return
        self.close()
        if self._opened.done():
            self._listener.ended(self, problem)
        elif isinstance(problem, ClientError | ProtocolError | OSError):
            self._opened.set_exception(problem)
        else:
            ended = ClientError(f"{self.address} closed the connection during its handshake", address=self.address)
            self._opened.set_exception(ended)


def _settled(answer: bytes) -> dict[str, Any]:
    if answer == b"OK":  # a server that does not negotiate
        return {}
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ClientError(f"unreadable answer to IDENTIFY: {answer[:100]!r}")
    return found


def _codec(settled: Mapping[str, Any]) -> Codec | None:
    if settled.get("snappy"):
        return Snappy()
    if settled.get("deflate"):
        return Deflate(settled.get("deflate_level", 6))
    return None
