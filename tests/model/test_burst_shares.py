"""The burst that a broker's share of b must let pass, known or expected, and the split of b by bursts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.model.bucket import TokenBucket
from srtm.model.burst import Source, expected_b, needed_b
from srtm.model.profile import profile
from srtm.model.scan import access_delays
from srtm.model.split import least_b, split, split_among
from srtm.units import NS_PER_S, percentile
from srtm.workload.publishers import Population, Workload

QUANTILE = "0.99"
gaps = st.lists(st.integers(0, 50_000_000), min_size=1, max_size=200)


@given(gaps, st.sampled_from(["0.9", "0.99", "0.995", "1"]))
def test_a_broker_that_has_everything_needs_the_profiles_b(steps: list[int], quantile: str) -> None:
    times = np.cumsum(steps)
    found = profile(times, quantile=quantile)
    assert needed_b(times, found.bucket.r_mtps, quantile) * 10**9 == found.bucket.b_ntok


@given(gaps, st.sampled_from(["0.5", "0.9", "0.99"]))
def test_it_is_the_least_b_that_lets_these_messages_pass_at_once(steps: list[int], quantile: str) -> None:
    times = np.cumsum(steps)
    b = needed_b(times, 100_000, quantile)
    assert percentile(access_delays(times, TokenBucket.of(100, b)), quantile) == 0
    if b > 1:
        assert percentile(access_delays(times, TokenBucket.of(100, b - 1)), quantile) > 0


def test_one_outlier_does_not_decide() -> None:
    calm = np.arange(1_000) * (NS_PER_S // 100)
    burst = np.sort(np.concatenate([calm, np.full(5, calm[500])]))
    assert needed_b(burst, 200_000, QUANTILE) == needed_b(calm, 200_000, QUANTILE) == 1
    assert needed_b(burst, 200_000, "1") == 6


@given(st.lists(st.tuples(st.integers(1, 1_000), st.integers(0, 500), st.integers(1, 60)), min_size=1, max_size=6))
def test_shares_by_bursts_add_up_and_hold_the_largest_batch(brokers: list[tuple[int, int, int]]) -> None:
    whole = TokenBucket.of(5_000, 100)
    rates, bursts, batches = (list(column) for column in zip(*brokers, strict=True))
    least = least_b(whole.b_ntok, batches)
    shares = split(whole, rates, bursts, min_b=least)
    assert sum(share.r_mtps for share in shares) == whole.r_mtps
    assert sum(share.b_ntok for share in shares) == whole.b_ntok
    assert all(share.b >= tokens for share, tokens in zip(shares, least, strict=True))
    assert least == (batches if sum(batches) <= 100 else [1] * len(batches))


def test_names_get_the_same_shares_as_numbers() -> None:
    whole = TokenBucket.of(100, 60)
    named = split_among(whole, {"a": 3, "b": 1}, {"a": 1, "b": 1}, {"a": 40})
    assert named == dict(zip("ab", split(whole, [3, 1], [1, 1], min_b=[40, 1]), strict=True))


@pytest.mark.parametrize(("group_size", "batch", "headroom"), [(1, 1, 1.1), (5, 10, 1.1), (30, 10, 1.1), (10, 1, 2.0)])
def test_an_expected_burst_is_near_that_of_poisson_arrivals(group_size: int, batch: int, headroom: float) -> None:
    population = Population(300, batch=batch, group_size=group_size)
    times = Workload((population,), 100 * NS_PER_S, 1).arrivals().times_ns
    together = float(group_size * batch)
    expected = expected_b([Source(population.total_mps, together)], headroom * population.total_mps, QUANTILE)
    assert expected == pytest.approx(
        needed_b(times, round(headroom * population.total_mps * 1_000), QUANTILE), rel=0.35
    )


def test_expected_bursts_do_not_depend_on_rates_and_grow_with_what_comes_together() -> None:
    slow, fast = (expected_b([Source(rate, 20.0)], 1.1 * rate, QUANTILE) for rate in (10.0, 10_000.0))
    assert slow == pytest.approx(fast)
    assert expected_b([Source(10.0, 40.0)], 11.0, QUANTILE) == pytest.approx(2 * slow)
    mixed = expected_b([Source(5.0, 40.0), Source(5.0, 20.0)], 11.0, QUANTILE)
    assert slow < mixed < 2 * slow


def test_a_burst_is_expected_of_every_declaration() -> None:
    assert expected_b([], 10.0, QUANTILE) == 1
    overdue = expected_b([Source(100.0, 1.0)], 10.0, QUANTILE)  # more than the contract
    assert 1 < overdue < 1_000
    assert expected_b([Source(0.001, 1.0)], 1e9, QUANTILE) == 1
    assert expected_b([Source(1.0, 1e6), Source(1e6, 1.0)], 1.2e6, "0.999999999") > 1e6
