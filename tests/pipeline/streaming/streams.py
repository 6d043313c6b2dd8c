"""Streams of the format `srtm` on any kind of Spark; what tests of clusters, servers and killed drivers run.

`python -m tests.pipeline.streaming.streams WHERE SPEC`, where SPEC is JSON: by name of a function below, its arguments.
Prints what they return, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srtm.pipeline.session import spark_session
from srtm.pipeline.streaming.format import register
from tests.pipeline.runtime.standalone import OPTIONS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

SLICE = 100


def relay(
    spark: SparkSession, source: dict[str, str], sink: dict[str, str], checkpoint: str, *, slice_s: float = 0.0
) -> list[int]:
    """Publish what is in one topic to another, until there is no more; rows of each batch. With `slice_s`, slowly."""

    def slowly(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for begin in range(0, batch.num_rows, SLICE):
                time.sleep(slice_s)
                yield batch.slice(begin, SLICE)

    rows = spark.readStream.format("srtm").options(**source).load().select("body")
    if slice_s:
        rows = rows.mapInArrow(slowly, "body binary")
    begun = rows.writeStream.format("srtm").options(**sink, checkpointLocation=checkpoint)
    query = begun.trigger(availableNow=True).start()
    query.awaitTermination()
    return [json.loads(progress.json)["sources"][0]["numInputRows"] for progress in query.recentProgress]


def digests(spark: SparkSession, source: dict[str, str], times: int, executors: int = 1) -> list[list[list[Any]]]:
    """The same rows read so often: of each partition its broker, first offset, rows, their digest, its executor.

    More often, within bounds, if no partition was read on so many executors by then: which one takes it is chance.
    """

    def digest(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        time.sleep(0.3)  # long enough that a second executor takes its share
        rows = [row for batch in batches for row in batch.to_pylist()]
        code = hashlib.sha256(repr([sorted(row.items()) for row in rows]).encode()).hexdigest()
        columns = [[rows[0]["broker"]], [rows[0]["offset"]], [len(rows)], [code], [os.getppid()]]
        yield pa.record_batch(columns, ["broker", "begin", "rows", "code", "executor"])

    fields = "broker string, begin bigint, rows bigint, code string, executor bigint"
    frame = spark.read.format("srtm").options(**source).load()
    reads: list[list[list[Any]]] = []
    while len(reads) < times or (
        len(reads) < 10 * times and max(len({row[4] for row in rows}) for rows in zip(*reads, strict=True)) < executors
    ):
        reads.append(sorted(list(row) for row in frame.mapInArrow(digest, fields).collect()))
    return reads


def keep(spark: SparkSession, source: dict[str, str], folder: str, *, to_the_end: bool) -> None:
    """Write each batch of a topic to a folder of its own; for ever, or until there is no more.

    A batch that begins is a line in `begun`; when it is written, `written` gets a file, and a moment later it is done.
    """

    def write(rows: DataFrame, batch: int) -> None:
        with (Path(folder) / "begun").open("a") as lines:
            print(batch, file=lines)
        rows.write.mode("overwrite").parquet(f"{folder}/rows/batch={batch}")
        (Path(folder) / f"written-{batch}").touch()
        time.sleep(0.3)

    rows = spark.readStream.format("srtm").options(**source).load()
    begun = rows.writeStream.foreachBatch(write).option("checkpointLocation", f"{folder}/checkpoint")
    (begun.trigger(availableNow=True) if to_the_end else begun).start().awaitTermination()


def main(where: str, spec: str) -> None:
    place = {"remote" if where.startswith("sc:") else "master": where}
    # With small batches, slices of rows reach the sink one by one.
    small = {"spark.sql.execution.arrow.maxRecordsPerBatch": str(SLICE)}
    options = OPTIONS | small if where.startswith("spark:") else {}
    with spark_session(**place, options=options) as spark:  # type: ignore[arg-type]
        register(spark)
        works = {"relay": relay, "digests": digests, "keep": keep}
        said = {name: works[name](spark, **arguments) for name, arguments in json.loads(spec).items()}  # type: ignore[operator]
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
