"""Kernel arrival times: a read of a stamped TCP socket returns the time at which its bytes arrived.

Linux stamps TCP segments as it stamps datagrams, without any patch; docs/adr/0011-arrival-times.md says which stamp a
read gets. Sockets accepted from a stamped listener are stamped too.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from struct import Struct

from srtm.units import NS_PER_S

SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
_TIMESPEC = Struct("@ll")
ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)  # bytes that `recvmsg` must leave room for
_unpack = _TIMESPEC.unpack


def stamp(sock: socket.socket) -> None:
    """Ask the kernel for stamps; without them, `arrival_ns` returns 0."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def arrival_ns(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Return the arrival time in what `recvmsg` gave, in ns of the wall clock; 0 without a stamp."""
    if not ancillary:
        return 0
    seconds, nanoseconds = _unpack(ancillary[0][2])
    return int(seconds * NS_PER_S + nanoseconds)
