"""`python -m bench.fleets [NAME …]`: the Spark jobs over many topics, mixed in time as brokers record them.

polars gets an r, the same for every topic, and computes b alone; `profile` finds r as well, counts publishers and
batches, and draws the envelope. Ratios are within one run.
"""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench import host
from bench.groups import Memory
from bench.measure import interleaved, show
from bench.pipeline import ONE_THREAD, SEED, polars_many, run_named
from bench.pipeline import written as one_topic
from srtm.model.bucket import TokenBucket
from srtm.model.latency import SLO
from srtm.model.profile import profile as model_profile
from srtm.model.timeline import Timeline
from srtm.pipeline.fleet import Scenario, plan_all
from srtm.pipeline.groups import groups
from srtm.pipeline.penalty import penalty
from srtm.pipeline.plan import plan
from srtm.pipeline.profile import TopicProfile, profile
from srtm.pipeline.traces.scanning import scanned_at
from srtm.sim.simulate import Loans, SimulatedBroker
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.trace import ARRIVAL_SCHEMA, RECORDED_SCHEMA, encoded, load, writing

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

SHAPES = ((10_000, 1_000), (100_000, 5))  # topics, messages of each
GROWTH = (1_000, 4_000, 16_000, 64_000)
ROWS = 1_000_000


