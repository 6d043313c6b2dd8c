"""A network in memory: socket pairs with arrival stamps, an epoll for them, and listeners by address.

Sockets behave as TCP sockets of Linux do, as far as brokers and clients look. With SO_TIMESTAMPNS, a read is stamped
with the arrival of the last segment that it took from; segments that wait may be merged, as the kernel does it, and
have the stamp of the newest then (docs/adr/0011-arrival-times.md). Buffers are bounded, and writable again
when a third of them is free. A half-closed connection can still be read. Closing a socket with unread bytes resets the
connection. Bytes arrive at once.
"""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from itertools import count
from struct import Struct
from typing import TYPE_CHECKING, Any

from srtm.net.stamps import SO_TIMESTAMPNS
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from srtm.testing.clock import VirtualClock

    Accept = Callable[["MemorySocket", str], object]
    Wait = Callable[[Callable[[], object], float | None], None]

BUFFER_BYTES = 256 * 1024  # on their way in one direction
_FIRST_NUMBER = 1 << 20  # no real file has such a number
_HOST = "127.0.0.1"
_TIMESPEC = Struct("@ll")


class Network:
    """All sockets of one virtual loop."""

    def __init__(self, clock: VirtualClock, wait: Wait) -> None:
        self.clock = clock  # stamps what arrives
        self.wait = wait  # lets time pass until something is true, for calls that block
        self.merges = 1  # segments that wait in a socket become one, up to this number
        self._numbers = count(_FIRST_NUMBER)
        self._ports = count(50_000)
        self._files: dict[int, MemorySocket | MemoryEpoll] = {}
        self._listeners: dict[int, Accept] = {}

    def listen(self, port: int, accept: Accept) -> None:
        """Call `accept` with the socket and the address of everyone who connects to a port."""
        if port in self._listeners:
            raise OSError(errno.EADDRINUSE, f"port {port} is in use")
        self._listeners[port] = accept

    def close_port(self, port: int) -> None:
        """Refuse everyone who connects to a port."""
        self._listeners.pop(port, None)

    def connect(self, port: int) -> MemorySocket:
        """A connection to a listener, whatever its host is called."""
        accept = self._listeners.get(port)
        if accept is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        near, far = self.pair()
        near.address, far.address = (_HOST, next(self._ports)), (_HOST, port)
        accept(far, f"{_HOST}:{near.address[1]}")
        return near

    def pair(self) -> tuple[MemorySocket, MemorySocket]:
        """Two sockets that are connected to each other; they do not block."""
        near, far = MemorySocket(self), MemorySocket(self)
        near.peer, far.peer = far, near
        return near, far

    def epoll(self) -> MemoryEpoll:
        """An epoll for sockets of this network."""
        return MemoryEpoll(self)

    def add(self, file: MemorySocket | MemoryEpoll) -> int:
        """Give a new file its number."""
        number = next(self._numbers)
        self._files[number] = file
        return number

    def remove(self, number: int) -> None:
        """Forget a closed file."""
        self._files.pop(number, None)

    def can_read(self, number: int) -> bool:
        """Whether a read of a file would not block."""
        file = self._files.get(number)
        return file is not None and file.can_read

    def can_write(self, number: int) -> bool:
        """Whether a write to a file would not block."""
        file = self._files.get(number)
        return isinstance(file, MemorySocket) and file.can_write


