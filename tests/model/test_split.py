from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from srtm.errors import SplitError
from srtm.model.bucket import TokenBucket
from srtm.model.split import split, within
from tests.strategies import rates_mtps, weights


@given(rates_mtps, st.integers(10**9, 10**13), weights)
def test_sub_buckets_sum_to_the_whole_exactly(r_mtps: int, b_ntok: int, parts: list[Fraction]) -> None:
    assume(b_ntok >= len(parts) * 10**9 and r_mtps >= len(parts))
    whole = TokenBucket(r_mtps, b_ntok)
    shares = split(whole, parts)
    assert sum(share.r_mtps for share in shares) == r_mtps
    assert sum(share.b_ntok for share in shares) == b_ntok
    assert within(whole, shares)


def test_a_part_may_stay_unused() -> None:
    assert split(TokenBucket.of(44, 40), [2, 1], unused=(1, 1)) == [TokenBucket.of(22, 20), TokenBucket.of(11, 10)]


def test_a_worked_split() -> None:
    thirds = split(TokenBucket.of(10, 13), [1, 1, 1])
    assert [(share.r_mtps, share.b_ntok) for share in thirds] == [
        (3_334, 4_333_333_334),
        (3_333, 4_333_333_333),
        (3_333, 4_333_333_333),
    ]
    weighted = split(TokenBucket.of(100, 40), r_weights=[3, 1], b_weights=[1, 1], min_b=[25, 1])
    assert [(share.r, share.b) for share in weighted] == [(75, 25), (25, 15)]


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            lambda: split(TokenBucket.of(10, 3), [1] * 4),
            "b = 3 tokens cannot be split into 4 shares that need at least 4 together",
        ),
        (lambda: split(TokenBucket.of(10, 30), [1, 1], min_b=20), "2 shares that need at least 40 together"),
        (lambda: split(TokenBucket.of("0.002", 30), [1, 1, 1]), "need at least 3 together, but there is only 2"),
        (lambda: split(TokenBucket.of(10, 30), []), "at least one share"),
        (lambda: split(TokenBucket.of(10, 30), [1, 2], [1]), "2 weights for r but 1 for b"),
        (lambda: split(TokenBucket.of(10, 30), [1, -2]), "must not be negative"),
        (lambda: split(TokenBucket.of(10, 20), [1, 1], min_b=[25, 1]), "need at least 26 together"),
        (lambda: split(TokenBucket.of(10, 20), [1, 1], min_b=[2]), "2 shares but 1 values of min_b"),
    ],
)
def test_impossible_splits_say_why(use: object, said: str) -> None:
    with pytest.raises(SplitError, match=said):
        use()  # type: ignore[operator]
