"""What brokers are told of lending, in virtual time: with whom, under which contract, by which rule, and until when."""

from __future__ import annotations

from msgspec import structs
from prometheus_client import generate_latest

from srtm.control.api import metrics
from srtm.control.api.explain import explained
from srtm.control.api.schema import topic_out
from srtm.control.controller import Controller
from srtm.control.lending import ROUND_TRIP_NS, loans_of, round_trip_ns
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.placing.search import Search
from srtm.control.store import Store
from srtm.model.fitting import Measure
from srtm.model.placement import Broker
from srtm.protocol import exchange
from srtm.protocol.exchange import Answer, Contract, Exchange, Lends, Lent
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN

CONTRACT = Contract(440_000, 60 * NANO_PER_TOKEN, policy="lb", fit="none", lending="when_waiting")


class Told(VirtualCluster):
    """A cluster that keeps the newest exchange that each broker was sent."""

    def __init__(self, brokers: int = 3, **options: float) -> None:
        self.said: dict[str, Exchange] = {}
        self.lent: Lent | None = None
        super().__init__(1, ControllerOptions(**options), Store(), brokers=brokers)  # type: ignore[arg-type]

    def _exchange(self, controller: Controller, name: str, text: bytes) -> None:
        super()._exchange(controller, name, text)
        self.said[name] = exchange.read(text, Exchange)

    def _answered(self, controller: Controller, name: str, said: Exchange, text: bytes) -> None:
        """Let brokers report what they would have after some lending."""
        answer = exchange.read(text, Answer)
        if self.lent:
            topics = {each: structs.replace(report, lent=self.lent) for each, report in answer.topics.items()}
            answer = structs.replace(answer, topics=topics)
        super()._answered(controller, name, said, exchange.write(answer))

    def lends(self, topic: str = "t") -> dict[str, Lends]:
        return {name: said.lends[topic] for name, said in sorted(self.said.items()) if topic in said.lends}


def publishers(number: int) -> list[DeclaredPublisher]:
    return [DeclaredPublisher(f"p{n}", 10.0) for n in range(number)]


def split_topic(contract: Contract = CONTRACT, brokers: int = 3, number: int = 40) -> Told:
    world = Told(brokers, lease_s=3.0)
    assert world.controller
    world.run(1)
    world.controller.create("t", contract, world.now_ns)
    world.publish("t", publishers(number))
    world.run(6)
    return world


def test_each_broker_is_told_the_others_with_their_addresses_and_the_shares_in_force() -> None:
    world = split_topic(structs.replace(CONTRACT, adapt=False))  # shares stay, so none is out of date
    assert world.controller
    topic = world.controller.topics["t"]
    world.run(1.5)
    found = world.lends()
    assert list(found) == ["broker-1", "broker-2", "broker-3"]
    assert {(each.birth, each.rule) for each in found.values()} == {(topic.birth, "when_waiting")}
    held = topic.transfer.held
    for name, told in found.items():
        assert {peer.name for peer in told.peers} == set(held) - {name}
        for peer in told.peers:
            assert peer.address == f"127.0.0.1:{world.brokers[peer.name].options.tcp_port}"
            assert peer.share.bucket == world.brokers[peer.name].topics["t"].gate.limiter.bucket  # type: ignore[union-attr]


def test_nothing_is_said_of_topics_that_do_not_lend() -> None:
    world = split_topic(structs.replace(CONTRACT, lending="off"))
    assert world.lends() == {}
    assert split_topic(structs.replace(CONTRACT, overflow="drop")).lends() == {}
    alone = split_topic(structs.replace(CONTRACT, policy="srtm"), brokers=1)
    assert alone.lends() == {}


def test_lending_with_a_dead_broker_ends() -> None:
    world = split_topic(brokers=2)
    assert len(world.lends()) == 2
    world.kill_broker("broker-2")
    world.run(1.5)
    assert "t" not in world.said["broker-1"].lends
    world.start_broker("broker-2")
    assert world.controller
    half = {f"p{n}": "broker-2" for n in range(20)}
    world.run(2)
    world.controller.move("t", list(half), "broker-2", world.now_ns)
    world.run(5)
    assert len(world.lends()) == 2


def test_a_broker_that_does_not_answer_is_nobody_s_peer() -> None:
    world = split_topic()
    world.network.cut.add("broker-3")
    world.run(5)
    assert {peer.name for peer in world.said["broker-1"].lends["t"].peers} == {"broker-2"}


def test_a_contract_that_changes_or_ends_changes_or_ends_it() -> None:
    world = split_topic()
    assert world.controller
    first = world.lends()["broker-1"].birth
    world.controller.change("t", structs.replace(CONTRACT, lending="early"), world.now_ns)
    world.run(1.5)
    assert {each.rule for each in world.lends().values()} == {"early"}
    world.controller.change("t", structs.replace(CONTRACT, lending="off"), world.now_ns)
    world.run(1.5)
    assert world.lends() == {}
    world.controller.change("t", CONTRACT, world.now_ns)
    world.run(1.5)
    assert len(world.lends()) == 3
    world.controller.remove("t", world.now_ns)
    world.run(1.5)
    assert world.lends() == {}
    world.controller.create("t", CONTRACT, world.now_ns)
    world.run(6)
    assert len(world.lends()) == 3
    assert {each.birth for each in world.lends().values()} == {world.controller.topics["t"].birth}
    assert world.lends()["broker-1"].birth > first


def test_a_restarted_controller_goes_on() -> None:
    world = split_topic()
    birth = world.lends()["broker-1"].birth
    world.said.clear()
    world.kill_controller()
    world.start_controller()
    world.run(3)
    assert {each.birth for each in world.lends().values()} == {birth}
    assert len(world.lends()) == 3


