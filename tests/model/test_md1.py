from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError
from srtm.model import md1, scan
from srtm.model.bucket import TokenBucket
from srtm.model.split import split


def positive_sum(x: float, utilisation: float) -> float:
    """Another road to P(U > x): the textbook's series from j = x on to infinity, where every term is positive."""
    terms: list[float] = []
    j, peak = math.floor(x) + 1, -math.inf
    while len(terms) < 3 or terms[-1] > peak - 45:
        y = j - x
        terms.append(j * math.log(utilisation * y) - math.lgamma(j + 1) - utilisation * y)
        peak = max(peak, terms[-1])
        j += 1
    return (1 - utilisation) * math.fsum(math.exp(power) for power in terms)


@pytest.mark.parametrize("utilisation", [0.01, 0.1, 0.5, 0.8, 0.909, 0.95])
@pytest.mark.parametrize("x", [0, 0.25, 1, 3.7, 12, 19.5, 25, 31, 60, 100, 180.5])
def test_it_equals_the_sum_of_positive_terms(x: float, utilisation: float) -> None:
    assert md1.exceeds(x, utilisation) == pytest.approx(positive_sum(x, utilisation), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("utilisation", [0.02, 0.3, 0.7, 0.909, 0.99, 0.999, 0.9999])
def test_both_ways_of_computing_agree_where_they_meet(utilisation: float) -> None:
    x = md1._one_exponential_from(utilisation)
    assert md1._textbook(x, utilisation) == pytest.approx(md1.exceeds(x, utilisation), rel=1e-11)


@pytest.mark.parametrize(("utilisation", "x"), [(0.9, 3_000), (0.99, 8_000), (0.5, 500), (0.999, 20_000)])
def test_far_out_the_tail_falls_by_its_known_factor(utilisation: float, x: float) -> None:
    ratio = md1.exceeds(x + 1, utilisation) / md1.exceeds(x, utilisation)
    assert ratio == pytest.approx(math.exp(-md1.decay(utilisation)), rel=1e-9)


@pytest.mark.parametrize("utilisation", [1e-9, 0.0009, 0.01, 0.018, 0.3, 0.9999])
def test_the_decay_is_the_root_for_small_loads_too(utilisation: float) -> None:
    eta = md1.decay(utilisation)
    assert utilisation * math.expm1(eta) == pytest.approx(eta, rel=1e-9)
    assert 0 <= md1.mean_delay(11_000 * utilisation, TokenBucket.of(11_000, 26)) < 1


def test_what_underflows_is_zero_and_comes_back() -> None:
    assert md1.exceeds(100_000, 0.9) == 0
    assert md1.exceeds(-1, 0.9) == 1
    assert md1.exceeds(0, 0.9) == pytest.approx(0.9, rel=1e-14)
    assert md1.exceeds(0, 0.9999) == pytest.approx(0.9999, rel=1e-13)
    assert md1.exceeds(5, 0) == 0


@given(st.floats(0.01, 0.99), st.floats(0, 300), st.floats(0.01, 5))
def test_it_is_a_tail(utilisation: float, x: float, more: float) -> None:
    near, far = md1.exceeds(x, utilisation), md1.exceeds(x + more, utilisation)
    assert 0 <= far <= near * (1 + 1e-9) <= 1 + 1e-9


@pytest.mark.parametrize("utilisation", [0.2, 0.909, 0.99])
def test_the_expected_excess_at_zero_is_pollaczek_and_khinchines(utilisation: float) -> None:
    mean = utilisation / (2 * (1 - utilisation))
    assert md1.expected_excess(0, utilisation) == pytest.approx(mean, rel=1e-10)
    assert md1.expected_excess(-3, utilisation) == pytest.approx(mean + 3, rel=1e-12)


@pytest.mark.parametrize("x", [0.5, 7, 42.25])
def test_the_expected_excess_is_the_integral_of_the_tail(x: float) -> None:
    grid = np.linspace(x, x + 150, 150 * 40 + 1)
    tail = np.array([md1.exceeds(float(at), 0.8) for at in grid])
    assert md1.expected_excess(x, 0.8) == pytest.approx(np.trapezoid(tail, grid), rel=1e-3)


def poisson_batches(rate_mps: float, batch: int, seconds: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate_mps / batch * seconds)
    return np.repeat(np.sort(rng.integers(0, round(seconds * 1e9), count)), batch)


@pytest.mark.parametrize(("b", "batch"), [(1, 1), (12, 1), (26, 1), (12, 10), (150, 10)])
def test_the_mean_delay_lies_within_the_simulations_confidence_interval(b: int, batch: int) -> None:
    """Independent runs, so their means are independent: 4 standard errors are one miss in 16,000."""
    bucket = TokenBucket.of(11_000, b)
    means = np.array(
        [scan.access_delays(poisson_batches(10_000, batch, 40, seed), bucket).mean() for seed in range(40)]
    )
    error = means.std(ddof=1) / math.sqrt(len(means))
    assert error < 0.1 * means.mean()
    assert abs(md1.mean_delay(10_000, bucket, batch) * 1e9 - means.mean()) < 4 * error


def test_eq1_as_printed_is_exact_for_one_token_and_3_percent_high_beyond() -> None:
    one = TokenBucket.of(11_000, 1)
    assert md1.mean_delay_eq1(10_000, one) == pytest.approx(md1.mean_delay(10_000, one), rel=1e-9)
    many = TokenBucket.of(11_000, 26)
    assert md1.mean_delay_eq1(10_000, many) / md1.mean_delay(10_000, many) == pytest.approx(1.0323, abs=1e-3)


@pytest.mark.parametrize("k", [2, 3, 4, 5, 6])
def test_a_split_k_ways_costs_at_least_k_fold(k: int) -> None:
    """Section 2.1: k smaller buckets, each with its part of the traffic."""
    whole = TokenBucket.of(11_000, 26)
    parts = [(10_000 / k, share) for share in split(whole, [1] * k)]
    ratio = md1.split_mean_delay(parts) / md1.mean_delay(10_000, whole)
    assert ratio > k


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: md1.exceeds(5, 1.0), "λ/r = 1.0"),
        (lambda: md1.exceeds(5, -0.1), "λ/r = -0.1"),
        (lambda: md1.exceeds(5, float("nan")), "λ/r = nan"),
        (lambda: md1.exceeds(float("nan"), 0.5), "x must be a finite number"),
        (lambda: md1.mean_delay(11_000, TokenBucket.of(11_000, 5)), "must exceed the message rate"),
        (lambda: md1.mean_delay(10, TokenBucket.of(20, 5), batch=0), "batch must be at least 1"),
        (lambda: md1.split_mean_delay([]), "must be positive"),
    ],
)
def test_bad_input_is_named(use: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        use()  # type: ignore[operator]
