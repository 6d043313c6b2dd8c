"""When a tail has been measured for long enough."""

from __future__ import annotations

import numpy as np
import pytest

from srtm.model.sequential import TailTest

ROUND_S = 60


def decided(over_share: float, sent: int, burst: int, rng: np.random.Generator) -> tuple[bool | None, int]:
    """A round in which delays strike `burst` messages at a time."""
    test = TailTest("0.99", burst)
    for _ in range(ROUND_S):
        struck = int(rng.poisson(over_share * sent / burst))
        if test.feed(sent, min(sent, struck * burst)) is not None:
            break
    return test.decision, test.blocks


@pytest.mark.parametrize("sent", [500, 2_500, 10_000])
@pytest.mark.parametrize("burst", [1, 10, 100])
@pytest.mark.parametrize(("share", "met"), [(0.0005, True), (0.009, True), (0.011, False), (0.03, False)])
def test_wrong_decisions_are_rare(sent: int, burst: int, share: float, met: bool) -> None:
    rng = np.random.default_rng([sent, burst, round(share * 1e6)])
    runs = [decided(share, sent, burst, rng)[0] for _ in range(200)]
    assert sum(decision is (not met) for decision in runs) <= 10  # 5 % of the rounds


def test_clear_cases_take_seconds() -> None:
    rng = np.random.default_rng(0)
    assert decided(0.0005, 10_000, 1, rng) == (True, 4)
    assert decided(0.2, 2_500, 10, rng) == (False, 4)


def test_seconds_without_messages_say_nothing() -> None:
    test = TailTest()
    for _ in range(100):
        assert test.feed(0, 0) is None
    assert (test.blocks, test.sent) == (0, 0)
    for _ in range(4):
        test.feed(10_000, 0)
    assert test.decision is True
    assert test.feed(10_000, 10_000) is True  # it stays decided


def test_what_is_likelier_needs_no_certainty() -> None:
    test = TailTest()
    test.feed(100, 2)
    assert (test.decision, test.likelier) == (None, False)
    test.feed(1_000, 0)
    assert test.likelier
