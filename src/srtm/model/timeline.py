"""A token bucket whose (r, b) changes over time, and the check that an output kept to it.

`access_delays` is `Limiter.admit` and `Limiter.reconfigure` over arrays. `largest_excess` checks an output, whatever
produced it. Both also work on a trace cut into stretches: `waits` and `check` continue from the state that the stretch
before left, and `left_by` computes that state from a summary, without another scan.

Release times are whole nanoseconds, rounded up. Messages released in a half-open window (s, t] were due in it, so every
such window of whole nanoseconds holds at most b(s) + ∫r over (s, t], with b(s) as in force at s. For a window given by
its first and last message, both included, Δt is one nanosecond more than their distance.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtm.errors import InputError, SRTMError
from srtm.model import excess as plain
from srtm.model import scan, waiting
from srtm.model._compiled import callable_from_compiled, compiled
from srtm.model.scan import Summary
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from srtm.model.bucket import TokenBucket

    Ints = NDArray[np.int64]

callable_from_compiled(plain.drain_excess, plain.scan_excess, plain.interval_at, plain.drained)
_scan_excess = compiled(plain.scan_excess)
_scan_excesses = compiled(plain.scan_excesses)
_enter_excesses = compiled(plain.enter_excesses)
callable_from_compiled(waiting.carried, waiting.wait_ns)
_scan_waits = compiled(waiting.scan_waits)
_enter_waits = compiled(waiting.enter_waits)

BEGINNING = scan.State(0, scan.EARLIEST_NS)


@dataclass(frozen=True, slots=True)
class Timeline:
    """(r, b) at the start, and each change: from `at_ns` on, arrivals at that instant included."""

    start: TokenBucket
    changes: tuple[tuple[int, TokenBucket], ...] = ()

    def __post_init__(self) -> None:
        """Refuse changes that are not in order of time."""
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
            for begin, until, bucket in self.intervals()
        )

    def intervals(self) -> Iterable[tuple[int, int, TokenBucket]]:
        """(from, until, bucket) for each interval with a constant (r, b), back to back over all of time."""
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
        """Whether no window held more than b + r·Δt."""
        return self.tokens <= 0


class Checked(NamedTuple):
    """The summary of a stretch of an output, its worst window, and the state behind it."""

    summary: Summary
    excess: Excess
    state: scan.State


def access_delays(arrivals: ArrayLike, timeline: Timeline) -> Ints:
    """How long each message waits for its token, in ns, while (r, b) changes; waiting messages keep their place."""
    return waits(arrivals, timeline)[0]


def waits(arrivals: ArrayLike, timeline: Timeline, entering: scan.State = BEGINNING) -> tuple[Ints, scan.State]:
    """`access_delays` of a stretch that follows a state, and the state behind it."""
    times = scan.as_arrivals(arrivals)
    owed, state = _owed(times, timeline, entering)
    delays = np.zeros(len(times), np.int64)
    waiting = np.flatnonzero(owed > 0)
    since, owed = times[waiting], owed[waiting]
    *earlier, (_, _, final) = timeline.intervals()
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


def summarise(arrivals: ArrayLike, timeline: Timeline, before: Summary | None = None) -> Summary:
    """The summary of these arrivals, or of them and the stretch just before them."""
    times = scan.as_arrivals(arrivals)
    start = scan.State(before.backlog, before.last_ns) if before else scan.State(0, int(times[0]))
    state = _owed(times, timeline, start)[1]
    messages, first_ns = (before.messages, before.first_ns) if before else (0, int(times[0]))
    return Summary(messages + len(times), first_ns, state.last_ns, state.backlog)


def left_by(summary: Summary, entering: scan.State, timeline: Timeline) -> scan.State:
    """The state behind a stretch of arrivals, given the state before it.

    Every step of a backlog is x → max(x + c, d), and so are all of them together: d is the stretch's own end.
    """
    carried = _carried(entering, timeline, summary.first_ns)
    first, last = timeline.bucket_at(summary.first_ns).pico_law, timeline.bucket_at(summary.last_ns).pico_law
    found = max(0, carried.backlog - first.rate * (summary.first_ns - carried.last_ns))
    change = summary.messages * PICO_PER_TOKEN + last.burst - first.burst
    change -= timeline.dripped(summary.first_ns, summary.last_ns)
    return scan.State(max(found + change, summary.backlog), summary.last_ns)


def largest_excess(releases: ArrayLike, timeline: Timeline) -> Excess:
    """The window of an output that comes closest to breaking (r, b), or breaks it by most."""
    return check(releases, timeline).excess


def check(releases: ArrayLike, timeline: Timeline, entering: scan.State | None = BEGINNING) -> Checked:
    """`largest_excess` of the windows that end in a stretch of an output.

    With an entering state, windows may begin before the stretch; without one, they begin in it.
    """
    times = scan.as_arrivals(releases)
    scan.check_sorted(times)
    table = _Table.of(timeline)
    work, interval, last = table.drained(entering, int(times[0]) - 1)
    worst, where, peak, work, _ = _scan_excess(times, *table, PICO_PER_TOKEN, work, last, interval)
    scan.check_peak(timeline.start.pico_law, int(peak))
    first_ns, last_ns = int(times[0]), int(times[-1])
    return Checked(
        Summary(len(times), first_ns, last_ns, int(work)),
        Excess(Fraction(int(worst), PICO_PER_TOKEN), int(times[where])),
        scan.State(int(work), last_ns),
    )


def work_before(summary: Summary, entering: scan.State, timeline: Timeline) -> int:
    """What is left of a state of `check` just before a stretch; if 0, the stretch may be checked without the state."""
    return int(_Table.of(timeline).drained(entering, summary.first_ns - 1)[0])


def checked_state(summary: Summary, entering: scan.State, timeline: Timeline) -> scan.State:
    """The state behind a stretch of an output, given the state before it: `left_by`, for `check`."""
    before_ns = summary.first_ns - 1
    change = summary.messages * PICO_PER_TOKEN - timeline.dripped(before_ns, summary.last_ns)
    change += timeline.bucket_at(summary.last_ns - 1).pico_law.burst - timeline.bucket_at(before_ns).pico_law.burst
    return scan.State(max(work_before(summary, entering, timeline) + change, summary.backlog), summary.last_ns)


def refused(held: Mapping[str, Timeline]) -> dict[str, str]:
    """By name, the timelines that 64 bits cannot hold, and why."""
    why: dict[int, str] = {}
    for timeline in {id(timeline): timeline for timeline in held.values()}.values():
        try:
            _Table.of(timeline)
        except SRTMError as error:
            why[id(timeline)] = str(error)
    return {name: why[id(timeline)] for name, timeline in held.items() if id(timeline) in why} if why else {}


class Timelines(NamedTuple):
    """The timelines of many topics, as one table: topic t has its columns from `places[t, 0]` to `places[t, 1]`."""

    table: Ints
    places: Ints

    @classmethod
    def of(cls, held: Sequence[Timeline]) -> Timelines:
        """A timeline for each topic; equal ones share their rows."""
        known = {id(timeline): timeline for timeline in held}
        tables = [_Table.of(timeline) for timeline in known.values()]
        ends = np.cumsum([len(table.begins) for table in tables])
        number = {key: place for place, key in enumerate(known)}
        of_each = np.array([number[id(timeline)] for timeline in held], np.int64)
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64) if tables else np.empty(0, np.int64)
        places = np.column_stack([starts, ends])[of_each] if tables else np.empty((0, 2), np.int64)
        return cls(np.concatenate([np.empty((4, 0), np.int64), *map(np.stack, tables)], axis=1), places)

    def check(self, times: Ints, segments: Ints, states: Ints, worst: Ints) -> None:
        """`check` of many topics: rows of `segments` are (topic, begin, end) and in order of time.

        `states` has a row (work, last, peak) by topic and is carried on; `worst` (excess, its end) is raised.
        """
        _scan_excesses(times, segments, self.table, self.places, states, worst)

    def entering(self, topics: Ints, summaries: Ints) -> Ints:
        """Rows (work, last, work left when the stretch begins) from summaries by topic and time: `checked_state`."""
        out = np.empty((len(topics), 3), np.int64)
        _enter_excesses(topics, summaries, self.table, self.places, out)
        return out

    def waits(self, times: Ints, segments: Ints, states: Ints, out: Ints) -> None:
        """`waits` of many topics: rows of `segments` are (topic, begin, end) and in order of time.

        `states` has a row (backlog, last, peak) by topic and is carried on; delays go into `out` unless it is empty.
        """
        _scan_waits(times, segments, self.table, self.places, states, out)

    def waiting(self, topics: Ints, summaries: Ints) -> Ints:
        """Rows (backlog, last) before each stretch, from summaries by topic and time: `left_by`."""
        out = np.empty((len(topics), 2), np.int64)
        _enter_waits(topics, summaries, self.table, self.places, out)
        return out


class _Table(NamedTuple):
    """A timeline in the integers of `law.scan_excess`."""

    begins: Ints
    rates: Ints
    bursts: Ints
    horizons: Ints

    @classmethod
    def of(cls, timeline: Timeline) -> _Table:
        rows = []
        for begin, _, bucket in timeline.intervals():
            law = bucket.pico_law
            scan.check_burst(law, bucket)
            rows.append((begin, law.rate, law.burst, law.horizon // 2 + 1))
        return cls(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))

    def drained(self, entering: scan.State | None, until_ns: int) -> tuple[int, int, int]:
        """(work, interval, time) just before a message, for `scan_excess` to continue from."""
        if entering is None:
            return 0, self._interval(until_ns), until_ns
        begins, rates, bursts, horizons = (column.tolist() for column in self)
        interval = self._interval(max(entering.last_ns - 1, scan.EARLIEST_NS))
        return plain.drain_excess(
            entering.backlog, entering.last_ns, until_ns, interval, begins, rates, bursts, horizons
        )

    def _interval(self, time_ns: int) -> int:
        return max(0, int(np.searchsorted(self.begins, time_ns, side="right")) - 1)


def _owed(times: Ints, timeline: Timeline, entering: scan.State) -> tuple[Ints, scan.State]:
    """Pico-tokens each message lacks on arrival (zero or less if it need not wait), and the state behind them."""
    scan.check_sorted(times)
    owed = np.empty(len(times), np.int64)
    state = entering
    for begin, until, bucket in timeline.intervals():
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
