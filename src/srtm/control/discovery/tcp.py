"""Discovery over TCP, as nsqlookupd does it: each connection is a producer of the registry once it has identified.

In: bytes from brokers. Out: answers, and registrations in `registry.Registry`. A broker that `admit` refuses is told
why, and nothing else. A connection buffers one incomplete
command, is not read while the broker does not read its answers, and ends half a minute after its host disappears. At
EOF, a producer's registrations go at once, even if answers are still unsent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from srtm.control.clock import now_ns
from srtm.control.discovery.registry import Producer, Reason
from srtm.errors import ProtocolError, RegistryFull
from srtm.net.tls import HANDSHAKE_S, names_in
from srtm.protocol import lookup

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from srtm.control.discovery.registry import Registry

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 10_000
_TICK_S = 1.0
# A host without power says nothing: probe it after 15 s, three times, and give up unsent answers with it.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


class Applicant(NamedTuple):
    """A broker that wants to register, and its credentials: a token, and the names in its certificate."""

    peer: lookup.PeerInfo
    address: str
    token: str
    names: frozenset[str]


Admit = Callable[[Applicant, int], str | None]  # at that time: the reason for a refusal, or None


class Discovery:
    """The service where brokers register; `me` is how it introduces itself."""

    def __init__(
        self,
        registry: Registry,
        me: lookup.PeerInfo,
        clock: Callable[[], int] = now_ns,
        max_connections: int = MAX_CONNECTIONS,
        admit: Admit = lambda *_: None,
    ) -> None:
        self.registry = registry
        self.me = me
        self.clock = clock
        self.max_connections = max_connections
        self.admit = admit
        self.connections: set[Connection] = set()
        self.stopping = False

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        """Serve a listening socket for the time of a block, and close it."""
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit these
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        loop = asyncio.get_running_loop()
        patience_s = HANDSHAKE_S if tls else None
        server = await loop.create_server(
            lambda: Connection(self), sock=listener, ssl=tls, ssl_handshake_timeout=patience_s
        )
        ticking = loop.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            self.stopping = True  # accepted connections may still be on their way here
            server.close()
            for connection in list(self.connections):
                connection.abandon()
            await server.wait_closed()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.registry.tick(self.clock())


class Connection(asyncio.Protocol):
    """The connection of one broker."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        self._registry = discovery.registry
        self._protocol = lookup.LookupServer()
        self._producer: Producer | None = None
        self._address = ""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection if there is room."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        if peer is None or self._discovery.stopping:
            self._transport.abort()
            return
        if len(self._discovery.connections) >= self._discovery.max_connections:
            log.warning("PRODUCER(%s): refused: %d connections are open", peer, len(self._discovery.connections))
            self._transport.abort()
            return
        host, port = peer[:2]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._discovery.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Carry out and answer all complete commands."""
        answers = bytearray()
        for event in self._protocol.feed(data):
            try:
                answers += self._answer(event)
            except RegistryFull as problem:
                self._protocol.closed = True
                answers += lookup.error(ProtocolError("E_INVALID", str(problem)))
                break
        self._transport.write(answers)
        if self._protocol.closed:
            self._leave(Reason.REFUSED)
            self._transport.close()

    def _answer(self, event: lookup.Event) -> bytes:
        match event:
            case ProtocolError():
                log.warning("PRODUCER(%s): %s", self._address, event)
                return lookup.error(event)
            case lookup.Identify(peer, token):
                names = names_in(self._transport.get_extra_info("peercert"))
                if why := self._discovery.admit(Applicant(peer, self._address, token, names), self._discovery.clock()):
                    log.warning("PRODUCER(%s): refused as broker %r: %s", self._address, peer.hostname, why)
                    self._protocol.closed = True
                    return lookup.error(ProtocolError("E_UNAUTHORIZED", why))
                self._producer = self._registry.identify(self._address, peer, self._discovery.clock())
                log.info("PRODUCER(%s): is %s", self._address, self._producer.node)
                return lookup.peer_response(self._discovery.me)
            case lookup.Register(topic, channel):
                self._registry.register(self._identified(), topic, channel)
            case lookup.Unregister(topic, channel):
                self._registry.unregister(self._identified(), topic, channel)
            case lookup.Ping() if self._producer:
                self._registry.ping(self._producer, self._discovery.clock())
        return _OK

    def _identified(self) -> Producer:
        assert self._producer, "the protocol requires IDENTIFY first"
        return self._producer

    def eof_received(self) -> None:
        """The broker closed its side; the transport closes once all answers are sent."""
        problem = self._protocol.end()
        if problem:
            self._transport.write(lookup.error(problem))
        self._leave(Reason.EOF)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._discovery.connections.discard(self)
        self._leave(Reason.RESET if isinstance(exc, ConnectionError) else Reason.SILENT)

    def pause_writing(self) -> None:
        """The broker does not read its answers: stop reading its commands."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The broker reads again: resume reading its commands."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Close because the service stops; the broker has not left, so nothing is reported."""
        self._producer = None
        self._transport.abort()

    def _leave(self, reason: Reason) -> None:
        producer, self._producer = self._producer, None
        if producer:
            log.info("PRODUCER(%s): left (%s)", self._address, reason)
            self._registry.leave(producer, reason)


_OK: Final = lookup.response()
