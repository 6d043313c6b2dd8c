from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ArrivalsError, BacklogOverflow, InputError
from srtm.model import law, scan
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter
from srtm.units import histogram_percentile, percentile
from tests import naive
from tests.strategies import traffic

if TYPE_CHECKING:
    from numpy.typing import NDArray


def scalar_delays(bucket: TokenBucket, arrivals: list[int]) -> list[int]:
    limiter = Limiter(bucket, arrivals[0])
    return [limiter.admit(at) - at for at in arrivals]


@given(traffic())
def test_scalar_equals_array_equals_naive_token_counter(case: tuple[TokenBucket, list[int]]) -> None:
    bucket, arrivals = case
    expected = naive.delays_ns(arrivals, bucket)
    assert scalar_delays(bucket, arrivals) == expected
    assert scan.access_delays(arrivals, bucket).tolist() == expected


@given(traffic(), st.data())
def test_stretches_equal_the_whole_for_any_cuts(case: tuple[TokenBucket, list[int]], data: st.DataObject) -> None:
    bucket, arrivals = case
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(arrivals) - 1)), max_size=6)))
    stretches = [stretch for stretch in np.split(np.array(arrivals), cuts) if len(stretch)]
    summaries = [scan.summarise(stretch, bucket) for stretch in stretches]

    state: scan.State | None = None
    joined: list[int] = []
    counted = np.zeros(1, np.int64)
    for stretch, summary in zip(stretches, summaries, strict=True):
        joined += scan.backlogs(stretch, bucket, state).tolist()
        counts, end = scan.backlog_histogram(stretch, bucket, state)
        counted = np.pad(counted, (0, max(0, len(counts) - len(counted))))
        counted[: len(counts)] += counts
        state = summary.leave(state, bucket.law)
        assert end == state
    whole = scan.backlogs(arrivals, bucket)
    assert joined == whole.tolist()
    assert counted.tolist() == scan.backlog_histogram(arrivals, bucket)[0].tolist()

    # Joining is associative: from the left, from the right, and as the summary of all of it.
    from_left, from_right = summaries[0], summaries[-1]
    for summary in summaries[1:]:
        from_left = from_left.then(summary, bucket.law)
    for summary in summaries[-2::-1]:
        from_right = summary.then(from_right, bucket.law)
    assert from_left == from_right == scan.summarise(arrivals, bucket)


@given(traffic())
def test_compiled_scan_equals_the_same_source_interpreted(case: tuple[TokenBucket, list[int]]) -> None:
    bucket, arrivals = case
    out = [0] * len(arrivals)
    rate, token, _ = bucket.law
    law.scan_backlogs(arrivals, rate, token, bucket.law.horizon, 0, arrivals[0], out)  # type: ignore[arg-type]
    assert scan.backlogs(arrivals, bucket).tolist() == out


@given(traffic())
def test_dropping_equals_naive_token_counter(case: tuple[TokenBucket, list[int]]) -> None:
    bucket, arrivals = case
    expected = naive.passing(arrivals, bucket)
    limiter = Limiter(bucket, arrivals[0])
    assert [limiter.offer(at) for at in arrivals] == expected
    assert scan.passing(arrivals, bucket).tolist() == expected


@given(traffic(), st.data())
def test_each_lane_is_a_bucket_of_its_own(case: tuple[TokenBucket, list[int]], data: st.DataObject) -> None:
    bucket, arrivals = case
    other = TokenBucket(bucket.r_mtps * 3, bucket.b_ntok + 10**9)
    bucket_of = np.array(data.draw(st.lists(st.sampled_from([0, 1]), min_size=len(arrivals), max_size=len(arrivals))))
    delays = scan.split_access_delays(arrivals, bucket_of, [bucket, other])
    for number, its_bucket in enumerate((bucket, other)):
        here = np.flatnonzero(bucket_of == number)
        if len(here):
            assert delays[here].tolist() == naive.delays_ns([arrivals[i] for i in here], its_bucket)


@given(traffic(), st.sampled_from(["0.5", "0.9", "0.99", "1"]))
def test_histogram_answers_for_every_b(case: tuple[TokenBucket, list[int]], quantile: str) -> None:
    bucket, arrivals = case
    needed = histogram_percentile(scan.backlog_histogram(arrivals, bucket)[0], quantile)
    assert percentile(scan.access_delays(arrivals, TokenBucket(bucket.r_mtps, needed * 10**9)), quantile) == 0
    if needed > 1:
        smaller = TokenBucket(bucket.r_mtps, (needed - 1) * 10**9)
        assert percentile(scan.access_delays(arrivals, smaller), quantile) > 0


