"""Shares of a topic in virtual time: they follow the traffic, unless the contract holds them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.placing.expected import expected
from srtm.control.placing.layout import Layout, Places
from srtm.control.store import Store
from srtm.model.bucket import TokenBucket
from srtm.model.burst import needed_b
from srtm.model.declared import share_out
from srtm.model.latency import SLO
from srtm.model.profile import profile
from srtm.protocol.exchange import Contract
from srtm.sim.simulate import SimulatedBroker, SimulatedCluster, SimulatedTopic
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN, NS_PER_S


def shares_over_time(*, adapt: bool, lending: str = "off") -> list[dict[str, TokenBucket]]:
    """What brokers hold each second; one of two publishers bursts, and sends as much as the other."""
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=2)
    assert world.controller
    contract = Contract(200_000, 60 * NANO_PER_TOKEN, policy="lb", fit="none", adapt=adapt, lending=lending)
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
    """Then b goes by what publishers declare: the second sends twenty at once."""
    first, *later = shares_over_time(adapt=False)
    assert later == [first] * 19
    assert {name: share.r for name, share in first.items()} == {"broker-1": 100, "broker-2": 100}
    assert first["broker-2"].b == pytest.approx(20 * first["broker-1"].b)
    assert sum(share.b_ntok for share in first.values()) == 60 * NANO_PER_TOKEN


def test_after_a_pause_shares_are_as_declared_and_the_first_second_does_not_decide() -> None:
    """Four of twenty publishers are at the second broker; when all begin again, neither has most of the bucket."""
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=2)
    assert world.controller
    contract = Contract(500_000, 60 * NANO_PER_TOKEN, fit="none", slo_ns=25 * NS_PER_S // 1_000)
    topic = world.controller.create("t", contract, world.now_ns)
    world.run(1)
    world.publish("t", [DeclaredPublisher(f"p{number}", 20.0) for number in range(20)])
    world.run(1)
    world.controller.move("t", [f"p{number}" for number in range(4)], "broker-2", world.now_ns)
    world.run(10)
    rests = [world.publishers[name] for name in sorted(world.publishers)]
    for publisher in rests:
        publisher.declared = DeclaredPublisher(publisher.declared.id, 0.001)
    world.run(30)
    assert topic.transfer.held["broker-1"].r == pytest.approx(400)
    world.controller.register("t", [], world.now_ns)
    world.publish("t", [DeclaredPublisher(f"q{number}", 20.0) for number in range(20)])
    for _ in range(10):
        world.run(1)
        assert min(share.r for share in topic.transfer.held.values()) >= 50


def test_a_broker_with_messages_and_without_a_share_does_not_wait_for_a_long_period() -> None:
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=2)
    assert world.controller
    contract = Contract(200_000, 20 * NANO_PER_TOKEN, fit="none", adapt_window_s=3_600, adapt_period_s=3_600)
    topic = world.controller.create("t", contract, world.now_ns)
    world.run(1)
    world.publish("t", [DeclaredPublisher("calm", 50.0)])
    world.run(20)
    (first,) = topic.transfer.held
    other = next(name for name in world.brokers if name != first)
    world._connect(world.publishers["calm"], other)
    world.run(5)
    assert other in topic.transfer.held
    assert other in {broker for _, broker, _ in world.record.releases["t"]}


def test_backlogs_that_lending_evens_out_are_not_followed() -> None:
    """Then r follows the traffic, and b what publishers declare, about twenty to one."""
    found = shares_over_time(adapt=True, lending="when_waiting")
    assert len({share.r_mtps for shares in found for share in shares.values()}) > 2
    ratios = [shares["broker-2"].b / shares["broker-1"].b for shares in found[3:]]
    assert 15 < min(ratios) <= max(ratios) < 30


def declared(groups: int, size: int, batch: int = 10) -> list[DeclaredPublisher]:
    return [
        DeclaredPublisher(f"{group}/{number}", 10.0, f"g{group}", batch=batch)
        for group in range(groups)
        for number in range(size)
    ]


def test_shares_of_a_group_that_k_does_not_divide_are_by_members_before_anything_is_sent() -> None:
    """Five of ten groups have two of three members at the first broker: b is by bursts, r by rates."""
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=2)
    assert world.controller
    topic = world.controller.create("t", Contract(330_000, 600 * NANO_PER_TOKEN, fit="none"), world.now_ns)
    publishers = declared(10, 3)
    places = {each.id: f"broker-{1 + (each.id.endswith('/2'))}" for each in publishers}
    world.controller.register("t", publishers, world.now_ns)
    world.controller.placing._relocate(topic, places, "moved", world.now_ns)
    world.run(3)
    one, two = (topic.transfer.wanted[f"broker-{number}"] for number in (1, 2))
    assert (one.r, two.r) == (220, 110)
    assert one.b == pytest.approx(400)  # twenty come together here, ten there
    topic.layout.place.assign({f"{group}/1": "broker-2" for group in range(5)}, "moved")
    topic.sharing.stale = True
    world.run(1)
    one, two = (topic.transfer.wanted[f"broker-{number}"] for number in (1, 2))
    assert (one.r, two.r) == (165, 165)
    assert one.b == pytest.approx(two.b)


def test_the_simulator_agrees_with_the_controller_on_shares() -> None:
    """A group of ten on three brokers is 4, 3 and 3: b by what is declared is b by what is simulated."""
    publishers = declared(20, 10)
    layout = Layout(Places("t"))
    broker_of = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2] * 20, np.int32)
    for each, broker in zip(publishers, broker_of.tolist(), strict=True):
        layout.publishers[each.id] = each
        layout.place.assign({each.id: f"b{broker}"}, "registered")
    arrivals = expected(publishers, 1)
    whole = profile(arrivals.times_ns).bucket
    brokers = [SimulatedBroker(f"b{number}") for number in range(3)]
    topic = SimulatedTopic([each.publisher for each in publishers], arrivals, whole)
    simulated = SimulatedCluster(topic, brokers, SLO(), 0).shares(broker_of)
    bursts = layout.expected_bursts(whole, "0.99")
    by_declaration = share_out(whole, layout.rates(), bursts, layout.batches())
    as_declared = SimulatedCluster(topic, brokers, SLO(), 0, declared=publishers).shares(broker_of)
    assert {f"b{number}": share for number, share in as_declared.items()} == by_declaration
    for number, share in simulated.items():
        mine = by_declaration[f"b{number}"]
        assert mine.r == pytest.approx(share.r)
        assert mine.b == pytest.approx(share.b, rel=0.08)
    assert by_declaration["b0"].b == pytest.approx(4 / 3 * by_declaration["b2"].b, rel=0.01)


def test_jitter_spreads_a_group_while_tokens_come() -> None:
    layout = Layout(Places("t"))
    for name, jitter_ns in (("together", 0), ("spread", NS_PER_S)):
        for number in range(50):
            layout.publishers[f"{name}/{number}"] = DeclaredPublisher(
                f"{name}/{number}", 1.0, name, batch=2, jitter_ns=jitter_ns
            )
            layout.place.assign({f"{name}/{number}": name}, "registered")
    bursts = layout.expected_bursts(TokenBucket.of(110, 1_000), "0.99")
    assert bursts["spread"] == pytest.approx(0.45 * bursts["together"])  # 55 tokens come during a second
    assert layout.batches() == {"together": 2, "spread": 2}


@pytest.mark.parametrize("period_s", [1, 5])
def test_shares_are_adapted_once_a_period(period_s: int) -> None:
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=2)
    assert world.controller
    contract = Contract(200_000, 60 * NANO_PER_TOKEN, policy="lb", fit="none", adapt_period_s=period_s)
    topic = world.controller.create("t", contract, world.now_ns)
    world.publish("t", [DeclaredPublisher("a", 50.0), DeclaredPublisher("b", 50.0, batch=20)])
    world.run(5)
    seen = []
    for _ in range(20):
        world.run(1)
        seen.append(topic.sharing.adapted_ns)
    assert len(set(seen)) == pytest.approx(20 / period_s, abs=1)


def test_the_window_is_the_contracts() -> None:
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=2)
    assert world.controller
    contract = Contract(200_000, 60 * NANO_PER_TOKEN, policy="lb", fit="none", adapt_window_s=15)
    topic = world.controller.create("t", contract, world.now_ns)
    world.publish("t", [DeclaredPublisher("a", 50.0), DeclaredPublisher("b", 50.0)])
    world.run(25)
    assert {len(seen.history) for seen in topic.layout.seen.values()} == {15}
    world.controller.change("t", structs.replace(contract, adapt_window_s=4), world.now_ns)
    world.run(2)
    assert {len(seen.history) for seen in topic.layout.seen.values()} == {4}


def test_brokers_report_quantiles_of_the_backlog() -> None:
    """What brokers measure is what the model computes from the same arrivals."""
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=1)
    assert world.controller
    contract = Contract(60_000, 100 * NANO_PER_TOKEN, fit="none", adapt_window_s=30)
    topic = world.controller.create("t", contract, world.now_ns)
    world.publish("t", [DeclaredPublisher(f"p{n}", 5.0, batch=10) for n in range(10)])
    world.run(25)
    (seen,) = topic.layout.seen.values()
    times = np.array(world.record.arrivals["t"])
    known = needed_b(times, contract.r_mtps, "0.9")
    assert seen.history.burst_ntok("0.9") / NANO_PER_TOKEN == pytest.approx(known, rel=0.1)
    assert len(times) == pytest.approx(1250, rel=0.2)


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
