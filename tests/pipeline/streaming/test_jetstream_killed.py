"""The source at three JetStream servers, one of which is killed; and a driver that is killed, on real Spark."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow.dataset as ds
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from srtm.pipeline.streaming import jetstream
from srtm.pipeline.streaming.settings import Settings
from srtm.pipeline.streaming.source import OffsetRange, StreamReader
from tests.broker.running import Running
from tests.engines import NatsCluster, NatsServer
from tests.pipeline.runtime.standalone import wait_for
from tests.pipeline.streaming.streams import digests, keep
from tests.pipeline.streaming.streams_of_nats import at_nats
from tests.pipeline.streaming.test_streaming import in_process
from tests.pipeline.streaming.topics import brokers, numbered, plain, publish

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.needs("nats-server")


class Three(NamedTuple):
    """Three servers that keep three replicas, and a broker before them."""

    servers: NatsCluster
    broker: Running


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    folder = tmp_path_factory.mktemp("three")
    with NatsCluster(folder) as servers, brokers(folder, engine=servers.url) as start:
        yield Three(servers, start("one"))


def leader_of(three: Three, stream: str) -> NatsServer:
    name = at_nats(three.servers.url, lambda js: js.stream_info(stream)).cluster.leader
    return next(server for server in three.servers.servers if server.name == name)


def test_a_node_of_three_is_killed_in_the_middle_of_a_read(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetstream, "_ROWS", 50)
    x = publish(three.broker, numbered("x", 1000), "read")
    reader = StreamReader(Settings("read", controller="", engine=three.servers.url, timeout_s=60.0))
    whole = reader.latestOffset({"read": 1}, ReadAllAvailable())
    assert plain(whole) == {"read": 1001}
    leader = leader_of(three, "read")
    for victim in sorted(three.servers.servers, key=lambda server: server is leader):  # whose death costs an election
        begun = reader.read(OffsetRange("read", "read", three.servers.url, 1, 1001, whole["read"]["log"]))
        first = list(islice(begun, 3))
        victim.kill()
        assert [body for batch in [*first, *begun] for body in batch.column("body").to_pylist()] == x
        at = {"read": {"offset": 901, "log": whole["read"]["log"]}}
        assert reader.latestOffset(at, ReadAllAvailable()) in (at, whole)  # the same stream, whoever leads it
        victim.start()


def test_two_tasks_of_spark_read_the_same_three_times_while_a_node_is_killed(spark: SparkSession, three: Three) -> None:
    publish(three.broker, numbered("x", 600), "digested")
    source = {"engine": three.servers.url, "topic": "digested", "maxRowsPerPartition": "150"}
    victim = leader_of(three, "digested")
    reads = digests(spark, source, times=1)
    with ThreadPoolExecutor() as pool:
        disturbed = pool.submit(digests, spark, source, times=1)
        victim.kill()
        reads += disturbed.result()
        reads += digests(spark, source, times=1)
        victim.start()
    codes = [[row[:4] for row in read] for read in reads]
    assert codes[0] == codes[1] == codes[2]
    assert [row[:3] for row in codes[0]] == [["one", at, 150] for at in (1, 151, 301, 451)]


def test_a_killed_driver_loses_and_doubles_nothing(spark: SparkSession, three: Three, tmp_path: Path) -> None:
    """It is killed when a batch was written and is not yet done, so that this batch is run once more."""
    published = publish(three.broker, numbered("x", 300), "kept")
    source = {"engine": three.servers.url, "topic": "kept", "maxRowsPerTrigger": "100"}
    process = in_process("local[2]", keep={"source": source, "folder": str(tmp_path), "to_the_end": False})
    try:
        wait_for(lambda: (tmp_path / "written-1").exists() or process.poll() is not None)
        running = process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert running
    published += publish(three.broker, numbered("later", 100), "kept")
    keep(spark, source, str(tmp_path), to_the_end=True)  # another driver
    begun = Counter((tmp_path / "begun").read_text().split())
    assert begun["1"] == 2
    assert set(begun) == {str(number) for number in range(4)}
    found = ds.dataset(tmp_path / "rows", format="parquet").to_table(["offset", "body"]).to_pylist()
    assert sorted((row["offset"], row["body"]) for row in found) == list(enumerate(published, 1))
