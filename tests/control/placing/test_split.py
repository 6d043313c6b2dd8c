"""Publishers that are faster than a broker: registered in parts, if they allow it."""

from __future__ import annotations

from pathlib import Path

import pytest

from srtm.control.controller import Controller
from srtm.control.members import DeclaredPublisher, part_id
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.errors import InputError
from srtm.model.room import fewest_parts
from srtm.protocol.exchange import Contract
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN, NS_PER_MS, NS_PER_S

MCAP_MPS = 1_000.0
SLOW = "200000,100000,200000"  # single messages take 0.3 ms of a processor
FAST = DeclaredPublisher("cam", 2_500.0, split=True)


class World:
    """Brokers for a thousand messages a second each, and one topic."""

    def __init__(
        self, brokers: int = 4, b: int = 300, fit: str = "none", store: Store | None = None, model: str | None = None
    ) -> None:
        options = ControllerOptions(broker_model=model) if model else ControllerOptions(mcap_mps=MCAP_MPS)
        self.cluster = VirtualCluster(1, options, store or Store(), brokers)
        self.cluster.run(1)
        contract = Contract(5_000_000, b * NANO_PER_TOKEN, slo_ns=50 * NS_PER_MS, fit=fit)
        self.controller.create("t", contract, self.cluster.now_ns)

    @property
    def controller(self) -> Controller:
        assert self.cluster.controller
        return self.cluster.controller

    def register(self, *publishers: DeclaredPublisher, lost: tuple[str, ...] = ()) -> dict[str, str]:
        return self.controller.register("t", publishers, self.cluster.now_ns, lost)

    def neighbour(self, *rates: float) -> None:
        """A strict topic with a publisher of this rate at each broker."""
        if "strict" not in self.controller.topics:
            contract = Contract(10_000_000, 300 * NANO_PER_TOKEN, slo_ns=2 * NS_PER_MS, policy="lb", fit="none")
            self.controller.create("strict", contract, self.cluster.now_ns)
        publishers = [DeclaredPublisher(f"s{number}", rate) for number, rate in enumerate(rates)]
        self.controller.register("strict", publishers, self.cluster.now_ns)

    def rates(self) -> dict[str, float]:
        return {each.id: each.rate_mps for each in self.controller.topics["t"].layout.publishers.values()}

    def publish_parts(self) -> None:
        """Let every part that is registered send."""
        self.cluster.publish("t", list(self.controller.topics["t"].layout.publishers.values()))


def parts(number: int) -> list[str]:
    return [part_id("cam", each) for each in range(1, number + 1)]


@pytest.mark.parametrize(
    ("rate", "rooms", "number"),
    [
        (90, [100, 100], 1),
        (100, [100], 1),
        (101, [100, 100, 100], 2),
        (250, [100, 100, 100, 100], 3),
        (120, [100, 40, 40], 3),  # two parts of 60 would find one broker only
        (500, [100, 100, 100], 3),  # too much for all: as much as possible
        (500, [100, 100, 0], 2),
        (5, [], 1),
    ],
)
def test_the_number_of_parts_is_the_smallest_that_brokers_have_room_for(
    rate: float, rooms: list[float], number: int
) -> None:
    assert fewest_parts(rate, rooms) == number


def test_a_publisher_that_allows_it_is_split_over_different_brokers() -> None:
    world = World()
    places = world.register(FAST, DeclaredPublisher("slow", 10.0, split=True))
    assert list(places) == [*parts(3), "slow"]
    assert len({places[part] for part in parts(3)}) == 3
    assert world.rates() == {**dict.fromkeys(parts(3), pytest.approx(2_500 / 3)), "slow": 10.0}


def test_one_that_does_not_allow_it_is_not_split() -> None:
    world = World()
    assert list(world.register(DeclaredPublisher("cam", 2_500.0))) == ["cam"]
    world.controller.fit("t", world.cluster.now_ns)
    world.cluster.run(1)
    assert "with split: true in its declaration" in world.controller.topics["t"].journal.events[-1].text


def test_there_are_no_more_parts_than_tokens_of_b() -> None:
    world = World(b=2)
    assert list(world.register(FAST)) == parts(2)


def test_who_asks_again_keeps_its_parts_and_their_places() -> None:
    world = World()
    before = world.register(FAST)
    assert world.register(FAST) == before
    (part,) = (each for each in parts(3) if before[each] == before[part_id("cam", 2)])
    after = world.register(FAST, lost=(before[part],))
    assert {each for each in before if before[each] != after[each]} == {part}


def test_another_rate_changes_the_number_of_parts() -> None:
    world = World()
    first = world.register(FAST)
    grown = world.register(DeclaredPublisher("cam", 3_500.0, split=True))
    assert list(grown) == parts(4)
    assert len(set(grown.values())) == 4
    assert grown.items() >= first.items()
    assert list(world.register(DeclaredPublisher("cam", 1_500.0, split=True))) == parts(2)
    assert world.rates() == dict.fromkeys(parts(2), 750.0)


def test_the_same_name_without_split_is_one_publisher_again() -> None:
    world = World()
    world.register(FAST)
    assert list(world.register(DeclaredPublisher("cam", 20.0))) == ["cam"]
    assert world.rates() == {"cam": 20.0}


