from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from srtm.pipeline.traces import gathering
from srtm.pipeline.traces.gathering import COLUMNS, over_topics
from srtm.pipeline.traces.reading import opened
from srtm.workload.trace import load
from tests.pipeline.local import LocalSpark

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession

    from srtm.workload.gathered import TopicArrivals

GROUPS = {"p": "g", "q": "g", "r": None}
rows = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from("pqr"), st.integers(0, 50)).map(
        lambda row: (row[0], row[1], GROUPS[row[1]], row[2])
    ),
    min_size=1,
    max_size=60,
)


def plain(topic: TopicArrivals) -> tuple[Any, ...]:
    times, senders = topic.arrivals
    return topic.publishers, times.tolist(), senders.tolist()


def written(path: Path, messages: list[tuple[str, str, str | None, int]], row_group: int) -> None:
    names = ["topic", "publisher", "group", "arrival_ns"]
    kinds = [pa.string(), pa.string(), pa.string(), pa.int64()]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*messages, strict=True), kinds, strict=True)]
    pq.write_table(pa.table(columns, names), path, row_group_size=row_group)


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(1, 20), st.integers(1, 3))
def test_every_topic_comes_whole_to_one_task(
    messages: list[tuple[str, str, str | None, int]], row_group: int, files: int
) -> None:
    with TemporaryDirectory() as folder:
        for number in range(files):
            if mine := messages[number::files]:
                written(Path(folder) / f"{number}.parquet", mine, row_group)
        spark: Any = LocalSpark(2)
        with opened(folder, spark, COLUMNS) as source:
            topics, _ = source.topics()
            found = dict(over_topics(source, topics, plain))
            some = np.arange(len(topics)) % 2 == 0
            half = dict(over_topics(source, topics.only(some), plain))
        expected = {topic.topic: plain(topic) for topic in load(folder)}
    assert found == expected
    assert half == {name: expected[name] for number, name in enumerate(sorted(expected)) if some[number]}


def test_lots_are_about_equally_large() -> None:
    messages = np.array([10_000] * 100)
    lots = gathering._lots(messages, 2)
    assert np.bincount(lots).max() <= 7
    assert gathering._lots(np.array([3, 4]), 2).tolist() == [0, 0]
    giant = gathering._lots(np.array([10, 10**9, 10]), 2)
    assert giant[0] == giant[1] != giant[2]


def test_on_spark_as_here(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_SMALLEST", 10)
    rng = np.random.default_rng(1)
    messages = [
        (f"t{rng.integers(5)}", f"p{sender}", "g" if sender % 2 else None, int(rng.integers(1000)))
        for sender in rng.integers(0, 20, 500).tolist()
    ]
    written(tmp_path / "t.parquet", messages, 50)
    expected = {topic.topic: plain(topic) for topic in load(tmp_path)}
    frame = spark.read.parquet(str(tmp_path / "t.parquet")).repartition(3)
    for trace in (tmp_path, frame):
        with opened(trace, spark, COLUMNS) as source:
            topics, _ = source.topics()
            assert dict(over_topics(source, topics, plain)) == expected
