"""A token bucket whose (r, b) changes over time, and the check that an output kept to it.

`access_delays` is `Limiter.admit` and `Limiter.reconfigure` over arrays. `largest_excess` feeds an output back
into the same law: an output that kept to (r, b) never has to wait again.

Released times are whole nanoseconds, rounded up, so what is released in the half-open window (s, t] was due in
it, and every such window holds at most b(s) + ∫r. For a window given by its first and last message, both
included, that makes Δt one nanosecond longer than their distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.model import scan
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    from srtm.model.bucket import TokenBucket

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """(r, b) at the start, and each change: from `at_ns` on, arrivals at that instant included."""

    start: TokenBucket
    changes: tuple[tuple[int, TokenBucket], ...] = ()

    def __post_init__(self) -> None:
        """Changes come in order of time."""
        times = [at_ns for at_ns, _ in self.changes]
        if times != sorted(times):
            raise InputError(f"changes of (r, b) must come in order of time, not at {times} ns")

    def stretches(self) -> Iterable[tuple[int, int, TokenBucket]]:
        """(from, until, bucket), back to back, from the beginning of time to its end."""
        begins = [scan.EARLIEST_NS, *(at_ns for at_ns, _ in self.changes)]
        buckets = [self.start, *(bucket for _, bucket in self.changes)]
        return zip(begins, [*begins[1:], scan.LATEST_NS + 1], buckets, strict=True)

    @property
    def max_r_mtps(self) -> int:
        """The fastest rate that was ever in force."""
        return max(bucket.r_mtps for _, _, bucket in self.stretches())


@dataclass(frozen=True, slots=True)
class Excess:
    """By how many tokens the worst window exceeded b + r·Δt (negative: how far it stayed below), and its end."""

    tokens: Fraction
    at_ns: int

    @property
    def conforms(self) -> bool:
        """No window held more than it might."""
        return self.tokens <= 0


def access_delays(arrivals: ArrayLike, timeline: Timeline) -> Ints:
    """How long each message waits for its token, in ns, while (r, b) changes; waiting messages count on."""
    times = scan.as_arrivals(arrivals)
    owed = _owed(times, timeline)
    delays = np.zeros(len(times), np.int64)
    waiting = np.flatnonzero(owed > 0)
    since = times[waiting]
    owed = owed[waiting]
    for _, until, bucket in timeline.stretches():
        rate = bucket.r_mtps
        release = since + -(-owed // rate)
        done = release <= until
        here = since < until
        delays[waiting[done & here]] = (release - times[waiting])[done & here]
        carry = here & ~done
        owed[carry] -= rate * (until - since[carry])
        since[carry] = until
        keep = ~(done & here)
        waiting, since, owed = waiting[keep], since[keep], owed[keep]
    return delays


def largest_excess(releases: ArrayLike, timeline: Timeline) -> Excess:
    """The window of an output that comes closest to breaking (r, b), or breaks it by most."""
    times = scan.as_arrivals(releases)
    owed = _owed(times, timeline)
    worst = int(np.argmax(owed))
    one_tick = timeline.max_r_mtps
    return Excess(Fraction(int(owed[worst]) - one_tick, PICO_PER_TOKEN), int(times[worst]))


def _owed(times: Ints, timeline: Timeline) -> Ints:
    """Pico-tokens that each message lacks at its arrival; not positive where it goes at once."""
    owed = np.empty(len(times), np.int64)
    state, previous = scan.State(0, scan.EARLIEST_NS), timeline.start.pico_law
    for begin, until, bucket in timeline.stretches():
        law = bucket.pico_law
        scan.check_burst(law, bucket)
        left = max(0, state.backlog - previous.rate * (begin - state.last_ns))
        state, previous = scan.State(max(0, left + law.burst - previous.burst), begin), law
        low, high = np.searchsorted(times, [begin, until])
        if low < high:
            behind, state = scan.run(times[low:high], law, state)
            owed[low:high] = behind - law.burst
    return owed
