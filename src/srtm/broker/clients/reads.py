"""Reads of clients: one large read in time; after a stall, as many as there are stamps.

The kernel stamps a read with its last segment (docs/adr/0011-arrival-times.md). If the loop looked away for long, a
large read would give all messages of a connection the time of the last. Peeks find the bytes of each stamp, and each
such run is read alone. Messages of one run came together, or the kernel merged their segments; it does not say which.
They are taken to have come evenly since the run before.

Always holds:
- a read in time makes one system call;
- a stamp is never later than the kernel's, and never earlier than bytes that came before;
- after a stall, peeks are bounded: what they do not reach is read as one run.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final, Protocol

from srtm.net.stamps import ANCILLARY, arrival_ns
from srtm.protocol.commands import Dpub, Mpub, Pub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from srtm.broker.poller import Socket

    Read = Callable[[list[memoryview], int], bool]

PEEKS: Final = 512  # after one stall, for all clients: a few milliseconds
OLD_NS: Final = 2_000_000  # bytes that waited for so long were not read in time
_LITTLE: Final = 4096  # about thirty messages: less than a tenth of a millisecond's work
_PEEK: Final = getattr(socket, "MSG_PEEK", 0) | getattr(socket, "MSG_TRUNC", 0)  # stamps without bytes
_PUBLISHING: Final = frozenset({Pub, Mpub, Dpub})


class Buffers:
    """The buffer of all reads, whole or only its beginning, and the number of reads without a kernel stamp."""

    __slots__ = ("_looked_ns", "_oldest_ns", "_peeks", "little", "unstamped", "view", "whole")

    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))
        self.whole = [self.view]
        self.little = [self.view[:_LITTLE]]  # for publishers whose messages must wait for tokens
        self.unstamped = 0
        self._looked_ns = 0  # the look that late reads belong to
        self._oldest_ns = 0  # the oldest stamp that they found
        self._peeks = 0  # that they may still make

    def read_late(self, sock: Socket, most: list[memoryview], since_until: tuple[int, int], read: Read) -> None:
        """Read what waits in a socket long after the last look: if bytes are old, each run by itself.

        `since_until` are the times of that look and of this read. `read` gets a buffer and, if the loop stood still, a
        time before which none of its bytes came; it returns whether it may go on.
        """
        looked_ns, now_ns = since_until
        if self._looked_ns != looked_ns:
            self._looked_ns, self._oldest_ns, self._peeks = looked_ns, now_ns, PEEKS
        _, first_ns = self._peek(sock, 1)
        if not first_ns or now_ns - first_ns < OLD_NS:  # the loop slept, and these bytes woke it
            read(most, 0)
            return
        self._oldest_ns = min(self._oldest_ns, first_ns)
        for size in self._runs(sock, len(most[0]), first_ns):
            if not read([self.view[:size]], self._oldest_ns):
                return

    def _runs(self, sock: Socket, most: int, first_ns: int) -> Iterator[int]:
        """Sizes of the runs among the bytes that wait; each is read before the next is asked for."""
        left, last_ns = self._peek(sock, most)
        size = 0
        while first_ns != last_ns and self._peeks > 0:
            low, high, next_ns = 1, left, last_ns  # the stamp changes between these two
            for tried in (size, size + 1):  # messages of a publisher often have one size
                if low < tried < high:
                    low, high, next_ns = self._narrow(sock, first_ns, tried, (low, high, next_ns))
            while high - low > 1:
                low, high, next_ns = self._narrow(sock, first_ns, (low + high) // 2, (low, high, next_ns))
            yield low
            first_ns, left, size = next_ns, left - low, low
        yield max(1, left)

    def _narrow(self, sock: Socket, first_ns: int, tried: int, within: tuple[int, int, int]) -> tuple[int, int, int]:
        low, high, next_ns = within
        _, stamp_ns = self._peek(sock, tried)
        return (tried, high, next_ns) if stamp_ns == first_ns else (low, tried, stamp_ns)

    def _peek(self, sock: Socket, size: int) -> tuple[int, int]:
        """How many of so many bytes are there, and the stamp of the last of them; 0 without one."""
        self._peeks -= 1
        try:
            there, ancillary, _, _ = sock.recvmsg_into([self.view[:size]], ANCILLARY, _PEEK)
        except OSError:  # nothing is there, or the client is gone: the read will say so
            return 0, 0
        return there, arrival_ns(ancillary)


class Closing(Protocol):
    """A connection."""

    @property
    def closing(self) -> bool:
        """Whether it is being closed."""


class Client(Protocol):
    """A client that carries out commands."""

    @property
    def connection(self) -> Closing:
        """Its connection."""

    def carry_out(self, events: list[Any], arrival_ns: int) -> None:
        """Carry out commands, in order."""


def carry_out_evenly(client: Client, events: list[Any], last_ns: int, since_ns: int) -> None:
    """Carry out commands of one stamp; messages are taken to have come evenly, the last of them at the stamp."""
    if not since_ns < last_ns or len(events) < 2 or not _PUBLISHING.issuperset(map(type, events)):
        client.carry_out(events, last_ns)
        return
    step_ns = (last_ns - since_ns) // len(events)
    for behind, event in zip(range(len(events) - 1, -1, -1), events, strict=True):
        client.carry_out([event], last_ns - behind * step_ns)
        if client.connection.closing:
            break
