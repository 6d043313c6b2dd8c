"""The staged road without Spark: rows in any order, sorted and written by tasks, are read as files and then removed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from srtm.model.defaults import HEADROOM, QUANTILE
from srtm.pipeline.profile import COLUMNS, profile_source
from srtm.pipeline.traces import staging
from srtm.pipeline.traces.files import Files
from srtm.pipeline.traces.reading import opened
from tests.pipeline.local import LocalSpark, Rows
from tests.pipeline.traces.test_scanning import Message, expected, table_of

if TYPE_CHECKING:
    import pyarrow as pa


class Unsorted:
    """As much of a DataFrame as the staged road asks for."""

    def __init__(self, partitions: list[list[pa.RecordBatch]]) -> None:
        self._partitions = partitions
        self.sparkSession = LocalSpark(2)
        self.sparkSession.sparkContext.master = "local[2]"
        self.dtypes = [("topic", "string"), ("publisher", "string"), ("arrival_ns", "bigint")]

    def select(self, columns: list[str]) -> Rows:
        return Rows([[batch.select(columns) for batch in batches] for batches in self._partitions])


class RunTwice(Rows):
    """Partitions whose tasks Spark runs twice, as after a failure: only what the second run says counts."""

    def mapInArrow(self, task: Any, fields: str) -> Rows:
        super().mapInArrow(task, fields)
        return super().mapInArrow(task, fields)


def messages() -> list[Message]:
    rng = random.Random(3)
    return [(f"t{rng.randrange(9)}", f"p{rng.randrange(3)}", rng.randrange(10**11)) for _ in range(500)]


def partitions(rows: list[Message]) -> list[list[pa.RecordBatch]]:
    return [*(table_of(rows[part::4]).to_batches(max_chunksize=17) for part in range(4)), []]


def test_rows_in_any_order_are_written_sorted_read_and_removed() -> None:
    rows = messages()
    frame = cast("Any", Unsorted(partitions(rows)))
    with patch.object(staging, "_AT_ONCE", 60), opened(frame, None, COLUMNS) as source:
        assert isinstance(source, Files)
        paths = {group.path for stretch in source.stretches for group in stretch.row_groups}
        assert len(paths) == 8
        assert profile_source(source, HEADROOM, QUANTILE) == expected(rows)
    assert not any(Path(path).exists() for path in paths)


def test_what_a_task_wrote_in_a_run_that_does_not_count_is_not_read() -> None:
    rows = messages()
    frame = Unsorted([])
    with (
        patch.object(frame, "select", lambda _: RunTwice(partitions(rows))),
        opened(cast("Any", frame), None, COLUMNS) as source,
    ):
        assert profile_source(source, HEADROOM, QUANTILE) == expected(rows)
