"""Quantiles of many keys at once, from samples of parts, are those of all values."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from srtm.pipeline.traces import quantiles
from srtm.pipeline.traces.quantiles import Bounds, Samples, narrowed, sampled, selected
from srtm.units import percentile, rank

VALUES = st.sampled_from([0, 0, 0, 1, 2, 5, 100, 10**12]) | st.integers(0, 50)
Parts = list[np.ndarray]


def bounds_of(keys: list[Parts], quantile: str) -> Bounds:
    """The bounds of a quantile of each key, whose parts are sampled by tasks of their own."""
    rows, complete = [], np.ones(len(keys), np.bool_)
    for key, parts in enumerate(keys):
        for part in parts:
            samples, all_of_it = sampled(np.sort(part), np.array([len(part)]))
            rows.append(np.column_stack([samples.groups + key, *samples[1:]]))
            complete[key] &= bool(all_of_it[0])
    table = np.concatenate(rows)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    ranks = np.array([rank(sum(map(len, parts)), quantile) for parts in keys])
    return narrowed(Samples(*table.T), ranks, complete)


def parts(lists: list[list[int]]) -> Parts:
    return [np.array(values, np.int64) for values in lists]


@given(
    st.lists(st.lists(st.lists(VALUES, min_size=1), min_size=1, max_size=4).map(parts), min_size=1, max_size=4),
    st.sampled_from(["0.01", "0.5", "0.95", "0.99", "1"]),
    st.integers(1, 8),
)
def test_two_looks_find_the_quantiles_of_all_parts(keys: list[Parts], quantile: str, most: int) -> None:
    with patch.object(quantiles, "SAMPLES", most):
        bounds = bounds_of(keys, quantile)
    wholes = [np.concatenate(its_own) for its_own in keys]
    expected = [percentile(whole, quantile) for whole in wholes]
    for key, (whole, value) in enumerate(zip(wholes, expected, strict=True)):
        above, upto = bounds.above[key], bounds.upto[key]
        assert above < value <= upto
        assert not bounds.settled[key] or value == upto
        assert ((whole > above) & (whole <= upto)).any()
    between = [whole[(whole > bounds.above[key]) & (whole <= bounds.upto[key])] for key, whole in enumerate(wholes)]
    numbers = np.repeat(np.arange(len(keys)), [len(some) for some in between])
    places = [
        rank(len(whole), quantile) - 1 - int((whole <= bounds.above[key]).sum()) for key, whole in enumerate(wholes)
    ]
    assert selected(numbers, np.concatenate(between), np.array(places)).tolist() == expected


@given(st.lists(st.lists(VALUES, min_size=1, max_size=30), min_size=1, max_size=5), st.integers(1, 8))
def test_groups_are_sampled_together_as_they_are_alone(lists: list[list[int]], most: int) -> None:
    groups = [np.sort(np.array(values, np.int64)) for values in lists]
    with patch.object(quantiles, "SAMPLES", most):
        together, complete = sampled(np.concatenate(groups), np.cumsum([len(group) for group in groups]))
        for number, group in enumerate(groups):
            alone, all_of_it = sampled(group, np.array([len(group)]))
            mine = together.groups == number
            for one, other in zip(together[1:], alone[1:], strict=True):
                assert one[mine].tolist() == other.tolist()
            assert complete[number] == all_of_it[0]
            assert alone.least.sum() == alone.most.sum() == len(group)


def test_little_lies_between_the_bounds() -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 10**9, 50_000) for _ in range(5)]
    bounds = bounds_of([arrays], "0.99")
    between = sum(int(((array > bounds.above[0]) & (array <= bounds.upto[0])).sum()) for array in arrays)
    assert between < 0.01 * 250_000


def test_small_parts_and_equal_values_need_one_look() -> None:
    assert bounds_of([[np.array([3, 9, 4]), np.array([7])], [np.zeros(10_000, np.int64)] * 3], "0.5").settled.all()
