"""An alarm that is exact to the microsecond on Linux.

libuv counts in milliseconds, which can be a topic's whole latency goal. Linux's timerfd counts in nanoseconds and wakes
the loop as a socket does. Other systems use the loop's own timer.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_CLOEXEC, _NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK


class Alarm:
    """Calls back once, at the earliest time that was set."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None], *, precise: bool = True) -> None:
        """Without `precise`, the loop's own timer serves everywhere."""
        self._loop = loop
        self._ring = ring
        self._at_ns = 0
        self._handle: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1
        if precise and hasattr(self._libc, "timerfd_create"):
            self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _CLOEXEC | _NONBLOCK)
            self._spec = (ctypes.c_long * 4)()
        if self._fd >= 0:
            loop.add_reader(self._fd, self._rung)

    def set(self, at_ns: int, now_ns: int) -> None:
        """Ring at this time of the wall clock, unless an earlier time is set."""
        if self._at_ns and self._at_ns <= at_ns:
            return
        self._at_ns = at_ns
        delay_ns = max(1, at_ns - now_ns)
        if self._fd >= 0:
            self._spec[2], self._spec[3] = divmod(delay_ns, 1_000_000_000)
            self._libc.timerfd_settime(self._fd, 0, self._spec, None)
            return
        if self._handle:
            self._handle.cancel()
        self._handle = self._loop.call_later(delay_ns / 1e9, self._rung)

    def _rung(self) -> None:
        if self._fd >= 0:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:
                return
        self._at_ns = 0
        self._ring()

    def close(self) -> None:
        """Never ring again."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        elif self._handle:
            self._handle.cancel()
