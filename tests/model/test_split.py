from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from srtm.errors import SplitError
from srtm.model.bucket import TokenBucket
from srtm.model.split import apportion, split, within
from tests.strategies import rates_mtps

weights = st.lists(st.one_of(st.integers(0, 1_000), st.fractions(0, 50)), min_size=1, max_size=12)


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


@given(rates_mtps, st.integers(10**9, 10**13), weights)
def test_sub_buckets_sum_to_the_whole_exactly(r_mtps: int, b_ntok: int, parts: list[Fraction]) -> None:
    assume(b_ntok >= len(parts) * 10**9 and r_mtps >= len(parts))
    whole = TokenBucket(r_mtps, b_ntok)
    shares = split(whole, parts)
    assert sum(share.r_mtps for share in shares) == r_mtps
    assert sum(share.b_ntok for share in shares) == b_ntok
    assert within(whole, shares)


def test_a_worked_split() -> None:
    thirds = split(TokenBucket.of(10, 13), [1, 1, 1])
    assert [(share.r_mtps, share.b_ntok) for share in thirds] == [
        (3_334, 4_333_333_334),
        (3_333, 4_333_333_333),
        (3_333, 4_333_333_333),
    ]
    weighted = split(TokenBucket.of(100, 40), r_weights=[3, 1], b_weights=[1, 1], min_b=[25, 1])
    assert [(share.r, share.b) for share in weighted] == [(75, 25), (25, 15)]


def test_equal_shares_without_any_weight() -> None:
    assert apportion(10, [0, 0, 0]) == [4, 3, 3]


def test_floors_that_bind_leave_the_rest_in_proportion() -> None:
    assert apportion(100, [1, 9, 90], [10, 10, 10]) == [10, 10, 80]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: split(TokenBucket.of(10, 3), [1] * 4), "b = 3 tokens cannot be split 4 ways"),
        (lambda: split(TokenBucket.of(10, 30), [1, 1], min_b=20), "at least 20 tokens each"),
        (lambda: split(TokenBucket.of("0.002", 30), [1, 1, 1]), "need 3, but there is only 2"),
        (lambda: split(TokenBucket.of(10, 30), []), "at least one share"),
        (lambda: split(TokenBucket.of(10, 30), [1, 2], [1]), "2 weights for r but 1 for b"),
        (lambda: split(TokenBucket.of(10, 30), [1, -2]), "must not be negative"),
    ],
)
def test_impossible_splits_say_why(use: object, said: str) -> None:
    with pytest.raises(SplitError, match=said):
        use()  # type: ignore[operator]
