"""Groups: per topic, the publishers that burst together; exactly the groups of `model.correlation`.

Two stages. Tasks scan the stretches of the trace (`traces.reading`) for onsets in parallel, as if nothing came before
them: ten times fewer rows than messages if publishers send batches of ten. Then one task per topic joins the onsets of
its publishers and finds the groups; the last message before a stretch decides whether the first one in it starts a
burst. Groups never span topics. A topic that fails does not fail the others: its error is in its line of the result.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from srtm.errors import SRTMError
from srtm.model import correlation as model
from srtm.model import scan
from srtm.model.drift import Drift, drift
from srtm.pipeline.traces.batches import by_topic
from srtm.pipeline.traces.reading import opened
from srtm.units import NS_PER_S
from srtm.workload.trace import files_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

    from srtm.pipeline.traces.batches import Batches, Work
    from srtm.pipeline.traces.reading import Trace

COLUMNS = ("topic", "publisher", "arrival_ns")
_ONSET_FIELDS = (
    "topic string, publisher string, last_ns long, onsets binary, declared string, names_groups boolean, error string"
)
_ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("publisher", pa.string()),
        ("last_ns", pa.int64()),
        ("onsets", pa.binary()),
        ("declared", pa.string()),
        ("names_groups", pa.bool_()),
        ("error", pa.string()),
    ]
)
_LINES = "topic string, line binary"
_ROWS = 1_000  # publishers per batch: some megabytes


@dataclass(frozen=True, slots=True)
class TopicGroups:
    """One topic's groups, and their drift from the declared ones if any are declared; or an error."""

    topic: str
    messages: int
    publishers: int = 0
    groups: tuple[model.Group, ...] = ()
    drift: Drift | None = None
    error: str | None = None


def groups(
    trace: Trace, spark: SparkSession | None = None, *, options: model.Options | None = None
) -> list[TopicGroups]:
    """The correlation groups of every topic of a trace: a DataFrame, or a path that the session reads."""
    chosen = options or model.Options()
    columns = (*COLUMNS, "group") if _names_groups(trace, spark) else COLUMNS
    with opened(trace, spark, columns) as source:
        spans = source.spans()
        onsets = source.map(_scanning(chosen), _ONSET_FIELDS, columns)
        found = onsets.groupBy("topic").applyInArrow(_finding(chosen), _LINES).toArrow()
        lines = [pickle.loads(line) for line in found["line"].to_pylist()]
        lines = [replace(line, messages=spans[line.topic].messages) for line in lines]
        faults = [TopicGroups(topic, 0, error=error) for topic, error in source.faults.items()]
    return sorted([*lines, *faults], key=lambda line: line.topic)


def _names_groups(trace: Trace, spark: SparkSession | None) -> bool:
    """Whether the trace has a column of declared groups; imported traces may lack it."""
    if not isinstance(trace, str | Path):
        return "group" in trace.columns
    if "://" in str(trace):
        return spark is not None and "group" in spark.read.parquet(str(trace)).columns
    try:
        return all("group" in pq.read_schema(file).names for file in files_of(Path(trace)))
    except (OSError, pa.ArrowInvalid):
        return False  # `opened` names the problem


