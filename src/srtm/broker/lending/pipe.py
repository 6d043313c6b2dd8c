"""Frames of lending on a socket: read in the broker's turn, written at its end, before what clients are sent.

A frame that the kernel does not take at once waits; what would come behind a backlog is dropped. Asks and answers are
worth nothing when they are late, and a lost one only loses tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.errors import ProtocolError
from srtm.net.compression import BadStream
from srtm.net.explain import explained
from srtm.net.writer import Writer
from srtm.protocol.lending import Answers, Asks, Decoder, encode

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from srtm.broker.poller import Poller
    from srtm.broker.turn import Turn
    from srtm.net.tls import Tls
    from srtm.protocol.lending import Entry, Message

_READ_SIZE = 64 * 1024


class Pipe:
    """One connection to another broker; `take` gets its messages, and `lost` why it ended, unless we closed it."""

    __slots__ = (
        "_begin",
        "_decoder",
        "_kind",
        "_lost",
        "_poller",
        "_said",
        "_sock",
        "_take",
        "_tls",
        "_turn",
        "_writer",
    )

    def __init__(
        self,
        sock: socket.socket,
        turn: Turn,
        poller: Poller,
        take: Callable[[Message], None],
        lost: Callable[[str], None],
        *,
        asks: bool,
    ) -> None:
        """What is posted here `asks`, or answers."""
        self._sock = sock
        self._turn = turn
        self._poller = poller
        self._take = take
        self._lost = lost
        self._kind = Asks if asks else Answers
        self._decoder = Decoder()
        self._tls: Tls | None = None
        self._begin: Callable[[], None] | None = None  # after the handshake
        self._said: list[Entry] = []  # in this turn
        self._writer = Writer(turn.loop, sock, lambda: None, lambda error: self.end(explained(error)))
        poller.add(sock, self._readable)

    def secure(self, tls: Tls, begin: Callable[[], None] | None = None) -> None:
        """Go on inside of TLS, and `begin` when its handshake is done; a client starts the handshake at once."""
        self._tls, self._begin = tls, begin
        if not tls.serves:
            self._decoded(b"")

    @property
    def secured(self) -> bool:
        """Whether TLS has begun."""
        return self._tls is not None

    @property
    def ready(self) -> bool:
        """Whether the TLS handshake is over, or TLS is off."""
        return self._tls is None or self._tls.ready

    def send(self, data: bytes) -> None:
        """Write at once."""
        self._writer.write(self._tls.encode(data) if self._tls else data)

    def post(self, entry: Entry) -> None:
        """Say something at the end of this turn; there must be one."""
        if not self._said:
            self._turn.to_deliver.append(self)
        self._said.append(entry)

    def flush(self) -> None:
        """Write what this turn has said, unless the peer does not read."""
        said, self._said = self._said, []
        if not self._writer.waiting:
            self.send(encode(self._kind(said)))

    def _readable(self) -> None:
        """Read once; the caller ends the turn."""
        try:
            data = self._sock.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(explained(error))
            return
        if not data:
            self.end("it closed the connection")
            return
        try:
            for message in self._decoder.feed(self._decoded(data)):
                self._take(message)
        except (BadStream, ProtocolError) as problem:
            self.end(str(problem))
        else:
            if self._tls is not None and self._tls.ended:
                self.end("it closed the connection")

    def _decoded(self, data: bytes) -> bytes:
        """Bytes of the protocol; what TLS itself has to say is written at once."""
        if self._tls is None:
            return data
        try:
            plain = self._tls.decode(data)
        finally:
            self._writer.write(self._tls.pending())
        begin = self._begin
        if self._tls.ready and begin is not None:
            self._begin = None
            begin()
        return plain

    def end(self, problem: str) -> None:
        """Close the connection because of a problem, unless it is closed."""
        if self._sock.fileno() >= 0:
            self.close()
            self._lost(problem)

    def close(self) -> None:
        """Close the connection."""
        if self._sock.fileno() >= 0:
            self._poller.remove(self._sock)
            self._writer.close()
            self._sock.close()
