"""Brokers that lie about lending, in virtual time: the controller says who lied, and whatever they say is bounded.

The other half of it, honest brokers that are never accused whatever fails, is in `test_lending.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs
from prometheus_client import generate_latest

from srtm.control.api import metrics
from srtm.control.api.explain import explained
from srtm.control.controller import Controller
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.model.lending import ASK_NS, MOST_ASKS
from srtm.model.limiter import Limiter
from srtm.model.timeline import Timeline, largest_excess
from srtm.protocol import exchange
from srtm.protocol.exchange import Answer, Contract, Exchange, Lent, PeerLent
from srtm.protocol.lending import Entry
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN, NS_PER_MS

LIAR = "broker-2"
CONTRACT = Contract(200_000, 30 * NANO_PER_TOKEN, policy="lb", fit="none", adapt=False, lending="when_waiting")
Lie = Callable[[Lent], Lent]


class Lying(VirtualCluster):
    """A cluster with one broker that does not report what it did."""

    def __init__(self, brokers: int = 3) -> None:
        self.lie: Lie | None = None
        super().__init__(1, ControllerOptions(lease_s=10.0), Store(), brokers=brokers)
        assert self.controller
        self.run(1)
        self.controller.create("t", CONTRACT, self.now_ns)
        self.publish("t", [DeclaredPublisher(f"p{n}", 2.0, batch=5) for n in range(30)])
        self.run(15)

    def _answered(self, controller: Controller, name: str, said: Exchange, text: bytes) -> None:
        answer = exchange.read(text, Answer)
        report = answer.topics.get("t")
        if name == LIAR and self.lie and report and report.lent:
            topics = {"t": structs.replace(report, lent=self.lie(report.lent))}
            text = exchange.write(structs.replace(answer, topics=topics))
        super()._answered(controller, name, said, text)

    @property
    def accused(self) -> dict[str, str]:
        assert self.controller
        return self.controller.topics["t"].lending.accused

    def peers_of(self, broker: str) -> set[str]:
        lender = self.brokers[broker].topics["t"].gate.lender
        return {peer.name for peer in lender.terms.peers} if lender else set()


def each_peer(change: Callable[[PeerLent], PeerLent]) -> Lie:
    return lambda lent: structs.replace(lent, peers=[change(peer) for peer in lent.peers])


def more_borrowed(peer: PeerLent) -> PeerLent:
    amounts = [(number, lent, borrowed + 5 * NANO_PER_TOKEN) for number, lent, borrowed in peer.amounts]
    return structs.replace(peer, amounts=amounts)


def nothing_lent(peer: PeerLent) -> PeerLent:
    return structs.replace(peer, amounts=[(number, 0, borrowed) for number, _, borrowed in peer.amounts])


def test_honest_brokers_lend_and_are_not_accused() -> None:
    world = Lying()
    world.run(30)
    assert world.controller
    (shown,) = world.controller.statistics(world.now_ns).topics
    assert shown.lending.borrowed > 50
    assert (world.accused, shown.lending.accused) == ({}, ())


@pytest.mark.parametrize("lie", [each_peer(more_borrowed), each_peer(nothing_lent)], ids=["claims", "hides"])
def test_a_broker_whose_books_others_contradict_neither_asks_nor_lends(lie: Lie) -> None:
    world = Lying()
    world.lie = lie
    world.run(10)
    assert list(world.accused) == [LIAR]
    assert world.peers_of(LIAR) == set()
    assert world.peers_of("broker-1") == {"broker-3"}  # the others go on
    assert world.controller
    topic = world.controller.topics["t"]
    (event,) = [each.text for each in topic.journal.events if each.kind == "accused"]
    assert event.startswith(f"{LIAR} is excluded from lending: ")
    assert "tokens from" in event
    (shown,) = world.controller.statistics(world.now_ns).topics
    assert [(each.broker, each.evidence) for each in shown.lending.accused] == list(world.accused.items())
    assert explained(topic, world.controller)["accused"] == world.accused
    text = generate_latest(metrics.registry(world.controller)).decode()
    assert f'srtm_cluster_topic_lending_accused{{broker="{LIAR}",topic="t"}} 1.0' in text
    lent = world.brokers[LIAR].topics["t"].gate.books
    assert lent is not None
    before = lent.total
    world.run(5)
    assert (lent.total.lent_ptok, lent.total.borrowed_ptok) == (before.lent_ptok, before.borrowed_ptok)


def test_the_liar_s_next_process_begins_anew() -> None:
    world = Lying()
    world.lie = each_peer(more_borrowed)
    world.run(10)
    assert list(world.accused) == [LIAR]
    world.lie = None
    world.kill_broker(LIAR)
    world.run(0.5)
    world.start_broker(LIAR)
    world.run(20)
    assert world.accused == {}


def test_a_restarted_controller_finds_the_lie_again() -> None:
    world = Lying()
    world.lie = each_peer(more_borrowed)
    world.run(10)
    world.kill_controller()
    world.start_controller()
    world.run(10)
    assert list(world.accused) == [LIAR]


@pytest.mark.interpreted
def test_a_broker_without_a_bucket_is_found_by_what_it_spends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Lying()
    bucket, admit, due = world.brokers[LIAR].topics["t"].gate.limiter, Limiter.admit, Limiter.due

    def let_pass(self: Limiter, now_ns: int, count: int = 1) -> int:
        return now_ns if self is bucket else admit(self, now_ns, count)

    def all_due(self: Limiter, now_ns: int, waiting: int) -> int:
        return waiting if self is bucket else due(self, now_ns, waiting)

    monkeypatch.setattr(Limiter, "admit", let_pass)
    monkeypatch.setattr(Limiter, "due", all_due)
    world.run(20)
    assert world.accused == {}  # it does not exceed its share
    world.publish("t", [DeclaredPublisher(f"q{n}", 10.0) for n in range(30)])  # more than all shares allow
    world.run(90)
    assert list(world.accused) == [LIAR]
    assert "spent and lent" in world.accused[LIAR]


def test_a_broker_that_asks_without_end_is_answered_at_a_bounded_rate_and_the_contract_holds() -> None:
    world = Lying()
    wire, number = world.brokers[LIAR].control.lenders.wire, 2**62
    assert wire is not None
    assert world.controller
    birth = world.controller.topics["t"].birth

    def flood() -> None:
        nonlocal number
        for _ in range(200):  # each millisecond, and always as if it had nothing
            number += 1
            wire.post("broker-1", True, Entry("t", birth, number, 2**61, -(2**61)))
        if world.now_ns < end_ns:
            world.at(NS_PER_MS, flood)

    world.network.longest_delay_ns = 0  # nothing overtakes
    end_ns = world.now_ns + 100 * NS_PER_MS
    world.at(0, flood)
    world.run(1)
    books = world.brokers["broker-1"].topics["t"].gate.books
    assert books is not None
    account = books.of(LIAR)
    assert account.refused > 0
    assert account.heard - account.refused <= MOST_ASKS + 10**9 // ASK_NS
    events = [each.text for each in world.controller.topics["t"].journal.events if each.kind == "lending"]
    assert any(text.startswith(f"{LIAR} asks too often: broker-1 refused") for text in events)
    released = sorted(world.record.released_under[birth])
    assert largest_excess(released, Timeline(CONTRACT.bucket)).tokens <= 0
