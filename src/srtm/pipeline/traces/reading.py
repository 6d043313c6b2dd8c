"""A trace as stretches of time, each read in order by one task. What every job over traces starts from.

A job's work is a function over the batches of one stretch. In every batch, and from batch to batch, the rows of a topic
come in order of the key (a column of times), rows of the same topic and instant (or, if asked for, of the same grain of
time) are never cut apart, and strings are dictionaries. Where the batches come from is decided by what the input is:

- `Files`: Parquet whose row groups have statistics. Each task reads with pyarrow the row groups that overlap its
  stretch, and merges those of several writers that overlap each other. No shuffle, no JVM in the data's way.
- `Frame`: any DataFrame, in any order. Spark sorts it into ranges of (topic, key): a giant topic becomes many
  stretches, and small ones share one.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from srtm.errors import TraceError
from srtm.model.scan import is_sorted
from srtm.workload.trace import RECORDED_SCHEMA, check_schema, files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    Ints = NDArray[np.int64]
    Batches = Iterator[pa.RecordBatch]
    Work = Callable[[int, Batches], Batches]
    Trace = DataFrame | str | Path

_BATCH = 1_000_000  # messages that are handed on together, about a row group
_MIXED = 16  # times as many, where they are of several topics: fewer pieces of each
_STRETCH = 64_000_000  # messages of a stretch at most: what is lost with an executor
_SMALL = 2_000_000  # messages of which one task is done before a second has started
_HELD = 32_000_000  # messages of overlapping row groups that a task may hold: 12 to 30 bytes each
_NAMES = pa.dictionary(pa.int32(), pa.string())
_KINDS = {
    "string": pa.string(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "array<string>": pa.list_(pa.string()),
}
_BEGINNING, _END = -(2**63), 2**63  # around every time that a file can hold, sensible or not
_REREAD = 8  # how often a message may be read on average: still cheaper than a shuffle


class Span(NamedTuple):
    """Messages, first and last time."""

    messages: int
    first_ns: int
    last_ns: int

    def joined(self, other: Span) -> Span:
        """Both together."""
        return Span(
            self.messages + other.messages, min(self.first_ns, other.first_ns), max(self.last_ns, other.last_ns)
        )


class RowGroup(NamedTuple):
    """A row group of a trace file, as the footer describes it; without a topic if it has several."""

    path: str
    number: int
    topic: str | None
    span: Span


class Stretch(NamedTuple):
    """begin ≤ key < end, and the row groups with messages there, in order of their first."""

    begin_ns: int
    end_ns: int
    row_groups: tuple[RowGroup, ...]


@dataclass(frozen=True)
class Files:
    """A trace that tasks read themselves."""

    spark: SparkSession
    key: str
    grain_ns: int
    stretches: tuple[Stretch, ...]
    faults: dict[str, str]  # topics whose rows are incomplete; not here, where the footers have promised it

    @property
    def tasks(self) -> int:
        """How many tasks a run has."""
        return len(self.stretches)

    def spans(self) -> dict[str, Span]:
        """Messages, first and last time of every topic; from the footers if these tell topics apart."""
        row_groups = {row_group for stretch in self.stretches for row_group in stretch.row_groups}
        if any(row_group.topic is None for row_group in row_groups):
            found = self.run(_counting(self.key), _SPAN_FIELDS, ("topic",)).to_pylist()
            return _total((row["topic"], Span(row["messages"], row["first_ns"], row["last_ns"])) for row in found)
        return _total((str(row_group.topic), row_group.span) for row_group in row_groups)

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
            stretches = [stretches[number] for number in sorted({self._number(time_ns) for time_ns in at})]
        if before_ns:
            stretches = [self._reaching_back(stretch, before_ns) for stretch in stretches]

        def task(batches: Batches) -> Batches:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    stretch = stretches[number]
                    yield from work(stretch.begin_ns, _merged(stretch, key, wanted, before_ns, grain_ns))

        return self.spark.range(0, len(stretches), 1, len(stretches)).mapInArrow(task, fields)

    def _number(self, time_ns: int) -> int:
        return bisect_right(self.stretches, time_ns, key=lambda stretch: stretch.begin_ns) - 1

    def _reaching_back(self, stretch: Stretch, before_ns: int) -> Stretch:
        begin = stretch.begin_ns - before_ns
        near = self.stretches[max(0, self._number(begin)) : self._number(stretch.begin_ns) + 1]
        reached = {group for earlier in near for group in earlier.row_groups if group.span.last_ns >= begin}
        return stretch._replace(row_groups=_in_order(reached))


@dataclass(frozen=True)
class Frame:
    """A trace that Spark has sorted into ranges of (topic, key)."""

    key: str
    grain_ns: int
    ordered: DataFrame
    ranges: int
    faults: dict[str, str]
    _spans: dict[str, Span]

    @property
    def tasks(self) -> int:
        """How many tasks a run has."""
        return self.ranges

    def spans(self) -> dict[str, Span]:
        """Messages, first and last time of every topic that has no fault."""
        return self._spans

    def run(
        self, work: Work, fields: str, columns: Sequence[str], *, before_ns: int = 0, at: Iterable[int] | None = None
    ) -> pa.Table:
        """What the work yields over each range, brought to the driver; here, batches never start ahead of it."""
        del columns, before_ns, at
        return self.map(work, fields).toArrow()

    def map(self, work: Work, fields: str, columns: Sequence[str] = ()) -> DataFrame:
        """What the work yields over each range, left in the cluster."""
        del columns
        key, grain_ns, faults = self.key, self.grain_ns, set(self.faults)

        def task(batches: Batches) -> Batches:
            yield from work(_BEGINNING, _gathered(batches, key, grain_ns, faults))

        return self.ordered.mapInArrow(task, fields)

    def run_around(self, cuts: dict[str, list[int]], reach_ns: int, work: Work, fields: str) -> pa.Table:
        """What the work yields over the rows of a topic, topic and key alone, that lie within `reach_ns` of a cut."""
        zones = {topic: _zones(times, reach_ns) for topic, times in cuts.items()}
        key, faults = self.key, set(self.faults)

        def pick(batches: Batches) -> Batches:
            for batch in _gathered(batches, key, 1, faults):
                for topic, rows in by_topic(batch):
                    times = rows.column(key).to_numpy()
                    for number, (begin, end) in enumerate(zones.get(topic, ())):
                        near = times[slice(*np.searchsorted(times, [begin, end]))]
                        if len(near):
                            names = pa.array([topic]).take(pa.array(np.zeros(len(near), np.int32)))
                            yield pa.record_batch([names, np.full(len(near), number), near], ["topic", "zone", key])

        def whole(zone: pa.Table) -> pa.Table:
            rows = zone.select(["topic", key]).sort_by(key).combine_chunks().to_batches()
            return pa.Table.from_batches(work(_BEGINNING, (_with_dictionaries(batch) for batch in rows)))

        picked = self.ordered.mapInArrow(pick, f"topic string, zone long, {key} long")
        return picked.groupBy("topic", "zone").applyInArrow(whole, fields).toArrow()


@contextmanager
def opened(
    trace: Trace, spark: SparkSession | None, columns: Sequence[str], key: str = "arrival_ns", grain_ns: int = 1
) -> Iterator[Files | Frame]:
    """The trace by the best road that it allows: a DataFrame, a path, or an address that Spark reads.

    A work that needs all rows of, say, a minute together asks for that grain, and gets batches no smaller.
    """
    wanted = [name for name in RECORDED_SCHEMA.names if name in {"topic", key, *columns}]
    if not isinstance(trace, str | Path):
        with _sorted_frame(trace, wanted, key, grain_ns) as frame:
            yield frame
        return
    if spark is None:
        raise TraceError(f"{trace} needs a session to be read with: give one, or a DataFrame")
    if "://" in str(trace):
        with _sorted_frame(spark.read.parquet(str(trace)), wanted, key, grain_ns) as frame:
            yield frame
        return
    path = Path(trace).absolute()  # workers may stand elsewhere
    row_groups = row_groups_of(path, wanted, key)
    stretches = row_groups and _cut(row_groups, parallelism(spark), grain_ns)
    if stretches:
        yield Files(spark, key, grain_ns, stretches, {})
        return
    with _sorted_frame(spark.read.parquet(*map(str, files_of(path))), wanted, key, grain_ns) as frame:
        yield frame


def by_topic(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each topic of a batch, in the order in which they stand there; the topic need not be among them."""
    topics = batch.column("topic")
    codes = topics.indices.to_numpy()
    if not len(codes):
        return
    if codes.min() == codes.max():
        yield topics.dictionary[int(codes[0])].as_py(), batch
        return
    order = np.argsort(codes.astype(np.uint16) if len(topics.dictionary) < 2**16 else codes, kind="stable")
    ordered, grouped = codes[order], batch.drop_columns(["topic"]).take(pa.array(order))
    begins = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    for begin, end in pairwise(begins):
        yield topics.dictionary[int(ordered[begin])].as_py(), grouped.slice(begin, end - begin)


