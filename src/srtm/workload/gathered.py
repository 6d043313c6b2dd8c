"""The messages of topics in memory: 12 bytes each, whatever the names of topics and publishers.

In: batches of rows, their strings as dictionaries. Out: each topic's publishers and arrivals. Publishers are in order
of name, and messages of one instant in order of publisher, so the result does not depend on how rows were cut into
batches and files, nor on the order in which those were read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from srtm.model import fleet
from srtm.model._compiled import compiled
from srtm.model.placement import Publisher
from srtm.model.profile import mean_rate
from srtm.model.scan import is_sorted
from srtm.workload.publishers import Arrivals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class TopicArrivals:
    """One topic of a trace, sorted: its publishers with their measured rates, and its arrivals."""

    topic: str
    publishers: tuple[Publisher, ...]
    arrivals: Arrivals


class Names:
    """Numbers for names, consistent over all batches of a task; null counts as the first."""

    def __init__(self, known: pa.StringArray | None = None) -> None:
        self.all = pa.array([], pa.string()) if known is None else known

    def numbered(self, column: pa.DictionaryArray) -> Indices:
        """The number of each row's name."""
        codes, meaning = self.coded(column)
        numbered: Indices = meaning[codes]
        return numbered

    def coded(self, column: pa.DictionaryArray) -> tuple[Indices, Indices]:
        """A code for each row's name, and the number that each code means: few to look up if rows are many."""
        numbers = pc.index_in(column.dictionary, value_set=self.all)
        if numbers.null_count:
            self.all = pa.concat_arrays([self.all, column.dictionary.filter(pc.is_null(numbers))])
            numbers = pc.index_in(column.dictionary, value_set=self.all)
        meaning, codes = numbers.to_numpy(), column.indices
        if column.null_count:
            meaning, codes = np.append(meaning, np.int32(0)), pc.fill_null(codes, len(meaning))
        return codes.to_numpy(), meaning


class Rows(NamedTuple):
    """Messages in order of time: the number of each one's sender, and when it arrived."""

    senders: Indices
    times: Ints


class Senders:
    """Numbers for the publishers of topics, in the order in which they come, and the group of each."""

    def __init__(self) -> None:
        self._topics, self._publishers = Names(), Names()
        self._groups = Names(pa.array([""]))  # number 0 is none
        self._pairs = fleet.PairNumbers()
        self._first_ns, self._group_of = np.empty(0, np.int64), np.empty(0, np.int32)

    def numbered(self, rows: pa.RecordBatch) -> Rows:
        """The messages of a batch, sorted; a publisher's group is that of its first message."""
        times = rows.column("arrival_ns").to_numpy()
        if not is_sorted(times):
            rows = rows.take(pa.array(np.argsort(times, kind="stable")))
            times = rows.column("arrival_ns").to_numpy()
        topics = self._topics.numbered(rows.column("topic"))
        senders = self._pairs.numbered(topics, self._publishers.numbered(rows.column("publisher")))
        more = len(self._pairs) - len(self._first_ns)
        self._first_ns = np.append(self._first_ns, np.full(more, _NEVER))
        self._group_of = np.append(self._group_of, np.zeros(more, np.int32))
        first = np.full(len(self._pairs), -1, np.int64)
        first[senders[::-1]] = np.arange(len(senders))[::-1]  # numpy keeps the last of several values for one place
        new = np.flatnonzero(first >= 0)
        new = new[times[first[new]] < self._first_ns[new]]
        self._first_ns[new] = times[first[new]]
        if "group" in rows.schema.names:
            self._group_of[new] = self._groups.numbered(rows.column("group").take(pa.array(first[new])))
        return Rows(senders, times)

    @property
    def topics(self) -> Indices:
        """The topic of each sender, as a place among `topic_names`."""
        return self._pairs.topics

    @property
    def topic_names(self) -> pa.StringArray:
        """The topics, in the order in which they came."""
        return self._topics.all

    def table(self) -> pa.Table:
        """A row for each sender: its topic, its name, its group or an empty one, and when it sent first."""
        return pa.table(
            {
                "topic": self._topics.all.take(pa.array(self._pairs.topics)),
                "publisher": self._publishers.all.take(pa.array(self._pairs.values)),
                "group": self._groups.all.take(pa.array(self._group_of)),
                "first_ns": self._first_ns,
            }
        )


