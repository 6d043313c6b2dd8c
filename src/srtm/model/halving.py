"""How many publishers an overloaded broker can keep: a search by halving, one probe a round.

Shedding helps a broker that is too busy. It does not help a broker whose messages wait for tokens: the fewer publishers
stay, the smaller is its share of the bucket. So a search ends when a probe is slower than the larger number before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from srtm.model.placement import Roster, pick

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True)
class Halving:
    """The search of one broker: `low` publishers are known to be few enough, `high` to be too many."""

    members: NDArray[np.int64]
    high: int
    high_ns: int
    low: int = 0
    probe: int = 0
    done: bool = False

    def aim(self) -> None:
        """Choose the next number to try; done if there is none."""
        self.probe = (self.low + self.high) // 2
        self.done = self.done or self.probe == self.low

    def hear(self, latency_ns: int, slo_ns: int, enough_ns: float) -> None:
        """Narrow the search by what the probe measured; a latency of `enough_ns` or more, within the SLO, ends it."""
        if latency_ns > slo_ns:
            self.done = latency_ns > self.high_ns
            self.high, self.high_ns = self.probe, latency_ns
        else:
            self.low = self.probe
            self.done = latency_ns >= enough_ns

    def kept(self, roster: Roster, *, by_group: bool, seed: int) -> NDArray[np.int64]:
        """The publishers that stay: of every group its share, as in placing."""
        keep = self.low if self.done else self.probe
        members = self.members
        if keep == len(members) or keep == 0:
            return members[:keep]
        rate = int(roster.rates[members].sum())
        stay = rate * keep // len(members)
        split = pick(roster, [stay, rate - stay], by_group=by_group, seed=seed, among=members)
        return np.flatnonzero(split == 0)
