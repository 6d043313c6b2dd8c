from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError, PipelineError
from srtm.pipeline.importing import output
from srtm.pipeline.profile import COLUMNS, profile
from srtm.pipeline.traces.stretches import row_groups_of
from srtm.workload.trace import ARRIVAL_SCHEMA
from srtm.workload.uris import footers_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 20)), max_size=60),
    st.integers(1, 9),
    st.integers(1, 12),
    st.booleans(),
)
def test_row_groups_hold_every_row_once_and_in_order(
    rows: list[tuple[str, int]], batch: int, group: int, sharing: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "ROW_GROUP", group)
        patch.setattr(output, "_SMALL_TOPIC", 4)
        ordered = [{"topic": topic, "publisher": "p", "group": None, "arrival_ns": at} for topic, at in sorted(rows)]
        batches = pa.Table.from_pylist(ordered, ARRIVAL_SCHEMA).to_batches(max_chunksize=batch)
        groups = [table.to_pylist() for table in output.row_groups(batches, ARRIVAL_SCHEMA, sharing=sharing)]
    assert Counter((row["topic"], row["arrival_ns"]) for found in groups for row in found) == Counter(rows)
    last: dict[str, int] = {}
    for found in groups:
        assert all(one["arrival_ns"] <= other["arrival_ns"] for one, other in pairwise(found))
        assert 0 < len(found) < group + max(batch, 4)
        assert sharing or len({row["topic"] for row in found}) == 1
        for row in found:
            assert row["arrival_ns"] >= last.get(row["topic"], 0)
            last[row["topic"]] = row["arrival_ns"]


def test_a_topic_larger_than_a_task_and_many_smaller_than_a_row_group(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_FILE", 1_000)
    frame = spark.range(6_000).selectExpr(
        "if(id < 4000, 'big', concat('t', id % 50)) as topic",
        "concat('p', id % 7) as publisher",
        "cast(null as string) as `group`",
        "(id * 7919) % 6000 as arrival_ns",
    )
    own, shared = tmp_path / "own", tmp_path / "shared"
    assert output.write_trace(frame, own, ARRIVAL_SCHEMA, messages=6_000, topics=51).files == 6
    groups = row_groups_of(footers_of(own), COLUMNS, "arrival_ns") or []
    big = [group.span for group in groups if group.topic == "big"]
    assert len(big) >= 4  # several tasks, none of which overlap
    assert all(before.last_ns < after.first_ns for before, after in pairwise(big))
    monkeypatch.setattr(output, "MANY_TOPICS", 50)
    output.write_trace(frame, shared, ARRIVAL_SCHEMA, messages=6_000, topics=51)
    groups = row_groups_of(footers_of(shared), COLUMNS, "arrival_ns") or []
    assert {group.topic for group in groups} == {"big", None}
    footers = [pq.read_metadata(file) for file in shared.iterdir()]
    assert sum(footer.num_row_groups for footer in footers) <= 7
    assert all(footer.row_group(0).sorting_columns[0].column_index == 3 for footer in footers)
    assert profile(shared, spark) == profile(own, spark) == profile(frame)


def test_rows_that_change_on_the_way_are_noticed(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.sql("select 't' as topic, 'p' as publisher, cast(null as string) as `group`, 1L as arrival_ns")
    with pytest.raises(PipelineError, match="Spark wrote 1 of 2 messages: the input changed"):
        output.write_trace(frame, tmp_path / "x", ARRIVAL_SCHEMA, messages=2, topics=1)
    with pytest.raises(InputError, match="too many for one file: name a folder"):
        output.write_trace(frame, tmp_path / "x.parquet", ARRIVAL_SCHEMA, messages=10**9, topics=1)
    assert list(tmp_path.iterdir()) == []