def test_a_publisher_that_leaves_takes_all_its_parts_along() -> None:
    world = World()
    world.register(FAST, DeclaredPublisher("other", 10.0))
    world.controller.unregister("t", "cam")
    assert list(world.rates()) == ["other"]


def test_more_parts_come_with_brokers_when_it_asks_again() -> None:
    world = World(brokers=2)
    assert list(world.register(FAST)) == parts(2)
    world.cluster.start_broker("broker-3")
    world.cluster.run(2)
    assert list(world.register(FAST)) == parts(3)


def test_parts_survive_a_restart_of_the_controller(tmp_path: Path) -> None:
    world = World(store=Store(tmp_path))
    before = world.register(FAST)
    world.cluster.kill_controller()
    world.cluster.start_controller()
    world.cluster.run(2)
    assert dict(world.controller.topics["t"].layout.place) == before
    assert world.register(FAST) == before


def test_parts_send_all_that_the_publisher_declared_and_one_broker_may_die() -> None:
    world = World()
    world.register(FAST)
    world.publish_parts()
    world.cluster.run(10)
    layout = world.controller.topics["t"].layout
    victim = layout.place[part_id("cam", 2)]
    world.cluster.kill_broker(victim)
    world.cluster.run(10)
    assert list(layout.publishers) == parts(3)
    assert len(layout.place.brokers - {victim}) == 3
    assert all(each.broker is not None for each in world.cluster.publishers.values())
    since_ns = world.cluster.now_ns - 5 * NS_PER_S
    sent = sum(at_ns > since_ns for at_ns, _, _ in world.cluster.record.releases["t"])
    assert sent == pytest.approx(5 * FAST.rate_mps, rel=0.05)


def test_a_split_publisher_can_be_fitted() -> None:
    world = World(fit="model")
    world.register(FAST)
    world.publish_parts()
    world.cluster.run(30)
    fitted = world.controller.topics["t"].fitting.last
    assert fitted
    assert (fitted.met, fitted.k) == (True, 3)


def test_it_is_split_into_what_neighbours_leave() -> None:
    world = World(model=SLOW)
    world.neighbour(*[300.0] * 4)
    assert list(world.register(DeclaredPublisher("cam", 4_000.0, split=False))) == []
    assert "'strict' (2 ms)" in world.controller.topics["t"].fitting.refusal
    assert "with split: true in its declaration" in world.controller.topics["t"].fitting.refusal
    places = world.register(DeclaredPublisher("cam", 4_000.0, split=True))
    assert len(set(places.values())) == len(places) > 1
    assert not world.controller.topics["t"].layout.refused


def test_one_of_which_a_part_is_refused_is_refused_as_a_whole_and_may_come_when_there_is_room() -> None:
    world = World(brokers=2, model=SLOW)
    world.neighbour(100.0, 900.0)
    layout = world.controller.topics["t"].layout
    cam = DeclaredPublisher("cam", 2_600.0, split=True)  # one broker has room for half of it
    assert not world.register(cam)
    assert not layout.publishers
    assert not layout.place
    assert layout.refused == {"cam": 1_300.0, part_id("cam", 2): 1_300.0}
    assert "split: true" not in world.controller.topics["t"].fitting.refusal
    assert list(world.register(DeclaredPublisher("cam", 1_000.0, split=True))) == ["cam"]
    assert not layout.refused
    world.controller.unregister("t", "cam")
    world.controller.remove("strict", world.cluster.now_ns)
    assert list(world.register(cam)) == ["cam"]  # alone, it fits on one broker


def test_a_publisher_that_breaks_a_neighbour_with_one_part_is_sent_away_with_all() -> None:
    world = World(model=SLOW)
    world.neighbour(*[100.0] * 4)
    placing, topic = world.controller.placing, world.controller.topics["t"]
    before = world.register(DeclaredPublisher("cam", 4_500.0, split=True), DeclaredPublisher("other", 1.0))
    assert len(before) > 2
    world.neighbour(*[1_500.0] * 4)
    bad = part_id("cam", 2)
    assert placing.leave(topic, before[bad], [bad], world.cluster.now_ns, {bad}) == (0, len(before) - 1)
    assert list(topic.layout.publishers) == list(topic.layout.place) == ["other"]
    orders = {publisher: name for name in world.cluster.brokers for publisher in _told_to_leave(world, name)}
    assert orders == {part: broker for part, broker in before.items() if part != "other"}


def _told_to_leave(world: World, broker: str) -> list[str]:
    return [each for move in world.controller.placing.take_orders(broker) if not move.to for each in move.publishers]


def test_who_was_refused_is_forgotten_when_told_so_and_when_a_neighbour_leaves() -> None:
    world = World(model=SLOW)
    world.neighbour(*[300.0] * 4)
    topic = world.controller.topics["t"]
    for name in ("one", "two"):
        assert not world.register(DeclaredPublisher(name, 4_000.0))
        assert "no room for 1 publisher with 4,000 msg/s" in topic.fitting.refusal  # of this request
    world.controller.unregister("t", "one")
    assert list(topic.layout.refused) == ["two"]
    with pytest.raises(InputError, match="has no publisher 'one'"):
        world.controller.unregister("t", "one")
    world.controller.remove("strict", world.cluster.now_ns)
    assert not topic.layout.refused
