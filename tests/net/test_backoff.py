"""Back-off: waits grow to a limit, and start over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from srtm.net.backoff import Backoff


@given(st.floats(0.001, 1.0), st.integers(0, 8))
def test_waits_double_up_to_the_limit(first_s: float, doublings: int) -> None:
    backoff = Backoff(first_s, first_s * 2**doublings)
    for number in range(doublings + 3):
        assert backoff.exhausted == (number >= doublings)
        limit_s = first_s * 2 ** min(number, doublings)
        assert limit_s / 2 <= backoff.next_s() <= limit_s
    backoff.reset()
    assert backoff.next_s() <= first_s


def test_two_clients_do_not_wait_in_step() -> None:
    assert len({Backoff().next_s() for _ in range(10)}) > 1
