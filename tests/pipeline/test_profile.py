from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest

from srtm.errors import TraceError
from srtm.model import profile as model
from srtm.pipeline.profile import TopicProfile, profile, profile_frame
from srtm.pipeline.traces import reading, stretches
from srtm.pipeline.traces.files import Files
from srtm.pipeline.traces.frames import Frame
from srtm.pipeline.traces.reading import opened
from srtm.pipeline.traces.topics import unnamed
from srtm.units import NS_PER_S
from srtm.workload import trace
from srtm.workload.publishers import Arrivals, Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, writing
from tests.pipeline.traces.test_scanning import Message, expected, table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORKLOADS = {
    "bursty": Workload((Population(200, 10.0, 10, "poisson", 20),), 60 * NS_PER_S, seed=1),
    "calm": Workload((Population(50, 10.0, 1, "periodic"),), 60 * NS_PER_S, seed=2, start_ns=1_800_000_000 * NS_PER_S),
}


def rows_of(name: str) -> list[Message]:
    workload = WORKLOADS[name]
    names, arrivals = [publisher.id for publisher in workload.publishers()], workload.arrivals()
    return [
        (name, names[sender], at)
        for sender, at in zip(arrivals.publisher_of.tolist(), arrivals.times_ns.tolist(), strict=True)
    ]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two topics in small row groups, so that bursts are cut."""
    monkeypatch.setattr(trace, "_ROW_GROUP", 10_000)
    for name, workload in WORKLOADS.items():
        with writing(tmp_path / f"{name}.parquet", ARRIVAL_SCHEMA, {}) as writer:
            rows = ArrivalWriter(writer, name, workload.publishers())
            arrivals = workload.arrivals()
            for part in np.array_split(np.arange(len(arrivals.times_ns)), 13):
                rows.write(Arrivals(arrivals.times_ns[part], arrivals.publisher_of[part]))
            rows.flush()
    return tmp_path


def test_files_and_frames_in_any_order_equal_the_model(
    spark: SparkSession, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = expected(rows_of("bursty") + rows_of("calm"))
    with opened(files, spark, ("publisher",)) as source:
        assert isinstance(source, Files)
    assert profile(files, spark) == lines
    shuffled = spark.read.parquet(str(files)).orderBy("publisher").repartition(5)
    with opened(shuffled, None, ("publisher",)) as source:
        assert isinstance(source, Files)  # staged
        assert all(Path(group.path).exists() for stretch in source.stretches for group in stretch.row_groups)
    assert not any(Path(group.path).exists() for stretch in source.stretches for group in stretch.row_groups)
    assert profile(shuffled) == lines
    monkeypatch.setattr(reading, "on_one_machine", lambda _: False)
    with opened(shuffled, None, ("publisher",)) as source:
        assert isinstance(source, Frame)  # sorted by Spark
    assert profile(shuffled) == lines
    rows = [row.asDict(recursive=True) for row in profile_frame(shuffled).collect()]
    assert [(row["r"], row["b"]) for row in rows] == [(line.bucket.r, line.bucket.b) for line in lines if line.bucket]
    for row, line in zip(rows, lines, strict=True):
        assert (row["topic"], row["publishers"], row["rate"]) == (line.topic, line.publishers, line.rate_mps)
        assert {each["window_ns"]: each["messages"] for each in row["envelope"]} == line.envelope
        assert {each["size"]: each["count"] for each in row["batches"]} == line.batches


def test_options_reach_the_model(spark: SparkSession, files: Path) -> None:
    options = {"headroom": "1.5", "quantile": "0.999"}
    known = model.profile(WORKLOADS["bursty"].arrivals().times_ns, **options)
    assert [line.bucket for line in profile(files / "bursty.parquet", spark, **options)] == [known.bucket]


def test_many_topics_of_every_kind_at_once(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal times, gaps of days, one message, topics that straddle partitions; one job for all of them."""
    rng = random.Random(7)
    topics = {}
    for number in range(60):
        gaps = [
            rng.choice([0, 0, 1, 1_000, 10**6, 10**9, 3 * 86_400 * 10**9]) for _ in range(rng.choice([1, 2, 40, 400]))
        ]
        topics[f"t{number:02}"] = np.cumsum(gaps)
    rows = [(name, f"p{int(at) % 3}", int(at)) for name, times in topics.items() for at in times]
    rng.shuffle(rows)
    frame = spark.createDataFrame(rows, "topic string, publisher string, arrival_ns long").repartition(7)
    assert profile(frame) == expected(rows)
    monkeypatch.setattr(reading, "on_one_machine", lambda _: False)
    assert profile(frame) == expected(rows)


