"""The Load Distributor over brokers in virtual time."""

from __future__ import annotations

import pytest

from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.control.topic import ManagedTopic
from srtm.model.broker_models import ServiceModel
from srtm.protocol.exchange import Contract
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN

PUBLISHERS = [DeclaredPublisher(f"p{number}", 10.0, f"g{number // 5}") for number in range(40)]


def fitted(r: float, b: int, fit: str, mcap_mps: float = 1_000.0, **times: int) -> ManagedTopic:
    world = VirtualCluster(1, ControllerOptions(mcap_mps=mcap_mps, **times), Store())  # type: ignore[arg-type]
    world.run(1)
    assert world.controller
    contract = Contract(round(r * 1000), b * NANO_PER_TOKEN, slo_ns=20_000_000, fit=fit)
    topic = world.controller.create("t", contract, world.now_ns)
    world.run(1)
    world.publish("t", PUBLISHERS)
    for _ in range(60):
        world.run(10)
        if topic.fitting.last:
            break
    return topic


@pytest.mark.parametrize("fit", ["model", "measure"])
def test_a_topic_that_is_well_where_it_is_stays_there(fit: str) -> None:
    topic = fitted(800, 200, fit)
    assert topic.fitting.last
    assert (topic.fitting.last.met, topic.fitting.last.k, len(topic.fitting.last.rounds)) == (True, 1, 1)
    assert set(topic.layout.place.values()) == {"broker-1"}


def test_the_model_has_its_say_only_where_measuring_says_no() -> None:
    topic = fitted(400, 1, "model")  # single tokens for groups of 5, at the rate that is sent: nothing helps
    assert topic.fitting.last
    assert not topic.fitting.last.met
    assert not topic.fitting.last.rounds[0].within
    assert len(topic.fitting.last.rounds) > 1 or topic.fitting.last.reason


def test_a_topic_that_needs_several_brokers_is_confirmed_on_them() -> None:
    topic = fitted(1_200, 400, "model", mcap_mps=150.0)
    assert topic.fitting.last
    assert (topic.fitting.last.met, topic.fitting.last.k) == (True, 3)
    assert topic.fitting.last.rounds[0].latency_ns.keys() == {"broker-1", "broker-2", "broker-3"}


def test_a_round_lasts_for_as_many_blocks_as_it_takes_to_be_certain() -> None:
    seconds = [fitted(800, 200, "measure", block_s=block_s).fitting.last for block_s in (1, 5)]
    short, long = (each.rounds[0].seconds for each in seconds if each)
    assert short < 4 * 5 <= long  # no look at the data before the fourth block


def test_a_round_ends_in_time_however_long_its_blocks_are() -> None:
    last = fitted(800, 200, "measure", block_s=30, round_s=60).fitting.last
    assert last
    assert 60 <= last.rounds[0].seconds < 70
    assert not last.rounds[0].certain


def test_a_round_without_messages_says_nothing() -> None:
    world = VirtualCluster(1, ControllerOptions(), Store())
    world.run(1)
    assert world.controller
    contract = Contract(100_000, 10 * NANO_PER_TOKEN, slo_ns=500_000)
    topic = world.controller.create("t", contract, world.now_ns)
    world.run(1)
    world.controller.register("t", PUBLISHERS, world.now_ns)  # who never come
    world.controller.fit("t", world.now_ns)
    world.run(20)
    assert (topic.fitting.running, topic.fitting.last) == (None, None)
    assert "abandoned: no messages through broker-1" in topic.journal.events[-1].text


def test_a_measured_fit_on_100_brokers_takes_few_rounds() -> None:
    """Two groups of 96 burst at once, and a message takes 1 ms: 5 of a group fit into 5.5 ms, so 20 brokers do."""
    service = ServiceModel(0, 1_000_000)
    world = VirtualCluster(1, ControllerOptions(mcap_mps=1_000.0), Store(), 100, service)
    world.run(1)
    assert world.controller
    contract = Contract(400_000, 400 * NANO_PER_TOKEN, slo_ns=5_500_000, fit="measure")
    topic = world.controller.create("t", contract, world.now_ns)
    world.run(1)
    world.publish("t", [DeclaredPublisher(f"p{number}", 0.5, f"g{number // 96}") for number in range(192)])
    for _ in range(60):
        world.run(10)
        if topic.fitting.last:
            break
    assert topic.fitting.last
    assert topic.fitting.last.met
    assert abs(topic.fitting.last.k - 20) <= 1
    assert len(topic.fitting.last.rounds) <= 12
