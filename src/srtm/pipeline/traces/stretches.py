"""Stretches: intervals of a trace's time, each of which one task scans; cut from the footers of its files.

In: Parquet files and the column that orders them. Out: row groups in order of time, and stretches that share them out,
or None if the footers say too little or too much would be read twice.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from srtm.workload.trace import RECORDED_SCHEMA, check_schema, partitions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BEGINNING, END = -(2**63), 2**63  # around every time that a file can hold, sensible or not
_LONGEST = 64_000_000  # messages in a stretch: what a lost executor loses
_SMALL = 2_000_000  # messages that one task scans before a second one has started
_JOINED = 4  # times as many if row groups hold several topics: joining those would take longer than scanning them
_HELD = 32_000_000  # messages of overlapping row groups that a task may hold, at 12 to 30 bytes each
_REREAD = 8  # how often a message may be read on average: still cheaper than a shuffle


class Span(NamedTuple):
    """The number of messages, and their first and last time."""

    messages: int
    first_ns: int
    last_ns: int

    def joined(self, other: Span) -> Span:
        """The span of both together."""
        return Span(
            self.messages + other.messages, min(self.first_ns, other.first_ns), max(self.last_ns, other.last_ns)
        )


class RowGroup(NamedTuple):
    """A row group of a trace file, as the footer describes it; `topic` is None if it has several."""

    path: str
    number: int
    topic: str | None
    span: Span


class Stretch(NamedTuple):
    """begin ≤ key < end, and the row groups with messages in it, in order of their first."""

    begin_ns: int
    end_ns: int
    row_groups: tuple[RowGroup, ...]


def row_groups_of(footers: Mapping[str, Any], columns: Sequence[str], key: str) -> list[RowGroup] | None:
    """The row groups of files in order of their first time; None if a footer lacks the statistics."""
    found = []
    for file, known in footers.items():
        check_schema(file, known.schema.to_arrow_schema(), columns)
    for file, known in footers.items():
        for number in range(known.num_row_groups):
            group = known.row_group(number)
            if not group.num_rows:
                continue
            described = _described(file, number, group, columns, key)
            if described is None:
                return None
            found.append(described)
    return list(in_order(found))


def _described(path: str, number: int, group: Any, columns: Sequence[str], key: str) -> RowGroup | None:
    described = [group.column(column) for column in range(group.num_columns)]
    statistics = {column.path_in_schema: column.statistics for column in described}
    times, named = statistics[key], partitions_of(path)
    if times is None or not times.has_min_max:
        return None
    required = [name for name in columns if not RECORDED_SCHEMA.field(name).nullable]
    if any(named[name] is None for name in required if name not in statistics):
        return None
    known = [statistics[name] for name in required if name in statistics]
    if any(about is None or not about.has_null_count or about.null_count for about in known):
        return None
    topics = statistics.get("topic")
    topic = (
        named["topic"] if topics is None else topics.min if topics.has_min_max and topics.min == topics.max else None
    )
    return RowGroup(path, number, topic, Span(group.num_rows, times.min, times.max))


def in_order(row_groups: Iterable[RowGroup]) -> tuple[RowGroup, ...]:
    """Row groups by time, then by place."""
    return tuple(
        sorted(row_groups, key=lambda group: (group.span.first_ns, group.span.last_ns, group.path, group.number))
    )


def is_small(row_groups: Iterable[RowGroup], *, joined: bool = False) -> bool:
    """Whether these are too few messages for a second task; `joined` if the driver must join stretches by topic."""
    listed = list(row_groups)
    mixed = joined and any(row_group.topic is None for row_group in listed)
    return sum(row_group.span.messages for row_group in listed) <= (_JOINED if mixed else 1) * _SMALL


def cut(row_groups: list[RowGroup], at_once: int, grain_ns: int, *, joined: bool = False) -> tuple[Stretch, ...] | None:
    """Stretches of about equally many messages, cut where row groups begin; None if too much would be read twice.

    `joined` is for jobs whose driver joins the stretches of each topic.
    """
    total = sum(row_group.span.messages for row_group in row_groups)
    if _overlap(row_groups) > _HELD:
        return None
    wanted = 1 if is_small(row_groups, joined=joined) else at_once * -(-total // (at_once * _LONGEST))
    before, cuts = 0, [BEGINNING]
    for row_group in row_groups:
        at_ns = floor(row_group.span.first_ns, grain_ns)
        if before * wanted >= len(cuts) * total and at_ns > cuts[-1]:
            cuts.append(at_ns)
        before += row_group.span.messages
    inside: list[list[RowGroup]] = [[] for _ in cuts]
    for row_group in row_groups:
        first = bisect_right(cuts, row_group.span.first_ns) - 1
        for number in range(first, bisect_right(cuts, row_group.span.last_ns)):
            inside[number].append(row_group)
    stretches = [
        Stretch(begin, end, tuple(its_own))
        for (begin, end), its_own in zip(pairwise([*cuts, END]), inside, strict=True)
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


def floor(time_ns: int, grain_ns: int) -> int:
    """The beginning of the grain that holds a time."""
    return time_ns - time_ns % grain_ns
