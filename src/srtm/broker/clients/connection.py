"""The bytes of one client: reads with the kernel's time, one write a turn, and the layers between.

In: bytes of a socket. Out: commands to the client's `Speaker`, bytes in `out`. A client that must wait, for a full
topic, a disk or an authority, is held: not read. So is a client that does not read its answers, and one that is being
closed.
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from srtm.broker.clients.transport import Transport
from srtm.net.compression import BadStream
from srtm.net.tls import HANDSHAKE_S
from srtm.protocol import frames, lending
from srtm.protocol.server import ServerProtocol
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from mypy_extensions import i64

    from srtm.broker.clients.reads import Buffers
    from srtm.broker.poller import Poller, Socket
    from srtm.broker.statistics import ClientStatistics
    from srtm.broker.turn import Turn
    from srtm.errors import ProtocolError
    from srtm.protocol.identify import Identity
    from srtm.protocol.names import Settings

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0  # for a client that is being closed to read what it was sent
AGAIN_S = 0.1  # before a held client's read is looked at again
_NOT_SOON_NS: Final = NS_PER_S  # since the read before, for bytes that came with an earlier read
_TIMESPEC: Final = Struct("@ll")
_ANCILLARY: Final = socket.CMSG_SPACE(_TIMESPEC.size)
_timespec: Final = _TIMESPEC.unpack


class Keeper:
    """What connections share, and who must know when one closes."""

    turn: Turn
    poller: Poller
    buffers: Buffers
    tls: ssl.SSLContext | None
    max_unsent: int  # bytes that a consumer may leave unread before it gets no more messages
    most_unsent: int  # and any client, before it is not read either
    lend: Callable[[Any, str, bool], None] | None  # takes sockets of brokers that ask for tokens; and if by TLS

    def rest(self, connection: Connection) -> None:
        """Read a busy consumer now and then, instead of waking for each FIN."""
        raise NotImplementedError

    def end_rest(self, connection: Connection) -> None:
        """Read a resting client again as soon as it says something."""
        raise NotImplementedError

    def closed(self, connection: Connection) -> None:
        """Forget it."""
        raise NotImplementedError


class Speaker:
    """What a client says, command by command."""

    __slots__ = ()

    def hear(self, events: list[Any], arrival_ns: int, gap_ns: int, late_since_ns: int = 0) -> None:
        """Carry out the commands of a read, which came so long after the read before.

        `late_since_ns` is set after a stall: they have come between that time and `arrival_ns`.
        """
        raise NotImplementedError

    def attentive(self) -> bool:
        """Whether more commands may follow: none before them waits for an answer or an authority."""
        raise NotImplementedError

    def drained(self) -> None:
        """Go on: everything is written that the kernel had not taken at first."""
        raise NotImplementedError

    def fell_silent(self, *, cut: bool) -> None:
        """The client sends no more; `cut` if it stopped in the middle of a command."""
        raise NotImplementedError

    def hungry(self) -> bool:
        """Whether it must be read soon to be sent more messages."""
        raise NotImplementedError

    def leave(self) -> None:
        """Leave everything that it takes part in; it gets no more answers."""
        raise NotImplementedError

    def statistics(self) -> ClientStatistics:
        """A snapshot of the client."""
        raise NotImplementedError


class Connection:
    """One client's socket, and what is read from and written to it."""

    __slots__ = (
        "address",
        "choked",
        "closing",
        "heard_ns",
        "holds",
        "keeper",
        "out",
        "protocol",
        "read_into",
        "resting",
        "sent",
        "sock",
        "speaker",
        "transport",
        "writing",
    )

    speaker: Speaker

    def __init__(self, keeper: Keeper, sock: Socket, address: str, settings: Settings) -> None:
        self.keeper = keeper
        self.sock = sock
        self.address = address
        self.protocol = ServerProtocol(settings)
        self.transport: Transport | None = None  # TLS and compression
        self.read_into = keeper.buffers.whole  # for the next read: less if it floods its topic
        self.holds = 0  # reasons not to read from it
        self.resting = False  # a busy consumer, read now and then
        self.out = bytearray()
        self.writing = False  # the kernel took less than there was; it says when it takes more
        self.choked = False  # held, because it does not read what it is sent
        self.closing = False
        self.sent: Callable[[], None] | None = None  # is called after each complete write
        self.heard_ns = keeper.turn.now_ns()

    @property
    def closed(self) -> bool:
        """Whether the socket is closed."""
        return self.sock.fileno() < 0

    def send(self, data: bytes) -> None:
        """Write bytes at the end of this turn."""
        if not self.out:
            self.keeper.turn.to_flush.append(self)
        self.out += data

    def readable(self) -> None:
        """Read what is there, and carry out what it says; the caller ends the turn."""
        keeper = self.keeper
        read_into, self.read_into = self.read_into, keeper.buffers.whole
        now_ns, poller = keeper.turn.now_ns(), keeper.poller
        if now_ns > poller.late_ns:
            keeper.buffers.read_late(self.sock, read_into, (poller.began_ns, now_ns), self._read_on)
        else:
            self.read(read_into)

    def _read_on(self, read_into: list[memoryview], late_since_ns: int) -> bool:
        """Read once; returns whether more may be read, though the disk may have to store this first."""
        if not self.read(read_into, late_since_ns) or self.closing or self.closed:
            return False
        return not (self.transport is not None and self.transport.more) and self.speaker.attentive()

    def read(self, read_into: list[memoryview], late_since_ns: int = 0) -> bool:
        """Read once, and carry out what it says; returns whether there was anything to read."""
        try:
            size, ancillary, _, _ = self.sock.recvmsg_into(read_into, _ANCILLARY)
        except BlockingIOError:
            return False
        except OSError:
            self.close()
            return False
        if not size:
            self._ended()
            return False
        buffers = self.keeper.buffers
        if ancillary:
            stamp: tuple[int, int] = _timespec(ancillary[0][2])
            seconds: i64 = stamp[0]
            arrival_ns: int = seconds * NS_PER_S + stamp[1]
        else:
            arrival_ns = self.keeper.turn.now_ns()
            late_since_ns = 0
            buffers.unstamped += 1
        heard_ns, self.heard_ns = self.heard_ns, arrival_ns
        if late_since_ns < heard_ns and late_since_ns:
            late_since_ns = heard_ns
        data = buffers.view[:size].tobytes()
        if self.transport is None:
            self._take(data, arrival_ns, arrival_ns - heard_ns, late_since_ns)
        else:
            self._receive(self.transport, data, arrival_ns, arrival_ns - heard_ns, late_since_ns)
        return True

    def _take(self, data: bytes, arrival_ns: int, gap_ns: int, late_since_ns: int = 0) -> None:
        self.speaker.hear(self.protocol.feed(data), arrival_ns, gap_ns, late_since_ns)
        if self.writing and not self.choked and len(self.out) > self.keeper.most_unsent:
            self.choked = True
            self.hold()

    def _receive(self, transport: Transport, data: bytes, arrival_ns: int, gap_ns: int, late_since_ns: int = 0) -> None:
        """Take what comes out of the layers."""
        try:
            plain = transport.receive(data)
        except BadStream as problem:
            shaking = "TLS handshake failed" if not transport.ready else "unreadable stream"
            log.warning("CLIENT(%s): %s: %s", self.address, shaking, problem)
            with suppress(OSError):
                if not self.writing:
                    self.sock.send(transport.wire)  # an alert says why
            self.close()
            return
        self.protocol.tls = transport.tls is not None and transport.ready
        self.keeper.turn.to_flush.append(self)
        self._take(plain, arrival_ns, gap_ns, late_since_ns)
        if self.closed:
            return
        if transport.more:
            self.hold()
            self.keeper.turn.loop.call_soon(self._take_more, transport, arrival_ns)
        elif transport.ended:
            self._ended()

    def _take_more(self, transport: Transport, arrival_ns: int) -> None:
        """Go on with a read that was too much for one turn, once nothing else holds the client."""
        turn = self.keeper.turn
        if self.closed:
            return
        if self.holds > 1:
            turn.loop.call_later(AGAIN_S, self._take_more, transport, arrival_ns)
            return
        turn.wake()
        self._receive(transport, b"", arrival_ns, _NOT_SOON_NS)
        self.release()

    def upgrade(self, identity: Identity, arrival_ns: int) -> None:
        """Go on through the layers that IDENTIFY settled; it was the last command before them."""
        turn, rest = self.keeper.turn, self.protocol.take_unparsed()
        self.transport = Transport(identity, self.keeper.tls, bytes(self.out))
        self.out.clear()
        turn.to_flush.append(self)
        if not self.transport.ready:
            turn.loop.call_later(HANDSHAKE_S, self._check_handshake)
        if rest:
            self._receive(self.transport, rest, arrival_ns, _NOT_SOON_NS)

    def _check_handshake(self) -> None:
        if self.transport is not None and not self.transport.ready and not self.closed:
            log.warning("CLIENT(%s): TLS handshake failed: not complete after %g s", self.address, HANDSHAKE_S)
            self.close()

    def hold(self) -> None:
        """Read no more from it, until it has been released as often as it was held."""
        self.holds += 1
        if self.holds == 1:
            self.keeper.poller.remove(self.sock)

    def release(self) -> None:
        """Take back one reason not to read from it."""
        self.holds -= 1
        if not self.holds and not self.resting and not self.closed:
            self.heard_ns = self.keeper.turn.now_ns()  # it could not be heard
            self.keeper.poller.add(self.sock, self.readable)

    def _ended(self) -> None:
        """The client sends no more; a command that it had begun gets nsqd's error."""
        problem = self.protocol.end()
        if self.writing:  # what it does not read while it speaks, it will not read now
            self.close()
            return
        self.hold()
        if problem and not self.closing:
            self.send(frames.error(problem))
        self.speaker.fell_silent(cut=problem is not None)

    @property
    def certified(self) -> frozenset[str]:
        """Whom the client's certificate belongs to, if it showed one."""
        tls = self.transport.tls if self.transport else None
        return tls.names if tls is not None else frozenset()

    def fail(self, problem: ProtocolError) -> None:
        """Tell the client what is wrong, and close it; others get what it had in flight at once."""
        magic = problem.facts.get("magic")
        if self.keeper.lend is not None and magic in (lending.MAGIC, lending.MAGIC_TLS):
            self.keeper.poller.remove(self.sock)
            self.closing = True
            self.keeper.closed(self)
            self.keeper.lend(self.sock, self.address, magic == lending.MAGIC_TLS)
            return
        self.speaker.leave()
        self.send(frames.error(problem))
        self.protocol.closed = True
        self.hold()
        self.end()

    def end(self) -> None:
        """Close it when it has read what there is for it, or after a while."""
        turn = self.keeper.turn
        self.closing = True
        turn.to_flush.append(self)
        turn.loop.call_later(LAST_WORDS_S, self.close)
        turn.wake()

    def flush(self) -> None:
        """Write everything there is, at once. What the kernel does not take is kept, and written when it does."""
        if self.writing:
            return
        wire = self.out if self.transport is None else self.transport.encode(self.out)
        if wire:
            try:
                sent = self.sock.send(wire)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close()
                return
            if sent < len(wire):
                del wire[:sent]
                self.writing = True
                self.keeper.poller.add_writer(self.sock, self._writable)
                return
            wire.clear()
        if self.sent is not None:
            self.sent()
        if self.closing:
            self.close()

    def _writable(self) -> None:
        wire = self.out if self.transport is None else self.transport.wire
        try:
            sent = self.sock.send(wire)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        del wire[:sent]
        if wire:
            return
        self.writing = False
        self.keeper.poller.remove_writer(self.sock)
        self.flush()
        if self.closed:
            return
        if self.choked and not self.writing:
            self.choked = False
            self.release()
        self.speaker.drained()

    def close(self) -> None:
        """Close the socket; others get what the client had in flight."""
        if self.closed:
            return
        poller = self.keeper.poller
        poller.remove(self.sock)
        if self.writing:
            poller.remove_writer(self.sock)
        self.sock.close()
        self.out.clear()
        self.keeper.closed(self)
        self.speaker.leave()
