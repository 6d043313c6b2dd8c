from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest

from srtm.errors import InputError, PlacementError
from srtm.model.latency import SLO
from srtm.model.placement import POLICIES
from srtm.model.timeline import Timeline
from srtm.pipeline.conformance import conformance
from srtm.pipeline.plan import Cell, Plans, _from_plain, _plain, assessed, plan, record
from srtm.sim.simulate import Loans, SimulatedBroker, SimulatedTopic, assess, simulate
from srtm.units import NS_PER_MS, NS_PER_S, percentile
from srtm.workload.publishers import Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, load, writing

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

WORKLOAD = Workload((Population(200, 20.0, 10, "poisson", 20),), 10 * NS_PER_S, seed=3)
BROKERS = [SimulatedBroker.like("paper-testbed", f"b{number}") for number in range(3)]
SLO_5MS = SLO(5 * NS_PER_MS)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.parquet"
    with writing(path, ARRIVAL_SCHEMA, {}) as writer:
        rows = ArrivalWriter(writer, "topic", WORKLOAD.publishers())
        for window in WORKLOAD.windows():
            rows.write(window)
        rows.flush()
    return path


def test_every_cell_is_what_the_simulator_says(spark: SparkSession, trace: Path) -> None:
    plans = plan(trace, spark, BROKERS, slo=SLO_5MS)
    (known,) = load(trace)
    topic = SimulatedTopic(known.publishers, known.arrivals, plans.bucket)
    assert [(each.policy, each.fitted) for each in plans.plans] == [(name, True) for name in POLICIES] + [
        (name, False) for name in POLICIES for _ in BROKERS
    ]
    for each in plans.plans:
        if each.fitted:
            seen = simulate(topic, BROKERS, each.policy, SLO_5MS)
        else:
            seen = assess(topic, BROKERS, each.policy, each.k, SLO_5MS)
        assert each.latency == seen.latency
        assert each.meets_slo == seen.meets_slo
        assert {broker.broker: broker.bucket for broker in each.brokers} == seen.shares
        assert each.broker_of is not None
        assert (each.broker_of == seen.broker_of).all()
        assert sum(broker.publishers for broker in each.brokers) == 200
        assert sum(broker.bucket.b_ntok for broker in each.brokers) == plans.bucket.b_ntok


def test_the_fewest_brokers_that_meet_the_slo_are_chosen(spark: SparkSession) -> None:
    plans = plan(WORKLOAD, spark, BROKERS, slo=SLO_5MS, fit=False)
    chosen = plans.chosen
    assert chosen is not None
    meeting = [each for each in plans.plans if each.meets_slo]
    assert {each.k for each in meeting if each.k < chosen.k} == set()
    assert chosen in meeting
    never = plan(WORKLOAD, spark, BROKERS, slo=SLO(1), policies=["srtm"], ks=[1, 2])
    assert never.chosen is not None
    assert not never.chosen.meets_slo
    tails = [each.latency.total.p99 for each in never.plans if each.latency]
    assert never.chosen.latency is not None
    assert never.chosen.latency.total.p99 == min(tails)


def test_rows_of_a_frame_are_planned_like_their_file(spark: SparkSession, trace: Path) -> None:
    options = {"policies": ["srtm"], "ks": [2], "fit": False}
    (one,) = plan(trace, spark, BROKERS, **options).plans  # type: ignore[arg-type]
    frame = spark.read.parquet(str(trace)).repartition(3)
    (other,) = plan(frame, spark, BROKERS, **options).plans  # type: ignore[arg-type]
    # Publishers come in another order, so others are chosen; but as many, with the same buckets.
    assert [b.bucket for b in one.brokers] == [b.bucket for b in other.brokers]


