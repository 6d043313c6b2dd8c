"""The DRL penalty: how long messages wait under a split, against one bucket over the same arrivals.

Proposition 1: the running sum of delays S(t) of one bucket never exceeds that of any split, S^(k)(t), however
messages are spread. Delays are rounded up to whole nanoseconds, so sums agree with the proposition to 1 ns per message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import BacklogOverflow, InputError
from srtm.model import scan, timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from srtm.model.bucket import TokenBucket
    from srtm.model.timeline import Timeline

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Penalty:
    """Access delays of every message, in ns: with the split, and with one bucket."""

    arrivals: Ints
    split_ns: Ints
    one_ns: Ints

    def split_sum(self, times: ArrayLike) -> Ints:
        """S^(k)(t): delay accrued by all messages up to each time, in ns."""
        return accrued(self.arrivals, self.split_ns, times)

    def one_sum(self, times: ArrayLike) -> Ints:
        """S(t), the same with one bucket."""
        return accrued(self.arrivals, self.one_ns, times)


def penalty(
    arrivals: ArrayLike, bucket_of: NDArray[np.int32], whole: TokenBucket, shares: Sequence[TokenBucket]
) -> Penalty:
    """Compare messages spread over `shares` (message i through `shares[bucket_of[i]]`) with one bucket `whole`."""
    times = scan.as_arrivals(arrivals)
    return Penalty(times, scan.split_access_delays(times, bucket_of, shares), scan.access_delays(times, whole))


def recorded(arrivals: ArrayLike, releases: ArrayLike, contract: Timeline) -> Penalty:
    """`penalty` of a recorded run: how long messages waited, and would have waited with one bucket."""
    times, left = scan.as_arrivals(arrivals), scan.as_arrivals(releases)
    if len(times) != len(left):
        raise InputError(f"{len(times)} arrivals but {len(left)} releases: there must be one each")
    if early := int((left < times).sum()):
        raise InputError(f"{early} of {len(times)} messages were released before they arrived: check clocks and units")
    return Penalty(times, left - times, timeline.access_delays(times, contract))


def accrued(arrivals: ArrayLike, delays_ns: Ints, times: ArrayLike) -> Ints:
    """Σ_i min(d_i, (t − a_i)^+) in ns at each time t: waiting messages count for as long as they have waited.

    Written as Σ (t − a_i)^+ − Σ (t − a_i − d_i)^+. Both sums wrap around 64 bits on long traces; their
    difference is right as long as it fits itself.
    """
    starts = scan.as_arrivals(arrivals)
    at = scan.as_arrivals(times)
    scan.check_sorted(starts)
    if len(delays_ns) != len(starts):
        raise InputError(f"{len(starts)} arrivals but {len(delays_ns)} delays: there must be one each")
    if float(delays_ns.sum(dtype=np.float64)) > 2.0**62:
        raise BacklogOverflow("the delays add up to more than 2**62 ns: sum them over shorter windows")
    return _ramp_sum(starts, at) - _ramp_sum(np.sort(starts + delays_ns), at)


def _ramp_sum(points: Ints, at: Ints) -> Ints:
    below = np.searchsorted(points, at, side="right")
    sums = np.concatenate(([0], np.cumsum(points)))
    return np.asarray(below * at - sums[below], np.int64)
