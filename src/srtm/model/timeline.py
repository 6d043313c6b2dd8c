"""A token bucket whose (r, b) changes over time, and the check that an output kept to it.

`access_delays` is `Limiter.admit` and `Limiter.reconfigure` over arrays. `largest_excess` checks an output, whoever
made it.

Release times are whole nanoseconds, rounded up. What is released in a half-open window (s, t] was due in it, so every
such window of whole nanoseconds holds at most b(s) + ∫r over (s, t], with b(s) as in force at s. For a window given by
its first and last message, both included, Δt is one nanosecond more than their distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.model import law as plain
from srtm.model import scan
from srtm.model._compiled import compiled
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    from srtm.model.bucket import TokenBucket

    Ints = NDArray[np.int64]

_scan_excess = compiled(plain.scan_excess)


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
    since, owed = times[waiting], owed[waiting]
    *earlier, (_, _, final) = timeline.stretches()
    for _, until, bucket in earlier:
        release = since - (-owed // bucket.r_mtps)
        here = since < until
        done = here & (release <= until)
        delays[waiting[done]] = release[done] - times[waiting[done]]
        carry = here & ~done
        owed[carry] -= bucket.r_mtps * (until - since[carry])
        since[carry] = until
        waiting, since, owed = waiting[~done], since[~done], owed[~done]
    delays[waiting] = since - (-owed // final.r_mtps) - times[waiting]
    return delays


def largest_excess(releases: ArrayLike, timeline: Timeline) -> Excess:
    """The window of an output that comes closest to breaking (r, b), or breaks it by most."""
    times = scan.as_arrivals(releases)
    scan.check_sorted(times)
    stretches = list(timeline.stretches())
    laws = [bucket.pico_law for _, _, bucket in stretches]
    for law, (_, _, bucket) in zip(laws, stretches, strict=True):
        scan.check_burst(law, bucket)
    begins, rates, bursts, horizons = (
        np.array(column, np.int64)
        for column in zip(
            *(
                (begin, law.rate, law.burst, law.horizon // 2 + 1)
                for law, (begin, _, _) in zip(laws, stretches, strict=True)
            ),
            strict=True,
        )
    )
    worst, where, peak = _scan_excess(times, begins, rates, bursts, horizons, PICO_PER_TOKEN)
    scan.check_peak(laws[0], peak)
    return Excess(Fraction(int(worst), PICO_PER_TOKEN), int(times[where]))


def _owed(times: Ints, timeline: Timeline) -> Ints:
    """Pico-tokens that each message lacks at its arrival; not positive where it goes at once."""
    scan.check_sorted(times)
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