def test_found_groups_take_the_place_of_declared_ones(spark: SparkSession, trace: Path) -> None:
    ids = [publisher.id for publisher in WORKLOAD.publishers()]
    declared = {publisher.id: str(publisher.group) for publisher in WORKLOAD.publishers()}
    options = {"policies": ["srtm"], "ks": [2], "fit": False}
    (with_its_own,) = plan(trace, spark, BROKERS, **options).plans  # type: ignore[arg-type]
    (with_the_same,) = plan(trace, spark, BROKERS, groups=declared, **options).plans  # type: ignore[arg-type]
    (without,) = plan(trace, spark, BROKERS, groups=dict.fromkeys(ids[:2], "x"), **options).plans  # type: ignore[arg-type]
    assert with_its_own.latency == with_the_same.latency
    assert with_its_own.latency != without.latency


def test_a_recorded_plan_keeps_its_contract(spark: SparkSession, trace: Path, tmp_path: Path) -> None:
    plans = plan(trace, spark, BROKERS, slo=SLO_5MS, policies=["lb"], ks=[3], fit=False)
    files = record(plans, trace, BROKERS, tmp_path / "run")
    assert [file.name for file in files] == ["b0.parquet", "b1.parquet", "b2.parquet"]
    (line,) = conformance(tmp_path / "run", {"topic": Timeline(plans.bucket)}, spark)
    assert line.conforms
    assert line.messages == len(WORKLOAD.arrivals().times_ns)
    waits = np.concatenate([spark.read.parquet(str(file)).toArrow()["release_ns"].to_numpy() for file in files])
    assert len(waits) == line.messages


def test_what_cannot_be_placed_says_so_in_its_cell(spark: SparkSession) -> None:
    small = [SimulatedBroker(f"b{number}", 3_000, BROKERS[0].model) for number in range(2)]
    plans = plan(WORKLOAD, spark, small, policies=["srtm"], fit=False)
    assert [each.error is None for each in plans.plans] == [False, True]
    assert "more than the 3000 msg/s" in str(plans.plans[0].error)


def test_bad_input_is_named(spark: SparkSession, trace: Path) -> None:
    with pytest.raises(PlacementError, match="unknown policy 'best'"):
        plan(trace, spark, BROKERS, policies=["best"])
    with pytest.raises(PlacementError, match=r"k = \[4\]: choose from 1 to 3"):
        plan(trace, spark, BROKERS, ks=[1, 4])
    with pytest.raises(InputError, match="unknown topic 'other'; topics of the trace: topic"):
        plan(trace, spark, BROKERS, topic="other")


@pytest.mark.parametrize("k", [None, 3])
def test_a_cell_knows_of_lending_and_records_it(k: int | None, tmp_path: Path) -> None:
    """Without a session: what a worker computes, its way back, and the trace."""
    alone = Workload((Population(200, 20.0, 10),), 10 * NS_PER_S, seed=3)
    topic, loans = SimulatedTopic.of(alone), Loans("early", 200_000)
    static, lending = (assessed(topic, BROKERS, Cell("lb", k), SLO_5MS, 0, each) for each in (None, loans))
    assert static.latency
    assert lending.latency
    assert lending.latency.access.p99 < static.latency.access.p99 / 5
    assert (static.rule, static.asks) == ("off", 0)
    assert lending.broker_of is not None
    row = {"found": json.dumps(_plain(lending)), "broker_of": lending.broker_of.tobytes()}
    back = _from_plain(row)
    assert (back.rule, back.asks, back.latency) == ("early", lending.asks, lending.latency)
    assert back.asks > 0
    plans = Plans("topic", topic.bucket, SLO_5MS, (back,), loans)
    written = record(plans, alone, BROKERS, tmp_path / "run")
    waits = np.concatenate([_waits(path) for path in written])
    assert percentile(waits, "0.99") == lending.latency.access.p99


def _waits(path: Path) -> NDArray[np.int64]:
    table = pq.read_table(path)
    waits: NDArray[np.int64] = table["release_ns"].to_numpy() - table["arrival_ns"].to_numpy()
    return waits
