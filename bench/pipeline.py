"""`python -m bench.pipeline [NAME …]`: the Spark jobs, against others that do what they can of the same on one machine.

Every table says what each row computes. Peers get (r, b) alone, r being known; the jobs count publishers and batches
and draw the envelope as well.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.pipeline.local import LocalSpark

from bench import host
from bench.measure import interleaved, show
from srtm.model import burst, scan
from srtm.model.bucket import TokenBucket
from srtm.model.profile import profile as model_profile
from srtm.pipeline.plan import plan
from srtm.pipeline.profile import profile
from srtm.pipeline.session import spark_session
from srtm.pipeline.traces.batches import batch_of
from srtm.pipeline.traces.reading import opened
from srtm.pipeline.traces.scanning import scanned_at
from srtm.sim import SimulatedBroker, SimulatedTopic, assess
from srtm.units import NS_PER_S, histogram_percentile, percentile
from srtm.workload.publishers import Arrivals, Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, encoded, load, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import SparkSession

SEED = 1
POPULATION = Population(1_000, 10.0, 10, "poisson", 25, 4_000_000)
ONE_THREAD: Any = LocalSpark(1)


def one_topic(spark: SparkSession, folder: Path) -> None:
    """The profile of one topic; how its cost grows; where the time goes."""
    grown = [[f"{messages:,}", f"{of_size(spark, folder, messages):.2f}"] for messages in (10**6, 10**7, 10**8)]
    show("Growth", ["messages", "s"], grown)
    stages(spark, written(folder, 10**8))
    memory(spark)


def of_size(spark: SparkSession, folder: Path, messages: int) -> float:
    path = written(folder, messages)
    (line,) = profile(path, ONE_THREAD)
    assert profile(path, spark) == [line]
    assert line.bucket is not None
    r_mtps, (rate, token, _) = line.bucket.r_mtps, scanned_at(line.bucket.r_mtps).law
    ours: dict[str, Callable[[], Any]] = {
        "srtm on Spark: everything": lambda: profile(path, spark),
        "the same work, one thread": lambda: profile(path, ONE_THREAD),
        "numba, one thread: b": lambda: numba_b(path, r_mtps),
    }
    peers: dict[str, Callable[[], Any]] = {
        "polars: b": lambda: polars_b(path, rate, token),
        "numpy: b": lambda: numpy_b(path, rate, token),
        "duckdb: b": lambda: duckdb_b(path, rate, token),
    }
    for name, run in {**peers, "numba": ours["numba, one thread: b"]}.items():
        assert run() == int(line.bucket.b), name
    taken = interleaved({**ours, **(peers if messages < 10**8 else {})}, 5)
    if messages == 10**8:  # minutes a turn
        taken |= interleaved(peers, 1)
    fastest = taken["srtm on Spark: everything"]
    show(
        f"One topic, {messages:,} messages, {path.stat().st_size / messages:.2f} bytes each; warm",
        ["", "s", "M messages/s", "time against Spark"],
        [[name, f"{s:.2f}", f"{messages / s / 1e6:.1f}", f"{s / fastest:.2f} ×"] for name, s in taken.items()],
    )
    return fastest


def stages(spark: SparkSession, path: Path) -> None:
    """What one thread spends on each step, and what Spark adds."""
    with pq.ParquetFile(path) as file:
        rows = sum(file.metadata.row_group(number).num_rows for number in range(10))

    def read(columns: list[str]) -> list[pa.Table]:
        with pq.ParquetFile(path, read_dictionary=["publisher"], pre_buffer=False) as file:
            return [file.read_row_group(number, columns=columns, use_threads=False) for number in range(10)]

    tables = [table.combine_chunks() for table in read(["arrival_ns", "publisher"])]
    pieces = [(t["arrival_ns"].to_numpy(), t["publisher"].chunk(0).indices.to_numpy()) for t in tables]
    bucket = TokenBucket.of(11_000, 1)

    def nothing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield batch_of("n long", [(1,)])

    def footers() -> None:
        with opened(path, spark, ("publisher",)):
            pass

    def widened() -> None:
        envelope = burst.Envelope()
        for times, _ in pieces:
            envelope.add(times)

    per_message = interleaved(
        {
            "read and decode arrival_ns": lambda: read(["arrival_ns"]),
            "read and decode publisher": lambda: read(["publisher"]),
            "law: histogram of backlogs": lambda: [scan.backlog_histogram(times, bucket) for times, _ in pieces],
            "envelope, 22 lengths": widened,
            "batches": lambda: [burst.batch_sizes(times, senders) for times, senders in pieces],
        }
    )
    fixed = interleaved(
        {
            "footers of the file": footers,
            "an empty job": lambda: spark.range(0, 2, 1, 2).mapInArrow(nothing, "n long").toArrow(),
        }
    )
    rows_of = [[name, f"{s / rows * 1e9:.2f} ns a message"] for name, s in per_message.items()]
    rows_of += [[name, f"{s * 1e3:.0f} ms a job"] for name, s in fixed.items()]
    show("Where the time goes, one thread", ["", "cost"], rows_of)


def memory(spark: SparkSession) -> None:
    """The largest that any worker has been, and the driver."""

    def largest(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield batch_of("kib long", [(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,)])

    workers = spark.range(0, 4, 1, 4).mapInArrow(largest, "kib long").toArrow()["kib"].to_pylist()
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory: workers {max(workers) / 1024:.0f} MiB at most; driver, peers included, {own / 1024:.0f} MiB")


def many_topics(spark: SparkSession, folder: Path) -> None:
    """10^7 messages of 10,000 topics, as a broker records them: in order of time, topics mixed."""
    path, messages = mixed(folder, 10**7, 10_000), 10**7
    assert profile(path, spark) == profile(path, ONE_THREAD)
    law = scanned_at(110_000).law
    taken = interleaved(
        {
            "srtm on Spark: everything": lambda: profile(path, spark),
            "the same work, one thread": lambda: profile(path, ONE_THREAD),
            "polars: b": lambda: polars_many(path, law.rate, law.token),
            "duckdb: b": lambda: duckdb_many(path, law.rate, law.token),
        },
        3,
    )
    fastest = taken["srtm on Spark: everything"]
    show(
        "10,000 topics, 10,000,000 messages; warm",
        ["", "s", "M messages/s", "time against Spark"],
        [[name, f"{s:.2f}", f"{messages / s / 1e6:.1f}", f"{s / fastest:.2f} ×"] for name, s in taken.items()],
    )


def placements(spark: SparkSession, folder: Path) -> None:
    """60 placements of 10^7 messages: access, processing and total latency of every message in each."""
    path = written(folder, 10**7)
    brokers = [SimulatedBroker.like("paper-testbed", f"broker-{number}") for number in range(15)]
    (found,) = load(path)
    topic = SimulatedTopic(found.publishers, found.arrivals, model_profile(found.arrivals.times_ns).bucket)
    messages = len(found.arrivals.times_ns)

    def on_spark() -> None:
        assert len(plan(path, spark, brokers, bucket=topic.bucket, fit=False).plans) == 60

    few = range(2, 15, 4)

    def one_thread() -> None:
        for k in few:
            assess(topic, brokers, "srtm", k)

    def numpy_one() -> None:
        numpy_split(found.arrivals, topic.bucket, 4)

    taken = interleaved({"srtm on Spark: 60 placements": on_spark}, 2)
    taken |= interleaved({f"one thread: {len(few)} of them": one_thread, "numpy: access delays of 1": numpy_one}, 2)
    updates = dict(zip(taken, (60 * messages, len(few) * messages, messages), strict=True))
    fastest = taken["srtm on Spark: 60 placements"] / updates["srtm on Spark: 60 placements"]
    show(
        f"60 placements × {messages:,} messages, one bucket a broker; loading the trace included on Spark",
        ["", "s", "M messages × placements/s", "time each against Spark"],
        [
            [name, f"{s:.2f}", f"{updates[name] / s / 1e6:.1f}", f"{s / updates[name] / fastest:.2f} ×"]
            for name, s in taken.items()
        ],
    )


def written(folder: Path, messages: int) -> Path:
    path = folder / f"{messages}.parquet"
    if not path.exists():
        workload = Workload((POPULATION,), round(messages / POPULATION.total_mps * NS_PER_S), SEED)
        with writing(path, ARRIVAL_SCHEMA, {}) as writer:
            rows = ArrivalWriter(writer, "topic", workload.publishers())
            for window in workload.windows():
                rows.write(window)
            rows.flush()
    return path


def mixed(folder: Path, messages: int, topics: int) -> Path:
    path = folder / f"{topics}-topics.parquet"
    rng = np.random.default_rng(SEED)
    names = pa.array([f"topic-{number:05}" for number in range(topics)])
    with writing(path, ARRIVAL_SCHEMA, {}) as writer:
        for part in range(10):
            count = messages // 10
            times = np.sort(rng.integers(part * 10**10, (part + 1) * 10**10, count))
            columns = [
                pa.DictionaryArray.from_arrays(rng.integers(0, topics, count, np.int32), names),
                pa.DictionaryArray.from_arrays(rng.integers(0, 1_000, count, np.int32), names),
                pa.nulls(count).cast(pa.string()).dictionary_encode(),
                pa.array(times),
            ]
            writer.write_batch(pa.record_batch(columns, schema=encoded(ARRIVAL_SCHEMA)), row_group_size=count)
    return path


def numba_b(path: Path, r_mtps: int) -> int:
    counts, state = np.zeros(1, np.int64), None
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=["arrival_ns"], use_threads=False)
            times = table["arrival_ns"].combine_chunks().to_numpy()
            more, state = scan.backlog_histogram(times, scanned_at(r_mtps), state)
            longer, shorter = (counts, more) if len(counts) > len(more) else (more, counts)
            longer[: len(shorter)] += shorter
            counts = longer
    return histogram_percentile(counts, "0.99")


def numpy_b(path: Path, rate: int, token: int) -> int:
    times = pq.read_table(path, columns=["arrival_ns"], use_threads=False)["arrival_ns"].to_numpy()
    drained = np.arange(len(times)) * token - rate * (times - times[0])
    backlogs = drained + np.maximum(0, -np.minimum.accumulate(drained)) + token
    return -(-percentile(backlogs, "0.99") // token)


def numpy_split(arrivals: Arrivals, bucket: TokenBucket, brokers: int) -> None:
    law = TokenBucket(bucket.r_mtps // brokers, bucket.b_ntok // brokers).law
    broker_of = arrivals.publisher_of % brokers
    delays = []
    for broker in range(brokers):
        times = arrivals.times_ns[broker_of == broker]
        drained = np.arange(len(times)) * law.token - law.rate * (times - times[0])
        backlogs = drained + np.maximum(0, -np.minimum.accumulate(drained)) + law.token
        delays.append(np.maximum(0, -((law.burst - backlogs) // law.rate)))
    percentile(np.concatenate(delays), "0.99")


def polars_b(path: Path, rate: int, token: int) -> int:
    import polars as pl

    at = pl.col("arrival_ns")
    drained = pl.int_range(pl.len(), dtype=pl.Int64) * token - (at - at.first()) * rate
    backlog = pl.col("c") + pl.max_horizontal(pl.lit(0), -pl.col("c").cum_min()) + token
    frame = pl.scan_parquet(path).select(c=drained).select(x=backlog)
    wanted = frame.select(pl.col("x").quantile(0.99, "higher"), n=pl.len()).collect()
    return -(-int(wanted["x"][0]) // token)


def polars_many(path: Path, rate: int, token: int) -> int:
    import polars as pl

    at = pl.col("arrival_ns")
    drained = (pl.int_range(pl.len(), dtype=pl.Int64) * token - (at - at.first()) * rate).over("topic")
    backlog = pl.col("c") + pl.max_horizontal(pl.lit(0), -pl.col("c").cum_min().over("topic")) + token
    frame = pl.scan_parquet(path).select("topic", c=drained).select("topic", x=backlog)
    return int(frame.group_by("topic").agg(pl.col("x").quantile(0.99, "higher")).collect().height)


_DUCK = """
select quantile_disc(c - least(0, low) + {token}, 0.99) from (
  select {by} c, min(c) over ({part} order by i rows unbounded preceding) low from (
    select {by} i, {number} * {token}::bigint - {rate} * (arrival_ns - {first}) c
    from (select {by} file_row_number i, arrival_ns from read_parquet('{path}', file_row_number = true))))
