from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from srtm.errors import InputError, PlacementError
from srtm.model.latency import SLO
from srtm.pipeline.fleet import FleetPlan, Scenario, Search, plan_all, resized
from srtm.pipeline.plan import alike, best, plan
from srtm.sim.simulate import Loans, SimulatedBroker, SimulatedTopic
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, load, writing
from tests.pipeline.local import LocalSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLO_5MS = SLO(5 * NS_PER_MS)
BROKERS = tuple(SimulatedBroker(f"broker-{number}", None) for number in range(1, 5))
SMALL = tuple(replace(broker, mcap_mps=3_000.0) for broker in BROKERS)
HERE: Any = LocalSpark(2)


def write(folder: Path, *populations: Population, seconds: int = 5) -> Path:
    """A trace with a topic of each population, in a file of its own."""
    for number, population in enumerate(populations):
        workload = Workload((population,), seconds * NS_PER_S, seed=number)
        with writing(folder / f"{number}.parquet", ARRIVAL_SCHEMA, {}) as writer:
            rows = ArrivalWriter(writer, f"topic-{number}", workload.publishers())
            for window in workload.windows():
                rows.write(window)
            rows.flush()
    return folder


def same_as_plan(fleet: FleetPlan, trace: Path, spark: SparkSession, brokers: tuple[SimulatedBroker, ...]) -> None:
    chosen = plan(trace, spark, brokers, slo=fleet.scenario.slo, loans=fleet.scenario.loans).chosen
    assert chosen is not None
    assert chosen.latency is not None
    (line,) = fleet.topics
    assert (line.k, line.total, line.meets_slo) == (chosen.k, chosen.latency.total, chosen.meets_slo)
    assert line.brokers == chosen.brokers
    assert fleet.brokers_used == chosen.k


