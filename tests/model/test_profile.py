from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ArrivalsError, InputError
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.model.profile import mean_rate, profile, token_rate
from srtm.units import percentile


@st.composite
def bursts(draw: st.DrawFn) -> list[int]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 30)), min_size=1, max_size=30))
    at, times = 0, []
    for gap, count in sizes:
        at += gap
        times += [at] * count
    return times


@given(bursts(), st.sampled_from(["0.5", "0.9", "0.99", "0.999", "1"]), st.sampled_from(["1", "1.1", "2.5"]))
def test_b_is_the_smallest_that_makes_the_quantile_of_the_delay_zero(
    arrivals: list[int], quantile: str, headroom: str
) -> None:
    bucket = profile(arrivals, headroom=headroom, quantile=quantile).bucket
    assert percentile(scan.access_delays(arrivals, bucket), quantile) == 0
    if bucket.b_ntok > 10**9:
        smaller = TokenBucket(bucket.r_mtps, bucket.b_ntok - 10**9)
        assert percentile(scan.access_delays(arrivals, smaller), quantile) > 0


def test_r_is_the_mean_rate_and_ten_percent() -> None:
    steady = profile(np.arange(100_001) * 100_000)
    assert steady.rate_mps == Fraction(100_001, 10)
    assert steady.bucket == TokenBucket.of(11_001, 1)  # 11,000.11, rounded up to a whole number
    slow = profile([0, 10**10])
    assert slow.rate_mps == Fraction(1, 5)
    assert slow.bucket == TokenBucket.of("0.22", 1)


def test_one_burst_is_not_a_rate() -> None:
    assert profile([7] * 30).bucket == TokenBucket.of(33, 30)
    assert profile([7]).bucket == TokenBucket.of("1.1", 1)
    assert mean_rate(5, 0, 1) == 5


def test_bad_input_is_named() -> None:
    with pytest.raises(ArrivalsError, match="trace is empty"):
        profile([])
    with pytest.raises(InputError, match=r"headroom = 0\.9"):
        profile([1, 2], headroom="0.9")
    for quantile in ("0", "1.01", "-1"):
        with pytest.raises(InputError, match="quantile must lie in"):
            profile([1, 2], quantile=quantile)
    assert token_rate(Fraction(1, 10**9)) == 1
