"""Groups: per topic, which publishers burst together; exactly what `model.correlation` says.

Two stages. The first turns messages into onsets, ten times fewer where publishers send batches of ten, by one of two roads:

- *files*: traces whose row groups are sorted and do not overlap in time, as SRTM writes them. Each task reads a stretch
  of row groups with pyarrow, as if nothing came before it; what a publisher sent last before tells whether its first
  message of a stretch starts a burst.
- *general*: any DataFrame with `topic`, `publisher` and `arrival_ns`, in any order. Spark gives each publisher to one task
  and sorts.

The second gathers the onsets of each topic in one task, which finds its groups. They never span topics. A topic that fails
does not take the others with it: its error stands in its line of the result.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from srtm.errors import SRTMError, TraceError
from srtm.model import correlation as model
from srtm.model import scan
from srtm.model.drift import Drift, drift
from srtm.pipeline.profile import parallelism, row_groups_of
from srtm.workload.trace import files_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from srtm.pipeline.profile import RowGroup

_PIECES = (
    "topic string, publisher string, messages long, last_ns long, onsets binary, declared string, names_groups boolean,"
    " error string"
)
_ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("publisher", pa.string()),
        ("messages", pa.int64()),
        ("last_ns", pa.int64()),
        ("onsets", pa.binary()),
        ("declared", pa.string()),
        ("names_groups", pa.bool_()),
        ("error", pa.string()),
    ]
)
_RESULT = "topic string, result string"
_ROWS = 1_000  # publishers a batch: some megabytes


@dataclass(frozen=True, slots=True)
class TopicGroups:
    """One topic's groups, and how they differ from those declared where any are; or why that cannot be said."""

    topic: str
    messages: int
    publishers: int = 0
    groups: tuple[model.Group, ...] = ()
    drift: Drift | None = None
    error: str | None = None


def groups(
    trace: DataFrame | str | Path, spark: SparkSession | None = None, *, options: model.Options | None = None
) -> list[TopicGroups]:
    """The correlation groups of every topic of a trace: a DataFrame, or a path to be read with the session."""
    chosen = options or model.Options()
    if not isinstance(trace, str | Path):
        return _gathered(_by_sorting(trace, chosen), chosen)
    if spark is None:
        raise TraceError("a path needs a session to be read with: groups(path, spark)")
    row_groups = row_groups_of(Path(trace))
    if row_groups is None:
        return _gathered(_by_sorting(spark.read.parquet(*map(str, files_of(Path(trace)))), chosen), chosen)
    return _gathered(_by_files(spark, row_groups, chosen), chosen)


class _Stretch:
    """A topic's messages in order of time, on their way to onsets."""

    def __init__(self, topic: str | None, options: model.Options) -> None:
        self._topic = topic
        self._scanner = model.Scanner(options.silence_ns)
        self._numbers: dict[str, int] = {}
        self._groups: dict[str | None, int] = {None: 0}
        self._ranks = np.zeros(1, np.int32)
        self._messages = 0
        self._missing = {"publisher": 0, "arrival_ns": 0}
        self._error: str | None = None

    def feed(self, table: pa.Table | pa.RecordBatch) -> None:
        """Take the next messages."""
        self._messages += table.num_rows
        for name in self._missing:
            self._missing[name] += table.column(name).null_count
        if self._topic is None or any(self._missing.values()) or self._error:
            return
        try:
            times = scan.as_arrivals(_whole(table.column("arrival_ns")).to_numpy())
            senders = _numbered(table.column("publisher"), self._numbers)
            self._scanner.feed(times, senders, len(self._numbers))
        except SRTMError as error:
            self._error = str(error)
            return
        if "group" in table.schema.names and table.column("group").null_count < table.num_rows:
            groups = _numbered(table.column("group"), self._groups)
            if len(self._ranks) < len(self._groups):
                ordered = sorted(self._groups, key=lambda name: (name is not None, name))
                self._ranks = np.array([self._groups[name] for name in ordered], np.int32).argsort().astype(np.int32)
            self._scanner.note(times, senders, groups, self._ranks)

    def fail(self, error: SRTMError) -> None:
        """Stop at what could not be read."""
        self._error = str(error)

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """A row for the stretch, without a publisher, and one for each publisher."""
        names_groups = len(self._groups) > 1
        yield _batch([self._row(error=self._problem(), messages=self._messages, names_groups=names_groups)])
        if self._problem():
            return
        declared = list(self._groups)
        rows = []
        scanned = zip(self._numbers, self._scanner.onsets(), strict=True)
        for number, (name, onsets) in enumerate(scanned):
            rows.append(
                self._row(
                    publisher=name,
                    last_ns=int(self._scanner.last_ns[number]),
                    onsets=onsets.tobytes(),
                    declared=declared[self._scanner.group_of[number]],
                )
            )
            if len(rows) == _ROWS:
                yield _batch(rows)
                rows = []
        yield _batch(rows)

    def _problem(self) -> str | None:
        if self._topic is None:
            return f"{self._messages} messages have no topic"
        lacking = [f"{count} of {self._messages} messages have no {name}" for name, count in self._missing.items() if count]
        return "; ".join(lacking) or self._error

    def _row(self, **values: Any) -> dict[str, Any]:
        return {"topic": self._topic or "", **values}


