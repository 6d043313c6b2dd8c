"""One connection to a broker, or to a stock nsqd.

In: commands as bytes, and what a read brought. Out: what the server says, told to a listener in the order it came.
Opening settles everything: IDENTIFY with negotiation, TLS, deflate or snappy, AUTH. Heartbeats are answered here, and a
server that is not heard for two and a half of their intervals counts as lost.

What is said in one turn of the loop goes out in one write. What the kernel does not take is kept; `writable` says
whether there is room for more. `finish` closes our side alone, through TLS as well, so that a broker can say by its own
end when it is done with what it got.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from srtm.errors import ClientError, InputError, ProtocolError
from srtm.net.compression import HAS_SNAPPY, BadStream, Codec, Deflate, Snappy
from srtm.net.tls import Tls
from srtm.protocol import client as say
from srtm.protocol import frames
from srtm.protocol.client import ClientProtocol, Error, Heartbeat, Message, Response
from srtm.protocol.names import MAGIC_V2
from srtm.protocol.orders import Order

_READ: Final = 256 * 1024
_UNSENT: Final = 256 * 1024  # bytes that the kernel has not taken, beyond which no more should be said
_SILENCE: Final = 2.5  # intervals of heartbeats


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What every connection of a client asks for."""

    tls: ssl.SSLContext | None = None
    server_name: str | None = None  # that the certificate must bear; the host unless given
    deflate: bool = False
    snappy: bool = False
    auth_secret: bytes | None = None
    auth_if_asked: bool = False  # show the secret to a server that wants one, and to no other
    heartbeat_ms: int = 10_000
    timeout_s: float = 5.0  # for everything that opening takes
    identity: Mapping[str, Any] = field(default_factory=dict)  # further fields of IDENTIFY, such as msg_timeout

    def __post_init__(self) -> None:
        """What cannot be is refused here, not at the first connection."""
        if self.deflate and self.snappy:
            raise InputError("ask for deflate or for snappy, not for both")
        if self.snappy and not HAS_SNAPPY:
            raise InputError("snappy needs cramjam: pip install 'srtm[snappy]'")


