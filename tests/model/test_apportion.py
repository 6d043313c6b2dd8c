from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import SplitError
from srtm.model.apportion import apportion
from srtm.model.rounding import proportional_table
from tests.strategies import weights


@given(st.integers(0, 10**15), weights, st.data())
def test_shares_add_up_respect_floors_and_are_proportional(
    total: int, parts: list[Fraction], data: st.DataObject
) -> None:
    floors = data.draw(st.lists(st.integers(0, total // len(parts)), min_size=len(parts), max_size=len(parts)))
    shares = apportion(total, parts, floors)
    assert sum(shares) == total
    assert all(share >= floor for share, floor in zip(shares, floors, strict=True))
    # Whoever got more than its floor is proportional to every other such share, within one unit.
    free = [i for i in range(len(parts)) if shares[i] > floors[i] and parts[i]]
    for i in free:
        for j in free:
            assert abs(shares[i] * Fraction(parts[j]) - shares[j] * Fraction(parts[i])) <= Fraction(parts[i] + parts[j])


def test_equal_shares_without_any_weight() -> None:
    assert apportion(10, [0, 0, 0]) == [4, 3, 3]


def test_floors_that_bind_leave_the_rest_in_proportion() -> None:
    assert apportion(100, [1, 9, 90], [10, 10, 10]) == [10, 10, 80]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=15),
    st.lists(st.integers(0, 10**9), min_size=1, max_size=9).filter(any),
    st.integers(0, 9),
)
def test_every_entry_and_every_sum_of_a_table_is_rounded_up_or_down(
    sizes: list[int], shares: list[int], seed: int
) -> None:
    table = proportional_table(np.array(sizes), shares, np.random.default_rng(seed))
    assert table.sum(axis=1).tolist() == sizes
    for i, size in enumerate(sizes):
        for j, share in enumerate(shares):
            assert abs(int(table[i, j]) - Fraction(size * share, sum(shares))) < 1
    for j, share in enumerate(shares):
        assert abs(int(table[:, j].sum()) - Fraction(sum(sizes) * share, sum(shares))) <= 2


def test_which_columns_are_rounded_up_cannot_always_be_chosen() -> None:
    """Largest remainders want (2, 2, 2, 2, 2), and no table of rounded entries has these sums: it ends all the same."""
    table = proportional_table(np.array([4, 6]), [2, 2, 2, 3, 3], np.random.default_rng(0))
    assert table.sum() == 10
    assert sorted(table.sum(axis=0).tolist()) != [2, 2, 2, 2, 2]


def test_nothing_to_go_by_is_refused() -> None:
    with pytest.raises(SplitError, match="add up to more than 0"):
        proportional_table(np.array([4]), [0, 0], np.random.default_rng(0))