@pytest.mark.parametrize(
    ("population", "brokers", "slo", "loans"),
    [
        (Population(50, 20.0, 5, "poisson", 10), BROKERS, SLO_5MS, None),  # one broker does
        (Population(100, 50.0, 5, "poisson", 10), SMALL, SLO_5MS, None),  # it takes two
        (Population(100, 50.0, 5, "poisson", 10), SMALL, SLO_5MS, Loans("early", 500_000)),
        (Population(50, 20.0, 5), BROKERS, SLO(1), None),  # no plan meets the SLO
        (Population(50, 20.0, 5), (SMALL[0], *BROKERS[1:]), SLO_5MS, None),  # brokers differ
    ],
)
def test_the_plan_of_one_topic_is_that_of_plan(
    population: Population,
    brokers: tuple[SimulatedBroker, ...],
    slo: SLO,
    loans: Loans | None,
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    trace = write(tmp_path, population)
    (fleet,) = plan_all(trace, spark, [Scenario("now", brokers, slo, loans)])
    same_as_plan(fleet, trace, spark, brokers)


def test_the_best_plan_needs_only_some_cells(spark: SparkSession, tmp_path: Path) -> None:
    trace = write(tmp_path, Population(100, 50.0, 5, "poisson", 10))
    (known,) = load(trace)
    for brokers, slo in ((SMALL, SLO_5MS), (BROKERS, SLO_5MS), (SMALL, SLO(1)), (SMALL[:1], SLO_5MS)):
        plans = plan(trace, spark, brokers, slo=slo)
        found = best(SimulatedTopic(known.publishers, known.arrivals, plans.bucket), brokers, slo)
        if plans.chosen is None:
            assert found.latency is None
            assert "more than the 3000 msg/s" in str(found.error)
        else:
            assert (found.k, found.latency, found.brokers) == (
                plans.chosen.k,
                plans.chosen.latency,
                plans.chosen.brokers,
            )


def test_topics_share_brokers_and_what_ifs_say_what_would_change(tmp_path: Path) -> None:
    trace = write(tmp_path, *(Population(20, 250.0, 5) for _ in range(6)), seconds=3)
    now = Scenario("now", BROKERS, SLO_5MS)
    scenarios = [
        now,
        replace(now, name="traffic=2", traffic=Fraction(2)),
        replace(now, name="brokers=1", brokers=BROKERS[:1]),
        replace(now, name="slo=0.5ms", slo=SLO(NS_PER_MS // 2)),
        replace(now, name="lending=early", loans=Loans("early", 500_000)),
    ]
    fleet, faster, fewer, stricter, lending = plan_all(trace, HERE, scenarios)
    assert [line.topic for line in fleet.topics] == [f"topic-{number}" for number in range(6)]
    assert fleet.meets_slo
    assert fleet.needs == fleet.brokers_used < 6
    assert sum(parts for parts, _, _ in fleet.loads.values()) == 6
    assert sum(rate_mps for _, rate_mps, _ in fleet.loads.values()) == pytest.approx(30_000, rel=0.05)
    assert all(line.total and line.total.p50 <= line.total.p95 <= line.total.p99 for line in fleet.topics)
    assert faster.brokers_used > fleet.brokers_used
    assert fewer.brokers_used == 1 < fleet.brokers_used
    assert not fewer.meets_slo
    assert not stricter.meets_slo
    assert lending.topics == fleet.topics  # no topic is split, so nobody lends


def test_topics_without_room_are_split_or_counted(tmp_path: Path) -> None:
    trace = write(tmp_path, *(Population(40, 50.0, 5) for _ in range(3)))
    roomy = replace(SMALL[0], mcap_mps=3_400.0)
    three, two = ([replace(roomy, name=f"broker-{number}") for number in range(1, count + 1)] for count in (3, 2))
    slo = SLO(100 * NS_PER_MS)  # half of the bucket holds it, too
    sizes = {"three": three, "two": two, "one": two[:1]}
    alone, few, fewest = plan_all(trace, HERE, [Scenario(name, tuple(some), slo) for name, some in sizes.items()])
    assert [line.k for line in alone.topics] == [1, 1, 1]
    assert sorted(line.k for line in few.topics) == [1, 1, 2]  # half of the third has room at each
    assert few.brokers_used == 2
    assert sorted(line.k for line in fewest.topics) == [0, 0, 1]
    assert [line.error for line in fewest.topics if not line.k] == ["no broker has room for it beside the others"] * 2
    assert (fewest.brokers_used, fewest.needs, fewest.meets_slo) == (1, 3, False)


def test_files_frames_and_one_thread_agree(spark: SparkSession, tmp_path: Path) -> None:
    trace = write(tmp_path, Population(20, 50.0, 5, group_size=5), Population(10, 20.0))
    scenarios = [Scenario("now", BROKERS, SLO_5MS), Scenario("faster", BROKERS, SLO_5MS, traffic=Fraction(3, 2))]
    expected = plan_all(trace, HERE, scenarios)
    assert plan_all(trace, spark, scenarios) == expected
    assert plan_all(spark.read.parquet(str(trace)).repartition(3), spark, scenarios) == expected


def test_a_topic_that_cannot_be_judged_does_not_fail_the_others(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"topic": ["good", "absurd"], "publisher": ["p", "p"], "arrival_ns": pa.array([1, 2**63 - 1], pa.int64())}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    (fleet,) = plan_all(tmp_path, HERE, [Scenario("now", BROKERS, SLO_5MS)])
    absurd, good = fleet.topics
    assert "check the unit" in str(absurd.error)
    assert good.meets_slo
    assert not fleet.meets_slo


def test_bad_scenarios_are_named() -> None:
    with pytest.raises(InputError, match=r"traffic = 0: it must be more than 0"):
        Scenario("x", BROKERS, SLO_5MS, traffic=Fraction(0))
    with pytest.raises(InputError, match=r"quantile of a fleet's SLO must be 0\.99, not 0\.9"):
        Scenario("x", BROKERS, SLO(1, "0.9"))
    with pytest.raises(InputError, match="at least 1 broker, not 0"):
        resized(BROKERS, 0)
    with pytest.raises(InputError, match="describe 3 of them"):
        resized((SimulatedBroker("x"), SimulatedBroker("y")), 3)
    with pytest.raises(PlacementError, match="unknown policy 'best'"):
        plan_all("nowhere", HERE, [], Search(("best",)))
    assert [broker.name for broker in resized(BROKERS, 5)] == [f"broker-{number}" for number in range(1, 6)]
    assert resized(BROKERS, 2) == BROKERS[:2]
    assert alike(BROKERS)
    assert not alike((*BROKERS, SMALL[0]))