class _TopicStretch:
    """One topic in one stretch, its messages taken in order of time and reduced to onsets."""

    def __init__(self, topic: str, options: model.Options) -> None:
        self._topic = topic
        self._scanner = model.Scanner(options.silence_ns)
        self._numbers: dict[str | None, int] = {}
        self._groups: dict[str | None, int] = {None: 0}
        self._ranks = np.zeros(1, np.int32)
        self._error: str | None = None

    def feed(self, rows: pa.RecordBatch) -> None:
        """Take the next messages."""
        if self._error:
            return
        try:
            times = scan.as_arrivals(rows.column("arrival_ns").to_numpy())
            senders = _numbered(rows.column("publisher"), self._numbers)
            self._scanner.feed(times, senders, len(self._numbers))
        except SRTMError as error:
            self._error = str(error)
            return
        if "group" in rows.schema.names and rows.column("group").null_count < rows.num_rows:
            groups = _numbered(rows.column("group"), self._groups)
            if len(self._ranks) < len(self._groups):
                names = np.array([name or "" for name in self._groups])
                self._ranks = names.argsort(kind="stable").argsort().astype(np.int32)
            self._scanner.note(times, senders, groups, self._ranks)

    def onsets(self) -> Batches:
        """A row for the stretch, without a publisher, and a row for each publisher."""
        names_groups = len(self._groups) > 1
        yield self._batch([{"names_groups": names_groups, "error": self._error}])
        if self._error:
            return
        declared = list(self._groups)
        rows: list[dict[str, Any]] = []
        for number, (name, onsets) in enumerate(zip(self._numbers, self._scanner.onsets(), strict=True)):
            if not len(onsets):
                continue  # in the file's dictionary, but for another topic or time
            last_ns, group = int(self._scanner.last_ns[number]), declared[self._scanner.group_of[number]]
            rows.append({"publisher": name, "last_ns": last_ns, "onsets": onsets.tobytes(), "declared": group})
            if len(rows) == _ROWS:
                yield self._batch(rows)
                rows = []
        yield self._batch(rows)

    def _batch(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([{"topic": self._topic, **row} for row in rows], _ARROW)


def _numbered(column: pa.DictionaryArray, numbers: dict[str | None, int]) -> NDArray[np.int32]:
    """The numbers of a column of names, 0 for null; new names get the next numbers."""
    table = np.array([numbers.setdefault(name, len(numbers)) for name in column.dictionary.to_pylist()] + [0], np.int32)
    numbered: NDArray[np.int32] = table[pc.fill_null(column.indices, len(table) - 1).to_numpy()]
    return numbered


def _scanning(options: model.Options) -> Work:
    def work(_: int, batches: Batches) -> Batches:
        stretches: dict[str, _TopicStretch] = {}
        for batch in batches:
            for topic, rows in by_topic(batch):
                if topic not in stretches:
                    stretches[topic] = _TopicStretch(topic, options)
                stretches[topic].feed(rows)
        for stretch in stretches.values():
            yield from stretch.onsets()

    return work


def _finding(options: model.Options) -> Any:
    def run(onsets: pa.Table) -> pa.Table:
        return pa.table({"topic": onsets["topic"][:1], "line": [pickle.dumps(_of_topic(onsets, options))]})

    return run


def _of_topic(stretches: pa.Table, options: model.Options) -> TopicGroups:
    """The groups of a topic, from its onsets in all stretches."""
    topic = stretches["topic"][0].as_py()
    if errors := stretches["error"].drop_null().to_pylist():
        return TopicGroups(topic, 0, error=min(errors))
    by_name: dict[str, list[model.StretchOnsets]] = defaultdict(list)
    declared: dict[str, tuple[int, str]] = {}
    for name, last_ns, onsets, group in _rows(stretches):
        by_name[name].append(model.StretchOnsets(np.frombuffer(onsets, np.int64), last_ns))
        declared[name] = max(declared.get(name, (model.NEVER, "")), (last_ns, group or ""))
    onsets_of = model.Onsets.of({name: model.join(its, options.silence_ns) for name, its in by_name.items()})
    found = tuple(model.find_groups(onsets_of, options))
    compared = None
    if pc.any(stretches["names_groups"]).as_py():
        group_of = {name: group.name for group in found for name in group.publishers}
        compared = drift(by_name, {name: group or None for name, (_, group) in declared.items()}, group_of)
    return TopicGroups(topic, 0, len(by_name), found, compared)


def _rows(stretches: pa.Table) -> Iterator[tuple[str, int, bytes, str | None]]:
    rows = stretches.filter(pc.is_valid(stretches["publisher"]))
    yield from zip(
        *(rows[name].to_pylist() for name in ("publisher", "last_ns", "onsets", "declared")),
        strict=True,
    )


def document(lines: Iterable[TopicGroups]) -> dict[str, Any]:
    """The document that `srtm groups --json` prints and `--out` writes; `workload.groups` reads it."""
    listed = list(lines)
    return {
        "groups": [
            {
                "topic": line.topic,
                "group": group.name,
                "publishers": list(group.publishers),
                "confidence": round(group.confidence, 4),
                "period_s": None if group.period_ns is None else group.period_ns / NS_PER_S,
            }
            for line in listed
            for group in line.groups
        ],
        "topics": [
            {
                "topic": line.topic,
                "messages": line.messages,
                "publishers": line.publishers,
                "grouped": sum(len(group.publishers) for group in line.groups),
                "error": line.error,
            }
            for line in listed
        ],
        "drift": [_drift(line.topic, line.drift) for line in listed if line.drift],
    }


def _drift(topic: str, found: Drift) -> dict[str, Any]:
    return {
        "topic": topic,
        "agreement": found.agreement,
        **{
            name: [
                {"group": group, "parts": [{"group": part, "publishers": count} for part, count in parts]}
                for group, parts in groups
            ]
            for name, groups in (("split", found.split), ("merged", found.merged))
        },
        "moved": [{"publisher": name, "declared": said, "found": seen} for name, said, seen in found.moved],
    }