def mixed(folder: Path, topics: int, each: int, publishers: int = 1_000) -> Path:
    """Messages of topics and publishers at random, as many a second as ROWS in ten."""
    rng, count = np.random.default_rng(SEED), topics * each
    times = np.sort(rng.integers(0, max(1, count * 10 * NS_PER_S // ROWS), count))
    in_topic, by = rng.integers(0, topics, count, np.int32), rng.integers(0, publishers, count, np.int32)
    return written(folder / f"{topics}-{each}.parquet", times, in_topic, by)


def bursting(folder: Path, topics: int, publishers: int = 50, bursts: int = 10) -> Path:
    """Topics with publishers of their own, in groups of ten that send together, once a second on average."""
    rng, count = np.random.default_rng(SEED), topics * publishers
    together = np.cumsum(rng.exponential(1.0, (count // 10, bursts)) * NS_PER_S, axis=1)
    times = (np.repeat(together, 10, axis=0) + rng.random((count, bursts)) * 4 * NS_PER_MS).astype(np.int64).ravel()
    by = np.repeat(np.arange(count, dtype=np.int32), bursts)
    order = np.argsort(times, kind="stable")
    return written(folder / f"bursting-{topics}.parquet", times[order], by[order] // publishers, by[order])


def recorded(folder: Path, topics: int, each: int, brokers: int = 3) -> Path:
    """The messages of `mixed` as a run at brokers recorded them: one in ten waited, up to 10 ms."""
    table = pq.read_table(mixed(folder, topics, each))
    rng, count = np.random.default_rng(SEED), len(table)
    waits = np.where(rng.random(count) < 0.1, rng.integers(0, 10 * NS_PER_MS, count), 0)
    names = pa.array([f"broker-{number}" for number in range(brokers)])
    table = table.append_column("broker", names.take(pa.array(rng.integers(0, brokers, count))))
    released = pa.array(table["arrival_ns"].to_numpy() + waits)
    table = table.append_column("release_ns", released).append_column("sent_ns", released)
    path = folder / f"recorded-{topics}.parquet"
    with writing(path, RECORDED_SCHEMA, {}) as writer:
        strings = [pa.types.is_string(column.type) for column in table.columns]
        columns = [c.dictionary_encode() if coded else c for c, coded in zip(table.columns, strings, strict=True)]
        rows = pa.table(columns, schema=encoded(RECORDED_SCHEMA)).unify_dictionaries().combine_chunks()
        writer.write_table(rows, row_group_size=ROWS)
    return path


def fleet(folder: Path, topics: int = 1_000, messages: int = 10**7, publishers: int = 50, batch: int = 10) -> Path:
    """Topics of very different rates, whose publishers send batches: 100,000 messages a second together."""
    rng, count = np.random.default_rng(SEED), messages // batch
    weights = 1 / (10.0 + np.arange(topics))
    in_topic = rng.choice(topics, count, p=weights / weights.sum()).astype(np.int32)
    by = in_topic * publishers + rng.integers(0, publishers, count, np.int32)
    times = np.sort(rng.integers(0, messages * NS_PER_S // 100_000, count))
    path = folder / f"fleet-{topics}-{messages}.parquet"
    return written(path, *(np.repeat(column, batch) for column in (times, in_topic, by)))


def written(path: Path, times: NDArray[np.int64], in_topic: NDArray[np.int32], by: NDArray[np.int32]) -> Path:
    topics = pa.array([f"topic-{number:06}" for number in range(int(in_topic.max()) + 1)])
    names = pa.array([f"publisher-{number:07}" for number in range(int(by.max()) + 1)])
    with writing(path, ARRIVAL_SCHEMA, {}) as writer:
        for begin in range(0, len(times), ROWS):
            some = slice(begin, begin + ROWS)
            columns = [
                pa.DictionaryArray.from_arrays(in_topic[some], topics),
                pa.DictionaryArray.from_arrays(by[some], names),
                pa.nulls(len(times[some])).cast(pa.string()).dictionary_encode(),
                pa.array(times[some]),
            ]
            writer.write_batch(pa.record_batch(columns, schema=encoded(ARRIVAL_SCHEMA)), row_group_size=ROWS)
    return path


def profiles(spark: SparkSession, folder: Path) -> None:
    """The profile of all topics, and polars computing b."""
    law = scanned_at(110_000).law
    for topics, each in SHAPES:
        path = mixed(folder, topics, each)
        found = profile(path, spark)
        assert found == profile(path, ONE_THREAD)
        for topic in load(path)[:: topics // 50]:
            (line,) = (line for line in found if line.topic == topic.topic)
            assert line.bucket == model_profile(topic.arrivals.times_ns).bucket
        print(host.jitter_line())
        taken = interleaved(
            {
                "srtm on Spark: everything, as columns": partial(profile, path, spark),
                "srtm on Spark: everything, as Python lines": partial(listed, path, spark),
                "the same work as columns, one thread": partial(profile, path, ONE_THREAD),
                "polars: b": partial(polars_many, path, law.rate, law.token),
            },
            5,
        )
        peer = taken["polars: b"]
        show(
            f"{topics:,} topics × {each:,} messages on average; warm",
            ["", "s", "time against polars"],
            [[name, f"{s:.2f}", f"{s / peer:.2f} ×"] for name, s in taken.items()],
        )


def listed(path: Path, spark: SparkSession) -> list[TopicProfile]:
    return list(profile(path, spark))


def growth(spark: SparkSession, folder: Path) -> None:
    """What a topic costs as topics become more: 100 messages of each, and 10 bursts of 50 publishers of each."""
    rows = []
    law = scanned_at(110_000).law
    for topics in GROWTH:
        path = mixed(folder, topics, 100)
        run: dict[str, Callable[[], Any]] = {
            "profile": partial(profile, path, spark),
            "polars": partial(polars_many, path, law.rate, law.token),
        }
        taken = interleaved(run, 3)
        path.unlink()
        own, peer = taken["profile"], taken["polars"]
        rows.append([f"{topics:,}", f"{own:.2f}", f"{own / topics * 1e6:.0f}", f"{peer:.2f}", f"{own / peer:.2f} ×"])
    show("Growth of profile", ["topics × 100 messages", "s", "µs a topic", "polars: b, s", "against polars"], rows)
    print(host.jitter_line())


def penalties(spark: SparkSession, folder: Path) -> None:
    """What a topic costs `penalty` as topics become more: 100 messages of each, at three brokers."""
    rows, contract = [], Timeline(TokenBucket.of(10, 20))
    for topics in GROWTH:
        path = recorded(folder, topics, 100)
        taken = interleaved({"penalty": partial(penalty, path, contract, spark)}, 2)["penalty"]
        path.unlink()
        rows.append([f"{topics:,}", f"{taken:.2f}", f"{taken / topics * 1e6:.0f}"])
    show("Growth of penalty", ["topics × 100 messages", "s", "µs a topic"], rows)
    print(host.jitter_line())


def grouping(spark: SparkSession, folder: Path) -> None:
    """Groups of topics with 50 publishers each, and the memory of all processes together."""
    rows = []
    for topics in (250, 1_000, 4_000):
        path = bursting(folder, topics)
        with Memory() as memory:
            taken = interleaved({"groups": partial(groups, path, spark)}, 2)["groups"]
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.parts.items())
        sizes = [f"{memory.pss / 1e9:.2f}", parts, f"{memory.peak / 1e9:.2f}"]
        rows.append([f"{topics:,}", f"{taken:.2f}", f"{taken / topics * 1e3:.1f}", *sizes])
    columns = ["topics × 50 publishers × 10 messages", "s", "ms a topic", "GB in all processes (PSS)", "of it", "RSS"]
    show("Groups", columns, rows)
    print(host.jitter_line())


def planning(spark: SparkSession, folder: Path) -> None:
    """A fleet's plan with four what-ifs, the memory of all processes together, and one topic as `plan` has it."""
    path = fleet(folder)
    brokers = tuple(SimulatedBroker(f"broker-{number}", None) for number in range(1, 41))
    now = Scenario("now", brokers, SLO(5 * NS_PER_MS))
    what_ifs = [
        replace(now, name="traffic=1.5", traffic=Fraction(3, 2)),
        replace(now, name="brokers=-1", brokers=brokers[:-1]),
        replace(now, name="slo=2ms", slo=SLO(2 * NS_PER_MS)),
        replace(now, name="lending=auto", loans=Loans("auto", NS_PER_MS // 2)),
    ]
    rows = []
    for name, scenarios in {"alone": [now], "and 4 what-ifs": [now, *what_ifs]}.items():
        with Memory() as memory:
            took = [0.0, 0.0]
            for turn in range(2):
                began = time.perf_counter()
                found = plan_all(path, spark, scenarios)
                took[turn] = time.perf_counter() - began
        rows.append([f"a plan {name}", f"{took[0]:.1f}", f"{took[1]:.1f}", f"{memory.peak / 1e9:.2f}"])
    show("1,000 topics, 10,000,000 messages", ["", "s, first", "s, again", "GB in all processes"], rows)
    outcome = [
        [
            each.scenario.name,
            f"{each.brokers_used} of {len(each.scenario.brokers)}",
            str(each.needs),
            str(each.meets_slo),
        ]
        for each in found
    ]
    show("What it says", ["what if", "brokers", "needed", "meets the SLO"], outcome)
    alone = folder / "alone.parquet"
    pq.write_table(pq.read_table(path, filters=[("topic", "==", "topic-000000")]), alone)
    (line,) = plan_all(alone, spark, [replace(now, brokers=brokers[:4])])[0].topics
    chosen = plan(alone, spark, brokers[:4], slo=now.slo).chosen
    assert chosen is not None
    assert (line.brokers, line.meets_slo) == (chosen.brokers, chosen.meets_slo)
    print(host.jitter_line())


def one_plan(spark: SparkSession, folder: Path) -> None:
    """`plan` of one topic of 10^7 messages on six brokers, and the memory of all processes together."""
    path = one_topic(folder, 10**7)
    brokers = [SimulatedBroker.like("paper-testbed", f"broker-{number}") for number in range(6)]
    with Memory() as memory:
        began = time.perf_counter()
        found = plan(path, spark, brokers, slo=SLO(5 * NS_PER_MS), fit=False)
        took = time.perf_counter() - began
    print(f"{len(found.plans)} cells in {took:.1f} s; {memory.peak / 1e9:.2f} GB in all processes")


ALL = {
    "grouping": grouping,
    "profiles": profiles,
    "growth": growth,
    "penalties": penalties,
    "planning": planning,
    "one_plan": one_plan,
}


if __name__ == "__main__":
    run_named("bench.fleets", __doc__, ALL)
