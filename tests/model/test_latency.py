"""Latencies in bins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError
from srtm.model.latency import Sketch
from srtm.units import percentile

TIMES = st.lists(st.integers(0, 2**50), min_size=1, max_size=200)


@given(TIMES, TIMES, st.sampled_from(["0.5", "0.95", "0.99", "1"]))
def test_a_sketch_knows_a_quantile_to_one_in_32(some: list[int], others: list[int], quantile: str) -> None:
    merged = Sketch.of(np.array(some))
    merged.add(Sketch.read(Sketch.of(np.array(others)).flat))
    exact = percentile(np.array(some + others), quantile)
    assert merged.total == len(some) + len(others)
    assert exact <= merged.quantile_ns(quantile) <= exact + exact // 32


@given(TIMES, TIMES, st.sampled_from(["0.5", "0.95", "0.99", "1"]))
def test_a_quantile_without_a_part_is_that_of_the_rest(some: list[int], others: list[int], quantile: str) -> None:
    rest, part = Sketch.of(np.array(some)), Sketch.of(np.array(others))
    whole = Sketch(dict(rest.counts))
    whole.add(part)
    assert whole.quantile_ns(quantile, [part]) == rest.quantiles_ns((quantile,))[0]
    assert whole.quantile_ns(quantile, [part, rest]) == 0


def test_the_sketch_of_nothing() -> None:
    assert Sketch.of(np.array([], np.int64)).quantile_ns("0.99") == 0
    assert Sketch.of(np.array([-5])).quantile_ns("0.99") == 0


@pytest.mark.parametrize("flat", [[1], [1, 2, 3], [2**40, 1], [-1, 1]])
def test_a_list_that_is_no_sketch_is_refused(flat: list[int]) -> None:
    with pytest.raises(InputError, match="alternating list of bins and counts"):
        Sketch.read(flat)


def test_the_largest_latency_of_64_bits_is_a_sketch() -> None:
    sketch = Sketch.of(np.array([0, 2**63 - 1]))
    assert Sketch.read(sketch.flat).counts == sketch.counts
    assert sketch.quantile_ns("1") >= 2**63 - 1
