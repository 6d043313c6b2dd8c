from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from srtm.errors import InputError, PlacementError, SplitError
from srtm.model import scan
from srtm.model.broker_models import ServiceModel
from srtm.model.bucket import TokenBucket
from srtm.model.burst import needed_b
from srtm.model.declared import shares
from srtm.model.latency import SLO, Distribution
from srtm.model.lending import RULES
from srtm.model.lending_scan import lending_delays
from srtm.model.placement import UNPLACED
from srtm.model.server import Background
from srtm.model.service import processing_latencies
from srtm.model.split import split
from srtm.sim import SimulatedBroker, SimulatedTopic, simulate
from srtm.sim.simulate import Loans, SimulatedCluster, assess
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Population, Workload

SIX = [SimulatedBroker.like("paper-testbed", f"b{i}") for i in range(1, 7)]


def topic(publishers: int = 200, seconds: int = 10, seed: int = 1, **kind: object) -> SimulatedTopic:
    return SimulatedTopic.of(Workload((Population(publishers, **kind),), seconds * NS_PER_S, seed))  # type: ignore[arg-type]


def test_it_is_the_model_and_nothing_else() -> None:
    """Every number again from the law and the service model, for a topic that needs several brokers."""
    busy = [SimulatedBroker.like("paper-testbed", f"b{i}", Background(5_000.0 * i, 10)) for i in range(4)]
    case = topic(batch=10, group_size=20)
    result = simulate(case, busy, "lb", SLO(NS_PER_S))
    assert result.meets_slo
    assert result.k == 4
    assert sum(share.r_mtps for share in result.shares.values()) == case.bucket.r_mtps
    assert sum(share.b_ntok for share in result.shares.values()) == case.bucket.b_ntok
    for number, name in enumerate(result.brokers):
        here = np.flatnonzero(result.broker_of[case.arrivals.publisher_of] == number)
        times = case.arrivals.times_ns[here]
        access = scan.access_delays(times, result.shares[name])
        assert Distribution.of(access) == result.by_broker[name].access
        assert len(here) == result.by_broker[name].messages
    assert (
        sum(latency.messages for latency in result.by_broker.values())
        == result.latency.messages
        == len(case.arrivals.times_ns)
    )
    # Without background the processing latencies can be had again as well.
    alone = simulate(case, SIX[:1], "srtm", SLO(NS_PER_S))
    access = scan.access_delays(case.arrivals.times_ns, case.bucket)
    processing = processing_latencies(
        case.arrivals.times_ns, case.arrivals.times_ns + access, case.arrivals.publisher_of, SIX[0].model
    )
    assert alone.latency.processing == Distribution.of(processing)
    assert alone.latency.total == Distribution.of(access + processing)


def test_a_seed_says_it_all() -> None:
    one, same = (simulate(topic(batch=10, group_size=20), SIX, "srtm", seed=4) for _ in range(2))
    assert (one.broker_of == same.broker_of).all()
    assert one.latency == same.latency
    assert one.rounds == same.rounds


def test_background_load_slows_a_broker_down() -> None:
    case = topic()
    idle = simulate(case, SIX[:1], "srtm").latency.processing.p99
    loaded = SimulatedBroker("b", 1e6, SIX[0].model, Background(370_000, 10))
    assert simulate(case, [loaded], "srtm", SLO(NS_PER_S)).latency.processing.p99 > 2 * idle


def test_placed_means_that_every_broker_holds_the_slo() -> None:
    case = topic(1_000, 20, batch=10, group_size=20)
    result = simulate(case, SIX, "srtm", SLO(3 * NS_PER_MS))
    assert result.meets_slo
    assert all(latency.total.p99 <= 3 * NS_PER_MS for latency in result.by_broker.values())


def test_what_cannot_hold_the_slo_is_reported_as_it_is() -> None:
    result = simulate(topic(), SIX, "srtm", SLO(1_000))
    assert not result.meets_slo
    assert result.latency.total.p99 > 1_000


def test_the_model_confirms_in_fewer_rounds_what_measuring_finds() -> None:
    kind = {"batch": 10, "group_size": 10}
    case = topic(1_000, 20, seed=1, **kind)
    earlier = SimulatedTopic.of(Workload((Population(1_000, **kind),), 20 * NS_PER_S, 2), case.bucket)  # type: ignore[arg-type]
    slow = [SimulatedBroker(b.name, b.mcap_mps, ServiceModel(30_000, 9_000)) for b in SIX]
    slo = SLO(2 * NS_PER_MS)
    measured = simulate(case, slow, "srtm", slo)
    modelled = simulate(case, slow, "srtm", slo, fit="model", history=earlier)
    assert measured.meets_slo
    assert modelled.meets_slo
    assert modelled.k <= measured.k
    assert modelled.rounds < measured.rounds


