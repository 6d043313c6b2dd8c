"""Profile: per topic, what was sent and the token bucket that it needs; exactly what `model.profile` says.

Two roads to the same numbers, chosen by what the input is:

- *files*: traces whose row groups are sorted and do not overlap in time, as SRTM writes them. Counts and times come
  from the files' footers. Each task reads a stretch of row groups with pyarrow and scans it as if nothing came before.
  Where work is left over from the stretch before, a second job reads again, just as far as that work lasts.
- *general*: any DataFrame with `topic`, `publisher` and `arrival_ns`, in any order. Spark sorts it into ranges of
  (topic, time): a giant topic becomes many parts, and small ones share a task. Summaries first, histograms second.

A topic that cannot be profiled does not take the others with it: its error stands in its line of the result.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from srtm.errors import SRTMError, TraceError
from srtm.model import profile as model
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.pipeline.chunks import (
    PART_FIELDS,
    Part,
    add_counts,
    as_batch,
    as_parts,
    by_topic,
    entering_states,
    scanned_at,
    scanning,
)
from srtm.units import NANO_PER_TOKEN, Number, histogram_percentile
from srtm.workload.trace import check_schema, files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ("topic", "publisher", "arrival_ns")
_RESULT = "topic string, messages long, publishers long, rate double, r double, b double, error string"


@dataclass(frozen=True, slots=True)
class TopicProfile:
    """One topic's line: what was sent and what it needs, or why that cannot be said."""

    topic: str
    messages: int
    publishers: int = 0
    rate_mps: float = 0.0
    bucket: TokenBucket | None = None
    error: str | None = None


class Span(NamedTuple):
    """Messages, first and last arrival."""

    messages: int
    first_ns: int
    last_ns: int


class RowGroup(NamedTuple):
    """A row group of a trace file, as the footer describes it."""

    path: str
    group: int
    topic: str
    span: Span


class Piece(NamedTuple):
    """Consecutive row groups of a topic that one task reads, the rate to scan at, and the state they start from."""

    number: int
    topic: str
    r_mtps: int
    row_groups: tuple[RowGroup, ...]
    entering: scan.State | None = None


def profile(
    trace: DataFrame | str | Path,
    spark: SparkSession | None = None,
    *,
    headroom: Number = model.HEADROOM,
    quantile: Number = model.QUANTILE,
) -> list[TopicProfile]:
    """The profile of every topic of a trace: a DataFrame, or a path to be read with the session."""
    if not isinstance(trace, str | Path):
        return _by_sorting(trace, headroom, quantile)
    if spark is None:
        raise TraceError("a path needs a session to be read with: profile(path, spark)")
    row_groups = row_groups_of(Path(trace))
    if row_groups is None:
        return _by_sorting(spark.read.parquet(*map(str, files_of(Path(trace)))), headroom, quantile)
    return _by_files(spark, row_groups, headroom, quantile)


def profile_frame(
    trace: DataFrame, *, headroom: Number = model.HEADROOM, quantile: Number = model.QUANTILE
) -> DataFrame:
    """`profile` from DataFrame to DataFrame, for notebooks."""
    rows = [
        (line.topic, line.messages, line.publishers, line.rate_mps, *_size(line.bucket), line.error)
        for line in profile(trace, headroom=headroom, quantile=quantile)
    ]
    return trace.sparkSession.createDataFrame(rows, _RESULT)


def row_groups_of(path: Path) -> dict[str, list[RowGroup]] | None:
    """Row groups by topic in order of time; None where they are not sorted, hold several topics or overlap."""
    topics: dict[str, list[RowGroup]] = defaultdict(list)
    for file in files_of(path):
        try:
            footer = pq.read_metadata(file)
        except (OSError, pa.ArrowInvalid) as error:
            raise TraceError(f"{file} is not a readable Parquet file: {error}", path=str(file)) from None
        check_schema(file, footer.schema.to_arrow_schema(), COLUMNS)
        for number in range(footer.num_row_groups):
            found = _described(str(file), number, footer.row_group(number))
            if found is None:
                return None
            topics[found.topic].append(found)
    if not topics:
        raise TraceError(f"{path} holds no messages", path=str(path))
    for row_groups in topics.values():
        row_groups.sort(key=lambda row_group: row_group.span[1:])
        if any(before.span.last_ns > after.span.first_ns for before, after in pairwise(row_groups)):
            return None
    return dict(topics)


