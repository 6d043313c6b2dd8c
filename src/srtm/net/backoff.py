"""How long to wait before the next attempt: longer each time, up to a limit, and never the same for two clients."""

from __future__ import annotations

from random import random

_FIRST_S, _MOST_S = 0.02, 1.0


class Backoff:
    """Times to wait, from about 20 ms to a second."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def next_s(self) -> float:
        """Seconds to wait now: between half of the limit of this attempt and all of it."""
        limit_s, self._next_s = self._next_s, min(_MOST_S, 2 * self._next_s)
        return limit_s * (1 + random()) / 2