@given(traffic())
def test_work_is_what_the_limiter_holds(case: tuple[TokenBucket, list[int]]) -> None:
    bucket, arrivals = case
    times = sorted({*arrivals, *(at + 7 for at in arrivals)})
    work = scan.work_at(arrivals, bucket, times)
    for at, expected in zip(times, work.tolist(), strict=True):
        limiter = Limiter(bucket, arrivals[0])
        for arrival in arrivals:
            if arrival <= at:
                limiter.admit(arrival)
        assert limiter.backlog(at) * 10**12 == expected


def test_long_histograms_grow_as_they_need_to() -> None:
    burst = np.zeros(5_000, np.int64)
    counts, _ = scan.backlog_histogram(burst, TokenBucket.of(1, 1))
    assert counts.tolist() == [0] + [1] * 5_000


@pytest.mark.parametrize(
    ("arrivals", "said"),
    [
        ([], "no arrivals"),
        ([3, 2], "number 1 at 2 ns comes after 3 ns"),
        ([0.0, float("nan")], "arrival 1 is"),
        ([0.5], "whole nanoseconds"),
        ([0, 2**62], "beyond"),
        ([-(2**62)], "beyond"),
        ([2**63], "beyond"),
        ([0, 2**70], "beyond"),
        ([2**62 - 1, 2**62 - 1 - (2**63 - 1 - 1_500_000_000_000)], "not sorted"),
        (["now"], "must be integers"),
        ([[1], [2]], "shape"),
    ],
)
def test_bad_arrivals_are_named(arrivals: list[object], said: str) -> None:
    for use in (scan.backlogs, scan.access_delays, scan.passing, scan.summarise, scan.backlog_histogram):
        with pytest.raises(ArrivalsError, match=said):
            use(arrivals, TokenBucket.of("0.001", 5))  # type: ignore[arg-type]


def test_order_is_checked_across_lanes_and_stretches() -> None:
    bucket = TokenBucket.of(10, 5)
    with pytest.raises(ArrivalsError, match="not sorted"):
        scan.split_access_delays([5, 3], np.array([0, 1], np.int32), [bucket, bucket])
    with pytest.raises(ArrivalsError, match="stretches overlap"):
        scan.summarise([0, 9], bucket).then(scan.summarise([8], bucket), bucket.law)
    for use in (scan.backlogs, scan.backlog_histogram):
        with pytest.raises(ArrivalsError, match="before the state"):
            use([3, 9], bucket, scan.State(0, 4))


def test_lanes_must_exist() -> None:
    bucket = TokenBucket.of(10, 5)
    with pytest.raises(InputError, match="one for each arrival"):
        scan.split_access_delays([1, 2], np.array([0], np.int32), [bucket])
    with pytest.raises(InputError, match="from 0 to 1"):
        scan.split_access_delays([1, 2], np.array([0, 1], np.int32), [bucket])


def test_a_backlog_beyond_64_bits_is_an_error_and_not_a_number() -> None:
    # 4.6 million messages at once, counted in pico-tokens, pass 2**62.
    burst: NDArray[np.int64] = np.zeros(4_700_000, np.int64)
    fractional, whole = TokenBucket.of("0.001", 1), TokenBucket.of(1, 1)
    for use in (scan.backlogs, scan.access_delays, scan.summarise):
        with pytest.raises(BacklogOverflow, match="backlog passed 4,611,686 messages"):
            use(burst, fractional)
    assert scan.backlogs(burst, whole)[-1] == 4_700_000 * 10**9
    with pytest.raises(BacklogOverflow, match="out of exact range"):
        scan.access_delays([1], TokenBucket.of("0.001", 5_000_000))


def test_a_gap_of_years_does_not_overflow() -> None:
    years = 100 * 365 * 86_400 * 10**9
    fastest = TokenBucket.of(10**9, 2)
    assert scan.access_delays([0, 0, 0, years, years, years], fastest).tolist() == [0, 0, 1, 0, 0, 1]


@given(traffic())
def test_a_broker_that_asks_what_is_due_releases_at_the_same_times(case: tuple[TokenBucket, list[int]]) -> None:
    """One timer: messages wait in a queue, and no release time is kept per message."""
    bucket, arrivals = case
    limiter = Limiter(bucket, arrivals[0])
    waiting: list[int] = []
    waited: list[int] = []

    def drain(now: int) -> None:
        due = limiter.due(now, len(waiting))
        waited.extend(now - came for came in waiting[:due])
        del waiting[:due]

    for at in arrivals:
        while waiting and (timer := limiter.next_release_ns(len(waiting))) < at:
            drain(timer)
        limiter.admit(at)
        waiting.append(at)
        drain(at)
    while waiting:
        before = len(waiting)
        drain(limiter.next_release_ns(len(waiting)))
        assert len(waiting) < before
    assert waited == naive.delays_ns(arrivals, bucket)
