from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError
from srtm.model import scan, timeline
from srtm.model.bucket import Limiter, TokenBucket
from srtm.model.timeline import Timeline
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


@given(changing_traffic())
def test_every_window_keeps_to_the_bucket_across_changes(case: tuple[list[int], Timeline]) -> None:
    """All windows (s, t] by brute force: what leaves is at most b(s) and what dripped in since."""
    arrivals, history = case
    out = sorted((np.array(arrivals) + timeline.access_delays(arrivals, history)).tolist())
    stretches = list(history.stretches())
    for i, first in enumerate(out):
        start = first - 1
        b = next(naive.size(bucket) for begin, until, bucket in stretches if begin <= start < until)
        for j in range(i, len(out)):
            dripped = sum(
                (
                    naive.rate(bucket) * max(0, min(out[j], until) - max(start, begin))
                    for begin, until, bucket in stretches
                ),
                Fraction(0),
            )
            assert j - i + 1 <= b + dripped
    assert timeline.largest_excess(out, history).conforms


@given(traffic(max_size=25))
def test_excess_is_the_worst_window_of_all(case: tuple[TokenBucket, list[int]]) -> None:
    bucket, times = case
    excess = timeline.largest_excess(times, Timeline(bucket))
    assert excess.tokens == naive.worst_window(times, bucket)
    assert excess.at_ns in times


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
