from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pyarrow as pa
import pytest

from srtm.pipeline.traces import tasks
from srtm.pipeline.traces.tasks import spread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from srtm.pipeline.traces.batches import Batches


@pytest.mark.parametrize("small", [0, 2**20])
def test_every_task_gets_its_own_part(small: int, spark: SparkSession) -> None:
    """Each part is alone in its partition, and results are in order, whichever way parts travel."""
    from pyspark import TaskContext

    def work(part: tuple[str, int]) -> Batches:
        context = TaskContext.get()
        assert context is not None
        yield pa.record_batch([pa.array([part[0]]), pa.array([context.partitionId()])], ["name", "task"])

    parts = [(f"part {number}", number) for number in range(5)]
    with patch.object(tasks, "_SMALL", small):
        done = spread(spark, parts, work, "name string, task long").toArrow()
    assert done["name"].to_pylist() == [name for name, _ in parts]
    assert done["task"].to_pylist() == list(range(5))