def test_shares_of_b_follow_the_bursts_of_each_broker() -> None:
    case = topic(batch=10)
    result = simulate(case, SIX[:3], "lb", SLO(NS_PER_S))
    rates = split(case.bucket, [67, 67, 66])
    times, senders = case.arrivals
    bursts = [
        needed_b(times[result.broker_of[senders] == number], share.r_mtps, "0.99") for number, share in enumerate(rates)
    ]
    assert len(set(bursts)) > 1
    assert list(result.shares.values()) == split(case.bucket, [67, 67, 66], bursts)


def test_shares_hold_the_largest_batch_that_comes() -> None:
    case = topic(batch=10)
    small = SimulatedTopic(case.publishers, case.arrivals, TokenBucket(case.bucket.r_mtps, 31 * 10**9))
    shares = assess(small, SIX, "lb", 3).shares.values()
    assert min(share.b for share in shares) == 10
    assert sum(share.b for share in shares) == 31


@dataclass(frozen=True)
class Declaration:
    id: str
    rate_mps: float
    group: str | None
    batch: int = 10
    jitter_ns: int = 0


def declared_by(case: SimulatedTopic, batch: int = 10) -> list[Declaration]:
    return [Declaration(each.id, each.rate_mps, each.group, batch) for each in case.publishers]


def test_shares_as_declared_do_not_know_the_traffic() -> None:
    """Three groups of four on three brokers are alike by declaration, whatever the bursts of their traffic were."""
    case = topic(12, batch=10, group_size=4)
    known = declared_by(case)
    broker_of = np.array([0, 1, 2, 0] * 3, np.int32)
    declared = SimulatedCluster(case, SIX[:3], SLO(), 0, declared=known).shares(broker_of)
    expected = shares(zip(known, [f"b{number + 1}" for number in broker_of], strict=True), case.bucket, "0.99")
    assert {f"b{number + 1}": share for number, share in declared.items()} == expected
    assert declared[1].b == pytest.approx(declared[2].b)
    assert declared[0].b == pytest.approx(2 * declared[1].b, rel=0.01)  # two of four come together here
    hindsight = SimulatedCluster(case, SIX[:3], SLO(), 0).shares(broker_of)
    assert hindsight != declared
    assert [share.r_mtps for share in hindsight.values()] == [share.r_mtps for share in declared.values()]


def test_a_search_may_split_b_as_declared() -> None:
    case = topic(400, 10, batch=10, group_size=20)
    result = simulate(case, SIX, "srtm", SLO(3 * NS_PER_MS), declared=declared_by(case))
    again = SimulatedCluster(case, SIX, SLO(), 0, declared=declared_by(case)).shares(result.broker_of)
    assert {result.brokers[number]: share for number, share in again.items()} == result.shares
    split_up = assess(case, SIX, "srtm", 3, declared=declared_by(case))
    assert split_up.shares != assess(case, SIX, "srtm", 3).shares


def test_the_declared_part_of_unplaced_publishers_stays_unused() -> None:
    case = topic(4)
    cluster = SimulatedCluster(case, SIX[:3], SLO(), 0, declared=declared_by(case, 1))
    parts = cluster.shares(np.array([0, 0, 2, UNPLACED], np.int32))
    everybody = cluster.shares(np.array([0, 0, 2, 1], np.int32))
    assert parts.keys() == {0, 2}
    assert all(parts[number].b == pytest.approx(everybody[number].b, abs=2e-9) for number in parts)
    tiny = SimulatedTopic(case.publishers, case.arrivals, TokenBucket.of(44, 1.5))
    with pytest.raises(SplitError, match=r"b = 1\.5 tokens leave none for \['b3'\]: use fewer brokers"):
        SimulatedCluster(tiny, SIX[:3], SLO(), 0, declared=declared_by(case, 1)).shares(
            np.array([0, 0, 0, 2], np.int32)
        )


def test_declarations_of_other_publishers_are_refused() -> None:
    case = topic(4)
    with pytest.raises(InputError, match="declarations must be of the topic's publishers"):
        SimulatedCluster(case, SIX[:3], SLO(), 0, declared=declared_by(case)[::-1])


