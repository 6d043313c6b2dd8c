from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import BucketError
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter
from srtm.units import NS_PER_MS, NS_PER_S


@pytest.mark.parametrize(
    ("r", "b", "said"),
    [
        (0, 5, "r = 0 tokens/s"),
        (-1, 5, "r = -1 tokens/s"),
        ("0.0001", 5, "r = 0 tokens/s"),
        (2e9, 5, "r = 2e+09 tokens/s"),
        (float("nan"), 5, "r must be a finite number, not nan"),
        (float("inf"), 5, "r must be a finite number, not inf"),
        ("fast", 5, "r must be a finite number, not 'fast'"),
        (5, 0.5, "b = 0.5 tokens"),
        (5, 0, "b = 0 tokens"),
        (5, -3, "b = -3 tokens"),
        (5, float("nan"), "b must be a finite number, not nan"),
        (5, 10**10, r"b = 1e\+10 tokens"),
    ],
)
def test_what_is_no_bucket_is_refused_by_name(r: float, b: float, said: str) -> None:
    with pytest.raises(BucketError, match=said.replace("2e+09", r"2e\+09")):
        TokenBucket.of(r, b)


def test_floats_mean_the_decimal_that_they_print_as() -> None:
    assert TokenBucket.of(0.1, 1.1) == TokenBucket(100, 1_100_000_000)
    assert TokenBucket.of("1833.333", "4.333333333") == TokenBucket(1_833_333, 4_333_333_333)
    assert TokenBucket.of(Fraction(22, 7), 4) == TokenBucket(3143, 4 * 10**9)


def test_numbers_of_numpy_are_numbers() -> None:
    bucket = TokenBucket(np.int64(10**9), np.int64(4 * 10**18))  # type: ignore[arg-type]
    assert bucket.pico_law.burst == 4 * 10**21
    assert TokenBucket.of(np.float64(0.1), np.int32(7)) == TokenBucket.of("0.1", 7)  # type: ignore[arg-type]
    with pytest.raises(BucketError, match=r"r_mtps must be a whole number, not 1\.5"):
        TokenBucket(1.5, 10**9)  # type: ignore[arg-type]


def test_the_law_counts_in_the_coarsest_exact_unit() -> None:
    assert TokenBucket.of(11_000, 26).law == (11_000, 10**9, 26 * 10**9)
    assert TokenBucket.of("0.5", 2).law == (1, 2 * 10**9, 4 * 10**9)
    assert TokenBucket.of("0.001", 2).law == (1, 10**12, 2 * 10**12)


def test_a_worked_bucket() -> None:
    """Two tokens, one a millisecond: two pass at once, the third waits 1 ms, the fourth 2 ms."""
    limiter = Limiter(TokenBucket.of(1_000, 2), now_ns=0)
    assert [limiter.admit(0) for _ in range(4)] == [0, 0, NS_PER_MS, 2 * NS_PER_MS]
    assert limiter.tokens(0) == -2
    assert limiter.due(0, 2) == 0
    assert limiter.due(NS_PER_MS, 2) == 1
    assert limiter.next_release_ns(2) == NS_PER_MS
    assert limiter.tokens(10 * NS_PER_S) == 2


def test_a_fraction_of_a_token_shortens_the_next_wait() -> None:
    """4.33 tokens let four messages pass at once; the fifth finds 0.33 of a token and waits for 0.67."""
    limiter = Limiter(TokenBucket.of(1_000, "4.33"), now_ns=0)
    assert [limiter.admit(0) for _ in range(6)] == [0, 0, 0, 0, 670_000, 1_670_000]


def test_a_rate_change_re_times_what_waits_in_order() -> None:
    limiter = Limiter(TokenBucket.of(1_000, 1), now_ns=0)
    assert [limiter.admit(0) for _ in range(3)] == [0, NS_PER_MS, 2 * NS_PER_MS]
    limiter.reconfigure(NS_PER_MS // 2, TokenBucket.of(2_000, 1))
    # Half a token was there; the other half takes 0.25 ms now, and the next token 0.5 ms.
    assert limiter.next_release_ns(2) == 750_000
    assert limiter.due(750_000, 2) == 1
    assert limiter.next_release_ns(1) == 1_250_000


def test_a_change_of_b_makes_no_tokens_and_a_cut_says_what_it_took() -> None:
    limiter = Limiter(TokenBucket.of(1_000, 10), now_ns=0)
    assert limiter.reconfigure(0, TokenBucket.of(1_000, 4)) == 6 * 10**9
    assert limiter.reconfigure(0, TokenBucket.of(1_000, 10)) == 0
    assert limiter.tokens(0) == 4
    assert limiter.reconfigure(0, TokenBucket.of(1_000, 10), gift_ntok=5 * 10**9) == 0
    assert limiter.tokens(0) == 9
    assert limiter.reconfigure(0, TokenBucket.of(1_000, 10), gift_ntok=5 * 10**9) == 4 * 10**9
    assert limiter.tokens(0) == 10


def test_a_late_stamp_counts_as_the_last_event() -> None:
    """A message that a change of (r, b) overtook, or whose socket was read late, makes no tokens and raises nothing."""
    limiter = Limiter(TokenBucket.of(1_000, 2), now_ns=100)
    limiter.reconfigure(200, TokenBucket.of(1_000, 2))
    assert [limiter.admit(at) for at in (150, 300, 250)] == [200, 300, 1_000_200]
    assert limiter.late == 2
    assert limiter.offer(0) is False
    assert limiter.late == 3
    limiter.reconfigure(5, TokenBucket.of(1_000, 2))
    assert limiter.tokens(0) == limiter.tokens(300)


@given(
    st.lists(st.tuples(st.integers(0, 5 * NS_PER_MS), st.integers(1, 12)), min_size=1, max_size=20),
    st.sampled_from(["0.5", "1000", "333.333"]),
    st.sampled_from(["1", "4.33", "30"]),
)
def test_messages_that_come_together_are_as_many_that_come_one_by_one(
    batches: list[tuple[int, int]], r: str, b: str
) -> None:
    """Stamps in any order: those that go back count as late, each of them."""
    together, single = Limiter(TokenBucket.of(r, b)), Limiter(TokenBucket.of(r, b))
    for arrival_ns, count in batches:
        last_ns = together.admit(arrival_ns, count)
        one_by_one = [single.admit(arrival_ns) for _ in range(count)]
        assert [together.next_release_ns(behind) for behind in range(count, 0, -1)] == one_by_one
        assert last_ns == one_by_one[-1]
        assert together.late == single.late
        assert together.backlog(arrival_ns) == single.backlog(arrival_ns)
    assert together.take_peak_ntok() == single.take_peak_ntok()


def test_the_peak_is_taken_once() -> None:
    limiter = Limiter(TokenBucket.of(1_000, 5), now_ns=0)
    for _ in range(3):
        limiter.admit(0)
    limiter.admit(10 * NS_PER_MS)
    assert limiter.take_peak_ntok() == 3 * 10**9
    assert limiter.take_peak_ntok() == 0
    limiter.offer(10 * NS_PER_MS)
    assert limiter.take_peak_ntok() == 2 * 10**9


def test_a_bucket_may_start_with_less_than_full() -> None:
    assert Limiter(TokenBucket.of(1_000, 5), 0, tokens_ntok=2 * 10**9).tokens(0) == 2
    assert Limiter(TokenBucket.of(1_000, 5), 0, tokens_ntok=9 * 10**9).tokens(0) == 5
    assert Limiter(TokenBucket.of(1_000, 5)).surrender(0) == 5 * 10**9
