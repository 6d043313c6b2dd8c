"""The watchdog in virtual time: it expires after an interval of silence, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from srtm.net.watchdog import Watchdog


class Timers:
    """A loop of which only the timer exists."""

    def __init__(self) -> None:
        self.due: tuple[float, Callable[[], None]] | None = None
        self.now_s = 0.0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timers:
        self.due = self.now_s + delay_s, callback
        return self

    def cancel(self) -> None:
        self.due = None

    def ring(self) -> None:
        assert self.due is not None
        (self.now_s, callback), self.due = self.due, None
        callback()


def watched(interval_s: float) -> tuple[Timers, Watchdog, list[float]]:
    timers, expired = Timers(), list[float]()
    loop = cast(asyncio.AbstractEventLoop, cast(Any, timers))
    watchdog = Watchdog(loop, lambda: expired.append(timers.now_s))
    watchdog.start(interval_s)
    return timers, watchdog, expired


def test_it_expires_after_an_interval_of_silence() -> None:
    timers, watchdog, expired = watched(2.0)
    for _ in range(3):
        watchdog.heard = True
        timers.ring()
    timers.ring()
    assert expired == [8.0]
    assert timers.due is None


def test_it_stops_when_told_and_never_begins_without_an_interval() -> None:
    timers, watchdog, _ = watched(2.0)
    watchdog.stop()
    watchdog.stop()
    assert timers.due is None
    assert watched(0.0)[0].due is None
