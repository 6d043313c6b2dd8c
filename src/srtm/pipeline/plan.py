"""Plan: what every split of a topic would cost, before making it: each policy on each k, and each policy's own fit.

One Spark task per cell. Each runs `sim` over the topic's whole traffic, so a plan gives the simulator's numbers. The
traffic is a trace or a workload, which workers read or generate themselves and keep for their next cell.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote
from uuid import uuid4

import numpy as np
import pyarrow as pa

from srtm.errors import InputError, PlacementError, SRTMError, TraceError
from srtm.model.bucket import TokenBucket
from srtm.model.defaults import HEADROOM, QUANTILE
from srtm.model.latency import SLO, Distribution, Latency
from srtm.model.placement import POLICIES, policy_named
from srtm.model.profile import profile
from srtm.pipeline.profile import COLUMNS, profile_source
from srtm.pipeline.traces.batches import batch_of
from srtm.pipeline.traces.reading import opened, resolved
from srtm.sim.simulate import SimulatedCluster, SimulatedTopic, Simulation, assess, simulate
from srtm.workload.publishers import Arrivals, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, Recorded, in_topics, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from srtm.sim.simulate import Loans, SimulatedBroker

    Traffic = DataFrame | str | Path | Workload

_FIELDS = "number long, found string, broker_of binary"
_kept: dict[str, SimulatedTopic] = {}  # a worker's traffic, for its next cell


@dataclass(frozen=True, slots=True)
class BrokerPlan:
    """One broker's publishers, sub-token bucket and end-to-end latency under a plan."""

    broker: str
    publishers: int
    bucket: TokenBucket
    total: Distribution


@dataclass(frozen=True, slots=True)
class Plan:
    """One cell: a policy on k brokers, or its own fit; the latency of its messages, or an error."""

    policy: str
    k: int
    fitted: bool
    meets_slo: bool = False
    brokers: tuple[BrokerPlan, ...] = ()
    latency: Latency | None = None
    error: str | None = None
    broker_of: NDArray[np.int32] | None = None  # by the order of the publishers
    rule: str = "off"  # by which brokers lend each other tokens
    asks: float = 0.0  # per message


@dataclass(frozen=True, slots=True)
class Plans:
    """All cells, and the one to choose: the fewest brokers that meet the SLO, then the shortest tail."""

    topic: str
    bucket: TokenBucket
    slo: SLO
    plans: tuple[Plan, ...]
    loans: Loans | None = None

    @property
    def chosen(self) -> Plan | None:
        """The best plan; if none meets the SLO, the one that comes closest."""
        possible = [plan for plan in self.plans if plan.latency]
        return min(possible, key=_preference, default=None)


class Cell(NamedTuple):
    """A policy, on a number of brokers or with the fit that it finds itself."""

    policy: str
    k: int | None  # None: as many as the fit chooses


def plan(
    traffic: Traffic,
    spark: SparkSession,
    brokers: Sequence[SimulatedBroker],
    *,
    bucket: TokenBucket | None = None,
    slo: SLO | None = None,
    policies: Sequence[str] = tuple(POLICIES),
    ks: Sequence[int] | None = None,
    fit: bool = True,
    groups: Mapping[str, str] | None = None,
    topic: str | None = None,
    seed: int = 0,
    loans: Loans | None = None,
) -> Plans:
    """Every policy on every number of brokers, and fitted by itself.

    (r, b) is the traffic's own profile unless given; `groups` maps publishers to groups and overrides the trace. With
    `loans`, brokers lend each other tokens.
    """
    for name in policies:
        policy_named(name)
    wrong = [k for k in ks or () if not 1 <= k <= len(brokers)]
    if wrong or not brokers:
        raise PlacementError(f"k = {wrong}: choose from 1 to {len(brokers)}, the number of brokers")
    goal = slo or SLO()
    source = _shipped(traffic, spark)
    named, contract = _named(source, spark, topic, bucket)
    cells = [Cell(name, None) for name in policies if fit]
    cells += [Cell(name, k) for name in policies for k in ks or range(1, len(brokers) + 1)]
    key = uuid4().hex

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                if key not in _kept:
                    _kept.clear()
                    _kept[key] = _topic_of(source, named, groups, contract).contract
                found = assessed(_kept[key], brokers, cells[number], goal, seed, loans)
                broker_of = b"" if found.broker_of is None else found.broker_of.tobytes()
                yield batch_of(_FIELDS, [(number, json.dumps(_plain(found)), broker_of)])

    rows = spark.range(0, len(cells), 1, len(cells)).mapInArrow(task, _FIELDS).toArrow().sort_by("number").to_pylist()
    return Plans(named, contract, goal, tuple(_from_plain(row) for row in rows), loans)


