"""When a tail latency has been measured for long enough: a sequential test over blocks of a second.

In: second by second, how many messages were sent and how many of them were slower than the SLO's limit. Out: met, not
met, or not certain yet. docs/adr/0013-rounds.md has the reasons and the measured error rates.

Latencies of neighbouring messages are alike: a burst delays many of them at once. So messages are not counted as
trials. The test is on the mean over seconds of y = over − (1 − quantile)·sent, with the variance that the seconds
themselves show (batch means), and at least that of delays which strike `burst` messages at a time: a quiet minute
must not hide that bursts are rare but long. Looks are few, each a third later than the last, and share the allowed
error, so that repeated looks do not add up to a decision by chance.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

from srtm.units import exact

if TYPE_CHECKING:
    from srtm.units import Number

ERROR = 0.05  # of deciding wrongly, on either side, over all looks
LOOKS = (4, 5, 7, 9, 12, 16, 21, 28, 37, 49, 60)  # seconds
_NORMAL = NormalDist()


class TailTest:
    """Decides whether the quantile is within the limit: feed seconds, then read `decision`."""

    def __init__(self, quantile: Number = "0.99", burst: int = 1, error: float = ERROR) -> None:
        """`burst` is the largest number of messages that come together: a group's members here, times their batch."""
        self._allowed = float(1 - exact(quantile, "quantile"))
        self._error = error / len(LOOKS)
        self._burst = max(1, burst)
        self._blocks = 0
        self._sent = self._over = 0
        self._sum = self._squares = 0.0
        self.decision: bool | None = None  # True: met

    @property
    def blocks(self) -> int:
        """Seconds counted so far."""
        return self._blocks

    @property
    def sent(self) -> int:
        """Messages counted so far."""
        return self._sent

    @property
    def likelier(self) -> bool:
        """The current estimate, certain or not."""
        return self._over <= self._allowed * self._sent

    def feed(self, sent: int, over: int) -> bool | None:
        """Count one more second; a second without messages counts for nothing."""
        if not sent or self.decision is not None:
            return self.decision
        y = over - self._allowed * sent
        self._blocks += 1
        self._sent += sent
        self._over += over
        self._sum += y
        self._squares += y * y
        if self._blocks in LOOKS:
            self.decision = self._look()
        return self.decision

    def _look(self) -> bool | None:
        n = self._blocks
        mean = self._sum / n
        seen = max(0.0, self._squares - n * mean * mean) / (n - 1)
        least = self._allowed * (1 - self._allowed) * self._burst * self._sent / n
        # The variance of n seconds is an estimate, but its least possible value is known.
        shown = _student(1 - self._error, n - 1) * math.sqrt(seen / n)
        known = _NORMAL.inv_cdf(1 - self._error) * math.sqrt(least / n)
        return None if abs(mean) <= max(shown, known) else mean < 0


def _student(probability: float, freedom: int) -> float:
    """Quantile of Student's t, by the expansion of Cornish and Fisher."""
    z = _NORMAL.inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + float(sum(term / freedom**power for power, term in enumerate(terms, 1)))
