from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ArrivalsError, InputError
from srtm.model import fleet, scan, timeline
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter
from srtm.model.timeline import Timeline, Timelines
from tests import naive
from tests.strategies import changes_during, traffic


@st.composite
def changing_traffic(draw: st.DrawFn) -> tuple[list[int], Timeline]:
    bucket, arrivals = draw(traffic(max_size=25))
    return arrivals, Timeline(bucket, tuple(draw(changes_during(arrivals))))


def limiter_releases(arrivals: list[int], history: Timeline) -> list[int]:
    """What a broker does: one queue, one timer, changes as they come (before arrivals of the same instant)."""
    start = min([*arrivals, *(at for at, _ in history.changes)])
    limiter = Limiter(history.start, start)
    events = sorted(
        [(at, 0, i) for i, (at, _) in enumerate(history.changes)] + [(at, 1, i) for i, at in enumerate(arrivals)]
    )
    waiting = 0
    released: list[int] = []

    def drain_before(until: int | None) -> None:
        nonlocal waiting
        while waiting and (until is None or limiter.next_release_ns(waiting) < until):
            now = limiter.next_release_ns(waiting)
            due = limiter.due(now, waiting)
            released.extend([now] * due)
            waiting -= due

    for at, kind, index in events:
        drain_before(at)
        if kind == 0:
            limiter.reconfigure(at, history.changes[index][1])
        else:
            limiter.admit(at)
            waiting += 1
    drain_before(None)
    return released


@given(changing_traffic())
def test_changes_with_messages_waiting_equal_the_naive_token_counter(case: tuple[list[int], Timeline]) -> None:
    arrivals, history = case
    expected = naive.delays_ns(arrivals, history.start, history.changes)
    assert timeline.access_delays(arrivals, history).tolist() == expected
    assert limiter_releases(arrivals, history) == [at + delay for at, delay in zip(arrivals, expected, strict=True)]


def brute_force_excess(times: list[int], history: Timeline) -> Fraction:
    """The most by which any window (s, t] exceeds b(s) + ∫r: every start around a message or a change, every end."""
    intervals = list(history.intervals())

    def size_at(at: int) -> Fraction:
        """The smallest b of this instant: of several changes at once, each has its effect."""
        return min(
            naive.size(bucket) for begin, until, bucket in intervals if begin <= at < until or begin == until == at
        )

    def dripped(start: int, end: int) -> Fraction:
        parts = (naive.rate(bucket) * max(0, min(end, until) - max(start, begin)) for begin, until, bucket in intervals)
        return sum(parts, Fraction(0))

    around = {at + step for at in times for step in (-2, -1, 0)}
    around |= {at + step for at, _ in history.changes for step in (-2, -1, 0, 1)}
    return max(
        sum(start < at <= end for at in times) - size_at(start) - dripped(start, end)
        for end in set(times)
        for start in around
        if start < end
    )


@given(changing_traffic())
def test_every_window_keeps_to_the_bucket_across_changes(case: tuple[list[int], Timeline]) -> None:
    arrivals, history = case
    out = sorted((np.array(arrivals) + timeline.access_delays(arrivals, history)).tolist())
    assert brute_force_excess(out, history) <= 0
    assert timeline.largest_excess(out, history).conforms


@given(changing_traffic())
def test_excess_is_the_worst_window_of_all(case: tuple[list[int], Timeline]) -> None:
    """Of any times, not only of what a bucket let through."""
    times, history = case
    excess = timeline.largest_excess(times, history)
    assert excess.tokens == brute_force_excess(times, history)
    assert excess.at_ns in times


@st.composite
def stretches_of_traffic(draw: st.DrawFn) -> tuple[list[int], Timeline, list[list[int]]]:
    """Traffic in stretches that part no instant."""
    times, history = draw(changing_traffic())
    places = [i for i in range(1, len(times)) if times[i] > times[i - 1]]
    cuts = sorted(draw(st.sets(st.sampled_from(places)))) if places else []
    return times, history, [times[low:high] for low, high in zip([0, *cuts], [*cuts, len(times)], strict=True)]


@given(stretches_of_traffic())
def test_delays_stretch_by_stretch_are_those_of_the_whole(case: tuple[list[int], Timeline, list[list[int]]]) -> None:
    times, history, stretches = case
    state, delays = timeline.BEGINNING, []
    for stretch in stretches:
        joined = timeline.left_by(timeline.summarise(stretch, history), state, history)
        some, state = timeline.waits(stretch, history, state)
        delays += some.tolist()
        assert joined == state
    assert delays == timeline.access_delays(times, history).tolist()


