"""A trace that tasks read themselves: Parquet files whose row groups have statistics.

Each task reads the row groups that overlap its stretch with pyarrow, and merges those of several writers that overlap
each other. No shuffle, and no JVM on the data's way.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from srtm.model.scan import is_sorted
from srtm.pipeline.runtime.cores import parallelism
from srtm.pipeline.traces.batches import batch_of
from srtm.pipeline.traces.parts import PART_FIELDS, joined, packed, table_of
from srtm.pipeline.traces.stretches import RowGroup, Stretch, floor, in_order, is_small
from srtm.pipeline.traces.tasks import spread
from srtm.pipeline.traces.topics import Topics
from srtm.workload.trace import RECORDED_SCHEMA, plain, rows_of
from srtm.workload.uris import explained, parquet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from srtm.pipeline.traces.batches import Batches, Work
    from srtm.pipeline.traces.topics import Faults

_BATCH = 1_000_000  # messages per batch, about a row group
_MIXED = 16  # times as many if row groups hold several topics: fewer batches of each
_NAMES = pa.dictionary(pa.int32(), pa.string())
_FOR_EACH = 4  # tasks that read rows for Spark, for each that runs at a time
_SPAN_FIELDS = "topic string, messages long, first_ns long, last_ns long"
_EMPTY = pa.record_batch([pa.array([], _NAMES), pa.array([], pa.int64())], ["topic", "key"])


@dataclass(frozen=True)
class Files:
    """A trace that tasks read themselves."""

    spark: SparkSession
    key: str
    grain_ns: int
    stretches: tuple[Stretch, ...]

    @property
    def tasks(self) -> int:
        """How many tasks a run has."""
        return len(self.stretches)

    @property
    def small(self) -> bool:
        """Whether one task holds all of it."""
        return len(self.stretches) == 1 and is_small(self.stretches[0].row_groups, joined=True)

    @property
    def at_once(self) -> int:
        """How many tasks Spark runs at a time."""
        return parallelism(self.spark)

    def topics(self) -> tuple[Topics, Faults]:
        """The topics, from the footers if these tell them apart, and those that cannot be judged."""
        row_groups = {row_group for stretch in self.stretches for row_group in stretch.row_groups}
        if any(row_group.topic is None for row_group in row_groups):
            found = joined(self.run(counting(self.key), PART_FIELDS, ("topic",)))["topics"]
        else:
            rows = [(row_group.topic, *row_group.span) for row_group in row_groups]
            found = pa.Table.from_batches([batch_of(_SPAN_FIELDS, rows)])
        return Topics.total(found).judged()

    def run(
        self, work: Work, fields: str, columns: Sequence[str], *, before_ns: int = 0, at: Iterable[int] | None = None
    ) -> pa.Table:
        """What the work yields over each stretch, brought to the driver."""
        return self.map(work, fields, columns, before_ns=before_ns, at=at).toArrow()

    def map(
        self, work: Work, fields: str, columns: Sequence[str], *, before_ns: int = 0, at: Iterable[int] | None = None
    ) -> DataFrame:
        """What the work yields over each stretch, left in the cluster.

        Batches hold the columns and the key. They start `before_ns` ahead of the stretch, for work that looks back;
        `at` restricts the run to the stretches that hold these times.
        """
        key, grain_ns, wanted = self.key, self.grain_ns, [*{*columns, self.key}]
        stretches = list(self.stretches)
        if at is not None:
            begins = np.array([stretch.begin_ns for stretch in stretches])
            numbers = np.searchsorted(begins, np.fromiter(at, np.int64), side="right") - 1
            stretches = [stretches[number] for number in np.unique(numbers).tolist()]
        if before_ns:
            stretches = [self._reaching_back(stretch, before_ns) for stretch in stretches]

        def task(stretch: Stretch) -> Batches:
            yield from work(stretch.begin_ns, _merged(stretch, key, wanted, before_ns, grain_ns))

        return spread(self.spark, stretches, task, fields)

    def _number(self, time_ns: int) -> int:
        return bisect_right(self.stretches, time_ns, key=lambda stretch: stretch.begin_ns) - 1

    def _reaching_back(self, stretch: Stretch, before_ns: int) -> Stretch:
        begin = stretch.begin_ns - before_ns
        near = self.stretches[max(0, self._number(begin)) : self._number(stretch.begin_ns) + 1]
        reached = {group for earlier in near for group in earlier.row_groups if group.span.last_ns >= begin}
        return stretch._replace(row_groups=in_order(reached))


def frame_of(spark: SparkSession, footers: Mapping[str, Any], columns: Sequence[str]) -> DataFrame:
    """Files in which nothing tells stretches apart, as rows for Spark to sort; tasks read them, too."""
    groups = [(file, number) for file, footer in footers.items() for number in range(footer.num_row_groups)]
    schema, tasks = plain(columns), min(len(groups), _FOR_EACH * parallelism(spark))

    def task(mine: list[tuple[str, int]]) -> Batches:
        for file, number in mine:
            with explained(file), parquet(file) as source:
                yield from rows_of(source, file, number, schema).to_batches()

    fields = ", ".join(f"`{field.name}` {'string' if field.type == pa.string() else 'long'}" for field in schema)
    return spread(spark, [groups[number::tasks] for number in range(tasks)], task, fields)


def _merged(stretch: Stretch, key: str, columns: list[str], before_ns: int, grain_ns: int) -> Batches:
    """The rows of a stretch in order of the key, from row groups that may overlap."""
    begin, end = stretch.begin_ns - before_ns, stretch.end_ns
    held: list[pa.Table] = []
    kept = fresh = 0
    with ExitStack() as files:
        opened_files: dict[str, Any] = {}
        for row_group in stretch.row_groups:
            enough = _BATCH if row_group.topic is not None else _MIXED * _BATCH
            if fresh >= max(enough, kept):  # rows held back are sorted again only when they have doubled
                ready, rest = _parted(_sorted(held, key), key, floor(row_group.span.first_ns, grain_ns))
                if ready.num_rows:
                    yield ready.combine_chunks().to_batches()[0]
                held, kept, fresh = [rest] if rest.num_rows else [], rest.num_rows, 0
            rows = _read(row_group, columns, files, opened_files)
            if row_group.span.first_ns < begin or row_group.span.last_ns >= end:
                rows = _parted(_parted(_sorted([rows], key), key, begin)[1], key, end)[0]
            held.append(rows)
            fresh += rows.num_rows
    rows = _sorted(held, key) if held else None
    if rows is not None and rows.num_rows:
        yield rows.combine_chunks().to_batches()[0]


def _read(row_group: RowGroup, columns: list[str], files: ExitStack, opened_files: dict[str, Any]) -> pa.Table:
    strings = [name for name in columns if RECORDED_SCHEMA.field(name).type == pa.string()]
    schema = pa.schema([(name, _NAMES if name in strings else pa.int64()) for name in columns])
    with explained(f"{row_group.path}, row group {row_group.number}"):
        if row_group.path not in opened_files:
            opened_files[row_group.path] = files.enter_context(parquet(row_group.path, strings))
        # A topic that the footer names need not be read.
        source = opened_files[row_group.path]
        return rows_of(source, row_group.path, row_group.number, schema, topic=row_group.topic)


def _sorted(tables: list[pa.Table], key: str) -> pa.Table:
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()
    table = table.combine_chunks()
    times = table[key].to_numpy()
    if is_sorted(times):
        return table
    return table.take(pa.array(np.argsort(times, kind="stable")))


def _parted(table: pa.Table, key: str, at_ns: int) -> tuple[pa.Table, pa.Table]:
    """The rows of a sorted table before an instant, and the others."""
    limits = np.iinfo(np.int64)
    cut = int(np.searchsorted(table[key].to_numpy(), min(max(at_ns, limits.min), limits.max)))
    return table.slice(0, cut), table.slice(cut)


def counting(key: str) -> Work:
    """Work over batches: rows (topic, messages, first_ns, last_ns), of which a topic may have several."""

    def work(_: int, batches: Batches) -> Batches:
        counted = [_counted(batch, key) for batch in batches]
        yield from packed({"topics": pa.concat_tables(counted or [_counted(_EMPTY, "key")])})

    return work


def _counted(batch: pa.RecordBatch, key: str) -> pa.Table:
    """A row for each topic of a batch in which each topic's rows are in order."""
    topics, times = batch.column("topic"), batch.column(key).to_numpy()
    codes = topics.indices.to_numpy()
    counts = np.bincount(codes, minlength=len(topics.dictionary))
    first, last = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
    first[codes[::-1]] = times[::-1]  # numpy keeps the last of several values written to one place
    last[codes] = times
    here = np.flatnonzero(counts)
    names = topics.dictionary.take(pa.array(here))
    return table_of(topic=names, messages=counts[here], first_ns=first[here], last_ns=last[here])
