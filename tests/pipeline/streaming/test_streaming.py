"""The format `srtm` on real Spark: on this machine, on a cluster, through Connect; drivers and executors are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.dataset as ds
import pytest

from srtm.errors import InputError, LogReplaced, OffsetTrimmed
from srtm.pipeline.profile import profile
from srtm.pipeline.runtime.failures import Place, explained
from srtm.pipeline.streaming.format import register, unwrapped
from tests.broker.running import Running
from tests.conftest import ROOT
from tests.pipeline.runtime.standalone import Cluster as SparkCluster
from tests.pipeline.runtime.standalone import children_of, wait_for
from tests.pipeline.streaming import topics
from tests.pipeline.streaming.streams import keep, relay
from tests.pipeline.streaming.topics import contract, log_of, numbered, on_disk, publish
from tests.programs import ask

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from srtm.pipeline.runtime.server import Server

HERE = Place("local[2]")


class Cluster(NamedTuple):
    """A controller and two brokers."""

    url: str
    one: Running
    two: Running

    def options(self, topic: str, **more: str) -> dict[str, str]:
        return {"controller": self.url, "topic": topic, **more}

    def make(self, *names: str) -> None:
        """Disk topics at both brokers, once the controller knows."""
        for name in names:
            on_disk(self.one, name)
            on_disk(self.two, name)
            path = f"/lookup?topic={name}"
            wait_for(lambda path=path: len(ask(int(self.url.rpartition(":")[2]), path).get("producers", [])) == 2, 20)  # type: ignore[misc]

    def fill(self, topic: str, count: int, name: str = "x") -> list[bytes]:
        """Publish so many to each broker; all bodies."""
        ones = publish(self.one, numbered(f"{name}-one", count), topic)
        return ones + publish(self.two, numbered(f"{name}-two", count), topic)

    def logs(self, topic: str) -> list[bytes]:
        return log_of(self.one, topic) + log_of(self.two, topic)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with topics.cluster(tmp_path_factory.mktemp("brokers")) as (url, start):
        yield Cluster(url, start("one"), start("two"))


def in_process(where: str, **spec: dict[str, Any]) -> subprocess.Popen[str]:
    """Works of `streams` in a process group of their own."""
    command = [sys.executable, "-m", "tests.pipeline.streaming.streams", where, json.dumps(spec)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def jvm_of(driver: int) -> int:
    """Java among the children of a driver's Python."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(driver)}
    (found,) = [pid for pid, command in commands.items() if b"SparkSubmit" in command]
    return found


def group_members(group: int) -> list[int]:
    """Processes of a process group that run."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *_ = file.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state != "Z":
                found.append(int(file.parent.name))
    return found


def said_by(process: subprocess.Popen[str]) -> Any:
    try:
        said, log = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, log[-3000:]
    return json.loads(said)


def test_from_topic_to_topic_and_on_from_a_checkpoint(spark: SparkSession, cluster: Cluster, tmp_path: Path) -> None:
    contract(cluster.url, "in", r=100, b=1000)
    cluster.make("in", "out")
    published = cluster.fill("in", 150)
    source = cluster.options("in", maxRowsPerTrigger="100", maxRowsPerPartition="30")
    sink, checkpoint = cluster.options("out"), str(tmp_path / "checkpoint")
    assert relay(spark, source, sink, checkpoint) == [100, 100, 100]
    assert sorted(cluster.logs("out")) == sorted(published)
    published += cluster.fill("in", 10, "later")
    assert relay(spark, source, sink, checkpoint) == [20]
    assert sorted(cluster.logs("out")) == sorted(published)


def test_a_checkpoint_of_a_topic_that_was_deleted_and_created_again(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    """The new log has grown beyond the old one's end: without its id, the query would skip what is before."""
    cluster.make("again", "copy")
    old = cluster.fill("again", 20)
    source, sink = cluster.options("again"), cluster.options("copy")
    checkpoint = str(tmp_path / "checkpoint")
    assert relay(spark, source, sink, checkpoint) == [40]
    assert cluster.one.post("/topic/delete?topic=again")[0] == 200
    on_disk(cluster.one, "again")
    new = cluster.fill("again", 30, "new")
    replaced = "topic 'again' at broker 'one' was deleted and created again.* failOnDataLoss to false"
    with pytest.raises(LogReplaced, match=replaced), explained(HERE):
        relay(spark, source, sink, checkpoint)
    assert sum(relay(spark, {**source, "failOnDataLoss": "false"}, sink, checkpoint)) == 60
    assert sorted(cluster.logs("copy")) == sorted(old + new)