def chosen(world: Told) -> str | None:
    assert world.controller
    return world.controller.topics["t"].lending.chosen


def test_auto_is_chosen_by_prediction() -> None:
    """Publishers that send independently, at three brokers: asking early helps most (docs/adr/0021-lending.md)."""
    contract = Contract(1_100_000, 30 * NANO_PER_TOKEN, policy="lb", fit="none", lending="auto")
    world = split_topic(contract, number=100)
    assert chosen(world) == "early"
    world.run(1.5)
    assert {each.rule for each in world.lends().values()} == {"early"}


def test_auto_is_off_where_nothing_waits() -> None:
    world = split_topic(structs.replace(CONTRACT, b_ntok=100_000 * NANO_PER_TOKEN, lending="auto"))
    assert chosen(world) == "off"
    world.run(1.5)
    assert world.lends() == {}


def test_auto_is_chosen_again_when_the_placement_changes_but_not_for_each_publisher() -> None:
    world = split_topic(structs.replace(CONTRACT, lending="auto"))
    assert world.controller
    topic = world.controller.topics["t"]
    world.run(10)
    basis, decided_ns = topic.lending.basis, topic.lending.next_ns
    world.run(12)
    assert (topic.lending.basis, topic.lending.next_ns) == (basis, decided_ns)
    world.controller.move("t", ["p0", "p1"], "broker-1", world.now_ns)
    world.run(6)
    assert topic.lending.basis != basis
    chosen_ns = topic.lending.next_ns
    world.controller.move("t", ["p2", "p3"], "broker-1", world.now_ns)
    world.run(4)
    assert topic.lending.next_ns == chosen_ns


def test_without_declarations_auto_asks_when_messages_wait() -> None:
    world = split_topic(structs.replace(CONTRACT, lending="auto"))
    assert world.controller
    world.controller.topics["t"].layout.undeclared.add("p0")
    world.controller.topics["t"].layout.roster += 1
    world.run(15)
    assert chosen(world) is None
    assert {each.rule for each in world.lends().values()} == {"when_waiting"}


def test_what_brokers_report_of_it_is_summed_up() -> None:
    world = split_topic(brokers=2)
    assert world.controller
    topic = world.controller.topics["t"]
    world.lent = Lent(1, round_trip_ns=10**6)  # a first guess, before anything was answered
    world.run(1.5)
    assert round_trip_ns(topic) == ROUND_TRIP_NS
    (shown,) = world.controller.statistics(world.now_ns).topics
    assert shown.lending.round_trip_ms is None
    world.lent = Lent(7, 1, 5 * NANO_PER_TOKEN, 4 * NANO_PER_TOKEN, NANO_PER_TOKEN // 2, 200_000)
    world.run(1.5)
    assert round_trip_ns(topic) == 200_000
    (shown,) = world.controller.statistics(world.now_ns).topics
    found = topic_out(shown)["lending"]
    assert found == {
        "rule": "when_waiting",
        "chosen": "when_waiting",
        "asks": 14,
        "unanswered": 2,
        "lent": 10.0,
        "borrowed": 8.0,
        "lost": 1.0,
        "round_trip_ms": 0.2,
    }
    text = generate_latest(metrics.registry(world.controller)).decode()
    assert 'srtm_cluster_topic_lending_asks_total{broker="broker-1",topic="t"} 7.0' in text
    assert 'srtm_cluster_topic_lending_lost_tokens_total{broker="broker-2",topic="t"} 0.5' in text
    assert 'srtm_cluster_topic_lending_round_trip_seconds{broker="broker-2",topic="t"} 0.0002' in text
    assert 'srtm_cluster_topic_lending_rule{rule="when_waiting",topic="t"} 1.0' in text
    assert 'srtm_cluster_topic_lending_rule{rule="off",topic="t"} 0.0' in text


def test_explanations_and_predictions_know_of_lending() -> None:
    contract = Contract(1_100_000, 30 * NANO_PER_TOKEN, policy="lb", fit="none", lending="early")
    world = split_topic(contract, number=100)
    assert world.controller
    topic = world.controller.topics["t"]
    found = explained(topic, world.controller)
    one, *split = found["predicted"]
    assert (found["lending"], one["with_lending"]["asks_per_message"]) == ("early", 0)
    assert one["with_lending"]["access_ms"] == one["access_ms"]
    assert len(split) == 2
    for each in split:
        lending = each["with_lending"]
        assert lending["access_ms"]["p99"] < each["access_ms"]["p99"] / 5
        assert (lending["rule"], 0 < lending["asks_per_message"] < 2) == ("early", True)
    declared = list(topic.layout.publishers.values())
    brokers = [Broker(f"broker-{n}", 400.0) for n in (1, 2, 3)]  # one could not carry the topic
    service, latencies = world.controller.placing.neighbours.service, []
    for loans in (None, loans_of(topic)):
        search = Search(contract, declared, brokers, service, predicts=True, loans=loans)
        search.begin()
        assert isinstance(search.order, Measure)
        latencies.append(max(search._prediction()(search.order).values()))
    assert latencies[1] < latencies[0] / 5
    off = world.controller.change("t", structs.replace(contract, lending="off"), world.now_ns)
    assert loans_of(off) is None
    again = explained(off, world.controller)["predicted"]
    assert [each["access_ms"] for each in again] == [each["access_ms"] for each in found["predicted"]]
    assert {each["with_lending"]["rule"] for each in again[1:]} == {"early"}  # what auto would choose
