"""Cells: independent computations, one Spark task each, whose results arrive one by one as they finish.

Each cell is a job of its own, as many at a time as Spark has cores: the tasks of a single job would answer together,
but callers that save finished cells want each as soon as it is done. Cells start in the given order, so put the longest
first.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from srtm.pipeline.runtime.cores import parallelism

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

Cell = TypeVar("Cell")


def run_cells(spark: SparkSession, cells: Sequence[Cell], work: Callable[[Cell], bytes]) -> Iterator[tuple[int, bytes]]:
    """The number and result of every cell, in the order they finish.

    `work` and the cells are pickled to workers; `work` must depend on its cell alone. An exception in it ends the run.
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
