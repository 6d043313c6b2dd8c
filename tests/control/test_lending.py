"""Whole clusters in virtual time whose brokers lend: with faults, the topics together never exceed their contracts."""

from __future__ import annotations

import os

import pytest

from srtm.model import lending as rules
from srtm.model.limiter import Limiter
from tests.control.lending import LendingRun

SEEDS = int(os.environ.get("SRTM_SEEDS", "30"))
FIRST = int(os.environ.get("SRTM_FIRST_SEED", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_whatever_fails_no_token_is_made_and_no_message_is_later_than_by_its_share_alone(seed: int) -> None:
    run = LendingRun(seed)
    outcome = run.go()
    assert outcome.holds, outcome
    assert not run.world.ledger.created
    assert not run.world.promises.broken
    assert run.world.accused == {}, outcome


@pytest.mark.parametrize("seed", [1000, 1001])
def test_tokens_are_lent_and_borrowed_meanwhile(seed: int) -> None:
    """By peers that the controller names, and by those that the run names."""
    run = LendingRun(seed)
    run.go()
    assert run.world.strange == bool(seed % 2)
    assert run.world.ledger.lent.total() > 10 * 10**12
    assert run.world.ledger.borrowed.total() > 10 * 10**12
    assert run.world.promises.made > 100


@pytest.mark.interpreted
def test_a_broker_that_lends_what_it_keeps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = Limiter.shift
    monkeypatch.setattr(Limiter, "shift", lambda self, now_ns, ptok: shift(self, now_ns, max(0, ptok)))
    assert max(LendingRun(seed).go().worst_tokens for seed in (1, 2)) > 0


def test_a_broker_that_takes_more_than_it_was_lent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    borrow = rules.Lending.borrow

    def twice(
        self: rules.Lending, sender: str, answer: rules.Answer, now_ns: int, waiting: int, incarnation: int = 0
    ) -> int:
        return borrow(self, sender, answer._replace(lent_ptok=2 * answer.lent_ptok), now_ns, waiting, incarnation)

    monkeypatch.setattr(rules.Lending, "borrow", twice)
    runs = [LendingRun(seed) for seed in (0, 3)]
    for run in runs:
        run.go()
    assert any(run.world.ledger.created for run in runs)


def test_a_broker_that_lends_while_its_messages_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "lendable", lambda want, *_: want)
    runs = [LendingRun(seed) for seed in range(2)]
    for run in runs:
        run.go()
    assert any(run.world.promises.broken for run in runs)
