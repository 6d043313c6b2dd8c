"""Whole clusters in virtual time whose brokers lend: with faults, the topics together never exceed their contracts."""

from __future__ import annotations

import os

import pytest

from srtm.model.bucket import Limiter
from tests.control.lending import LendingRun

SEEDS = int(os.environ.get("SRTM_SEEDS", "30"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_fails_lent_tokens_are_not_made(seed: int) -> None:
    run = LendingRun(seed)
    outcome = run.go()
    assert outcome.holds, outcome
    assert run.world.accused == {}, outcome


def test_tokens_are_lent_and_borrowed_meanwhile() -> None:
    run = LendingRun(1)
    run.go()
    lent, borrowed = run.world.count()
    assert lent > 10 * 10**12
    assert borrowed > 10 * 10**12


def test_a_broker_that_lends_what_it_keeps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = Limiter.shift
    monkeypatch.setattr(Limiter, "shift", lambda self, now_ns, ptok: shift(self, now_ns, max(0, ptok)))
    assert max(LendingRun(seed).go().worst_tokens for seed in (1, 2)) > 0