def test_a_table_of_what_is_there_for_any_job(spark: SparkSession, cluster: Cluster) -> None:
    cluster.make("table")
    published = cluster.fill("table", 50)
    frame = spark.read.format("srtm").options(**cluster.options("table")).load()
    rows = frame.orderBy("broker", "offset").collect()
    assert [bytes(row.body) for row in rows] == published
    assert [(row.broker, row.offset) for row in rows] == [(name, at) for name in ("one", "two") for at in range(50)]
    (found,) = profile(frame)
    assert (found.topic, found.messages) == ("table", 100)


def test_rows_name_their_publishers_and_keys_are_of_this_write(spark: SparkSession, cluster: Cluster) -> None:
    cluster.make("written")
    rows = [(f"sensor-{number % 3}", f'{{"n": {number}}}') for number in range(30)]
    frame = spark.createDataFrame(rows, "publisher string, body string").coalesce(1)
    frame.write.format("srtm").options(**cluster.options("written", keys="field")).mode("append").save()
    read = spark.read.format("srtm").options(**cluster.options("written")).load()
    found = sorted(unwrapped(read).collect(), key=lambda row: row.key.sequence)
    assert [(row.publisher, json.loads(row.body)["n"]) for row in found] == [
        (publisher, json.loads(body)["n"]) for publisher, body in rows
    ]
    assert [(row.key.batch, row.key.partition, row.key.sequence) for row in found] == [(0, 0, n) for n in range(30)]
    assert len({row.key.query for row in found}) == 1


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("'x' AS body", {"startingOffset": "latest"}, "did you mean startingOffsets"),
        ("'x' AS body", {"keys": "field"}, r"keys=field needs bodies that are JSON objects, not b'x'"),
        ("CAST(NULL AS STRING) AS body", {}, "row 0 of partition 0 has a null body: filter such rows out"),
        ("'' AS body", {}, "has an empty body"),
        ("1 AS body, 2 AS publisher", {}, "'body' must be binary or string, but is int; column 'publisher' must be"),
        ("'x' AS body, 'y' AS topic", {}, r"a message has no column 'topic': select"),
        ("'x' AS text", {}, "'body' must be binary or string, but is missing"),
    ],
)
def test_what_cannot_be_published(
    spark: SparkSession, cluster: Cluster, columns: str, options: dict[str, str], said: str
) -> None:
    written = spark.sql(f"SELECT {columns}").write.format("srtm").options(**cluster.options("refused", **options))
    with pytest.raises(InputError, match=said), explained(HERE):
        written.mode("append").save()


def test_what_cannot_be_read_or_overwritten(spark: SparkSession, cluster: Cluster) -> None:
    register(spark)  # again is harmless
    with pytest.raises(InputError, match="topic is missing"), explained(HERE):
        spark.readStream.format("srtm").load()
    cluster.make("trimmed")
    cluster.fill("trimmed", 10)
    cluster.one.post("/srtm/log/trim?topic=trimmed&before=5")
    begins = {"startingOffsets": '{"one": 0}'}
    frame = spark.read.format("srtm").options(**cluster.options("trimmed", **begins)).load()
    with pytest.raises(OffsetTrimmed, match="it begins at 5: set option failOnDataLoss to false"), explained(HERE):
        frame.collect()
    lossy = spark.read.format("srtm").options(**cluster.options("trimmed", failOnDataLoss="false", **begins)).load()
    assert lossy.count() == 15
    with pytest.raises(InputError, match=r"cannot be overwritten: write with mode\('append'\)"), explained(HERE):
        lossy.select("body").write.format("srtm").options(**cluster.options("trimmed")).mode("overwrite").save()


