"""Groups: per topic, the publishers that burst together; exactly the groups of `model.correlation`.

Two stages. Tasks scan the stretches of the trace (`traces.reading`) for onsets in parallel, as if nothing came before
them: ten times fewer rows than messages if publishers send batches of ten. Then each topic's onsets come to one task,
which joins them and finds the groups; the last message before a stretch decides whether the first one in it starts a
burst. Topics share tasks, and a task scans and joins all of its topics at once. Groups never span topics. A topic that
fails does not fail the others: its error is in its line of the result.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from srtm.model import correlation as model
from srtm.model import fleet
from srtm.model import onsets as onsets_model
from srtm.model.drift import Drift, drift
from srtm.pipeline.traces.parts import joined, packed, table_of
from srtm.pipeline.traces.reading import opened
from srtm.pipeline.traces.tasks import by_lot
from srtm.units import NS_PER_S
from srtm.workload.gathered import Names, ranked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession

    from srtm.pipeline.traces.batches import Batches, Work
    from srtm.pipeline.traces.files import Files
    from srtm.pipeline.traces.frames import Frame
    from srtm.pipeline.traces.hourly import ByHour
    from srtm.pipeline.traces.reading import Trace
    from srtm.pipeline.traces.topics import Topics

COLUMNS = ("topic", "publisher", "group", "arrival_ns")
_ONSET_FIELDS = "lot long, part string, rows binary"
_LINES = "lines binary"
_LOTS = 8  # of topics, for each task that runs at a time: some lots are heavier than others


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
    """The correlation groups of every topic of a trace: a DataFrame, a path or a URI."""
    with opened(trace, spark, COLUMNS) as source:
        return groups_source(source, options)


def groups_source(source: Files | Frame | ByHour, options: model.Options | None = None) -> list[TopicGroups]:
    """`groups` of an open trace."""
    chosen = options or model.Options()
    topics, faults = source.topics()
    lots = _LOTS * source.at_once
    onsets = source.map(_scanning(topics, chosen, lots), _ONSET_FIELDS, COLUMNS)
    found = by_lot(onsets, lots).applyInArrow(_finding(topics, chosen), _LINES).toArrow()
    lines = [line for lot in found["lines"].to_pylist() for line in pickle.loads(lot)] if found.num_rows else []
    counts = topics.counts()
    lines = [replace(line, messages=counts[line.topic]) for line in lines]
    lines += [TopicGroups(topic, messages, error=error) for topic, (messages, error) in faults.items()]
    return sorted(lines, key=lambda line: line.topic)


class _Stretch:
    """All topics in one stretch, their messages taken in order and reduced to onsets."""

    def __init__(self, topics: Topics, options: model.Options) -> None:
        self._topics = topics
        self._scanner = onsets_model.Scanner(options.silence_ns)
        self._senders, self._publishers = fleet.PairNumbers(), Names()
        self._groups, self._ranks = Names(pa.array([""])), np.zeros(1, np.int32)
        self._names_groups = np.zeros(len(topics), np.bool_)

    def feed(self, rows: pa.RecordBatch) -> None:
        """Take the next messages."""
        topics, times = self._topics.numbered(rows.column("topic")), rows.column("arrival_ns").to_numpy()
        if topics.min(initial=0) < 0:
            rows = rows.filter(pa.array(topics >= 0))
            topics, times = topics[topics >= 0], rows.column("arrival_ns").to_numpy()
        senders = self._senders.numbered(topics, self._publishers.numbered(rows.column("publisher")))
        self._scanner.feed(times, senders, len(self._senders))
        if "group" in rows.schema.names and rows.column("group").null_count < rows.num_rows:
            declared = rows.column("group")
            self._names_groups[topics[declared.is_valid().to_numpy(zero_copy_only=False)]] = True
            groups = self._groups.numbered(declared)
            if len(self._ranks) < len(self._groups.all):
                self._ranks = pc.rank(self._groups.all, tiebreaker="first").to_numpy().astype(np.int32)
            self._scanner.note(times, senders, groups, self._ranks)

    def onsets(self, lots: int) -> Batches:
        """What goes to the tasks that find the groups of each lot of topics."""
        times, ends = self._scanner.in_order()
        counts, topics = np.diff(ends, prepend=0), self._senders.topics
        names = self._publishers.all.take(pa.array(self._senders.values))
        declared = self._groups.all.take(pa.array(self._scanner.group_of))
        for lot in np.unique(topics % lots).tolist():
            mine = np.flatnonzero(topics % lots == lot)
            its_times = times[np.repeat(topics % lots == lot, counts)]
            senders = table_of(
                topic=topics[mine],
                publisher=names.take(pa.array(mine)),
                last_ns=self._scanner.last_ns[mine],
                onsets=counts[mine],
                declared=declared.take(pa.array(mine)),
                names_groups=self._names_groups[topics[mine]],
            )
            for batch in packed({"senders": senders, "onsets": table_of(at_ns=its_times)}):
                same = pa.array(np.full(batch.num_rows, lot))
                yield pa.RecordBatch.from_arrays([same, *batch.columns], ["lot", *batch.schema.names])


def _scanning(topics: Topics, options: model.Options, lots: int) -> Work:
    def work(_: int, batches: Batches) -> Batches:
        stretch = _Stretch(topics, options)
        for batch in batches:
            stretch.feed(batch)
        yield from stretch.onsets(lots)

    return work


def _finding(topics: Topics, options: model.Options) -> Any:
    def run(onsets: pa.Table) -> pa.Table:
        lines = list(_found(topics, joined(onsets), options))
        return pa.table({"lines": [pickle.dumps(lines)]})

    return run


def _found(topics: Topics, parts: dict[str, pa.Table], options: model.Options) -> Iterator[TopicGroups]:
    """The groups of the topics of a lot, from their onsets in all stretches."""
    table, times = parts["senders"].combine_chunks(), parts["onsets"]["at_ns"].to_numpy()
    in_topic, last_ns, ends = table["topic"].to_numpy(), table["last_ns"].to_numpy(), np.cumsum(table["onsets"])
    # Senders in order of topic and name, and a number for each.
    names, places = ranked(table["publisher"].combine_chunks())
    key = in_topic.astype(np.int64) * len(names) + places
    senders, sender_of = np.unique(key, return_inverse=True)
    onsets, ends = onsets_model.StretchOnsets(sender_of, last_ns, ends, times).joined(len(senders), options.silence_ns)
    latest = np.empty(len(senders), np.int64)  # the row that has each sender's last message
    by_time = np.argsort(last_ns, kind="stable")
    latest[sender_of[by_time]] = by_time
    declares = np.unique(in_topic[table["names_groups"].to_numpy(zero_copy_only=False)])
    cuts = np.flatnonzero(np.diff(senders // len(names), prepend=-1))
    for begin, end in zip(cuts.tolist(), [*cuts[1:].tolist(), len(senders)], strict=True):
        topic, mine = int(senders[begin]) // len(names), senders[begin:end] % len(names)
        first = int(ends[begin - 1]) if begin else 0
        listed = tuple(names.take(pa.array(mine)).to_pylist())
        starts = np.concatenate([[first], ends[begin:end]]) - first
        found = tuple(model.find_groups(onsets_model.Onsets(listed, onsets[first : ends[end - 1]], starts), options))
        compared = None
        if topic in declares:
            group_of = {name: group.name for group in found for name in group.publishers}
            declared = table["declared"].take(pa.array(latest[begin:end])).to_pylist()
            compared = drift(
                listed, {name: group or None for name, group in zip(listed, declared, strict=True)}, group_of
            )
        yield TopicGroups(topics.names[topic].as_py(), 0, len(listed), found, compared)


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
