"""A timer that notices a silent peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class Watchdog:
    """Calls `expired` once if `heard` was not set for a whole interval."""

    __slots__ = ("_expired", "_interval_s", "_loop", "_timer", "heard")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self.heard = True  # readers set this, and nothing else: it is on the hot path
        self._loop = loop
        self._expired = expired
        self._interval_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, interval_s: float) -> None:
        """Look every so many seconds; 0 never looks."""
        self._interval_s = interval_s
        if interval_s > 0:
            self._timer = self._loop.call_later(interval_s, self._look)

    def stop(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if not self.heard:
            self._timer = None
            self._expired()
            return
        self.heard = False
        self._timer = self._loop.call_later(self._interval_s, self._look)