@pytest.mark.parametrize("killed", ["python", "jvm"])
def test_a_killed_driver_loses_and_doubles_nothing(
    spark: SparkSession, cluster: Cluster, tmp_path: Path, killed: str
) -> None:
    """It is killed when a batch was written and is not yet done, so that this batch is run once more.

    That both are killed at once is tried at JetStream (test_jetstream.py).
    """
    topic = f"kept-{killed}"
    cluster.make(topic)
    published = cluster.fill(topic, 200)
    source = cluster.options(topic, maxRowsPerTrigger="100")
    process = in_process("local[2]", keep={"source": source, "folder": str(tmp_path), "to_the_end": False})
    try:
        wait_for(lambda: (tmp_path / "written-2").exists() or process.poll() is not None)
        running = process.poll() is None
        if killed == "python":
            process.kill()
        else:
            os.kill(jvm_of(process.pid), signal.SIGKILL)
        process.communicate()
        wait_for(lambda: not group_members(process.pid), 60)  # the one does not go on without the other
    finally:
        for pid in group_members(process.pid):
            os.kill(pid, signal.SIGKILL)
    assert running
    published += cluster.fill(topic, 50, "later")
    keep(spark, source, str(tmp_path), to_the_end=True)  # another driver
    begun = Counter((tmp_path / "begun").read_text().split())
    assert begun["2"] == 2
    assert set(begun) == {str(number) for number in range(5)}
    rows = ds.dataset(tmp_path / "rows", format="parquet").to_table(["broker", "offset", "body"]).to_pylist()
    assert sorted(row["body"] for row in rows) == sorted(published)
    assert len({(row["broker"], row["offset"]) for row in rows}) == len(rows) == 500


def test_a_killed_executor_loses_nothing_and_what_is_double_has_the_same_key(
    cluster: Cluster, spark_cluster: SparkCluster, tmp_path: Path, spark: SparkSession
) -> None:
    cluster.make("slow", "relayed")
    published = cluster.fill("slow", 600, "x" * 1000)  # large enough for Spark not to collect many in a buffer
    addresses = {"brokers": f"{cluster.one.url},{cluster.two.url}"}  # partition 0 publishes to one, 1 to two
    source, sink = {**addresses, "topic": "slow"}, {**addresses, "topic": "relayed", "keys": "envelope"}
    spec: dict[str, Any] = {
        "digests": {"source": {**source, "maxRowsPerPartition": "150"}, "times": 3, "executors": 2},
        "relay": {"source": source, "sink": sink, "checkpoint": str(tmp_path / "checkpoint"), "slice_s": 0.7},
    }
    before = spark_cluster.executors_ever()
    process = in_process(spark_cluster.master, **spec)
    try:
        wait_for(lambda: (log_of(cluster.one, "relayed") and log_of(cluster.two, "relayed")) or process.poll())
        victim, *_ = spark_cluster.executors() or [0]
        running = process.poll() is None and victim != 0
        if running:
            os.kill(victim, signal.SIGKILL)
    finally:
        said = said_by(process)
    assert running
    assert spark_cluster.executors_ever() - before == 3
    first, *others = [[row[:4] for row in read] for read in said["digests"]]
    assert len(others) >= 2
    assert all(read == first for read in others)
    assert [row[:3] for row in first] == [[name, at, 150] for name in ("one", "two") for at in (0, 150, 300, 450)]
    readers = [{row[4] for row in rows} for rows in zip(*said["digests"], strict=True)]
    assert max(map(len, readers)) == 2  # the same range, on two executors
    assert said["relay"] == [1200]
    frame = spark.read.format("srtm").options(**cluster.options("relayed")).load()
    found = [(tuple(row.key), bytes(row.body)) for row in unwrapped(frame).collect()]
    assert len(found) > len(set(found))  # something was published twice
    assert len({key for key, _ in found}) == len(set(found)) == len(published)
    assert sorted(body for _, body in set(found)) == sorted(published)
    assert unwrapped(frame).dropDuplicates(["key"]).count() == len(published)


def test_through_a_connect_server(cluster: Cluster, connect_server: Server, tmp_path: Path) -> None:
    cluster.make("far", "away")
    published = cluster.fill("far", 100)
    source, sink = cluster.options("far", maxRowsPerTrigger="120"), cluster.options("away")
    checkpoint = str(tmp_path / "checkpoint")
    done = in_process(
        connect_server.url,
        digests={"source": {**source, "maxRowsPerPartition": "50"}, "times": 1},
        relay={"source": source, "sink": sink, "checkpoint": checkpoint},
    )
    said = said_by(done)
    assert [row[:3] for row in said["digests"][0]] == [[name, at, 50] for name in ("one", "two") for at in (0, 50)]
    assert said["relay"] == [120, 80]
    assert sorted(cluster.logs("away")) == sorted(published)