def _described(path: str, number: int, group: Any) -> RowGroup | None:
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    names, times = columns["topic"].statistics, columns["arrival_ns"].statistics
    order = [group.column(key.column_index).path_in_schema for key in group.sorting_columns if not key.descending]
    if order[:1] != ["arrival_ns"] or names is None or times is None or not times.has_min_max:
        return None
    if names.min != names.max or names.null_count or times.null_count:
        return None
    return RowGroup(path, number, names.min, Span(group.num_rows, times.min, times.max))


def _by_files(
    spark: SparkSession, topics: dict[str, list[RowGroup]], headroom: Number, quantile: Number
) -> list[TopicProfile]:
    spans = {
        topic: Span(sum(g.span.messages for g in groups), groups[0].span.first_ns, groups[-1].span.last_ns)
        for topic, groups in topics.items()
    }
    rates = {topic: model.token_rate(model.mean_rate(*span), headroom) for topic, span in spans.items()}
    tasks = _cut(topics, rates, parallelism(spark))
    parts = _collect(spark, tasks, _scan_piece)
    pieces = {piece.number: piece for task in tasks for piece in task}
    again = [[pieces[part.number]._replace(entering=state)] for part, state in entering_states(parts, rates)]
    if again:
        parts += _collect(spark, again, _correct_piece)
    return _finish(spans, rates, parts, quantile)