def test_brokers_files_that_overlap_are_merged_and_not_shuffled(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What several brokers record: every file sorted, all over the same time, topics mixed."""
    monkeypatch.setattr(stretches, "_SMALL", 0)
    rows = rows_of("bursty")
    rows = sorted(rows + [("other", name, at) for _, name, at in rows[::3]], key=lambda row: row[2])
    for broker in range(3):
        table = table_of(rows[broker::3])
        pq.write_table(table, tmp_path / f"{broker}.parquet", row_group_size=1_000)
    with opened(tmp_path, spark, ("publisher",)) as source:
        assert isinstance(source, Files)
        assert len(source.stretches) == 2
    assert profile(tmp_path, spark) == expected(rows)


def test_files_without_statistics_take_the_general_road(spark: SparkSession, tmp_path: Path) -> None:
    rows = rows_of("bursty")[:5_000]
    pq.write_table(table_of(rows[::-1]), tmp_path / "t.parquet", write_statistics=False)
    with opened(tmp_path, spark, ("publisher",)) as source:
        assert isinstance(source, Frame)
    assert profile(tmp_path, spark) == expected(rows)


def test_an_iceberg_table_is_refused_by_its_folder_and_read_as_a_frame(spark: SparkSession, tmp_path: Path) -> None:
    """Its folder still has a file that the table no longer uses; Spark's catalogue says which ones it does."""
    rows = rows_of("bursty")[:2_000]
    (data := tmp_path / "data").mkdir()
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "v1.metadata.json").write_text("{}")
    pq.write_table(table_of(rows[:500]), data / "replaced.parquet")
    pq.write_table(table_of(rows), data / "current.parquet")
    with pytest.raises(TraceError, match=r"Iceberg table .* pass the DataFrame that Spark reads from it"):
        profile(tmp_path, spark)
    table = spark.read.parquet(str(data / "current.parquet"))
    assert profile(table) == profile(table, spark) == expected(rows)
    assert [row["topic"] for row in profile_frame(table).collect()] == ["bursty"]


def test_an_address_is_read_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    rows = rows_of("calm")[:100]
    pq.write_table(table_of(rows), tmp_path / "t.parquet")
    assert profile(tmp_path.as_uri(), spark) == expected(rows)


def test_a_bad_topic_does_not_take_the_others_with_it(spark: SparkSession) -> None:
    rows = [("good", "p", 1), ("good", "p", 2), ("bad", "p", None), ("bad", "p", 5), (None, "p", 3)]
    lines = profile(spark.createDataFrame(rows, "topic string, publisher string, arrival_ns long"))
    assert [line.error for line in lines] == [
        unnamed(1),
        "1 of 2 messages have no arrival_ns",
        None,
    ]
    assert lines[2:] == expected([("good", "p", 1), ("good", "p", 2)])


def test_null_and_empty_topics_are_one_error_and_no_message_is_lost(spark: SparkSession, tmp_path: Path) -> None:
    """A topic needs a name: from a DataFrame and from files, the nameless line counts every message without one."""
    named = [("t", "p", 1), ("t", "p", 2)]
    empty = [("", "p", 3), ("", "p", 4)]
    lines = profile(
        spark.createDataFrame([*named, *empty, (None, "p", 5)], "topic string, publisher string, arrival_ns long")
    )
    assert lines == [TopicProfile("", 3, error=unnamed(3)), *expected(named)]
    assert "give them a topic" in str(lines[0].error)
    pq.write_table(table_of([*named, *empty]), tmp_path / "t.parquet")
    with opened(tmp_path, spark, ("publisher",)) as source:
        assert isinstance(source, Files)
    assert profile(tmp_path, spark) == [TopicProfile("", 2, error=unnamed(2)), *expected(named)]


def test_times_out_of_range_are_their_topics_error(spark: SparkSession) -> None:
    rows = [("good", "p", 1), ("absurd", "p", 2**63 - 1)]
    lines = profile(spark.createDataFrame(rows, "topic string, publisher string, arrival_ns long"))
    assert [line.topic for line in lines if line.error] == ["absurd"]
    assert "check the unit" in str(lines[0].error)


def test_what_is_no_trace_is_named(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.createDataFrame([("t", 1)], "topic string, arrival_ns int")
    with pytest.raises(
        TraceError, match="'publisher' must be string, but is missing; column 'arrival_ns' must be bigint, but is int"
    ):
        profile(frame)
    with pytest.raises(TraceError, match="no trace at"):
        profile(tmp_path / "nowhere", spark)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(TraceError, match=r"cut\.parquet is not a readable Parquet file"):
        profile(tmp_path, spark)
    with pytest.raises(TraceError, match="holds no messages"):
        profile(spark.createDataFrame([], "topic string, publisher string, arrival_ns long"))
    with pytest.raises(TraceError, match="needs a Spark session"):
        profile(tmp_path)
