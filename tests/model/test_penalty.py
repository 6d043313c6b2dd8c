"""Proposition 1 and Lemma 1 of the paper, for random arrivals, splits and assignments, at every instant."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ArrivalsError, BacklogOverflow, InputError
from srtm.model import penalty, scan
from srtm.model.bucket import TokenBucket
from srtm.model.split import split
from tests.strategies import arrivals_for


@st.composite
def split_traffic(draw: st.DrawFn) -> tuple[TokenBucket, list[TokenBucket], list[int], list[int]]:
    """A bucket, any split of it (r and b by different weights), arrivals, and any assignment of them."""
    k = draw(st.integers(2, 5))
    whole = TokenBucket(draw(st.integers(1_000, 50_000_000)), draw(st.integers(k * 10**9, 30 * 10**9)))
    weight = st.lists(st.integers(1, 20), min_size=k, max_size=k)
    shares = split(whole, draw(weight), draw(weight))
    arrivals = draw(arrivals_for(whole, max_size=60))
    bucket_of = draw(st.lists(st.integers(0, k - 1), min_size=len(arrivals), max_size=len(arrivals)))
    return whole, shares, arrivals, bucket_of


def exact_delays(arrivals: list[int], bucket: TokenBucket) -> list[Fraction]:
    """Delays before rounding, from the product's own backlogs."""
    law = bucket.law
    return [max(Fraction(0), Fraction(int(x) - law.burst, law.rate)) for x in scan.backlogs(arrivals, bucket)]


def exact_sum(starts: list[int], delays: list[Fraction], at: Fraction) -> Fraction:
    return sum((min(d, max(Fraction(0), at - a)) for a, d in zip(starts, delays, strict=True)), Fraction(0))


@given(split_traffic())
def test_proposition_1_a_split_never_lowers_the_running_sum_of_delays(
    case: tuple[TokenBucket, list[TokenBucket], list[int], list[int]],
) -> None:
    whole, shares, arrivals, bucket_of = case
    one = exact_delays(arrivals, whole)
    many = [Fraction(0)] * len(arrivals)
    for number, share in enumerate(shares):
        here = [i for i, its in enumerate(bucket_of) if its == number]
        if here:
            for i, delay in zip(here, exact_delays([arrivals[i] for i in here], share), strict=True):
                many[i] = delay
    # Both sums are linear between arrivals and releases, so these instants stand for every t.
    instants = {Fraction(a) for a in arrivals}
    instants |= {a + d for a, d in zip(arrivals, one, strict=True)} | {
        a + d for a, d in zip(arrivals, many, strict=True)
    }
    for at in instants:
        assert exact_sum(arrivals, one, at) <= exact_sum(arrivals, many, at)

    # The product's integers say the same to a nanosecond per message, and what they say is the sum they stand for.
    result = penalty.penalty(arrivals, np.array(bucket_of, np.int32), whole, shares)
    assert result.one_ns.tolist() == [-(-d.numerator // d.denominator) for d in one]
    assert result.split_ns.tolist() == [-(-d.numerator // d.denominator) for d in many]
    times = sorted({int(at) for at in instants} | {arrivals[-1] + 10**15})
    split_sum, one_sum = result.split_sum(times), result.one_sum(times)
    assert (one_sum <= split_sum + len(arrivals)).all()
    assert one_sum.tolist() == [
        sum(min(int(d), max(0, at - a)) for a, d in zip(arrivals, result.one_ns, strict=True)) for at in times
    ]


@given(split_traffic())
def test_lemma_1_one_queue_never_holds_more_work_than_the_split(
    case: tuple[TokenBucket, list[TokenBucket], list[int], list[int]],
) -> None:
    whole, shares, arrivals, bucket_of = case
    # Work jumps at arrivals and falls in between: just before, at, and between them is everywhere.
    times = sorted({at + step for at in arrivals for step in (-1, 0, 1, 1_000, 10**6, 10**9)})
    one = scan.work_at(arrivals, whole, times)
    many = np.zeros(len(times), np.int64)
    for number, share in enumerate(shares):
        here = [at for at, its in zip(arrivals, bucket_of, strict=True) if its == number]
        if here:
            many += scan.work_at(here, share, times)
    assert (one <= many).all()


def test_a_worked_penalty() -> None:
    """Four messages at once, (1000/s, 2): together two wait 1 and 2 ms; in halves each half makes one wait 2 ms."""
    whole = TokenBucket.of(1_000, 2)
    halves = split(whole, [1, 1])
    result = penalty.penalty([0] * 4, np.array([0, 1, 0, 1], np.int32), whole, halves)
    assert result.one_ns.tolist() == [0, 0, 1_000_000, 2_000_000]
    assert result.split_ns.tolist() == [0, 0, 2_000_000, 2_000_000]
    assert result.one_sum([500_000, 10**9]).tolist() == [1_000_000, 3_000_000]
    assert result.split_sum([500_000, 10**9]).tolist() == [1_000_000, 4_000_000]


def test_sums_stay_exact_on_times_of_this_century() -> None:
    start = 1_800_000_000_000_000_000
    starts = np.arange(start, start + 10_000)
    delays = np.full(10_000, 10**14)
    assert penalty.accrued(starts, delays, [start + 10**16]).tolist() == [10**18]
    with pytest.raises(BacklogOverflow, match="shorter windows"):
        penalty.accrued(starts, delays * 10**4, [start])


def test_bad_sums_are_refused() -> None:
    with pytest.raises(ArrivalsError, match="not sorted"):
        penalty.accrued([5, 3], np.array([1, 1]), [9])
    with pytest.raises(InputError, match="2 arrivals but 1 delays"):
        penalty.accrued([3, 5], np.array([1]), [9])