def _cut(topics: dict[str, list[RowGroup]], rates: dict[str, int], tasks: int) -> list[list[Piece]]:
    """Share row groups out over tasks, consecutive ones together, about as many messages to each."""
    listed = [row_group for topic in sorted(topics) for row_group in topics[topic]]
    total = sum(row_group.span.messages for row_group in listed)
    before, placed = 0, []
    for row_group in listed:
        placed.append((min(tasks - 1, before * tasks // total), row_group))
        before += row_group.span.messages
    cut: list[list[Piece]] = [[] for _ in range(tasks)]
    runs = groupby(placed, key=lambda entry: (entry[0], entry[1].topic))
    for number, ((task, topic), members) in enumerate(runs):
        cut[task].append(Piece(number, topic, rates[topic], tuple(row_group for _, row_group in members)))
    return [pieces for pieces in cut if pieces]


def _collect(spark: SparkSession, tasks: list[list[Piece]], work: Callable[[Piece], Part]) -> list[Part]:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield as_batch(work(piece) for piece in tasks[number])

    return as_parts(spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(run, PART_FIELDS).toArrow())


def _scan_piece(piece: Piece) -> Part:
    """Histogram and summary of a piece as if nothing came before it."""
    counts, state, messages, publishers = np.zeros(1, np.int64), None, 0, set[str]()
    try:
        for row_group in piece.row_groups:
            table = _read(row_group, ["arrival_ns", "publisher"])
            times = table["arrival_ns"].combine_chunks().to_numpy()
            more, state = scan.backlog_histogram(times, scanned_at(piece.r_mtps), state)
            counts = add_counts(counts, more)
            messages += len(times)
            for column in table["publisher"].chunks:
                publishers.update(column.dictionary.to_pylist())
    except SRTMError as error:
        return Part(piece.topic, error=str(error))
    assert state is not None
    return Part(
        piece.topic,
        piece.number,
        messages,
        piece.row_groups[0].span.first_ns,
        state.last_ns,
        state.backlog,
        counts.tobytes(),
        tuple(sorted(publishers)),
    )


def _correct_piece(piece: Piece) -> Part:
    """What the state before a piece changes in its histogram: read until it makes no difference any more."""
    bucket = scanned_at(piece.r_mtps)
    counts, entering, empty = np.zeros(1, np.int64), piece.entering, None
    try:
        for row_group in piece.row_groups:
            times = _read(row_group, ["arrival_ns"])["arrival_ns"].combine_chunks().to_numpy()
            more, entering = scan.backlog_histogram(times, bucket, entering)
            less, empty = scan.backlog_histogram(times, bucket, empty)
            counts = add_counts(add_counts(counts, more), -less)
            if entering == empty:
                break
    except SRTMError as error:
        return Part(piece.topic, error=str(error))
    return Part(piece.topic, counts=counts.tobytes())


def _read(row_group: RowGroup, columns: list[str]) -> pa.Table:
    try:
        with pq.ParquetFile(row_group.path, read_dictionary=["publisher"], pre_buffer=False) as file:
            return file.read_row_group(row_group.group, columns=columns, use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise TraceError(f"{row_group.path}, row group {row_group.group}: {error}", path=row_group.path) from None


def _by_sorting(trace: DataFrame, headroom: Number, quantile: Number) -> list[TopicProfile]:
    _check_frame(trace)
    spans, publishers, failed = _counted(trace)
    if not spans and not failed:
        raise TraceError("the trace holds no messages")
    rates = {topic: model.token_rate(model.mean_rate(*span), headroom) for topic, span in spans.items()}
    ordered = (
        trace.select("topic", "arrival_ns")
        .dropna()
        .repartitionByRange(2 * parallelism(trace.sparkSession), "topic", "arrival_ns")
        .sortWithinPartitions("topic", "arrival_ns")
        .persist()  # the ranges come from a sample: computed again, they could be others
    )
    try:
        parts = as_parts(ordered.mapInArrow(scanning(rates, {}), PART_FIELDS).toArrow())
        states = {(part.topic, part.first_ns): state for part, state in entering_states(parts, rates)}
        if states:
            parts = as_parts(ordered.mapInArrow(scanning(rates, states), PART_FIELDS).toArrow())
    finally:
        ordered.unpersist()
    lines = [line for line in _finish(spans, rates, parts, quantile, publishers) if line.topic not in failed]
    return sorted([*lines, *failed.values()], key=lambda line: line.topic)


def _counted(trace: DataFrame) -> tuple[dict[str, Span], dict[str, int], dict[str, TopicProfile]]:
    """Span and publishers of every topic, and the topics whose rows are incomplete."""
    from pyspark.sql import functions as f

    counted = trace.groupBy("topic").agg(
        f.count("*").alias("messages"),
        f.count_distinct("publisher").alias("publishers"),
        f.min("arrival_ns").alias("first_ns"),
        f.max("arrival_ns").alias("last_ns"),
        f.count("arrival_ns").alias("timed"),
    )
    spans, publishers, failed = {}, {}, {}
    for row in counted.toArrow().to_pylist():
        topic, messages = row["topic"] or "", row["messages"]
        if row["topic"] is None:
            failed[topic] = TopicProfile(topic, messages, error=f"{messages} messages have no topic")
            continue
        if row["timed"]:
            spans[topic] = Span(row["timed"], row["first_ns"], row["last_ns"])
            publishers[topic] = row["publishers"]
        if row["timed"] < messages:
            missing = f"{messages - row['timed']} of {messages} messages have no arrival_ns"
            failed[topic] = TopicProfile(topic, messages, error=missing)
    return spans, publishers, failed


def _finish(
    spans: dict[str, Span],
    rates: dict[str, int],
    parts: list[Part],
    quantile: Number,
    publishers: dict[str, int] | None = None,
) -> list[TopicProfile]:
    lines = []
    for topic, its_parts in by_topic(parts):
        span = spans[topic]
        if errors := [part.error for part in its_parts if part.error]:
            lines.append(TopicProfile(topic, span.messages, error=errors[0]))
            continue
        counts = np.zeros(1, np.int64)
        for part in its_parts:
            counts = add_counts(counts, part.histogram)
        named = publishers[topic] if publishers else len({name for part in its_parts for name in part.publishers})
        b_ntok = histogram_percentile(counts, quantile) * NANO_PER_TOKEN
        bucket = TokenBucket(rates[topic], b_ntok)
        lines.append(TopicProfile(topic, span.messages, named, float(model.mean_rate(*span)), bucket))
    return lines


def parallelism(spark: SparkSession) -> int:
    """How many tasks run at once: what the session says, or the cores of this machine where it does not tell."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Spark Connect has no context, and says so with an error of its own
        return int(spark.conf.get("spark.default.parallelism", str(os.cpu_count() or 1)) or 1)


def _size(bucket: TokenBucket | None) -> tuple[float | None, float | None]:
    return (bucket.r, bucket.b) if bucket else (None, None)


def _check_frame(trace: DataFrame) -> None:
    types = dict(trace.dtypes)
    wanted = {"topic": "string", "publisher": "string", "arrival_ns": "bigint"}
    wrong = [
        f"column {name!r} must be {kind}, but is {types.get(name, 'missing')}"
        for name, kind in wanted.items()
        if types.get(name) != kind
    ]
    if wrong:
        raise TraceError(f"this is not a trace: {'; '.join(wrong)}; it has {', '.join(types)}")
