from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from srtm.pipeline.traces import quantiles
from srtm.pipeline.traces.quantiles import Samples, narrowed, selected
from srtm.units import percentile


@given(
    st.lists(st.lists(st.sampled_from([0, 0, 0, 1, 2, 5, 100, 10**12]) | st.integers(0, 50), min_size=1), min_size=1),
    st.sampled_from(["0.01", "0.5", "0.95", "0.99", "1"]),
    st.integers(1, 8),
)
def test_two_looks_find_the_quantile_of_all_parts(parts: list[list[int]], quantile: str, most: int) -> None:
    arrays = [np.array(part) for part in parts]
    whole = np.concatenate(arrays)
    with patch.object(quantiles, "SAMPLES", most):
        bounds = narrowed([Samples.of(array) for array in arrays], quantile)
    expected = percentile(whole, quantile)
    assert bounds.above < expected <= bounds.upto
    if bounds.settled:
        assert expected == bounds.upto
    between = [array[(array > bounds.above) & (array <= bounds.upto)] for array in arrays]
    assert selected(between, int((whole <= bounds.above).sum()), len(whole), quantile) == expected


def test_little_lies_between_the_bounds() -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 10**9, 50_000) for _ in range(5)]
    bounds = narrowed([Samples.of(array) for array in arrays], "0.99")
    between = sum(int(((array > bounds.above) & (array <= bounds.upto)).sum()) for array in arrays)
    assert between < 0.01 * 250_000


def test_small_parts_and_equal_values_need_one_look() -> None:
    assert narrowed([Samples.of(np.array([3, 9, 4])), Samples.of(np.array([7]))], "0.5").settled
    assert narrowed([Samples.of(np.zeros(10_000, np.int64))] * 3, "0.99").settled