def test_the_part_of_unplaced_publishers_stays_unused() -> None:
    case = topic(4)
    cluster = SimulatedCluster(case, SIX[:3], SLO(), 0)
    broker_of = np.array([0, 0, 2, UNPLACED], np.int32)
    parts = cluster.shares(broker_of)
    assert [parts[number].r_mtps for number in (0, 2)] == [
        share.r_mtps for share in split(case.bucket, [2, 1], unused=(1, 1))
    ]
    assert sum(share.b_ntok for share in parts.values()) < case.bucket.b_ntok
    # One bucket of the publishers that are placed nowhere counts as a broker.
    everybody = cluster.shares(np.array([0, 0, 2, 1], np.int32))
    for number in (0, 2):
        assert parts[number].b == pytest.approx(everybody[number].b, abs=2e-9)
    tiny = SimulatedCluster(SimulatedTopic(case.publishers, case.arrivals, TokenBucket.of(44, 1.5)), SIX[:3], SLO(), 0)
    with pytest.raises(SplitError, match=r"b = 1\.5 tokens cannot be split into 2 shares"):
        tiny.shares(broker_of)


def test_bad_input_is_named() -> None:
    case = topic()
    with pytest.raises(InputError, match="fit = 'guess'"):
        simulate(case, SIX, "srtm", fit="guess")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give both or neither"):
        simulate(case, SIX, "srtm", fit="model")
    with pytest.raises(PlacementError, match="unknown policy 'best'"):
        simulate(case, SIX, "best")
    with pytest.raises(PlacementError, match="no broker"):
        simulate(case, [], "srtm")
    with pytest.raises(InputError, match="SLO must be a positive time"):
        SLO(0)
    with pytest.raises(InputError, match="quantile must lie in"):
        SLO(quantile="99")
    for wrong in (case.arrivals.publisher_of - 1, case.arrivals.publisher_of + 1, case.arrivals.publisher_of[:-1]):
        with pytest.raises(InputError, match="one of the 200 publishers"):
            simulate(
                SimulatedTopic(case.publishers, case.arrivals._replace(publisher_of=wrong), case.bucket), SIX, "lb"
            )
    nobody = case.arrivals._replace(times_ns=case.arrivals.times_ns[:0], publisher_of=case.arrivals.publisher_of[:0])
    with pytest.raises(InputError, match="trace is empty"):
        simulate(SimulatedTopic(case.publishers, nobody, case.bucket), SIX, "lb")
    with pytest.raises(InputError, match="the same publishers"):
        simulate(case, SIX, "srtm", fit="model", history=topic(50))


def test_brokers_whose_publishers_are_silent_are_within_any_slo() -> None:
    case = topic()
    one_sends = SimulatedTopic(
        case.publishers, case.arrivals._replace(publisher_of=case.arrivals.publisher_of * 0), case.bucket
    )
    result = simulate(one_sends, SIX, "lb", SLO(NS_PER_S))
    assert result.k == 6
    assert len(result.by_broker) == 1


def test_a_bucket_too_small_to_split_ends_without_an_answer() -> None:
    case = topic()
    tiny = SimulatedTopic(case.publishers, case.arrivals, TokenBucket.of(case.bucket.r, 2))
    with pytest.raises(PlacementError, match="b, is too small for this topic"):
        simulate(tiny, SIX, "lb")


@pytest.mark.parametrize("rule", RULES)
def test_brokers_lend_as_the_model_says(rule: str) -> None:
    case = topic(rate_mps=20.0, batch=10)
    found = assess(case, SIX[:3], "lb", 3, loans=Loans(rule, 200_000))  # type: ignore[arg-type]
    shares = [found.shares[name] for name in found.brokers]
    broker_of = found.broker_of[case.arrivals.publisher_of]
    lent = lending_delays(case.arrivals.times_ns, broker_of, shares, 200_000, rule)  # type: ignore[arg-type]
    for number, name in enumerate(found.brokers):
        assert found.by_broker[name].access == Distribution.of(lent.delays_ns[broker_of == number])
    assert (found.rule, found.asks) == (rule, lent.asks / len(broker_of))
    assert (found.asks > 0) == (rule != "off")


def test_a_topic_too_large_for_a_broker_meets_its_slo_with_lending() -> None:
    case = topic(rate_mps=20.0)
    small = [SimulatedBroker(f"b{i}", 2_500.0) for i in range(3)]
    slo = SLO(2 * NS_PER_MS)
    assert not simulate(case, small, "lb", slo).meets_slo
    lending = simulate(case, small, "lb", slo, loans=Loans("auto", 200_000))
    assert lending.meets_slo
    assert lending.rule == "early"
    # Of unplaced publishers, nothing is known but that their part of the bucket is not used.
    broker_of = lending.broker_of.copy()
    broker_of[::2] = UNPLACED
    cluster = SimulatedCluster(case, small, slo, 0, Loans("early", 200_000))
    sent = np.bincount(broker_of[case.arrivals.publisher_of] + 1, minlength=4)[1:]
    seen = cluster.observe(broker_of, range(3))
    assert [len(access) for access, _ in seen.values()] == sent.tolist()
