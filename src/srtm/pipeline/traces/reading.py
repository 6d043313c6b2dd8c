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
from typing import TYPE_CHECKING, Any

from srtm.errors import TraceError
from srtm.pipeline.runtime.cores import parallelism
from srtm.pipeline.runtime.failures import first_line
from srtm.pipeline.traces.files import Files, frame_of
from srtm.pipeline.traces.frames import Frame, checked_columns, sorted_frame
from srtm.pipeline.traces.staging import on_one_machine, staged
from srtm.pipeline.traces.stretches import cut, row_groups_of
from srtm.workload.trace import RECORDED_SCHEMA, partitions_of
from srtm.workload.uris import absolute, footers_of, only_spark_opens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    Trace = DataFrame | str | Path


@contextmanager
def opened(
    trace: Trace,
    spark: SparkSession | None,
    columns: Sequence[str],
    key: str = "arrival_ns",
    grain_ns: int = 1,
    *,
    joined: bool = False,
) -> Iterator[Files | Frame]:
    """The trace by the fastest way it allows: a DataFrame, a path or a URI (`workload.uris`).

    Optional columns are null or missing if the trace lacks them. Work that needs all rows of, say, a minute together
    asks for that grain, and gets batches no smaller. `joined` is for jobs that join the stretches of each topic.
    """
    wanted = [name for name in RECORDED_SCHEMA.names if name in {"topic", key, *columns}]
    trace = resolved(trace, spark)
    if isinstance(trace, str):
        if spark is None:
            raise TraceError(f"reading {trace} needs a Spark session: pass one, or a DataFrame")
        footers = footers_of(trace)
        if not any(footer.num_rows for footer in footers.values()):
            raise TraceError(f"{trace} holds no messages", path=trace)
        if files := _files(footers, spark, wanted, key, grain_ns, joined=joined):
            yield files
            return
        trace = frame_of(spark, footers, wanted)
    else:
        wanted = checked_columns(trace, wanted)
        if on_one_machine(trace.sparkSession):
            with staged(trace, wanted, key) as folder:
                footers = footers_of(folder) if folder else {}
                if footers and (files := _files(footers, trace.sparkSession, wanted, key, grain_ns, joined=joined)):
                    yield files
                    return
    with sorted_frame(trace, wanted, key, grain_ns) as frame:
        yield frame


def resolved(trace: Trace, spark: SparkSession | None) -> DataFrame | str:
    """A DataFrame, or a string by which driver and workers open the trace themselves."""
    if not isinstance(trace, str | Path):
        return trace
    if not only_spark_opens(trace):
        return absolute(trace)
    if spark is None:
        raise TraceError(f"reading {trace} needs a Spark session: pass one, or a DataFrame")
    try:
        return spark.read.parquet(str(trace))
    except Exception as error:  # of Spark's, Java's or py4j's
        raise TraceError(f"Spark cannot read {trace}: {first_line(str(error))}", path=str(trace)) from None


def columns_of(trace: Trace, spark: SparkSession | None) -> set[str]:
    """The columns that all files of a trace have."""
    found = resolved(trace, spark)
    if not isinstance(found, str):
        return set(found.columns)
    footers = footers_of(found)
    return set.intersection(*({*footer.schema.names, *partitions_of(file)} for file, footer in footers.items()))


def _files(
    footers: Mapping[str, Any], spark: SparkSession, wanted: list[str], key: str, grain_ns: int, *, joined: bool
) -> Files | None:
    """The trace for tasks to read themselves; None if footers tell too little or row groups overlap too much."""
    row_groups = row_groups_of(footers, wanted, key)
    stretches = row_groups and cut(row_groups, parallelism(spark), grain_ns, joined=joined)
    return Files(spark, key, grain_ns, stretches) if stretches else None
