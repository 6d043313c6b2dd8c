from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError
from srtm.units import exact, format_ns, histogram_percentile, parse_duration_ns, percentile, percentiles, rank


@given(st.lists(st.integers(0, 50), min_size=1), st.sampled_from(["0.01", "0.5", "0.95", "0.99", "1"]))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[int], quantile: str) -> None:
    array = np.array(values, np.int64)
    found = percentile(array, quantile)
    enough = Fraction(quantile) * len(values)
    assert sum(value <= found for value in values) >= enough
    assert sum(value < found for value in values) < enough
    assert histogram_percentile(np.bincount(array), quantile) == found
    assert percentiles(array, ["0.5", quantile])[1] == found


def test_a_rank_is_counted_exactly() -> None:
    assert [rank(100, 0.55), rank(100, 0.07)] == [55, 7]
    assert [math.ceil(0.55 * 100), math.ceil(0.07 * 100)] == [56, 8]  # what floats make of it
    assert rank(1, "0.001") == 1


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1ms", 10**6),
        ("0.5 s", 5 * 10**8),
        ("60", 60 * 10**9),
        (".25us", 250),
        ("2m", 12 * 10**10),
        ("1e3ns", 1_000),
        ("3h", 108 * 10**11),
    ],
)
def test_durations(text: str, ns: int) -> None:
    assert parse_duration_ns(text) == ns


def test_bare_numbers_count_in_the_callers_unit() -> None:
    assert parse_duration_ns("4", bare="ms") == 4_000_000


@pytest.mark.parametrize("text", ["", "fast", "-1s", "1 year", "1ms2", "nan", "1e999999999s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a duration"):
        parse_duration_ns(text)


def test_durations_for_people() -> None:
    assert [format_ns(ns) for ns in (1, 1_500, 2_000_000, 3 * 10**9)] == ["1 ns", "1.5 µs", "2 ms", "3 s"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x", None, "1/0", "1e999999999"])
def test_only_finite_numbers_are_exact(value: object) -> None:
    with pytest.raises(InputError, match="finite number"):
        exact(value, "it")  # type: ignore[arg-type]


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(InputError, match="at least one"):
        percentile(np.empty(0, np.int64), "0.99")
    with pytest.raises(InputError, match="at least one"):
        histogram_percentile(np.empty(0, np.int64), "0.99")
