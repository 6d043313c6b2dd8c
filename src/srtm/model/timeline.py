"""A token bucket whose (r, b) changes over time, and the check that an output kept to it.

`access_delays` is `Limiter.admit` and `Limiter.reconfigure` over arrays. `largest_excess` checks an output, whoever
made it. Both also work on pieces of a trace: `waits` and `check` go on from the state that the piece before left, and
`left_by` says from two summaries what that state is, without scanning again.

Release times are whole nanoseconds, rounded up. What is released in a half-open window (s, t] was due in it, so every
such window of whole nanoseconds holds at most b(s) + ∫r over (s, t], with b(s) as in force at s. For a window given by
its first and last message, both included, Δt is one nanosecond more than their distance.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtm.errors import InputError
from srtm.model import law as plain
from srtm.model import scan
from srtm.model._compiled import callable_from_compiled, compiled
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    from srtm.model.bucket import TokenBucket

    Ints = NDArray[np.int64]

callable_from_compiled(plain.drain_excess)
_scan_excess = compiled(plain.scan_excess)

BEGINNING = scan.State(0, scan.EARLIEST_NS)


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

    def bucket_at(self, time_ns: int) -> TokenBucket:
        """(r, b) in force at an instant."""
        number = bisect_right(self.changes, time_ns, key=lambda change: change[0])
        return self.changes[number - 1][1] if number else self.start

    def dripped(self, since_ns: int, until_ns: int) -> int:
        """∫r over (since, until], in pico-tokens."""
        return sum(
            bucket.pico_law.rate * max(0, min(until_ns, until) - max(since_ns, begin))
            for begin, until, bucket in self.stretches()
        )

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


class Piece(NamedTuple):
    """What a piece of a trace does to those after it; `backlog` is its end if nothing is left at its first message."""

    messages: int
    first_ns: int
    last_ns: int
    backlog: int


class Checked(NamedTuple):
    """A piece of an output, its worst window, and the state behind it."""

    piece: Piece
    excess: Excess
    state: scan.State


def access_delays(arrivals: ArrayLike, timeline: Timeline) -> Ints:
    """How long each message waits for its token, in ns, while (r, b) changes; waiting messages count on."""
    return waits(arrivals, timeline)[0]


def waits(arrivals: ArrayLike, timeline: Timeline, entering: scan.State = BEGINNING) -> tuple[Ints, scan.State]:
    """`access_delays` of a piece that follows a state, and the state behind it."""
    times = scan.as_arrivals(arrivals)
    owed, state = _owed(times, timeline, entering)
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
    return delays, state


def summarise(arrivals: ArrayLike, timeline: Timeline, before: Piece | None = None) -> Piece:
    """The piece that these arrivals are, or that they make with the piece just before them."""
    times = scan.as_arrivals(arrivals)
    start = scan.State(before.backlog, before.last_ns) if before else scan.State(0, int(times[0]))
    state = _owed(times, timeline, start)[1]
    messages, first_ns = (before.messages, before.first_ns) if before else (0, int(times[0]))
    return Piece(messages + len(times), first_ns, state.last_ns, state.backlog)


def left_by(piece: Piece, entering: scan.State, timeline: Timeline) -> scan.State:
    """The state behind a piece of arrivals, given the state before it.

    Every step of a backlog is x → max(x + c, d), and so are all of them together: d is the piece's own end.
    """
    carried = _carried(entering, timeline, piece.first_ns)
    first, last = timeline.bucket_at(piece.first_ns).pico_law, timeline.bucket_at(piece.last_ns).pico_law
    found = max(0, carried.backlog - first.rate * (piece.first_ns - carried.last_ns))
    change = piece.messages * PICO_PER_TOKEN + last.burst - first.burst
    change -= timeline.dripped(piece.first_ns, piece.last_ns)
    return scan.State(max(found + change, piece.backlog), piece.last_ns)


def largest_excess(releases: ArrayLike, timeline: Timeline) -> Excess:
    """The window of an output that comes closest to breaking (r, b), or breaks it by most."""
    return check(releases, timeline).excess


def check(releases: ArrayLike, timeline: Timeline, entering: scan.State | None = BEGINNING) -> Checked:
    """`largest_excess` of the windows that end in a piece of an output.

    They may begin before it, which is what the entering state tells of; without a state they begin in the piece.
    """
    times = scan.as_arrivals(releases)
    scan.check_sorted(times)
    table = _Table.of(timeline)
    work, stretch, last = table.drained(entering, int(times[0]) - 1)
    worst, where, peak, work, _ = _scan_excess(times, *table, PICO_PER_TOKEN, work, last, stretch)
    scan.check_peak(timeline.start.pico_law, int(peak))
    first_ns, last_ns = int(times[0]), int(times[-1])
    return Checked(
        Piece(len(times), first_ns, last_ns, int(work)),
        Excess(Fraction(int(worst), PICO_PER_TOKEN), int(times[where])),
        scan.State(int(work), last_ns),
    )


def work_before(piece: Piece, entering: scan.State, timeline: Timeline) -> int:
    """What is left of a state of `check` just before a piece: nothing, and the piece may be checked without it."""
    return int(_Table.of(timeline).drained(entering, piece.first_ns - 1)[0])


def checked_state(piece: Piece, entering: scan.State, timeline: Timeline) -> scan.State:
    """The state behind a piece of an output, given the state before it: `left_by`, for `check`."""
    before_ns = piece.first_ns - 1
    change = piece.messages * PICO_PER_TOKEN - timeline.dripped(before_ns, piece.last_ns)
    change += timeline.bucket_at(piece.last_ns - 1).pico_law.burst - timeline.bucket_at(before_ns).pico_law.burst
    return scan.State(max(work_before(piece, entering, timeline) + change, piece.backlog), piece.last_ns)


class _Table(NamedTuple):
    """A timeline in the integers of `law.scan_excess`."""

    begins: Ints
    rates: Ints
    bursts: Ints
    horizons: Ints

    @classmethod
    def of(cls, timeline: Timeline) -> _Table:
        rows = []
        for begin, _, bucket in timeline.stretches():
            law = bucket.pico_law
            scan.check_burst(law, bucket)
            rows.append((begin, law.rate, law.burst, law.horizon // 2 + 1))
        return cls(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))

    def drained(self, entering: scan.State | None, until_ns: int) -> tuple[int, int, int]:
        """(work, stretch, time) just before a message, for `scan_excess` to go on from."""
        if entering is None:
            return 0, self._stretch(until_ns), until_ns
        begins, rates, bursts, horizons = (column.tolist() for column in self)
        stretch = self._stretch(max(entering.last_ns - 1, scan.EARLIEST_NS))
        return plain.drain_excess(
            entering.backlog, entering.last_ns, until_ns, stretch, begins, rates, bursts, horizons
        )

    def _stretch(self, time_ns: int) -> int:
        return max(0, int(np.searchsorted(self.begins, time_ns, side="right")) - 1)


def _owed(times: Ints, timeline: Timeline, entering: scan.State) -> tuple[Ints, scan.State]:
    """Pico-tokens that each message lacks at its arrival, not positive where it goes at once; and the state behind."""
    scan.check_sorted(times)
    owed = np.empty(len(times), np.int64)
    state = entering
    for begin, until, bucket in timeline.stretches():
        low, high = np.searchsorted(times, [begin, until])
        if low == high:
            continue
        law = bucket.pico_law
        scan.check_burst(law, bucket)
        behind, state = scan.run(times[low:high], law, _carried(state, timeline, int(times[low])))
        owed[low:high] = behind - law.burst
    return owed, state


def _carried(state: scan.State, timeline: Timeline, at_ns: int) -> scan.State:
    """A state behind the changes of (r, b) that follow it, up to an instant and with it."""
    law, since_ns = timeline.bucket_at(state.last_ns).pico_law, state.last_ns
    for change_ns, bucket in timeline.changes:
        if since_ns < change_ns <= at_ns:
            left = max(0, state.backlog - law.rate * (change_ns - state.last_ns))
            law, old = bucket.pico_law, law
            state = scan.State(max(0, left + law.burst - old.burst), change_ns)
    return state
