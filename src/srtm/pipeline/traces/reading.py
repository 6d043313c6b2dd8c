"""A trace as stretches of time, each read in order by one task: where every job over traces starts.

A job's work is a function over the batches of one stretch. In every batch, and from batch to batch, the rows of a topic
come in order of the key (a column of times). Rows of the same topic and instant (or, if asked for, of the same grain of
time) are never separated, and strings are dictionaries. The input decides where batches come from: `Files`, which tasks
read themselves, also from DataFrames that are written to files first (`traces.staging`), or a `Frame`, which Spark
sorts.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from srtm.errors import TraceError
from srtm.pipeline.runtime.cores import parallelism
from srtm.pipeline.traces.files import Files
from srtm.pipeline.traces.frames import Frame, check_columns, sorted_frame
from srtm.pipeline.traces.staging import on_one_machine, staged
from srtm.pipeline.traces.stretches import cut, row_groups_of
from srtm.workload.trace import RECORDED_SCHEMA, files_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    Trace = DataFrame | str | Path


@contextmanager
def opened(
    trace: Trace, spark: SparkSession | None, columns: Sequence[str], key: str = "arrival_ns", grain_ns: int = 1
) -> Iterator[Files | Frame]:
    """The trace by the fastest way it allows: a DataFrame, a path, or a URL that Spark reads.

    Work that needs all rows of, say, a minute together asks for that grain, and gets batches no smaller.
    """
    wanted = [name for name in RECORDED_SCHEMA.names if name in {"topic", key, *columns}]
    if not isinstance(trace, str | Path):
        check_columns(trace, wanted)
        if on_one_machine(trace.sparkSession):
            with staged(trace, wanted, key) as folder:
                files = folder and _files(folder, trace.sparkSession, wanted, key, grain_ns)
                if files:
                    yield files
                    return
        with sorted_frame(trace, wanted, key, grain_ns) as frame:
            yield frame
        return
    if spark is None:
        raise TraceError(f"reading {trace} needs a Spark session: pass one, or a DataFrame")
    if "://" in str(trace):
        rows = spark.read.parquet(str(trace))
    else:
        path = Path(trace).absolute()  # workers may run in another folder
        files = _files(path, spark, wanted, key, grain_ns)
        if files:
            yield files
            return
        rows = spark.read.parquet(*map(str, files_of(path)))
    check_columns(rows, wanted)
    with sorted_frame(rows, wanted, key, grain_ns) as frame:
        yield frame


def _files(path: Path, spark: SparkSession, wanted: list[str], key: str, grain_ns: int) -> Files | None:
    """The trace for tasks to read themselves; None if footers tell too little or row groups overlap too much."""
    row_groups = row_groups_of(path, wanted, key)
    stretches = row_groups and cut(row_groups, parallelism(spark), grain_ns)
    return Files(spark, key, grain_ns, stretches) if stretches else None