def _batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, _ARROW)


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _numbered(column: pa.ChunkedArray | pa.Array, numbers: dict[Any, int]) -> NDArray[np.int32]:
    """The numbers of a column of names; new names get the next ones, and no name is number 0 where None has it."""
    parts = []
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        encoded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        known = [numbers.setdefault(name, len(numbers)) for name in encoded.dictionary.to_pylist()]
        table = np.array([*known, 0], np.int32)
        parts.append(table[pc.fill_null(encoded.indices.cast(pa.int64()), len(known)).to_numpy()])
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _by_files(spark: SparkSession, topics: dict[str, list[RowGroup]], options: model.Options) -> DataFrame:
    tasks = _cut(topics, parallelism(spark))

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for row_groups in tasks[number]:
                    stretch = _Stretch(row_groups[0].topic, options)
                    try:
                        for row_group in row_groups:
                            stretch.feed(_read(row_group))
                    except SRTMError as error:
                        stretch.fail(error)
                    yield from stretch.pieces()

    return spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(run, _PIECES)


def _cut(topics: dict[str, list[RowGroup]], tasks: int) -> list[list[list[RowGroup]]]:
    """Share row groups out over tasks, consecutive ones of a topic together, about as many messages to each."""
    listed = [row_group for topic in sorted(topics) for row_group in topics[topic]]
    total = sum(row_group.span.messages for row_group in listed)
    before, placed = 0, []
    for row_group in listed:
        placed.append((min(tasks - 1, before * tasks // total), row_group))
        before += row_group.span.messages
    cut: list[list[list[RowGroup]]] = [[] for _ in range(tasks)]
    for (task, _), members in groupby(placed, key=lambda entry: (entry[0], entry[1].topic)):
        cut[task].append([row_group for _, row_group in members])
    return [pieces for pieces in cut if pieces]


def _read(row_group: RowGroup) -> pa.Table:
    try:
        with pq.ParquetFile(row_group.path, read_dictionary=["publisher", "group"], pre_buffer=False) as file:
            columns = [name for name in ("publisher", "group", "arrival_ns") if name in file.schema_arrow.names]
            return file.read_row_group(row_group.group, columns=columns, use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise TraceError(f"{row_group.path}, row group {row_group.group}: {error}", path=row_group.path) from None


def _by_sorting(trace: DataFrame, options: model.Options) -> DataFrame:
    _check_frame(trace)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stretch: _Stretch | None = None
        current: str | None = None
        for batch in batches:
            for topic, rows in _by_topic(batch):
                if stretch is None or topic != current:
                    if stretch:
                        yield from stretch.pieces()
                    stretch, current = _Stretch(topic, options), topic
                stretch.feed(rows)
        if stretch:
            yield from stretch.pieces()

    columns = [name for name in ("topic", "publisher", "group", "arrival_ns") if name in trace.columns]
    return (
        trace.select(*columns)
        .repartition(2 * parallelism(trace.sparkSession), "topic", "publisher")
        .sortWithinPartitions("topic", "arrival_ns")
        .mapInArrow(run, _PIECES)
    )


def _by_topic(batch: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    """Runs of rows of one topic."""
    topics = batch.column("topic").dictionary_encode()
    codes = pc.fill_null(topics.indices, -1).to_numpy()
    begin = 0
    for end in [*(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]:
        if end > begin:
            code = int(codes[begin])
            yield topics.dictionary[code].as_py() if code >= 0 else None, batch.slice(begin, end - begin)
        begin = end


def _gathered(pieces: DataFrame, options: model.Options) -> list[TopicGroups]:
    def run(table: pa.Table) -> pa.Table:
        line = _of_topic(table, options)
        return pa.table({"topic": [line.topic], "result": [json.dumps(asdict(line))]})

    lines = [_line(row["result"]) for row in pieces.groupBy("topic").applyInArrow(run, _RESULT).toArrow().to_pylist()]
    if not lines:
        raise TraceError("the trace holds no messages")
    return sorted(lines, key=lambda line: line.topic)


def _of_topic(table: pa.Table, options: model.Options) -> TopicGroups:
    """All pieces of a topic → its groups."""
    topic = table["topic"][0].as_py()
    about = table.filter(pc.is_null(table["publisher"]))
    messages = pc.sum(about["messages"]).as_py()
    if errors := about["error"].drop_null().to_pylist():
        return TopicGroups(topic, messages, error=_summed(errors, about))
    by_name: dict[str, list[model.Piece]] = defaultdict(list)
    declared: dict[str, tuple[int, str]] = {}
    rows = table.filter(pc.is_valid(table["publisher"]))
    columns = (rows[name].to_pylist() for name in ("publisher", "last_ns", "onsets", "declared"))
    for name, last_ns, onsets, group in zip(*columns, strict=True):
        by_name[name].append(model.Piece(np.frombuffer(onsets, np.int64), last_ns))
        declared[name] = max(declared.get(name, (model.NEVER, "")), (last_ns, group or ""))
    onsets_of = model.Onsets.of({name: model.join(its, options.silence_ns) for name, its in by_name.items()})
    found = tuple(model.find_groups(onsets_of, options))
    compared = None
    if pc.any(about["names_groups"]).as_py():
        group_of = {name: group.name for group in found for name in group.publishers}
        compared = drift(by_name, {name: group or None for name, (_, group) in declared.items()}, group_of)
    return TopicGroups(topic, messages, len(by_name), found, compared)


def _summed(errors: list[str], about: pa.Table) -> str:
    """One error for all stretches of a topic: counts are added, of others the first by name is told."""
    missing: dict[str, int] = defaultdict(int)
    others = []
    for text in errors:
        for part in text.split("; "):
            count, _, rest = part.partition(" ")
            if count.isdigit() and "messages have no " in rest:
                missing[rest.rpartition(" ")[2]] += int(count)
            else:
                others.append(part)
    if others:
        return min(others)
    total = pc.sum(about["messages"]).as_py()
    if "topic" in missing:
        return f"{total} messages have no topic"
    return "; ".join(f"{count} of {total} messages have no {name}" for name, count in sorted(missing.items()))


def _line(text: str) -> TopicGroups:
    facts = json.loads(text)
    found = tuple(
        model.Group(tuple(group["publishers"]), group["confidence"], group["period_ns"]) for group in facts["groups"]
    )
    compared = facts["drift"]
    if compared:
        compared = Drift(
            compared["agreement"],
            *(
                tuple((group, tuple((part, count) for part, count in parts)) for group, parts in compared[name])
                for name in ("split", "merged")
            ),
            tuple((name, one, other) for name, one, other in compared["moved"]),
        )
    return TopicGroups(facts["topic"], facts["messages"], facts["publishers"], found, compared, facts["error"])


def _check_frame(trace: DataFrame) -> None:
    types = dict(trace.dtypes)
    wanted = {"topic": "string", "publisher": "string", "arrival_ns": "bigint"}
    if "group" in types:
        wanted["group"] = "string"
    wrong = [
        f"column {name!r} must be {kind}, but is {types.get(name, 'missing')}"
        for name, kind in wanted.items()
        if types.get(name) != kind
    ]
    if wrong:
        raise TraceError(f"this is not a trace: {'; '.join(wrong)}; it has {', '.join(types)}")
