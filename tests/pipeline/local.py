"""Spark's part of the jobs in one process, for tests that try hundreds of traces: the same tasks over the same rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Rows:
    """Partitions of batches."""

    def __init__(self, partitions: list[list[pa.RecordBatch]]) -> None:
        self.partitions = partitions

    def mapInArrow(self, task: Task, fields: str) -> Rows:
        del fields
        return Rows([list(task(iter(batches))) for batches in self.partitions])

    def repartition(self, partitions: int, name: str) -> Rows:
        del partitions, name
        return self

    def groupBy(self, *names: str) -> Groups:
        return Groups(self, names)

    def toArrow(self) -> pa.Table:
        batches = [batch for batches in self.partitions for batch in batches]
        return pa.Table.from_batches(batches) if batches else pa.table({})


class Groups:
    def __init__(self, rows: Rows, names: tuple[str, ...]) -> None:
        self.rows, self.names = rows, names

    def applyInArrow(self, task: Callable[[pa.Table], pa.Table], fields: str) -> Rows:
        del fields
        table = self.rows.toArrow()
        if not table.num_rows:
            return Rows([])
        keys = list(zip(*(table[name].to_pylist() for name in self.names), strict=True))
        groups = [table.filter(pa.array([other == key for other in keys])) for key in dict.fromkeys(keys)]
        return Rows([task(group).to_batches() for group in groups])


class Shipped:
    """Rows that are still to be dealt to partitions."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def repartitionById(self, partitions: int, name: str) -> Rows:
        numbers = self.table[name].to_pylist()
        assert numbers == list(range(partitions))
        return Rows([self.table.slice(number, 1).to_batches() for number in numbers])


class LocalSpark:
    """A session that runs tasks here; `at_once` is how many it pretends to run at a time."""

    def __init__(self, at_once: int) -> None:
        self.sparkContext = SimpleNamespace(defaultParallelism=at_once)

    def range(self, begin: int, end: int, step: int, partitions: int) -> Any:
        assert (begin, step, end) == (0, 1, partitions)
        return Rows([[pa.record_batch([pa.array([number])], ["id"])] for number in range(end)])

    def createDataFrame(self, table: pa.Table) -> Any:
        return Shipped(table)
