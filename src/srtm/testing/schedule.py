"""Virtual time: actions at instants, run in order; the clock jumps from one to the next."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Any

from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable


class Schedule:
    """A clock, and the actions that are to come."""

    def __init__(self, start_ns: int) -> None:
        self.now_ns = start_ns
        self._actions: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()  # of actions at the same instant

    def at(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Run an action after a delay."""
        heapq.heappush(self._actions, (self.now_ns + delay_ns, next(self._order), action, args))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now_ns + round(seconds * NS_PER_S)
        while self._actions and self._actions[0][0] <= until:
            self.now_ns, _, action, args = heapq.heappop(self._actions)
            action(*args)
        self.now_ns = until
