"""Which clients have something to say: an epoll of the broker's own, which the loop watches as a single file.

In: sockets and who reads them. Out: calls to the readers of those that are ready, AT_ONCE at most, and then to the
broker, which is told whether more follow at once: a turn. Those that did not fit come first in the next one, because
the kernel puts whom it has reported at the end of its list. Where there is no epoll, each socket makes a turn.

A read is late if the look before it was much longer ago than looks usually are. Then the loop may have stood still; or
nobody spoke. Only arrival stamps tell which, and to ask for them costs calls (`clients/reads.py`).
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    Reader = Callable[[], None]
    Received = tuple[int, list[Any], int, Any]

AT_ONCE: Final = 64  # reads of one turn: the first messages of a burst need not wait for the last
TURNS: Final = 16  # that follow each other at once; then others in the loop have theirs
_RARELY: Final = 8  # times as long as usual between two looks: one in 3,000, if messages come at random
_LEAST_USUAL_NS: Final = 250_000  # so that a look is not late before 2 ms


class Socket(Protocol):
    """A non-blocking socket, or an object that behaves like one."""

    def fileno(self) -> int:
        """Return a number of its own; -1 once it is closed."""

    def recvmsg_into(self, buffers: list[memoryview], ancillary: int, flags: int = 0, /) -> Received:
        """Read bytes, with the kernel's stamp of the last of them beside them."""

    def send(self, data: bytes | bytearray, /) -> int:
        """Take some bytes and return how many; BlockingIOError if none fit, OSError if the peer is gone."""

    def close(self) -> None:
        """Close it."""


class Watched(Protocol):
    """Any file that can be watched."""

    def fileno(self) -> int:
        """Return its number."""


class Epoll(Protocol):
    """`select.epoll`, as far as it is used here."""

    def fileno(self) -> int:
        """Return its number."""

    def register(self, fd: int, eventmask: int, /) -> None:
        """Watch a socket."""

    def unregister(self, fd: int, /) -> None:
        """Watch it no more."""

    def poll(self, timeout: float, maxevents: int, /) -> list[tuple[int, int]]:
        """Return sockets that are ready."""

    def close(self) -> None:
        """Watch nothing."""


class Poller:
    """Reads sockets that can be read, and then calls `turn`, with True if more of them are read at once."""

    __slots__ = ("_epoll", "_loop", "_now_ns", "_readers", "_turn", "_usual_ns", "began_ns", "late_ns")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        turn: Callable[[bool], None],
        now_ns: Callable[[], int] = time.time_ns,
        epoll: Epoll | None = None,
    ) -> None:
        self._loop = loop
        self._turn = turn
        self._now_ns = now_ns
        self._readers: dict[int, Reader] = {}
        self.began_ns = 0  # when it was last looked for those that are ready
        self.late_ns = 0  # from when on reads are late
        self._usual_ns = _LEAST_USUAL_NS  # between two looks
        self._epoll: Epoll | None = epoll or (select.epoll() if hasattr(select, "epoll") else None)
        if self._epoll is not None:
            loop.add_reader(self._epoll.fileno(), self._ready)

    def add(self, sock: Watched, reader: Reader) -> None:
        """Watch a socket; one that is watched already stays so."""
        fd = sock.fileno()
        if fd in self._readers:
            return
        self._readers[fd] = reader
        if self._epoll is None:
            self._loop.add_reader(fd, self._one_ready, fd)
        else:
            self._epoll.register(fd, select.EPOLLIN)

    def remove(self, sock: Watched) -> None:
        """Watch it no more; one that is not watched is passed over."""
        fd = sock.fileno()
        if self._readers.pop(fd, None) is None:
            return
        if self._epoll is None:
            self._loop.remove_reader(fd)
        else:
            self._epoll.unregister(fd)

    def add_writer(self, sock: Watched, callback: Callable[[], None]) -> None:
        """Call back whenever a socket can be written to."""
        self._loop.add_writer(sock, callback)

    def remove_writer(self, sock: Watched) -> None:
        """Call back no more."""
        self._loop.remove_writer(sock)

    def _ready(self) -> None:
        epoll = self._epoll
        assert epoll is not None
        self._look()
        left = TURNS
        more = True
        while more:
            left -= 1
            found = epoll.poll(0, AT_ONCE)
            more = left > 0 and len(found) == AT_ONCE
            self._read(found)
            self._turn(more)
        self.late_ns = self.began_ns + _RARELY * self._usual_ns

    def _one_ready(self, fd: int) -> None:
        self._read([(fd, 0)])
        self._turn(False)

    def _read(self, found: list[tuple[int, int]]) -> None:
        readers = self._readers
        for fd, _ in found:
            read = readers.get(fd)  # one by one: what one client says may close another
            if read is None:
                continue
            try:
                read()
            except Exception as error:  # other clients must not suffer from one
                self._loop.call_exception_handler({"message": "a client was not understood", "exception": error})

    def _look(self) -> None:
        before_ns, self.began_ns = self.began_ns, self._now_ns()
        usual_ns = self._usual_ns
        if self.began_ns > self.late_ns:
            usual_ns *= 2  # a single stall is not usual, but several are
            self.late_ns = 0  # all that is read now is late
        else:
            usual_ns += (self.began_ns - before_ns - usual_ns) >> 3
            self.late_ns = self.began_ns + _RARELY * usual_ns
        self._usual_ns = max(usual_ns, _LEAST_USUAL_NS)

    def read_again(self) -> None:
        """Read those who can be read now, in this same turn."""
        self._look()
        if self._epoll is not None:
            self._read(self._epoll.poll(0, AT_ONCE * TURNS))

    def close(self) -> None:
        """Watch nobody."""
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
