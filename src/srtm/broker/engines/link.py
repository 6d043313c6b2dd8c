"""The connection to an engine: to one of its servers after another, with TLS if the address asks for it.

In: bytes in `out`, written once a turn. Out: what the engine says, to its `Speaker`. A link that breaks is connected
again, with waits that grow until something was acknowledged.

Always holds: if the address asks for TLS, nothing but what leads to it is written in the clear, and nothing else is
understood.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from srtm.broker.engines.lane import patience
from srtm.errors import InputError, ProtocolError
from srtm.net.compression import BadStream
from srtm.net.credentials import Credentials
from srtm.net.explain import explained
from srtm.net.sockets import connect
from srtm.net.tls import Tls
from srtm.net.writer import Writer

if TYPE_CHECKING:
    import socket

    from srtm.broker.poller import Poller
    from srtm.broker.turn import Turn
    from srtm.protocol.engine import EngineAddress

log = logging.getLogger(__name__)

CONNECT_S = 1.0
Place = tuple[str, int]  # host and port; port 0 is a unix socket


class Speaker(Protocol):
    """The engine's protocol, as its connection uses it."""

    connected: bool
    acknowledged: int
    problem: str | None

    def greet(self) -> None:
        """Begin a connection."""

    def take(self, data: bytes) -> None:
        """Understand what the engine says; ProtocolError or InputError ends the connection."""

    def hint(self) -> str:
        """Return a likely reason why the engine says nothing, to be appended to an error."""

    def lost(self) -> None:
        """Take back everything that was not acknowledged."""


class Link:
    """One connection at a time, to the server whose turn it is."""

    __slots__ = (
        "_ended",
        "_poller",
        "_sock",
        "_speaker",
        "_task",
        "_turn",
        "_view",
        "_writer",
        "address",
        "credentials",
        "heard_ns",
        "out",
        "place",
        "servers",
        "tls",
    )

    def __init__(self, address: EngineAddress, speaker: Speaker, turn: Turn, poller: Poller, read_size: int) -> None:
        self.address = address
        self.servers = dict.fromkeys(address.servers, "")  # with the name in the certificate, unless it is the host's
        self.place = address.servers[0]  # the server in use, or tried last
        self.credentials = Credentials.read(address)
        self.tls: Tls | None = None
        self.out = bytearray()  # for the engine, not encrypted yet
        self.heard_ns = 0
        self._speaker = speaker
        self._turn = turn
        self._poller = poller
        self._view = memoryview(bytearray(read_size))
        self._sock: socket.socket | None = None
        self._writer: Writer | None = None
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def server_name(self) -> str:
        """The name that the certificate of the server in use must bear."""
        host, port = self.place
        return self.servers[self.place] or (host if port else "localhost")

    @property
    def up(self) -> bool:
        """Whether there is a connection, greeted or not."""
        return self._sock is not None

    def start(self) -> None:
        """Connect, and stay connected."""
        self._task = self._turn.loop.create_task(self._keep())

    def stop(self) -> None:
        """Connect no more."""
        if self._task is not None:
            self._task.cancel()
        self._hang_up()

    async def _keep(self) -> None:
        speaker, backoff, said = self._speaker, patience(), set[str]()
        while True:
            self.place = place = next(iter(self.servers))
            self.servers[place] = self.servers.pop(place)  # behind the others, which are tried next
            was = speaker.acknowledged
            try:
                async with asyncio.timeout(CONNECT_S):
                    sock = await self._connect(*place)
            except (OSError, ValueError) as error:  # ValueError: unusable files, or an impossible host name
                told = speaker.problem = f"cannot connect to {_text(place)}: {explained(error)}"
            else:
                self._begin(sock)
                await self._ended.wait()
                told = f"lost {_text(place)}: {speaker.problem}"
            if speaker.acknowledged > was:
                backoff.reset()
                said.clear()
            if told not in said:
                log.warning("ENGINE(%s): %s", self.address, told)
            if speaker.acknowledged > was:
                continue  # the next server may take over at once
            said.add(told)
            await asyncio.sleep(backoff.next_s())

    async def _connect(self, host: str, port: int) -> socket.socket:
        sock = await connect(host, port)
        try:
            if self.address.tls or self.address.creds:  # the system's authorities alone take milliseconds to read
                self.credentials = await asyncio.to_thread(Credentials.read, self.address)
        except BaseException:
            sock.close()
            raise
        return sock

    def _begin(self, sock: socket.socket) -> None:
        self._sock = sock
        self.tls = None
        self.out.clear()
        self._writer = Writer(self._turn.loop, sock, self.write, self._unwritable)
        self.heard_ns = self._turn.now_ns()
        self._ended.clear()
        self._poller.add(sock, self._readable)
        self._speaker.greet()
        self.write()

    def _readable(self) -> None:
        """Read once; the caller ends the turn."""
        assert self._sock is not None
        view, tls = self._view, self.tls
        try:
            size = self._sock.recv_into(view)
        except BlockingIOError:
            return
        except OSError as error:
            self.lose(explained(error))
            return
        if not size:
            self.lose(f"it closed the connection{self._speaker.hint()}")
            return
        self.heard_ns = self._turn.now_ns()
        try:
            self._speaker.take(bytes(view[:size]) if tls is None else tls.decode(bytes(view[:size])))
        except (ProtocolError, InputError) as problem:
            self.lose(str(problem))
        except BadStream as problem:
            assert tls is not None
            with suppress(OSError):
                self._sock.send(tls.pending())  # an alert says why
            self.lose(explained(problem.__cause__ or problem))

    def secure(self) -> None:
        """Begin TLS. Everything that is said from now on waits for its handshake, and is encrypted."""
        assert self.credentials.tls is not None
        self.tls = Tls(self.credentials.tls, self.server_name)
        self.tls.decode(b"")

    def write(self) -> None:
        """Write what there is, unless the kernel is still busy with what was written before."""
        writer, tls = self._writer, self.tls
        if writer is None or writer.waiting:
            return
        if tls is not None and not tls.ready:
            writer.write(tls.pending())
            return
        writer.write(self.out if tls is None else tls.encode(self.out))
        self.out.clear()

    def _unwritable(self, error: OSError) -> None:
        if self._speaker.connected:  # an engine that refuses the connection has said why, which is read next
            self.lose(explained(error))

    def lose(self, problem: str) -> None:
        """Give up the connection; another one follows."""
        self._speaker.problem = problem
        self._hang_up()
        self._speaker.lost()
        self._ended.set()

    def _hang_up(self) -> None:
        self._speaker.connected = False
        sock, self._sock = self._sock, None
        writer, self._writer = self._writer, None
        if sock is not None:
            self._poller.remove(sock)
            if writer is not None:
                writer.close()
            sock.close()


def _text(place: Place) -> str:
    host, port = place
    return f"{host}:{port}" if port else host
