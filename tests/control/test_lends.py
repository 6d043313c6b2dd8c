"""What brokers are told of lending, in virtual time: with whom, under which contract, by which rule, and until when."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from msgspec import structs
from prometheus_client import generate_latest

from srtm.control import lending
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
from srtm.model.latency import Sketch
from srtm.model.placement import Broker
from srtm.protocol import exchange
from srtm.protocol.exchange import Answer, Contract, Exchange, Lends, Lent, PeerLent
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN

if TYPE_CHECKING:
    import pytest

    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic
    from srtm.model.bucket import TokenBucket

CONTRACT = Contract(440_000, 60 * NANO_PER_TOKEN, policy="lb", fit="none", lending="when_waiting")


class Told(VirtualCluster):
    """A cluster that keeps the newest exchange that each broker was sent."""

    def __init__(self, brokers: int = 3, **options: float) -> None:
        self.said: dict[str, Exchange] = {}
        self.lent: Lent | None = None
        self.lents: dict[str, Lent] = {}
        super().__init__(1, ControllerOptions(**options), Store(), brokers=brokers)  # type: ignore[arg-type]

    def _exchange(self, controller: Controller, name: str, text: bytes) -> None:
        super()._exchange(controller, name, text)
        self.said[name] = exchange.read(text, Exchange)

    def _answered(self, controller: Controller, name: str, said: Exchange, text: bytes) -> None:
        """Let brokers report what they would have after some lending."""
        answer = exchange.read(text, Answer)
        if lent := self.lents.get(name, self.lent):
            topics = {each: structs.replace(report, lent=lent) for each, report in answer.topics.items()}
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
    assert shown.lending.rtt_ms is None
    token = NANO_PER_TOKEN
    peers = {
        "broker-1": PeerLent("broker-2", 7, 1, 3, 0, token // 2, [(1, 0, 4 * token)], [100, 9, 200, 1]),
        "broker-2": PeerLent("broker-1", 3, 0, 7, 2, 0, [(1, 5 * token, 0)], [1]),  # not a sketch
    }
    world.lents = {
        "broker-1": Lent(7, 1, 0, 4 * token, token // 2, 200_000, 0, [peers["broker-1"]]),
        "broker-2": Lent(3, 0, 5 * token, 0, 0, 200_000, 0, [peers["broker-2"]]),
    }
    world.run(1.5)
    assert round_trip_ns(topic) == 200_000
    (shown,) = world.controller.statistics(world.now_ns).topics
    found = topic_out(shown)["lending"]
    took = Sketch.read([100, 9, 200, 1]).quantiles_ns((Fraction(1, 2), Fraction(99, 100)))
    rtt_ms = {"p50": took[0] / 10**6, "p99": took[1] / 10**6}
    assert found == {
        "mode": "when_waiting",
        "chosen": "when_waiting",
        "asked": 10,
        "unanswered": 1,
        "lent": 5.0,
        "borrowed": 4.0,
        "lost": 0.5,
        "rtt_ms": rtt_ms,
        "peers": (
            {
                "lender": "broker-1",
                "borrower": "broker-2",
                "asked": 3,
                "unanswered": 0,
                "refused": 0,
                "lent": 0.0,
                "borrowed": 0.0,
                "lost": 0.0,
                "per_second": 0.0,
                "rtt_ms": None,
            },
            {
                "lender": "broker-2",
                "borrower": "broker-1",
                "asked": 7,
                "unanswered": 1,
                "refused": 2,
                "lent": 5.0,
                "borrowed": 4.0,
                "lost": 0.5,
                "per_second": found["peers"][1]["per_second"],
                "rtt_ms": rtt_ms,
            },
        ),
        "accused": (),
    }
    world.run(1.5)
    text = generate_latest(metrics.registry(world.controller)).decode()
    pair = 'broker="broker-1",peer="broker-2"'
    assert f'srtm_cluster_topic_lending_asks_total{{{pair},topic="t"}} 7.0' in text
    assert f'srtm_cluster_topic_lending_lost_tokens_total{{{pair},topic="t"}} 0.5' in text
    assert f'srtm_cluster_topic_lending_refused_asks_total{{{pair},topic="t"}} 2.0' in text
    line = f'srtm_cluster_topic_lending_round_trip_seconds{{{pair},quantile="0.99",topic="t"}}'
    assert f"{line} {took[1] / 10**9}" in text
    events = [event.text for event in topic.journal.events]
    assert events.count("broker-1 asks too often: broker-2 refused 2 of 7 asks") == 1
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
        lent = each["with_lending"]
        assert lent["access_ms"]["p99"] < each["access_ms"]["p99"] / 5
        assert (lent["rule"], 0 < lent["asks_per_message"] < 2) == ("early", True)
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


def test_an_exchange_looks_only_at_topics_that_lend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 topics, four lend, and one of these at this broker."""
    world = split_topic()
    assert world.controller
    state = world.controller.state
    off = structs.replace(CONTRACT, lending="off")
    for number in range(1_000):
        world.controller.create(f"other-{number}", off, world.now_ns)
    for number in range(3):
        world.controller.create(f"lends-{number}", CONTRACT, world.now_ns)
    looked: list[str] = []
    found = lending.lenders

    def lenders(state: ControllerState, topic: ManagedTopic) -> dict[str, TokenBucket]:
        looked.append(topic.name)
        return found(state, topic)

    monkeypatch.setattr(lending, "lenders", lenders)
    assert lending.lends(state, "broker-1").keys() == {"t"}
    assert sorted(looked) == ["lends-0", "lends-1", "lends-2", "t"]
    listed = state.lending
    assert lending.lends(state, "broker-2").keys() == {"t"}
    assert state.lending is listed  # found once, and again only when contracts change
    world.controller.change("t", off, world.now_ns)
    assert lending.lends(state, "broker-1") == {}
    world.controller.change("t", CONTRACT, world.now_ns)
    world.controller.remove("lends-0", world.now_ns)
    looked.clear()
    assert lending.lends(state, "broker-1").keys() == {"t"}
    assert sorted(looked) == ["lends-1", "lends-2", "t"]