@given(st.lists(stretches_of_traffic(), min_size=1, max_size=3))
def test_many_topics_at_once_wait_as_each_does_alone(
    cases: list[tuple[list[int], Timeline, list[list[int]]]],
) -> None:
    timelines = Timelines.of([history for _, history, _ in cases])
    summaries, before = [], []
    for topic, (_, history, stretches) in enumerate(cases):
        state = timeline.BEGINNING
        for stretch in stretches:
            summary = timeline.summarise(stretch, history)
            summaries.append((topic, *summary))
            before.append(tuple(state))
            state = timeline.left_by(summary, state, history)
    rows = np.array(summaries)
    assert [tuple(row) for row in timelines.waiting(rows[:, 0], rows[:, 1:]).tolist()] == before
    times = np.concatenate([np.array(arrivals) for arrivals, _, _ in cases])
    ends = np.cumsum([len(arrivals) for arrivals, _, _ in cases])
    segments = np.column_stack([np.arange(len(cases)), np.concatenate([[0], ends[:-1]]), ends])
    states, delays = fleet.no_states(len(cases)), np.empty(len(times), np.int64)
    states[:, :2] = timeline.BEGINNING
    timelines.waits(times, segments, states, delays)
    assert delays.tolist() == [
        delay for arrivals, history, _ in cases for delay in timeline.access_delays(arrivals, history).tolist()
    ]
    alone = fleet.no_states(len(cases))
    timelines.waits(times, segments, alone, np.empty(0, np.int64))
    whole = [timeline.summarise(arrivals, history) for arrivals, history, _ in cases]
    assert alone[:, :2].tolist() == [[summary.backlog, summary.last_ns] for summary in whole]


@given(stretches_of_traffic())
def test_windows_of_stretches_are_those_of_the_whole(case: tuple[list[int], Timeline, list[list[int]]]) -> None:
    times, history, stretches = case
    state, found = timeline.BEGINNING, []
    for stretch in stretches:
        alone, after = timeline.check(stretch, history, None), timeline.check(stretch, history, state)
        assert timeline.checked_state(alone.summary, state, history) == after.state
        assert alone.excess.tokens <= after.excess.tokens
        if not timeline.work_before(alone.summary, state, history):
            assert alone.excess == after.excess
        found.append(after.excess)
        state = after.state
    assert max(found, key=lambda excess: (excess.tokens, -excess.at_ns)) == timeline.largest_excess(times, history)


def test_a_fast_past_excuses_nothing() -> None:
    """A token a nanosecond until 100 ns, then (1/s, 5): the sixth message at 200 ns is one too many."""
    history = Timeline(TokenBucket.of(10**9, 5), ((100, TokenBucket.of(1, 5)),))
    excess = timeline.largest_excess([200] * 6, history)
    assert excess.tokens == 1 - Fraction(1, 10**9)
    assert not excess.conforms


def test_what_still_waits_at_the_end_of_time_waits_as_long_as_it_must() -> None:
    bucket = TokenBucket.of(1, 1)
    late = [scan.LATEST_NS] * 3
    assert timeline.access_delays(late, Timeline(bucket)).tolist() == [0, 10**9, 2 * 10**9]


def test_unsorted_times_are_refused_wherever_the_changes_fall() -> None:
    bucket = TokenBucket.of(10, 2)
    history = Timeline(bucket, tuple((at, bucket) for at in (1, 5, 15, 25)))
    for use in (timeline.access_delays, timeline.largest_excess):
        with pytest.raises(ArrivalsError, match="not sorted"):
            use([3, 4, 13, 30, 0], history)


@given(traffic(max_size=25))
def test_without_changes_it_is_the_plain_bucket(case: tuple[TokenBucket, list[int]]) -> None:
    bucket, arrivals = case
    assert timeline.access_delays(arrivals, Timeline(bucket)).tolist() == scan.access_delays(arrivals, bucket).tolist()


def test_an_output_with_one_message_too_many_is_caught() -> None:
    bucket = TokenBucket.of(1_000, 3)
    out = (np.zeros(9, np.int64) + scan.access_delays(np.zeros(9, np.int64), bucket)).tolist()
    assert timeline.largest_excess(out, Timeline(bucket)).conforms
    worse = timeline.largest_excess(sorted([*out, out[4]]), Timeline(bucket))
    assert not worse.conforms
    assert worse.tokens > Fraction(999, 1000)


def test_changes_must_be_in_order() -> None:
    bucket = TokenBucket.of(1, 1)
    with pytest.raises(InputError, match="in order of time"):
        Timeline(bucket, ((5, bucket), (4, bucket)))
