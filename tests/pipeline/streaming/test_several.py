"""Several topics in one query: a list, or a pattern; each topic is read as if it were alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from srtm.errors import InputError, LogReplaced
from srtm.pipeline.streaming.format import register
from srtm.pipeline.streaming.settings import read_settings
from srtm.pipeline.streaming.source import BatchReader, StreamReader
from tests.broker.running import Running
from tests.pipeline.runtime.standalone import wait_for
from tests.pipeline.streaming.topics import (
    Start,
    between,
    bodies,
    cluster,
    contract,
    numbered,
    on_disk,
    plain,
    publish,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def options(*brokers: Running, **more: Any) -> Any:
    return read_settings({"brokers": ",".join(broker.url for broker in brokers), "timeout": "5s", **more})


def two_topics(start: Start) -> tuple[Running, Running]:
    one, two = (on_disk(on_disk(start(name), "a"), "b") for name in ("one", "two"))
    publish(one, numbered("a1", 30), "a")
    publish(two, numbered("a2", 20), "a")
    publish(one, numbered("b1", 10), "b")
    return one, two


def test_every_topic_has_offsets_of_its_own(start: Start) -> None:
    one, two = two_topics(start)
    reader = StreamReader(options(one, two, topic="a, b", maxRowsPerPartition="12"))
    begin = reader.initialOffset()
    assert plain(begin) == {"a/one": 0, "a/two": 0, "b/one": 0, "b/two": 0}
    end = reader.latestOffset(begin, ReadAllAvailable())
    assert plain(end) == {"a/one": 30, "a/two": 20, "b/one": 10, "b/two": 0}
    rows = [row for part in reader.partitions(begin, end) for batch in reader.read(part) for row in batch.to_pylist()]
    for topic in "ab":
        alone = BatchReader(options(one, two, topic=topic, maxRowsPerPartition="12"))
        assert [row for row in rows if row["topic"] == topic] == [
            row for part in alone.partitions() for batch in alone.read(part) for row in batch.to_pylist()
        ]
    half = reader.latestOffset(begin, ReadMaxRows(30))  # of 60, in proportion
    assert plain(half) == {"a/one": 15, "a/two": 10, "b/one": 5, "b/two": 0}
    first, rest = between(reader, begin, half), between(reader, half, end)
    assert sorted(first + rest) == sorted(row["body"] for row in rows)
    again = StreamReader(options(one, two, topic="a,b", maxRowsPerPartition="12"))
    assert between(again, half, end) == rest


def test_a_table_of_several_topics_between_offsets(start: Start) -> None:
    one, two = two_topics(start)
    given = {"startingOffsets": '{"a/one": 25}', "endingOffsets": '{"a/one": 28, "b/one": 2}'}
    reader = BatchReader(options(one, two, topic="b,a", **given))
    assert bodies(reader, reader.partitions()) == numbered("a1", 30)[25:28] + numbered("b1", 2)


def test_a_topic_created_again_is_named_and_the_others_are_not(start: Start) -> None:
    one, two = two_topics(start)
    reader = StreamReader(options(one, two, topic="a,b"))
    begin = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert one.post("/topic/delete?topic=b")[0] == 200
    on_disk(one, "b")
    with pytest.raises(LogReplaced, match="topic 'b' at broker 'one' was deleted and created again"):
        reader.latestOffset(begin, ReadAllAvailable())


def test_topics_of_a_pattern_join_while_the_query_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cluster(tmp_path) as (url, start):
        one = start("one")
        for topic, r in (("car.a", 100), ("car.b", 200)):
            contract(url, topic, r, 10)
            publish(on_disk(one, topic), numbered(topic, 5), topic)
        on_disk(one, "bus")
        reader = StreamReader(read_settings({"controller": url, "topicPattern": r"car\..", "timeout": "5s"}))
        wait_for(lambda: plain(reader.initialOffset()) == {"car.a/one": 0, "car.b/one": 0}, 30)
        begin = reader.initialOffset()
        assert reader.getDefaultReadLimit().max_rows == 20 + 10 * 300  # type: ignore[attr-defined]
        end = reader.latestOffset(begin, ReadAllAvailable())
        assert between(reader, begin, end) == numbered("car.a", 5) + numbered("car.b", 5)
        publish(on_disk(one, "car.c"), numbered("car.c", 5), "car.c")
        assert one.post("/topic/create?topic=car.m")[0] == 200  # in memory
        with caplog.at_level(logging.WARNING):
            wait_for(lambda: "car.c/one" in reader.latestOffset(end, ReadAllAvailable()), 30)
            wait_for(lambda: reader.latestOffset(end, ReadAllAvailable()) and caplog.records, 30)
            joined = reader.latestOffset(end, ReadAllAvailable())
            assert plain(joined) == {"car.a/one": 5, "car.b/one": 5, "car.c/one": 0}
            last = reader.latestOffset(joined, ReadAllAvailable())
        assert between(reader, joined, last) == numbered("car.c", 5)
        (said,) = {record.getMessage() for record in caplog.records}
        assert said.startswith("topic 'car.m' at broker 'one' is in memory: ")
        assert said.endswith("; leaving it out")


def test_a_pattern_at_brokers(start: Start) -> None:
    one, two = two_topics(start)
    on_disk(two, "other")
    reader = BatchReader(options(one, two, topicPattern="[ab]"))
    assert sorted(bodies(reader, reader.partitions())) == sorted(
        numbered("a1", 30) + numbered("a2", 20) + numbered("b1", 10)
    )


def test_a_listed_topic_that_nobody_has_is_refused(start: Start) -> None:
    one = on_disk(start("one"), "a")
    with pytest.raises(InputError, match="no broker has topic 'c'"):
        StreamReader(options(one, topic="a,c")).initialOffset()


def test_offsets_of_a_query_of_one_topic_are_refused(start: Start) -> None:
    one, two = two_topics(start)
    with pytest.raises(InputError, match="'one' is an offset of a query of one topic"):
        StreamReader(options(one, two, topic="a,b")).latestOffset({"one": 3}, ReadAllAvailable())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"topic": "a,,b"}, "topic = 'a,,b': a topic name is"),
        ({"topic": "a,b,a"}, "a topic is named twice"),
        ({"topic": "a", "topicPattern": "b"}, "topic and topicPattern are both set"),
        ({"topicPattern": "("}, r"topicPattern = '\(': not a regular expression"),
        ({"topicPattern": "a", "engine": "nats://h"}, "topicPattern needs a controller"),
    ],
)
def test_bad_lists_and_patterns_are_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_settings(given)


def test_spark_reads_several_topics_each_message_once(spark: SparkSession, start: Start, tmp_path: Path) -> None:
    one, two = two_topics(start)
    register(spark)
    given = {"topic": "a,b", "brokers": f"{one.url},{two.url}", "maxRowsPerTrigger": "25"}

    def run() -> list[bytes]:
        rows = spark.readStream.format("srtm").options(**given).load().select("topic", "body")
        stream = rows.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = stream.option("path", str(tmp_path / "rows")).trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        return sorted(spark.read.parquet(str(tmp_path / "rows")).toArrow()["body"].to_pylist())

    known = numbered("a1", 30) + numbered("a2", 20) + numbered("b1", 10)
    assert run() == sorted(known)
    known += publish(two, numbered("b2", 15), "b")
    assert run() == sorted(known)
    assert {row["topic"] for row in spark.read.format("srtm").options(**given).load().toArrow().to_pylist()} == {
        "a",
        "b",
    }
