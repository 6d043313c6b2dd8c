"""`python -m bench.streaming [--rows N] [--turns N] [--cores N]`: the format `srtm`; brokers in processes of their own.

Spark has one core by default (`local[1]`), so rows a second are rows a second and core; brokers and publishers use what
else there is. Bodies of 100 bytes. Medians of turns; on a busy machine turns differ by half and more, so all are shown.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import host
from bench.measure import show
from srtm.client.sync import Publisher
from srtm.pipeline.session import spark_session
from srtm.units import NS_PER_MS, percentiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BODY = bytes(100)
GROUP = 1_000
FASTER = {
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing."
    "FileSystemBasedCheckpointFileManager"
}


@contextmanager
def broker(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Addresses of a broker's TCP and HTTP."""
    flags = ["--tcp-port", "0", "--http-port", "0", "--name", name, "--data-path", str(folder)]
    process = subprocess.Popen([sys.executable, "-m", "srtm", "broker", *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        ports = re.findall(r"(?:TCP|HTTP) \S+:(\d+)", process.stdout.readline())
        yield f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
    finally:
        process.terminate()
        process.wait()


def create(http: str, topic: str) -> None:
    request = urllib.request.Request(f"http://{http}/topic/create?topic={topic}&durability=disk", method="POST")
    urllib.request.urlopen(request).close()


def fill(tcp: str, topic: str, rows: int) -> None:
    with Publisher(topic, broker=tcp) as publisher:
        for _ in range(0, rows, GROUP):
            publisher.publish_many([BODY] * GROUP)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def streamed(spark: SparkSession, options: dict[str, str], batch: int, folder: Path) -> float:
    """Read topics to their end into nothing; rows a second of a batch, the median of the query without its first."""
    rows = spark.readStream.format("srtm").options(**options, maxRowsPerTrigger=str(batch)).load()
    with tempfile.TemporaryDirectory(dir=folder) as checkpoint:
        sink = rows.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = sink.trigger(availableNow=True).start()
        query.awaitTermination()
        return float(
            statistics.median(json.loads(each.json)["processedRowsPerSecond"] for each in query.recentProgress[1:])
        )


def into_and_back(spark: SparkSession, brokers: list[tuple[str, str]], rows: int, turns: int, folder: Path) -> None:
    """A backlog into Spark, as a table and as a stream; rows of Spark into a topic."""
    for tcp, http in brokers:
        for topic in ("in", "left", "right"):
            create(http, topic)
            fill(tcp, topic, rows // len(brokers) // (1 if topic == "in" else 2))
        create(http, "out")
    addresses = ",".join(http for _, http in brokers)
    source, sink = {"brokers": addresses, "topic": "in"}, {"brokers": addresses, "topic": "out"}
    several = {"brokers": addresses, "topic": "left,right"}
    table = spark.read.format("srtm").options(**source).load()
    few = rows // 4
    bodies = spark.range(few).selectExpr("repeat('x', 100) AS body").coalesce(1)

    def rate(frame: DataFrame, count: int, form: str, **options: str) -> float:
        return count / timed(lambda: frame.write.format(form).options(**options).mode("append").save())

    works: dict[str, Callable[[], float]] = {
        "from a topic, as a table": lambda: rate(table, rows, "noop"),
        "from a topic, as a stream of 100,000 a batch": lambda: streamed(spark, source, 100_000, folder),
        "from a topic, as a stream of 500,000 a batch": lambda: streamed(spark, source, 500_000, folder),
        "from two topics, as a stream of 500,000 a batch": lambda: streamed(spark, several, 500_000, folder),
        "into a topic": lambda: rate(bodies, few, "srtm", **sink),
        "into a topic, keys=envelope": lambda: rate(bodies, few, "srtm", **sink, keys="envelope"),
    }
    lines = []
    for name, work in works.items():
        work()  # the first is slow: processes are started, code is compiled
        rates = sorted(work() for _ in range(turns))
        lines.append([name, f"{statistics.median(rates):,.0f}", ", ".join(f"{rate / 1000:,.0f}" for rate in rates)])
    show(f"{rows:,} rows out of topics, {few:,} into them", ["", "rows/s, median", "turns, thousands/s"], lines)


def until_visible(spark: SparkSession, brokers: list[tuple[str, str]], seconds: float, folder: Path) -> None:
    """How long after its arrival at a broker a message is in the hands of foreachBatch; 100 messages a second."""
    ages_ns: list[int] = []
    tcp, http = brokers[0]
    create(http, "live")

    def see(rows: DataFrame, _: int) -> None:
        arrivals = [row.arrival_ns for row in rows.select("arrival_ns").collect()]
        now_ns = time.time_ns()
        ages_ns.extend(now_ns - arrival for arrival in arrivals)

    stop = threading.Event()

    def publish() -> None:
        with Publisher("live", broker=tcp) as publisher:
            while not stop.wait(0.01):
                publisher.publish(BODY)

    live = spark.readStream.format("srtm").options(brokers=http, topic="live", startingOffsets="latest").load()
    with tempfile.TemporaryDirectory(dir=folder) as checkpoint:
        query = live.writeStream.foreachBatch(see).option("checkpointLocation", checkpoint).start()
        publishing = threading.Thread(target=publish)
        publishing.start()
        time.sleep(10)  # until Spark is warm
        ages_ns.clear()
        time.sleep(seconds)
        found = np.array(ages_ns, np.int64)
        stop.set()
        publishing.join()
        query.processAllAvailable()  # a query that is stopped in the middle of foreachBatch prints its stack
        batches = [json.loads(progress.json)["durationMs"] for progress in query.recentProgress[-20:]]
        query.stop()
    points = [f"{value / NS_PER_MS:,.0f}" for value in percentiles(found, ["0.5", "0.99"])]
    took = {name: statistics.median(batch.get(name, 0) for batch in batches) for name in batches[-1]}
    rest = [f"{took[name]:,.0f}" for name in ("triggerExecution", "latestOffset", "walCommit", "addBatch")]
    columns = ["messages", "p50", "p99", "batch", "latestOffset", "walCommit", "addBatch"]
    show("from arrival to visible, ms; and a batch, medians", columns, [[f"{len(found):,}", *points, *rest]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.streaming", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    print(host.describe(0))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="srtm-bench-")))
        names = ["one", "two"]
        for name in names:
            (folder / name).mkdir()
        brokers = [stack.enter_context(broker(folder / name, name)) for name in names]
        spark = stack.enter_context(spark_session(master=f"local[{options.cores}]", options=FASTER, heavy=True))
        into_and_back(spark, brokers, options.rows, options.turns, folder)
        until_visible(spark, brokers, options.seconds, folder)


if __name__ == "__main__":
    main()
