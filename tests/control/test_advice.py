"""Advice in the controller: taken once, of one birth, ended if it is not renewed; found groups used if asked for."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from srtm.control.advice import Batch
from srtm.control.controller import Controller
from srtm.control.found_groups import STEADY
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.placing.regrouping import largest_part
from srtm.control.store import Store
from srtm.control.topic import ManagedTopic
from srtm.model.advice import Findings, FoundGroup
from srtm.protocol.exchange import Contract
from srtm.testing.virtual import VirtualCluster
from srtm.units import NS_PER_S

CONTRACT = Contract(100_000, 100 * 10**9, fit="none")  # (100/s, 100)
SMALL = Findings(6000, 8, 60.0, 200.0, 220.0, 100.0)
PUBLISHERS = [f"p{number}" for number in range(8)]
GROUPS = (FoundGroup(tuple(PUBLISHERS[:4]), 0.9), FoundGroup(tuple(PUBLISHERS[4:]), 0.9))
FOUND = Findings(6000, 8, 60.0, 80.0, 90.0, 80.0, groups=GROUPS)


class World(VirtualCluster):
    """Two brokers, one topic, publishers that declare nothing; they come one by one, and fill broker after broker."""

    def __init__(self, store: Store | None = None) -> None:
        super().__init__(1, ControllerOptions(mcap_mps=4.0), store or Store(), brokers=2)
        self.run(1.0)
        self.numbers = itertools.count()
        self.topic = self.control.create("t", CONTRACT, self.now_ns)
        self.run(2.0)
        for name in PUBLISHERS:
            self.publish("t", [DeclaredPublisher(name)])
        self.run(3.0)

    @property
    def control(self) -> Controller:
        assert self.controller is not None
        return self.controller

    def advise(self, found: Findings, *, auto: bool = False, birth: int | None = None, seconds: float = 5.0) -> bool:
        """Post findings about the topic, and let time pass until the next ones."""
        birth = self.topic.birth if birth is None else birth
        batch = Batch("q", next(self.numbers), 30 * NS_PER_S, {("t", birth): found}, auto)
        taken = self.control.advise(batch, self.now_ns)
        self.run(seconds)
        return taken

    def events(self, kind: str) -> list[str]:
        return [event.text for event in self.topic.journal.events if event.kind == kind]


def kinds(topic: ManagedTopic) -> list[str]:
    return list(topic.advice.standing)


def test_advice_stands_while_it_is_renewed_and_is_an_event_once() -> None:
    world = World()
    assert world.advise(SMALL)
    since_ns = world.topic.advice.standing["contract-too-small"].since_ns
    for _ in range(10):
        world.advise(SMALL)
    assert kinds(world.topic) == ["contract-too-small"]
    assert world.topic.advice.standing["contract-too-small"].since_ns == since_ns
    assert len(world.events("advice")) == 1
    world.run(32.0)
    assert kinds(world.topic) == []
    assert world.events("advice")[-1] == "contract-too-small ended: it was not renewed"


def test_a_batch_counts_once_and_a_late_one_not_at_all() -> None:
    world = World()
    first = Batch("q", 7, 30 * NS_PER_S, {("t", world.topic.birth): SMALL})
    assert world.control.advise(first, world.now_ns)
    until_ns = world.topic.advice.standing["contract-too-small"].until_ns
    world.run(5.0)
    assert not world.control.advise(first, world.now_ns)
    assert not world.control.advise(replace(first, number=6), world.now_ns)
    assert world.topic.advice.standing["contract-too-small"].until_ns == until_ns
    assert world.control.advise(replace(first, number=8), world.now_ns)
    assert world.control.advise(replace(first, query="another", number=0), world.now_ns)


def test_findings_of_another_birth_say_nothing_about_this_contract() -> None:
    world = World()
    assert world.advise(SMALL, birth=world.topic.birth + 1)
    assert kinds(world.topic) == []
    world.advise(SMALL)
    world.control.remove("t", world.now_ns)
    again = world.control.create("t", CONTRACT, world.now_ns)
    assert kinds(again) == []
    world.advise(SMALL, birth=world.topic.birth)
    assert kinds(again) == []


def test_a_changed_contract_is_judged_anew() -> None:
    world = World()
    world.advise(SMALL)
    world.control.change("t", Contract(220_000, 100 * 10**9, fit="none"), world.now_ns)
    assert kinds(world.topic) == []
    world.advise(SMALL)
    assert kinds(world.topic) == []


def test_found_groups_change_nothing_unless_asked() -> None:
    world = World()
    before = dict(world.topic.layout.place)
    for _ in range(2 * STEADY):
        world.advise(FOUND)
    assert kinds(world.topic) == ["groups-found"]
    assert world.topic.layout.place == before
    assert not any(each.found for each in world.topic.layout.publishers.values())


def test_found_groups_spread_over_the_brokers_once_they_are_steady() -> None:
    world = World()
    place, group_of = world.topic.layout.place, FOUND.group_of
    assert len(place.brokers) == 2
    assert largest_part(place, group_of) == 1.0, "the worst placement there is"
    sizes = Counter(place.values())
    for number in range(STEADY):
        assert largest_part(place, group_of) == 1.0, number
        world.advise(FOUND, auto=True)
    assert largest_part(place, group_of) == 0.5
    assert Counter(place.values()) == sizes
    (text,) = world.events("regrouped")
    assert text.startswith("4 publishers move: 8 publishers burst in 2 groups that nobody declared")
    assert "one broker had 100% of a group, now at most 50%" in text
    changes = place.changes
    for _ in range(20):
        world.advise(FOUND, auto=True)
    assert place.changes == changes, "no more moves for the same groups"
    connected = {name: each.broker.name for name, each in world.publishers.items() if each.broker}
    assert connected == dict(place)


def test_groups_that_change_from_batch_to_batch_move_nobody() -> None:
    world = World()
    changes = world.topic.layout.place.changes
    other = (FoundGroup(tuple(PUBLISHERS[::2]), 0.9), FoundGroup(tuple(PUBLISHERS[1::2]), 0.9))
    for _ in range(STEADY):
        world.advise(FOUND, auto=True)
        world.advise(replace(FOUND, groups=other), auto=True)
    assert world.topic.layout.place.changes == changes


def test_declared_groups_win_over_found_ones() -> None:
    world = World()
    for _ in range(STEADY):
        world.advise(FOUND, auto=True)
    layout = world.topic.layout
    assert layout.publishers["p0"].found
    world.control.register("t", [DeclaredPublisher("p0")], world.now_ns)
    assert layout.publishers["p0"].group == "g-p0", "it still declares nothing"
    world.control.register("t", [DeclaredPublisher("p0", group="mine")], world.now_ns)
    assert (layout.publishers["p0"].group, layout.publishers["p0"].found) == ("mine", False)
    world.run(60.0)
    for _ in range(STEADY):
        world.advise(FOUND, auto=True)
    assert layout.publishers["p0"].group == "mine"


def test_a_restarted_controller_knows_found_groups_and_a_new_contract_does_not() -> None:
    store = Store()
    world = World(store)
    for _ in range(STEADY):
        world.advise(FOUND, auto=True)
    (kept,) = store.topics()
    assert kept.layout.publishers["p1"].found
    world.run(2.0)
    world.control.remove("t", world.now_ns)
    again = world.control.create("t", CONTRACT, world.now_ns)
    assert again.layout.publishers.keys() == set(PUBLISHERS)
    assert not any(each.found or each.group for each in again.layout.publishers.values())


@pytest.mark.parametrize("policy", ["lb", "conc", "max_min"])
def test_policies_that_ignore_groups_ignore_found_ones(policy: str) -> None:
    world = World()
    world.control.change("t", Contract(100_000, 100 * 10**9, policy=policy, fit="none"), world.now_ns)
    world.run(3.0)
    changes = world.topic.layout.place.changes
    for _ in range(STEADY):
        world.advise(FOUND, auto=True)
    assert world.topic.layout.place.changes == changes