def best(
    topic: SimulatedTopic,
    brokers: Sequence[SimulatedBroker],
    slo: SLO,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    fit: bool = True,
    seed: int = 0,
    loans: Loans | None = None,
) -> Plan:
    """What `plan` chooses, from as few cells as it takes; if nothing can be placed, a plan with the reason."""
    # Alone on the roomiest broker: no policy splits it, and nothing is preferred to that.
    alone = assessed(topic, brokers[:1] if alike(brokers) else brokers, Cell(policies[-1], 1), slo, seed)
    if alone.meets_slo:
        return alone
    tried = [assessed(topic, brokers, Cell(name, None), slo, seed, loans) for name in policies if fit]
    for k in range(1, len(brokers) + 1):
        if any(each.meets_slo and each.k < k for each in tried):
            break
        tried += [assessed(topic, brokers, Cell(name, k), slo, seed, loans) for name in policies]
    return min((each for each in tried if each.latency), key=_preference, default=tried[-1])


def alike(brokers: Sequence[SimulatedBroker]) -> bool:
    """Whether brokers differ in nothing but their names."""
    kinds = {(broker.mcap_mps, broker.model, broker.background) for broker in brokers}
    return len(kinds) == 1


def record(
    plans: Plans,
    traffic: Traffic,
    brokers: Sequence[SimulatedBroker],
    folder: Path,
    spark: SparkSession | None = None,
    *,
    seed: int = 0,
) -> list[Path]:
    """Write the trace that a run of the chosen plan would record, one file per broker, into a new folder."""
    chosen = plans.chosen
    if chosen is None or chosen.broker_of is None:
        raise InputError("no plan to record: no cell could be placed")
    topic = _topic_of(_shipped(traffic, spark), plans.topic, None, plans.bucket).contract
    cluster = SimulatedCluster(topic, brokers, plans.slo, seed, plans.loans)
    seen = cluster.observe(chosen.broker_of, sorted(set(chosen.broker_of.tolist())))
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise TraceError(f"cannot write {folder}: {error.strerror}", path=str(folder)) from None
    written = []
    for broker, (access, processing) in seen.items():
        here = np.flatnonzero(chosen.broker_of[topic.arrivals.publisher_of] == broker)
        arrivals = Arrivals(topic.arrivals.times_ns[here], topic.arrivals.publisher_of[here])
        release_ns = arrivals.times_ns + access
        name = brokers[broker].name
        rows = Recorded(plans.topic, name, topic.publishers, arrivals, release_ns, release_ns + processing)
        written.append(folder / f"{quote(name, safe='')}.parquet")  # a name may hold any character
        rows.write(written[-1], {"srtm.plan": f"{chosen.policy}, k = {chosen.k}"})
    return written


class _Named(NamedTuple):
    name: str
    contract: SimulatedTopic


def _shipped(traffic: Traffic, spark: SparkSession | None) -> str | Workload | pa.Table:
    """The traffic in a form that workers can use: a path or URI, a workload, or the rows themselves."""
    if isinstance(traffic, Workload):
        return traffic
    rows = resolved(traffic, spark)
    if isinstance(rows, str):
        return rows
    if "group" not in rows.columns:
        from pyspark.sql import functions as f

        rows = rows.withColumn("group", f.lit(None).cast("string"))
    return rows.select(*ARRIVAL_SCHEMA.names).toArrow()


def _named(
    source: str | Workload | pa.Table, spark: SparkSession, name: str | None, bucket: TokenBucket | None
) -> tuple[str, TokenBucket]:
    """The topic to plan and its bucket; of a trace in files, without its messages in this process."""
    if not isinstance(source, str):
        found = _topic_of(source, name, None, bucket)
        return found.name, found.contract.bucket
    with opened(source, spark, COLUMNS) as trace:
        topics, faults = trace.topics()
        chosen = _only([*topics.names.to_pylist(), *faults], name)
        if bucket and chosen not in faults:
            return chosen, bucket
        line = next(line for line in profile_source(trace, HEADROOM, QUANTILE) if line.topic == chosen)
    if line.bucket is None:
        raise TraceError(f"topic {chosen!r}: {line.error}", path=source)
    return chosen, bucket or line.bucket


