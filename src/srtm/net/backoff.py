"""Exponential back-off with jitter: waits grow up to a limit, and clients do not wait in step."""

from __future__ import annotations

from random import random


class Backoff:
    """Waits that double from `first_s` to `most_s`; each is drawn from the upper half of its limit."""

    __slots__ = ("_first_s", "_most_s", "limit_s")

    def __init__(self, first_s: float = 0.02, most_s: float = 1.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self.limit_s = first_s  # of the next wait

    @property
    def exhausted(self) -> bool:
        """Whether the waits have stopped growing."""
        return self.limit_s >= self._most_s

    def next_s(self) -> float:
        """Return the seconds to wait before the next attempt."""
        limit_s, self.limit_s = self.limit_s, min(self._most_s, 2 * self.limit_s)
        return limit_s * (1 + random()) / 2

    def reset(self) -> None:
        """Start over after a success."""
        self.limit_s = self._first_s
