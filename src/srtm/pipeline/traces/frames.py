"""A trace that Spark has sorted: any DataFrame, in any order.

Spark sorts the rows into stretches of (topic, key). A giant topic becomes many stretches, and small topics share one.
No task sees both sides of a cut between two stretches; `Frame.run_around` brings the rows around cuts together.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from srtm.errors import TraceError
from srtm.pipeline.runtime.cores import parallelism
from srtm.pipeline.traces.batches import by_topic, with_dictionaries
from srtm.pipeline.traces.stretches import BEGINNING
from srtm.pipeline.traces.topics import Topics, unnamed
from srtm.workload.trace import RECORDED_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyspark.sql import DataFrame

    from srtm.pipeline.traces.batches import Batches, Ints, Work
    from srtm.pipeline.traces.topics import Faults

_BATCH = 1_000_000  # messages per batch, about a row group
_FOR_EACH = 2  # stretches for each task that runs at a time


@dataclass(frozen=True)
class Frame:
    """A trace that Spark has sorted into stretches of (topic, key)."""

    key: str
    grain_ns: int
    ordered: DataFrame
    tasks: int  # of a run, one for each stretch
    faults: Faults  # topics with incomplete rows, and what they lack
    known: Topics  # the others

    @property
    def at_once(self) -> int:
        """How many tasks Spark runs at a time."""
        return max(1, self.tasks // _FOR_EACH)

    def topics(self) -> tuple[Topics, Faults]:
        """The topics, and those that cannot be judged."""
        topics, faults = self.known.judged()
        return topics, {**self.faults, **faults}

    def run(
        self, work: Work, fields: str, columns: Sequence[str], *, before_ns: int = 0, at: Iterable[int] | None = None
    ) -> pa.Table:
        """What the work yields over each stretch, brought to the driver; batches never start ahead of a stretch."""
        del columns, before_ns, at
        return self.map(work, fields).toArrow()

    def map(self, work: Work, fields: str, columns: Sequence[str] = ()) -> DataFrame:
        """What the work yields over each stretch, left in the cluster."""
        del columns
        key, grain_ns, faults = self.key, self.grain_ns, set(self.faults)

        def task(batches: Batches) -> Batches:
            yield from work(BEGINNING, _gathered(batches, key, grain_ns, faults))

        return self.ordered.mapInArrow(task, fields)

    def run_around(
        self, topics: Topics, cut: Ints, cuts_ns: Ints, reach_ns: int, work: Callable[[Topics], Work], fields: str
    ) -> pa.Table:
        """What the work yields over rows, topic and key alone, that lie within `reach_ns` of a cut of their topic.

        Topics `cut`, by number and in order, are cut at `cuts_ns`. At most one topic is cut between two stretches.
        """
        seams = {
            topics.names[topic].as_py(): _seams(cuts_ns[cut == topic].tolist(), reach_ns)
            for topic in np.unique(cut).tolist()
        }
        key, faults, names = self.key, set(self.faults), pa.array(seams, pa.string())

        def pick(batches: Batches) -> Batches:
            for batch in _gathered(batches, key, 1, faults):
                near_cuts = batch.filter(pc.is_in(batch.column("topic").cast(pa.string()), value_set=names))
                for topic, rows in by_topic(near_cuts):
                    times = rows.column(key).to_numpy()
                    for number, (begin, end) in enumerate(seams[topic]):
                        near = times[slice(*np.searchsorted(times, [begin, end]))]
                        if len(near):
                            same = pa.array([topic]).take(pa.array(np.zeros(len(near), np.int32)))
                            yield pa.record_batch([same, np.full(len(near), number), near], ["topic", "seam", key])

        def whole(seam: pa.Table) -> pa.Table:
            rows = seam.select(["topic", key]).sort_by(key).combine_chunks().to_batches()
            return pa.Table.from_batches(work(topics)(BEGINNING, (with_dictionaries(batch) for batch in rows)))

        picked = self.ordered.mapInArrow(pick, f"topic string, seam long, {key} long")
        return picked.groupBy("topic", "seam").applyInArrow(whole, fields).toArrow()


@contextmanager
def sorted_frame(frame: DataFrame, columns: list[str], key: str, grain_ns: int) -> Iterator[Frame]:
    """The frame sorted into stretches, and its topics counted and checked for missing values."""
    from pyspark.sql import functions as f

    tasks = _FOR_EACH * parallelism(frame.sparkSession)
    ordered = (
        frame.select(columns)
        .repartitionByRange(tasks, "topic", f.col(key) - f.pmod(f.col(key), f.lit(grain_ns)))
        .sortWithinPartitions("topic", key)
        .persist()  # Spark cuts by a sample: computed again, the cuts could differ
    )
    try:
        counted = ordered.groupBy("topic").agg(
            f.count("*").alias("messages"),
            f.min(key).alias("first_ns"),
            f.max(key).alias("last_ns"),
            *(f.count(name).alias(f"with_{name}") for name in columns if name != "topic"),
        )
        known, faults = _checked(counted.toArrow(), columns)
        yield Frame(key, grain_ns, ordered, tasks, faults, known)
    finally:
        ordered.unpersist()


def _checked(counted: pa.Table, columns: list[str]) -> tuple[Topics, Faults]:
    """The topics whose rows are complete, and what the others lack."""
    if not counted.num_rows:
        raise TraceError("the trace holds no messages")
    required = [name for name in columns if name != "topic" and not RECORDED_SCHEMA.field(name).nullable]
    complete = pc.is_in(counted["topic"], value_set=pa.array([None, ""], pa.string()))
    complete = pc.invert(complete)
    for name in required:
        complete = pc.and_(complete, pc.equal(counted[f"with_{name}"], counted["messages"]))
    faults = {}
    unnamed_rows = 0
    for row in counted.filter(pc.invert(complete)).to_pylist():
        messages = row["messages"]
        if not row["topic"]:
            unnamed_rows += messages
            continue
        missing = [
            f"{messages - row[f'with_{name}']} of {messages} messages have no {name}"
            for name in required
            if row[f"with_{name}"] < messages
        ]
        faults[row["topic"]] = messages, "; ".join(missing)
    if unnamed_rows:
        faults[""] = unnamed_rows, unnamed(unnamed_rows)
    return Topics.total(counted.filter(complete)), faults


def checked_columns(trace: DataFrame, columns: Sequence[str]) -> list[str]:
    """The columns that a frame has of these; refuse one that lacks a required column, or has another type in one."""
    types = dict(trace.dtypes)
    columns = [name for name in columns if name in types or not RECORDED_SCHEMA.field(name).nullable]
    wanted = {name: "string" if RECORDED_SCHEMA.field(name).type == pa.string() else "bigint" for name in columns}
    wrong = [
        f"column {name!r} must be {kind}, but is {types.get(name, 'missing')}"
        for name, kind in wanted.items()
        if types.get(name) != kind
    ]
    if wrong:
        raise TraceError(
            f"not a trace: {'; '.join(wrong)}; its columns are {', '.join(types)}."
            " Convert other data with srtm trace import, or with ingest.normalise"
        )
    return columns


def _gathered(batches: Batches, key: str, grain_ns: int, faults: set[str]) -> Batches:
    """Sorted batches joined to larger ones that never cut a grain of a topic; topics with faults are left out."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(_complete(batch, faults))
        if sum(rows.num_rows for rows in held) < _BATCH:
            continue
        rows = with_dictionaries(pa.Table.from_batches(held).combine_chunks().to_batches()[0])
        end = _last_grain(rows, key, grain_ns)
        if end:
            yield rows.slice(0, end)
        held = [pa.Table.from_batches(held).slice(end).combine_chunks().to_batches()[0]]
    for rows in pa.Table.from_batches(held).combine_chunks().to_batches() if held else ():
        yield with_dictionaries(rows)


def _complete(batch: pa.RecordBatch, faults: set[str]) -> pa.RecordBatch:
    if not faults:
        return batch
    bad = pc.is_in(batch.column("topic"), pa.array([*faults, None], pa.string()))
    return batch.filter(pc.invert(bad))


def _last_grain(rows: pa.RecordBatch, key: str, grain_ns: int) -> int:
    """Where the rows of the last topic and grain of time begin."""
    codes, times = rows.column("topic").indices.to_numpy(), rows.column(key).to_numpy() // grain_ns
    others = np.flatnonzero((codes != codes[-1]) | (times != times[-1]))
    return int(others[-1]) + 1 if len(others) else 0


def _seams(cuts: list[int], reach_ns: int) -> list[tuple[int, int]]:
    """The times within reach of a cut, overlapping ones joined."""
    seams: list[tuple[int, int]] = []
    for time_ns in sorted(cuts):
        begin, end = time_ns - reach_ns, time_ns + reach_ns + 1
        if seams and begin <= seams[-1][1]:
            begin, _ = seams.pop()
        seams.append((begin, end))
    return seams