"""


def duckdb_b(path: Path, rate: int, token: int) -> int:
    import duckdb

    first = pq.read_metadata(path).row_group(0).column(3).statistics.min
    query = _DUCK.format(path=path, rate=rate, token=token, by="", part="", number="i", first=first)
    with duckdb.connect() as connection:
        (found,) = connection.execute(query).fetchone() or (0,)
    return -(-int(found) // token)


def duckdb_many(path: Path, rate: int, token: int) -> int:
    import duckdb

    inner = "(row_number() over (partition by topic order by i) - 1)"
    first = "min(arrival_ns) over (partition by topic)"
    query = _DUCK.format(
        path=path, rate=rate, token=token, by="topic,", part="partition by topic", number=inner, first=first
    )
    with duckdb.connect() as connection:
        return len(connection.execute(query.strip() + " group by topic").fetchall())


ALL = {"one_topic": one_topic, "many_topics": many_topics, "placements": placements}


def run_named(
    prog: str, description: str | None, benches: Mapping[str, Callable[[SparkSession, Path], object]]
) -> None:
    """Run the benches that the command line names, or all, in one Spark session."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(benches)} (default: all)")
    options = parser.parse_args()
    print(host.describe(SEED))
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with spark_session(master="local[2]") as spark:
            print(f"session started in {time.perf_counter() - began:.1f} s")
            for name in options.names or benches:
                benches[name](spark, Path(folder))


if __name__ == "__main__":
    run_named("bench.pipeline", __doc__, ALL)
