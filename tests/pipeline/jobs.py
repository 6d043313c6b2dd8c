"""Every Spark job of the pipeline, run on any kind of Spark; what the tests of clusters and servers run in a process.

`python -m tests.pipeline.jobs WHERE TRACE [SLOWLY]` prints a JSON object: by name of the job, what it said. With a
folder SLOWLY, two jobs that take a DataFrame run once more, on rows that come slowly, and every task that begins
to read leaves a file there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline
from srtm.pipeline.conformance import conformance
from srtm.pipeline.groups import groups
from srtm.pipeline.penalty import penalty
from srtm.pipeline.plan import plan
from srtm.pipeline.profile import profile
from srtm.pipeline.session import spark_session
from srtm.sim.simulate import SimulatedBroker
from tests.pipeline.runtime.standalone import OPTIONS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

CONTRACT = Timeline(TokenBucket.of(2_000, 100))
BROKERS = [SimulatedBroker.like("paper-testbed", name) for name in ("one", "two")]
OF_PATHS: dict[str, Callable[[Path, SparkSession], object]] = {
    "profile of files": profile,
    "groups of files": groups,
    "penalty of files": lambda path, spark: penalty(path, CONTRACT, spark),
    "conformance of files": lambda path, spark: conformance(path, CONTRACT, spark),
    "plan of files": lambda path, spark: plan(path, spark, BROKERS, policies=["srtm"]),
}
OF_FRAMES: dict[str, Callable[[DataFrame], object]] = {
    "profile of rows": profile,
    "groups of rows": groups,
    "penalty of rows": lambda frame: penalty(frame, CONTRACT),
    "conformance of rows": lambda frame: conformance(frame, CONTRACT),
}
SLOWLY = ("profile of rows", "conformance of rows")
SLICES = 4


def run_all(path: Path, spark: SparkSession) -> dict[str, str]:
    """What every job says of a trace."""
    said = {name: repr(job(path, spark)) for name, job in OF_PATHS.items()}
    rows = spark.read.parquet(str(path)).repartition(SLICES + 1)
    return said | {name: repr(job(rows)) for name, job in OF_FRAMES.items()}


def run_slowly(path: Path, spark: SparkSession, folder: Path) -> dict[str, str]:
    """What two jobs say of rows that come slowly; the keys are those of `run_all`."""

    def slowly(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import time
        import uuid

        (folder / f"{uuid.uuid4()}.{os.getpid()}").touch()
        time.sleep(1)
        yield from batches

    rows = spark.read.parquet(str(path)).repartition(SLICES)
    rows = rows.mapInArrow(slowly, rows.schema)
    return {name: repr(OF_FRAMES[name](rows)) for name in SLOWLY}


def main(where: str, trace: str, slowly: str | None = None) -> None:
    place = {"remote" if where.startswith("sc:") else "master": where}
    options = OPTIONS if where.startswith("spark:") else {"spark.sql.shuffle.partitions": "4"}
    with spark_session(**place, options=options) as spark:  # type: ignore[arg-type]
        said = {"said": run_all(Path(trace), spark)}
        if slowly:
            said["said slowly"] = run_slowly(Path(trace), spark, Path(slowly))
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
