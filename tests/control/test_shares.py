"""Shares of a topic in virtual time: they follow the traffic, unless the contract holds them."""

from __future__ import annotations

import pytest

from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.model.bucket import TokenBucket
from srtm.protocol.exchange import Contract
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN


def shares_over_time(*, adapt: bool) -> list[dict[str, TokenBucket]]:
    """What brokers hold each second; one of two publishers bursts, and sends as much as the other."""
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=2)
    assert world.controller
    contract = Contract(200_000, 60 * NANO_PER_TOKEN, policy="lb", fit="none", adapt=adapt)
    topic = world.controller.create("t", contract, world.now_ns)
    world.run(1)
    world.publish("t", [DeclaredPublisher("calm", 50.0), DeclaredPublisher("bursts", 50.0, batch=20)])
    found = []
    for _ in range(20):
        world.run(1)
        found.append(topic.transfer.held)
    return found


def test_shares_follow_the_traffic() -> None:
    first, *_, last = shares_over_time(adapt=True)
    assert last != first
    assert max(share.b for share in last.values()) > 2 * min(share.b for share in last.values())


def test_a_contract_can_hold_them() -> None:
    held = shares_over_time(adapt=False)
    assert held == [{"broker-1": TokenBucket.of(100, 30), "broker-2": TokenBucket.of(100, 30)}] * 20


@pytest.mark.parametrize("adapt", [True, False])
def test_a_store_remembers_which(adapt: bool) -> None:
    store = Store()
    world = VirtualCluster(1, ControllerOptions(), store)
    assert world.controller
    world.controller.create("t", Contract(1_000, NANO_PER_TOKEN, adapt=adapt), world.now_ns)
    (again,) = store.topics()
    assert again.contract.adapt is adapt


def test_publishers_that_were_there_and_do_not_come_back_are_forgotten() -> None:
    """Who was registered and never came is expected still."""
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=2)
    assert world.controller
    topic = world.controller.create("t", Contract(200_000, 60 * NANO_PER_TOKEN, fit="none"), world.now_ns)
    world.run(1)
    world.controller.register("t", [DeclaredPublisher("expected", 5.0)], world.now_ns)
    world.publish("t", [DeclaredPublisher("stays", 5.0), DeclaredPublisher("goes", 5.0)])
    world.run(10)
    world.leave("goes")
    world.run(250)
    assert topic.layout.publishers.keys() == {"expected", "stays", "goes"}
    world.run(100)
    assert topic.layout.publishers.keys() == {"expected", "stays"}
    assert topic.journal.events[-1].text == "1 publishers, away for 300 s"
