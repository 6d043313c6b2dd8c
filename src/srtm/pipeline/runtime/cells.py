"""Cells: independent pieces of work, one Spark task each, whose results come back one by one as they are done.

Each cell is a job of its own, as many at a time as Spark has cores: a job's tasks answer together, and whoever keeps
finished cells wants each as soon as it is there. Cells start in the order given, so put what takes longest first.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from srtm.pipeline.traces.reading import parallelism

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

Cell = TypeVar("Cell")


def run_cells(spark: SparkSession, cells: Sequence[Cell], work: Callable[[Cell], bytes]) -> Iterator[tuple[int, bytes]]:
    """Number and result of every cell, in the order in which they are done.

    `work` and the cells are pickled to workers; `work` must depend on its cell alone. What it raises ends the run.
    """

    def on_spark(number: int) -> tuple[int, bytes]:
        cell = cells[number]

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for _ in batches:
                yield pa.record_batch([pa.array([work(cell)], pa.binary())], ["found"])

        return number, spark.range(0, 1, 1, 1).mapInArrow(task, "found binary").toArrow()["found"][0].as_py()

    pool = ThreadPoolExecutor(parallelism(spark), thread_name_prefix="cell")
    try:
        for future in as_completed([pool.submit(on_spark, number) for number in range(len(cells))]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