class Listener(Protocol):
    """Who is told what a server says."""

    def answered(self, data: bytes) -> None:
        """The oldest command that had no answer has this one."""

    def refused(self, problem: ProtocolError) -> None:
        """The server refused a command; if that is fatal, the end of the connection follows."""

    def delivered(self, message: Message) -> None:
        """A message of the subscribed channel."""

    def ordered(self, connection: Connection, order: Order) -> None:
        """A broker of SRTM's wants something."""

    def writable(self) -> None:
        """There is room again for more to be said."""

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """The server closed the connection, or it broke."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{address!r} is no address: write host:port, as in 127.0.0.1:4150", address=address)
    return host.strip("[]"), int(port)


class Connection:
    """One connection, from its opening to its end."""

    __slots__ = (
        "_codec",
        "_finishing",
        "_greeting",
        "_heard",
        "_heartbeat_s",
        "_layer",
        "_listener",
        "_loop",
        "_opened",
        "_plain",
        "_protocol",
        "_queue",
        "_sock",
        "_timer",
        "_tls",
        "_wire",
        "address",
        "closed",
        "settled",
        "writable",
    )

    def __init__(self, address: str, sock: socket.socket, listener: Listener) -> None:
        self.address = address
        self.closed = False
        self.writable = True
        self.settled: dict[str, Any] = {}  # the server's answer to IDENTIFY
        self._sock = sock
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._protocol = ClientProtocol()
        self._tls: Tls | None = None
        self._codec: Codec | None = None
        self._layer: Tls | Codec | None = None  # that was just begun: what came after the answer goes through it
        self._plain = False  # nothing stands between socket and protocol
        self._queue: list[bytes] = []  # said in this turn
        self._wire = bytearray()  # that the kernel did not take yet
        self._finishing = False
        self._greeting: Generator[None, bytes, None] | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._heard = True
        self._heartbeat_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        address: str,
        listener: Listener,
        options: ConnectionOptions,
        srtm: Mapping[str, Any] | None = None,
    ) -> Connection:
        """A connection on which everything is settled; ClientError or ProtocolError says why there is none."""
        host, port = split_address(address)
        connection: Connection | None = None
        ready = False
        try:
            async with asyncio.timeout(options.timeout_s):
                connection = cls(address, await _connect(host, port), listener)
                connection._greet(options, host, srtm)
                await connection._opened
            ready = True
        except TimeoutError:
            problem = f"{address} did not answer within {options.timeout_s:g} s"
            raise ClientError(problem, address=address) from None
        except OSError as error:
            raise ClientError(f"cannot connect to {address}: {error.strerror or error}", address=address) from None
        finally:
            if connection is not None and not ready:
                connection.close()
        return connection

    def say(self, data: bytes) -> None:
        """Write this at the end of the loop's turn, with all else that is said until then."""
        if not self._queue:
            self._loop.call_soon(self._flush)
        self._queue.append(data)

    def send(self, data: bytes) -> None:
        """Write this now."""
        self._queue.append(data)
        self._flush()

    def finish(self) -> None:
        """Say nothing more; what the server still says is heard until it ends the connection."""
        self._finishing = True
        self._flush()

    def close(self) -> None:
        """End it from here; the listener hears nothing more."""
        if self.closed:
            return
        self.closed = True
        self.writable = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        if self._timer:
            self._timer.cancel()

    def detach(self) -> socket.socket:
        """The socket, for someone who reads it in a way of his own; nothing may stand between it and the protocol."""
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
        """Everything that is settled before the connection is used: each step takes the answer to the one before."""
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
        codec: Codec | None = None
        if settled.get("snappy"):
            codec = Snappy()
        elif settled.get("deflate"):
            codec = Deflate(settled.get("deflate_level", 6))
        if options.tls is not None:
            if not settled.get("tls_v1"):
                raise ClientError(f"{self.address} offers no TLS: start it with a certificate, or connect without")
            self._layer = self._tls = Tls(options.tls, options.server_name or host)
            self._decoded(b"", self._tls)
            if codec is not None:
                self._protocol.pause_after_response()
            yield
        if codec is not None:
            self._layer = self._codec = codec
            yield
        asked = not options.auth_if_asked or settled.get("auth_required")
        if options.auth_secret is not None and asked:
            self.send(say.auth(options.auth_secret))
            yield
        self._plain = self._tls is None and self._codec is None
        self._heartbeat_s = fields["heartbeat_interval"] / 1000
        if self._heartbeat_s > 0:
            self._timer = self._loop.call_later(_SILENCE * self._heartbeat_s, self._listen)

    def _listen(self) -> None:
        """Whether anything was heard since the last look."""
        if not self._heard:
            self._end(ClientError(f"{self.address} is silent", address=self.address))
            return
        self._heard = False
        self._timer = self._loop.call_later(_SILENCE * self._heartbeat_s, self._listen)

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
        self._heard = True
        if self._plain:
            if data == frames.OK and not self._protocol.buffered:
                self._listener.answered(b"OK")
            else:
                self._take(data)
            return
        try:
            if self._tls is not None:
                data = self._decoded(data, self._tls)
            if self._codec is not None:
                data = self._decoded(data, self._codec)
            self._take(data)
        except BadStream as problem:
            self._end(ClientError(f"{self.address}: {problem}", address=self.address))

    def _decoded(self, data: bytes, layer: Tls | Codec) -> bytes:
        """What a layer makes of the bytes; TLS may have to say something itself."""
        if isinstance(layer, Tls):
            found = layer.decode(data)
            self._write(layer.pending())
            return found
        found = layer.decode(data)
        while layer.more:
            found += layer.decode(b"")
        return found

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
            rest, layer = self._protocol.take_unparsed(), self._layer
            self._layer = None
            if rest:
                self._take(rest if layer is None else self._decoded(rest, layer))

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
        if data:
            if self._codec is not None:
                data = self._codec.encode(data)
            if self._tls is not None:
                data = self._tls.encode(data)
        if self._finishing and self._tls is not None:
            data += self._tls.end()
        self._write(data)

    def _write(self, data: bytes) -> None:
        """Give the kernel what it takes, and keep the rest."""
        if self.closed:
            return
        if data and not self._wire:
            sent = self._push(data)
            data = data[sent:] if sent else data
            if data and not self.closed:
                self._loop.add_writer(self._sock, self._can_write)
        if data:
            self._wire += data
            self.writable = self.writable and len(self._wire) < _UNSENT
        elif self._finishing and not self._wire and not self.closed:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def _push(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the reason is read from the socket next, after all that the server had to say
            self._wire.clear()
            self._loop.remove_writer(self._sock)
            return len(data)

    def _can_write(self) -> None:
        del self._wire[: self._push(self._wire)]
        if self._wire:
            return
        self._loop.remove_writer(self._sock)
        self._write(b"")
        if not self.writable:
            self.writable = True
            self._listener.writable()

    def _end(self, problem: Exception | None) -> None:
        if self.closed:
            return
        self.close()
        if self._opened.done():
            self._listener.ended(self, problem)
        elif isinstance(problem, ClientError | ProtocolError | OSError):
            self._opened.set_exception(problem)
        else:
            ended = ClientError(f"{self.address} closed the connection before it was settled", address=self.address)
            self._opened.set_exception(ended)


async def _connect(host: str, port: int) -> socket.socket:
    """A connected socket; the first of the host's addresses that takes it."""
    loop = asyncio.get_running_loop()
    found = await _resolve(host, port)
    for number, (family, address) in enumerate(found):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            if number == len(found) - 1:
                raise
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise OSError(f"{host} has no address")


async def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return [(family, (host, port))]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


def _settled(answer: bytes) -> dict[str, Any]:
    if answer == b"OK":  # a server that does not negotiate
        return {}
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ClientError(f"the answer to IDENTIFY cannot be read: {answer[:100]!r}")
    return found