def arrivals_of(parts: Sequence[tuple[pa.Table, list[Rows]]]) -> list[TopicArrivals]:
    """The topics of messages that were numbered apart: tables of senders, with the messages that refer to each.

    Empties the lists, so that messages are not in memory twice.
    """
    table = pa.concat_tables([senders for senders, _ in parts]).combine_chunks()
    topic_names, topic_of = ranked(table["topic"].combine_chunks())
    names, name_of = ranked(table["publisher"].combine_chunks())
    width = len(names)
    pairs, first, number_of = np.unique(topic_of * width + name_of, return_index=True, return_inverse=True)
    by_time = np.argsort(-table["first_ns"].to_numpy(), kind="stable")  # the earliest is written last, and stays
    first[number_of[by_time]] = by_time
    groups = table["group"].take(pa.array(first)).to_pylist()
    begins = np.searchsorted(pairs // width, np.arange(len(topic_names) + 1))
    times, numbers = _joined(parts, number_of)
    in_topic = (pairs // width).astype(np.int32)[numbers]
    nothing = np.empty(0, np.int32), np.empty(0, np.int64)
    rows = fleet.dealt(*nothing, in_topic, times, numbers, 0, len(topic_names))
    found = []
    for topic, begin, end in zip(rows.topics.tolist(), rows.begins.tolist(), rows.ends.tolist(), strict=True):
        mine = slice(int(begins[topic]), int(begins[topic + 1]))
        arrivals = _in_order(rows.times[begin:end], rows.senders[begin:end] - np.int32(mine.start))
        listed = names.take(pa.array(pairs[mine] % width)).to_pylist()
        found.append(TopicArrivals(topic_names[topic].as_py(), _publishers(listed, groups[mine], arrivals), arrivals))
    return found


def _joined(parts: Sequence[tuple[pa.Table, list[Rows]]], number_of: Ints) -> tuple[Ints, Indices]:
    times = np.empty(sum(len(rows.times) for _, some in parts for rows in some), np.int64)
    numbers = np.empty(len(times), np.int32)
    filled = before = 0
    for senders, some in parts:
        here = number_of[before : before + len(senders)].astype(np.int32)
        before += len(senders)
        some.reverse()
        while some:
            rows = some.pop()
            place = slice(filled, filled + len(rows.times))
            times[place], numbers[place] = rows.times, here[rows.senders]
            filled = place.stop
    return times, numbers


def _in_order(times: Ints, senders: Indices) -> Arrivals:
    if not is_sorted(times):
        order = np.argsort(times, kind="stable")
        times, senders = times[order], senders[order]
    _sort_ties(times, senders)
    return Arrivals(times, senders)


@compiled
def _sort_ties(times: Ints, senders: Indices) -> None:
    """Sort the senders of messages that arrived at the same instant."""
    begin = 0
    while begin < len(times):
        end = begin + 1
        rising = True
        while end < len(times) and times[end] == times[begin]:
            rising &= senders[end - 1] <= senders[end]
            end += 1
        if not rising:
            senders[begin:end] = np.sort(senders[begin:end])
        begin = end


def _publishers(names: list[str], groups: list[str], arrivals: Arrivals) -> tuple[Publisher, ...]:
    span = int(arrivals.times_ns[0]), int(arrivals.times_ns[-1])
    counts = np.bincount(arrivals.publisher_of, minlength=len(names)).tolist()
    rates = {count: float(mean_rate(count, *span)) for count in set(counts)}
    return tuple(
        Publisher(name, rates[count], group or None) for name, count, group in zip(names, counts, groups, strict=True)
    )


def ranked(column: pa.StringArray) -> tuple[pa.StringArray, Ints]:
    """The different names of a column in order, and the place of each row's name among them."""
    encoded = column.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary)
    places: NDArray[np.int64] = np.empty(len(order), np.int64)
    places[order.to_numpy()] = np.arange(len(order))
    return encoded.dictionary.take(order), places[encoded.indices.to_numpy()]