def _topic_of(
    source: str | Workload | pa.Table, name: str | None, groups: Mapping[str, str] | None, bucket: TokenBucket | None
) -> _Named:
    """The topic to plan, with its groups and its bucket."""
    if isinstance(source, Workload):
        return _Named(name or "topic", SimulatedTopic.of(source, bucket))
    topics = in_topics(source, "the DataFrame") if isinstance(source, pa.Table) else load(source, name)
    names = [each.topic for each in topics]
    found = topics[names.index(_only(names, name))]
    publishers = found.publishers
    if groups is not None:
        publishers = tuple(replace(publisher, group=groups.get(publisher.id)) for publisher in publishers)
    return _Named(
        found.topic, SimulatedTopic(publishers, found.arrivals, bucket or profile(found.arrivals.times_ns).bucket)
    )


def _only(names: list[str], name: str | None) -> str:
    if name is not None and name not in names:
        raise InputError(f"unknown topic {name!r}; topics of the trace: {', '.join(names[:10])}")
    if name is None and len(names) > 1:
        listed = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise InputError(f"the trace has {len(names)} topics; choose one to plan: {listed}")
    return name or names[0]


def assessed(
    topic: SimulatedTopic,
    brokers: Sequence[SimulatedBroker],
    cell: Cell,
    slo: SLO,
    seed: int,
    loans: Loans | None = None,
) -> Plan:
    """One cell of a plan, from the simulator."""
    try:
        if cell.k is None:
            seen = simulate(topic, brokers, cell.policy, slo, seed=seed, loans=loans)
        else:
            seen = assess(topic, brokers, cell.policy, cell.k, slo, seed=seed, loans=loans)
    except SRTMError as error:
        return Plan(cell.policy, cell.k or 0, cell.k is None, error=str(error))
    return _made(seen, cell)


def _made(seen: Simulation, cell: Cell) -> Plan:
    sizes = np.bincount(seen.broker_of[seen.broker_of >= 0], minlength=len(seen.brokers)).tolist()
    numbers = {name: number for number, name in enumerate(seen.brokers)}
    silent = Distribution(0, 0, 0)
    brokers = tuple(
        BrokerPlan(name, sizes[numbers[name]], share, seen.by_broker[name].total if name in seen.by_broker else silent)
        for name, share in seen.shares.items()
    )
    return Plan(
        seen.policy,
        seen.k,
        cell.k is None,
        seen.meets_slo,
        brokers,
        seen.latency,
        broker_of=seen.broker_of,
        rule=seen.rule,
        asks=seen.asks,
    )


def _preference(plan: Plan) -> tuple[Any, ...]:
    assert plan.latency is not None
    tail_ns = plan.latency.total.p99
    by_name = -list(POLICIES).index(plan.policy)  # later policies know more
    if plan.meets_slo:
        return (0, plan.k, tail_ns, by_name)
    return (1, tail_ns, plan.k, by_name)


def _plain(found: Plan) -> dict[str, Any]:
    """A plan as JSON, for the way from a worker."""
    latency = found.latency
    return {
        "cell": [found.policy, found.k, found.fitted, found.meets_slo, found.error],
        "lending": [found.rule, found.asks],
        "brokers": [
            [b.broker, b.publishers, b.bucket.r_mtps, b.bucket.b_ntok, *_points(b.total)] for b in found.brokers
        ],
        "latency": latency
        and [latency.messages, *(_points(each) for each in (latency.access, latency.processing, latency.total))],
    }


def _from_plain(row: dict[str, Any]) -> Plan:
    found = json.loads(row["found"])
    policy, k, fitted, meets_slo, error = found["cell"]
    brokers = tuple(
        BrokerPlan(name, publishers, TokenBucket(r_mtps, b_ntok), Distribution(*points))
        for name, publishers, r_mtps, b_ntok, *points in found["brokers"]
    )
    latency = found["latency"] and Latency(
        found["latency"][0], *(Distribution(*points) for points in found["latency"][1:])
    )
    broker_of = np.frombuffer(row["broker_of"], np.int32) if row["broker_of"] else None
    return Plan(policy, k, fitted, meets_slo, brokers, latency, error, broker_of, *found["lending"])


def _points(latency: Distribution) -> list[int]:
    return [latency.p50, latency.p95, latency.p99]