class MemorySocket:
    """One end of a connection; `settimeout` makes it block, which lets virtual time pass."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._number = network.add(self)
        self._incoming = bytearray()
        self._segments: deque[list[int]] = deque()  # their sizes, stamps, and how many each was made of
        self._peer_ended = self._ended = self._reset = False
        self._stamped = False
        self._timeout_s: float | None = 0.0
        self.address = (_HOST, 0)
        self.peer: MemorySocket = self

    def __enter__(self) -> MemorySocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def can_read(self) -> bool:
        """Whether there are bytes, or an end."""
        return bool(self._incoming) or self._peer_ended or self._reset

    @property
    def can_write(self) -> bool:
        """Whether there is room enough to wake a writer, or an error to be told."""
        return self._reset or self.peer.closed or 3 * self._room >= BUFFER_BYTES

    @property
    def _room(self) -> int:
        return BUFFER_BYTES - len(self.peer._incoming)

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._number < 0

    def fileno(self) -> int:
        """Return its number; -1 once it is closed."""
        return self._number

    def getsockname(self) -> tuple[str, int]:
        """Return its own address."""
        return self.address

    def getpeername(self) -> tuple[str, int]:
        """Return the address of the other end."""
        return self.peer.address

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Set an option; only SO_TIMESTAMPNS changes anything here."""
        if (level, option) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            self._stamped = bool(value)

    def setblocking(self, blocking: bool) -> None:  # noqa: FBT001 - socket's signature
        """Wait in calls, or raise BlockingIOError."""
        self._timeout_s = None if blocking else 0.0

    def settimeout(self, timeout_s: float | None) -> None:
        """Wait in calls for so long, in virtual time; then TimeoutError."""
        self._timeout_s = timeout_s

    def recvmsg_into(
        self, buffers: list[memoryview], _ancillary: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        """Read bytes into the first buffer, or look at them, with the stamp of the last of them."""
        if flags & socket.MSG_PEEK:
            self._wait(lambda: self.can_read)
            self._check()
            size = min(len(buffers[0]), len(self._incoming))
            stamp_ns = self._stamp_ns(size)
        else:
            stamp_ns = self._stamp_ns(len(buffers[0]))
            size = self.recv_into(buffers[0])
        ancillary = []
        if size and self._stamped:
            stamp = _TIMESPEC.pack(*divmod(stamp_ns, NS_PER_S))
            ancillary.append((socket.SOL_SOCKET, SO_TIMESTAMPNS, stamp))
        return size, ancillary, 0, None

    def _stamp_ns(self, size: int) -> int:
        """The stamp of the last of so many bytes, or of all."""
        stamp_ns = 0
        for length, arrived_ns, _ in self._segments:
            if size <= 0:
                break
            stamp_ns = arrived_ns
            size -= length
        return stamp_ns

    def _arrive(self, data: bytes | bytearray | memoryview) -> None:
        self._incoming += data
        now_ns, segments = self._network.clock.time_ns(), self._segments
        if segments and (segments[-1][2] < self._network.merges or segments[-1][1] == now_ns):
            segments[-1][0] += len(data)
            segments[-1][1] = now_ns
            segments[-1][2] += 1
        else:
            segments.append([len(data), now_ns, 1])

    def _taken(self, size: int) -> None:
        segments = self._segments
        while size:
            taken = min(size, segments[0][0])
            segments[0][0] -= taken
            size -= taken
            if not segments[0][0]:
                segments.popleft()

    def recv_into(self, buffer: memoryview) -> int:
        """Read bytes into a buffer."""
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def recv(self, size: int) -> bytes:
        """Read bytes; b"" at the end."""
        self._wait(lambda: self.can_read)
        self._check()
        data = bytes(self._incoming[:size])
        del self._incoming[:size]
        self._taken(len(data))
        return data

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Write as many bytes as there is room for."""
        self._wait(lambda: self.can_write or (self._timeout_s == 0 and self._room > 0))
        self._check()
        if self._ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        peer = self.peer
        if peer.closed:  # whose kernel answers with a reset
            self._reset = True
            return len(data)
        taken = data[: self._room]
        if taken:
            peer._arrive(taken)
        return len(taken)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Write all bytes; waits for room if the socket blocks."""
        sent = 0
        while sent < len(data):
            sent += self.send(data[sent:])

    def shutdown(self, how: int) -> None:
        """Send no more; what the other end sends can still be read."""
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            self._ended = self.peer._peer_ended = True

    def close(self) -> None:
        """Close it; with unread bytes, reset the connection."""
        if self.closed:
            return
        if self._incoming:
            self.peer._reset = True
        self.peer._peer_ended = True
        self._network.remove(self._number)
        self._number = -1

    def _check(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self._reset:
            self._incoming.clear()
            self._segments.clear()
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    def _wait(self, ready: Callable[[], bool]) -> None:
        if self.closed or ready():
            return
        if self._timeout_s == 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self._network.wait(ready, self._timeout_s)


class MemoryEpoll:
    """As `select.epoll`, for memory sockets: level-triggered, and fair among many that are ready."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._number = network.add(self)
        self._watched: dict[int, None] = {}

    @property
    def can_read(self) -> bool:
        """Whether a socket is ready."""
        return any(self._network.can_read(each) for each in self._watched)

    def fileno(self) -> int:
        """Return its number."""
        return self._number

    def register(self, fd: int, _mask: int = select.EPOLLIN) -> None:
        """Watch a socket."""
        self._watched[fd] = None

    def unregister(self, fd: int) -> None:
        """Watch a socket no more."""
        del self._watched[fd]

    def poll(self, _timeout: float = 0, maxevents: int = -1) -> list[tuple[int, int]]:
        """Return the sockets that are ready. Those returned now come last the next time."""
        ready = [fd for fd in self._watched if self._network.can_read(fd)]
        found = ready if maxevents < 0 else ready[:maxevents]
        for fd in found:
            del self._watched[fd]
            self._watched[fd] = None
        return [(fd, select.EPOLLIN) for fd in found]

    def close(self) -> None:
        """Watch nothing."""
        self._network.remove(self._number)
        self._watched.clear()