def batch_of(fields: str, rows: Sequence[Sequence[object]]) -> pa.RecordBatch:
    """Rows as a task hands them to Spark; the fields are those of its schema."""
    named = [entry.split() for entry in fields.split(",")]
    columns: Sequence[Sequence[object]] = list(zip(*rows, strict=True)) if rows else [()] * len(named)
    arrays = [pa.array(column, _KINDS[kind]) for column, (_, kind) in zip(columns, named, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, [name for name, _ in named])


def row_groups_of(path: Path, columns: Sequence[str], key: str) -> list[RowGroup] | None:
    """The row groups of a trace in order of their first time; None where their footers say too little for that."""
    found = []
    for file in files_of(path):
        try:
            footer = pq.read_metadata(file)
        except (OSError, pa.ArrowInvalid) as error:
            raise TraceError(f"{file} is not a readable Parquet file: {error}", path=str(file)) from None
        check_schema(file, footer.schema.to_arrow_schema(), columns)
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            if not group.num_rows:
                continue
            described = _described(str(file), number, group, columns, key)
            if described is None:
                return None
            found.append(described)
    if not found:
        raise TraceError(f"{path} holds no messages", path=str(path))
    return list(_in_order(found))


def _described(path: str, number: int, group: Any, columns: Sequence[str], key: str) -> RowGroup | None:
    chunks = [group.column(column) for column in range(group.num_columns)]
    statistics = {chunk.path_in_schema: chunk.statistics for chunk in chunks}
    times, topics = statistics[key], statistics["topic"]
    if times is None or not times.has_min_max:
        return None
    required = [statistics[name] for name in columns if not RECORDED_SCHEMA.field(name).nullable]
    if any(known is None or not known.has_null_count or known.null_count for known in required):
        return None
    topic = topics.min if topics.has_min_max and topics.min == topics.max else None
    return RowGroup(path, number, topic, Span(group.num_rows, times.min, times.max))


def _cut(row_groups: list[RowGroup], at_once: int, grain_ns: int) -> tuple[Stretch, ...] | None:
    """Stretches of about as many messages each, cut where row groups begin; None if too much would be read twice."""
    total = sum(row_group.span.messages for row_group in row_groups)
    if _overlap(row_groups) > _HELD:
        return None
    wanted = at_once * -(-total // (at_once * _STRETCH)) if total > _SMALL else 1
    before, cuts = 0, [_BEGINNING]
    for row_group in row_groups:
        at_ns = _floor(row_group.span.first_ns, grain_ns)
        if before * wanted >= len(cuts) * total and at_ns > cuts[-1]:
            cuts.append(at_ns)
        before += row_group.span.messages
    inside: list[list[RowGroup]] = [[] for _ in cuts]
    for row_group in row_groups:
        for number in range(
            bisect_right(cuts, row_group.span.first_ns) - 1, bisect_right(cuts, row_group.span.last_ns)
        ):
            inside[number].append(row_group)
    stretches = [
        Stretch(begin, end, tuple(its_own))
        for (begin, end), its_own in zip(pairwise([*cuts, _END]), inside, strict=True)
        if its_own
    ]
    read = sum(group.span.messages for stretch in stretches for group in stretch.row_groups)
    return tuple(stretches) if read <= _REREAD * total else None


def _overlap(row_groups: list[RowGroup]) -> int:
    """The largest number of messages in row groups that share an instant."""
    events = sorted(
        event
        for group in row_groups
        for event in ((group.span.first_ns, 0, group.span.messages), (group.span.last_ns, 1, -group.span.messages))
    )
    return max(accumulate(change for _, _, change in events))


def _in_order(row_groups: Iterable[RowGroup]) -> tuple[RowGroup, ...]:
    return tuple(
        sorted(row_groups, key=lambda group: (group.span.first_ns, group.span.last_ns, group.path, group.number))
    )


def _merged(stretch: Stretch, key: str, columns: list[str], before_ns: int, grain_ns: int) -> Batches:
    """The rows of a stretch in order of the key, from row groups that may overlap."""
    begin, end = stretch.begin_ns - before_ns, stretch.end_ns
    held: list[pa.Table] = []
    kept = fresh = 0
    with ExitStack() as files:
        opened_files: dict[str, Any] = {}
        for row_group in stretch.row_groups:
            enough = _BATCH if row_group.topic is not None else _MIXED * _BATCH
            if fresh >= max(enough, kept):  # so that what is held is sorted again only when it has doubled
                ready, rest = _parted(_sorted(held, key), key, _floor(row_group.span.first_ns, grain_ns))
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
    try:
        if row_group.path not in opened_files:
            file = pq.ParquetFile(row_group.path, read_dictionary=strings, pre_buffer=False)
            opened_files[row_group.path] = files.enter_context(file)
        # A topic that the footer names need not be read.
        wanted = columns if row_group.topic is None else [name for name in columns if name != "topic"]
        rows = opened_files[row_group.path].read_row_group(row_group.number, columns=wanted, use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise TraceError(f"{row_group.path}, row group {row_group.number}: {error}", path=row_group.path) from None
    if row_group.topic is not None:
        everywhere = np.zeros(rows.num_rows, np.int32)
        rows = rows.append_column("topic", pa.DictionaryArray.from_arrays(everywhere, pa.array([row_group.topic])))
    # Files of several writers differ in what they call nullable or large; rows of all of them are put together.
    kinds = [_NAMES if name in strings else pa.int64() for name in columns]
    return pa.Table.from_arrays(
        [
            rows[name] if rows[name].type == kind else rows[name].cast(kind)
            for name, kind in zip(columns, kinds, strict=True)
        ],
        names=columns,
    )


def _sorted(tables: list[pa.Table], key: str) -> pa.Table:
    table = tables[0] if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()
    table = table.combine_chunks()
    times = table[key].to_numpy()
    if is_sorted(times):
        return table
    return table.take(pa.array(np.argsort(times, kind="stable")))


def _parted(table: pa.Table, key: str, at_ns: int) -> tuple[pa.Table, pa.Table]:
    """Rows before an instant, and the others, of a sorted table."""
    limits = np.iinfo(np.int64)
    cut = int(np.searchsorted(table[key].to_numpy(), min(max(at_ns, limits.min), limits.max)))
    return table.slice(0, cut), table.slice(cut)


@contextmanager
def _sorted_frame(frame: DataFrame, columns: list[str], key: str, grain_ns: int) -> Iterator[Frame]:
    from pyspark.sql import functions as f

    _check_frame(frame, columns)
    ranges = 2 * parallelism(frame.sparkSession)
    ordered = (
        frame.select(columns)
        .repartitionByRange(ranges, "topic", f.col(key) - f.pmod(f.col(key), f.lit(grain_ns)))
        .sortWithinPartitions("topic", key)
        .persist()  # the ranges come from a sample: computed again, they could be others
    )
    try:
        counted = ordered.groupBy("topic").agg(
            f.count("*").alias("messages"),
            f.min(key).alias("first_ns"),
            f.max(key).alias("last_ns"),
            *(f.count(name).alias(f"with_{name}") for name in columns if name != "topic"),
        )
        spans, faults = {}, {}
        for row in counted.toArrow().to_pylist():
            topic, messages = row["topic"] or "", row["messages"]
            missing = [] if row["topic"] is not None else [f"{messages} messages have no topic"]
            missing += [
                f"{messages - row[f'with_{name}']} of {messages} messages have no {name}"
                for name in columns
                if name != "topic" and not RECORDED_SCHEMA.field(name).nullable and row[f"with_{name}"] < messages
            ]
            if missing:
                faults[topic] = "; ".join(missing)
            else:
                spans[topic] = Span(messages, row["first_ns"], row["last_ns"])
        if not spans and not faults:
            raise TraceError("the trace holds no messages")
        good = {topic: span for topic, span in spans.items() if topic not in faults}
        yield Frame(key, grain_ns, ordered, ranges, faults, good)
    finally:
        ordered.unpersist()


def _gathered(batches: Batches, key: str, grain_ns: int, faults: set[str]) -> Batches:
    """Sorted batches joined to larger ones that end where an instant of a topic ends; incomplete topics left out."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(_complete(batch, faults))
        if sum(part.num_rows for part in held) < _BATCH:
            continue
        rows = _with_dictionaries(pa.Table.from_batches(held).combine_chunks().to_batches()[0])
        end = _last_grain(rows, key, grain_ns)
        if end:
            yield rows.slice(0, end)
        held = [pa.Table.from_batches(held).slice(end).combine_chunks().to_batches()[0]]
    for rows in pa.Table.from_batches(held).combine_chunks().to_batches() if held else ():
        yield _with_dictionaries(rows)


def _complete(batch: pa.RecordBatch, faults: set[str]) -> pa.RecordBatch:
    if not faults:
        return batch
    bad = pc.is_in(batch.column("topic"), pa.array([*faults, None], pa.string()))
    return batch.filter(pc.invert(bad))


def _floor(time_ns: int, grain_ns: int) -> int:
    return time_ns - time_ns % grain_ns


def _last_grain(rows: pa.RecordBatch, key: str, grain_ns: int) -> int:
    """Where the last rows of the same topic and grain of time begin."""
    codes, times = rows.column("topic").indices.to_numpy(), rows.column(key).to_numpy() // grain_ns
    others = np.flatnonzero((codes != codes[-1]) | (times != times[-1]))
    return int(others[-1]) + 1 if len(others) else 0


def _with_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [
        column.dictionary_encode()
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _zones(times: list[int], reach_ns: int) -> list[tuple[int, int]]:
    """The instants within reach of a cut, those that overlap joined."""
    zones: list[tuple[int, int]] = []
    for time_ns in sorted(times):
        begin, end = time_ns - reach_ns, time_ns + reach_ns + 1
        if zones and begin <= zones[-1][1]:
            begin, _ = zones.pop()
        zones.append((begin, end))
    return zones


_SPAN_FIELDS = "topic string, messages long, first_ns long, last_ns long"


def _counting(key: str) -> Work:
    def work(_: int, batches: Batches) -> Batches:
        spans = _total(span for batch in batches for span in _spans_of(batch, key))
        yield batch_of(_SPAN_FIELDS, [(topic, *span) for topic, span in spans.items()])

    return work


def _spans_of(batch: pa.RecordBatch, key: str) -> Iterator[tuple[str, Span]]:
    """The spans of the topics of a batch in which each topic's rows are in order."""
    topics, times = batch.column("topic"), batch.column(key).to_numpy()
    codes = topics.indices.to_numpy()
    counts = np.bincount(codes, minlength=len(topics.dictionary))
    first, last = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
    first[codes[::-1]] = times[::-1]  # of several values for a place, the one that comes last stays
    last[codes] = times
    for code in np.flatnonzero(counts).tolist():
        yield topics.dictionary[code].as_py(), Span(int(counts[code]), int(first[code]), int(last[code]))


def _total(spans: Iterable[tuple[str, Span]]) -> dict[str, Span]:
    total: dict[str, Span] = {}
    for topic, span in spans:
        total[topic] = total[topic].joined(span) if topic in total else span
    return total


def parallelism(spark: SparkSession) -> int:
    """How many tasks run at once: what the session says, or the cores of this machine where it does not tell."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Spark Connect has no context, and says so with an error of its own
        return int(spark.conf.get("spark.default.parallelism", str(os.cpu_count() or 1)) or 1)


def _check_frame(trace: DataFrame, columns: Sequence[str]) -> None:
    types = dict(trace.dtypes)
    wanted = {name: "string" if RECORDED_SCHEMA.field(name).type == pa.string() else "bigint" for name in columns}
    wrong = [
        f"column {name!r} must be {kind}, but is {types.get(name, 'missing')}"
        for name, kind in wanted.items()
        if types.get(name) != kind
    ]
    if wrong:
        raise TraceError(
            f"this is not a trace: {'; '.join(wrong)}; it has {', '.join(types)}."
            " Other data becomes a trace with srtm trace import, or ingest.normalise"
        )
