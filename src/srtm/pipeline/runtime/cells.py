"""Cells: independent computations on Spark, whose results arrive soon after each is finished.

A job of its own for every cell would cost a fifth of a second each, and the tasks of a single job would answer
together, but callers want to save finished cells early. So jobs take a few seconds: one long cell, or several short
ones. As many run at a time as Spark has cores. Cells start in the given order, so put the longest first.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from srtm.pipeline.runtime.cores import parallelism

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

Cell = TypeVar("Cell")
_JOB_S = 3.0
_MOST = 40  # cells of a job


def run_cells(spark: SparkSession, cells: Sequence[Cell], work: Callable[[Cell], bytes]) -> Iterator[tuple[int, bytes]]:
    """The number and result of every cell, in the order they finish.

    `work` and the cells are pickled to workers; `work` must depend on its cell alone. An exception in it ends the run.
    """

    def on_spark(numbers: range) -> tuple[range, list[bytes], float]:
        some, began_s = [cells[number] for number in numbers], time.monotonic()

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for _ in batches:
                yield pa.record_batch([pa.array([work(cell) for cell in some], pa.binary())], ["found"])

        found = spark.range(0, 1, 1, 1).mapInArrow(task, "found binary").toArrow()["found"].to_pylist()
        return numbers, found, time.monotonic() - began_s

    together = parallelism(spark)
    pool = ThreadPoolExecutor(together, thread_name_prefix="cell")
    running, begun, size = set[Future[tuple[range, list[bytes], float]]](), 0, 1
    try:
        while running or begun < len(cells):
            while len(running) < together and begun < len(cells):
                # The last ones are dealt out evenly.
                numbers = range(begun, begun + max(1, min(size, (len(cells) - begun) // together)))
                running.add(pool.submit(on_spark, numbers))
                begun = numbers.stop
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for each in finished:
                numbers, found, took_s = each.result()
                size = max(1, min(_MOST, round(_JOB_S * len(numbers) / took_s)))
                yield from zip(numbers, found, strict=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
