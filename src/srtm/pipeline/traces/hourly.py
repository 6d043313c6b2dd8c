"""What tasks do for the store of profiles: sum up every hour of every topic, as `model.hours` says.

No task cuts an hour, so each is summed up by itself and in one go. The tables that a task sends (`traces.parts`) are
aligned: `hours` says of each hour how many rows of `rates`, `batches` and `publishers` are its own, and `rates` how
many of `bins`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from srtm.model import burst, fleet, hours
from srtm.model.scan import EARLIEST_NS, LATEST_NS
from srtm.pipeline.traces.files import counting
from srtm.pipeline.traces.joining import tallies
from srtm.pipeline.traces.parts import PART_FIELDS, joined, packed, table_of
from srtm.pipeline.traces.topics import Topics
from srtm.workload.gathered import Names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from srtm.pipeline.traces.batches import Batches, Ints, Work
    from srtm.pipeline.traces.files import Files
    from srtm.pipeline.traces.frames import Frame
    from srtm.pipeline.traces.topics import Faults, Indices


_BETWEEN = "\x1f"  # topic and hour


def summing_up(topics: Topics, length_ns: int) -> Work:
    """Work over batches of (topic, publisher, arrival_ns) that cut no hour, which has this length.

    The trace covers the time from its first message to its last, of any topic.
    """
    seen = np.array([[topics.first_ns.min(initial=LATEST_NS), topics.last_ns.max(initial=EARLIEST_NS)]])

    def work(_: int, batches: Batches) -> Batches:
        names, parts = Names(), defaultdict(list)
        for batch in batches:
            numbers, times = topics.numbered(batch.column("topic")), batch.column("arrival_ns").to_numpy()
            senders = names.numbered(batch.column("publisher"))
            if numbers.min(initial=0) < 0:
                known = numbers >= 0
                numbers, times, senders = numbers[known], times[known], senders[known]
            if len(times):
                order, _ends = fleet.sorted_by_topic(numbers, np.arange(len(numbers)), len(topics))
                found = _summed_up(numbers[order], times[order], senders[order], len(names.all), length_ns, seen)
                for part, table in found.items():
                    parts[part].append(table)
        if parts:
            whole = {part: pa.concat_tables(tables) for part, tables in parts.items()}
            yield from packed({"names": table_of(name=names.all), **whole})

    return work


def _summed_up(
    topics: Indices, times: Ints, senders: Indices, known: int, length_ns: int, seen: Ints
) -> dict[str, pa.Table]:
    """The hours of rows that are in order of topic and time; `seen` is a row (from, to) of the time of the trace."""
    numbers = times // length_ns
    new = np.ones(len(times), np.bool_)
    new[1:] = (np.diff(topics) != 0) | (np.diff(numbers) != 0)
    begins = np.flatnonzero(new)
    ends = np.append(begins[1:], len(times))
    count = len(begins)
    segments = np.column_stack([np.arange(count), begins, ends])
    most = np.zeros((count, len(burst.WINDOWS_NS)), np.int64)
    burst.widen_topics(times, np.column_stack([np.arange(count), begins, begins, ends]), most)
    batches, (of_hours, publishers) = burst.topics_batches(times, senders, segments, known)
    hours_ns = numbers[begins] * length_ns
    place, rates = hours.rates_near(ends - begins, hours.observed_ns(seen, hours_ns, hours_ns + length_ns))
    bins, backlogs, clear = _needs(times, segments[:, 1:], place, rates)
    return {
        "hours": table_of(
            topic=topics[begins].astype(np.int64),
            hour_ns=hours_ns,
            messages=ends - begins,
            first_ns=times[begins],
            last_ns=times[ends - 1],
            seen_from_ns=np.full(count, seen[0, 0]),
            seen_until_ns=np.full(count, seen[0, 1]),
            envelope=most,
            place=place,
            rates=rates,
            batches=np.bincount(batches[:, 0], minlength=count),
            publishers=np.bincount(of_hours, minlength=count),
        ),
        "rates": table_of(backlog=backlogs, clear=clear, bins=np.bincount(bins[:, 0], minlength=len(backlogs))),
        "bins": table_of(bin=bins[:, 1].copy(), messages=bins[:, 2].copy()),
        "batches": table_of(size=batches[:, 1].copy(), count=batches[:, 2].copy()),
        "publishers": table_of(publisher=publishers.copy()),
    }


def _needs(times: Ints, segments: Ints, place: Ints, rates: Ints) -> tuple[Ints, Ints, Ints]:
    """Rows (rate of an hour, bin, messages), by hour and rate; the backlog behind each, and its clear table.

    One rate of every hour at a time: the scan has room for as many rows as there are messages.
    """
    of_hours = np.repeat(np.arange(len(rates)), rates)
    steps = np.arange(len(of_hours)) - np.repeat(np.cumsum(rates) - rates, rates)
    found = [np.empty((0, 3), np.int64)]
    backlogs, clear = np.empty(len(steps), np.int64), np.empty((len(steps), hours.LEVELS), np.int64)
    for step in range(int(rates.max())):
        mine = np.flatnonzero(steps == step)
        at = of_hours[mine]
        rows, backlogs[mine], clear[mine] = hours.needs(times, segments[at], hours.GRID[place[at] + step])
        rows[:, 0] = mine[rows[:, 0]]
        found.append(tallies(rows))
    return tallies(*found), backlogs, clear


class ByHour:
    """An open trace in which every hour of a topic is a topic of its own, for jobs that know topics alone."""

    def __init__(self, source: Files | Frame, length_ns: int) -> None:
        self._source, self._length_ns = source, length_ns

    @property
    def at_once(self) -> int:
        """How many tasks Spark runs at a time."""
        return self._source.at_once

    def topics(self) -> tuple[Topics, Faults]:
        """The hours of topics, and the topics that cannot be judged."""
        known, faults = self._source.topics()
        count, length_ns = counting("arrival_ns"), self._length_ns

        def work(number: int, batches: Batches) -> Batches:
            return count(number, (_with_hours(batch, length_ns) for batch in batches))

        found = Topics.total(joined(self._source.run(work, PART_FIELDS, ("topic", "arrival_ns")))["topics"])
        judged = set(known.names.to_pylist())
        mine = [hour_of(name)[0] in judged for name in found.names.to_pylist()]
        return found.only(np.array(mine, np.bool_)), faults

    def map(self, work: Work, fields: str, columns: Sequence[str]) -> DataFrame:
        """What the work yields over each stretch, left in the cluster."""
        length_ns = self._length_ns

        def by_hour(number: int, batches: Batches) -> Batches:
            return work(number, (_with_hours(batch, length_ns) for batch in batches))

        return self._source.map(by_hour, fields, columns)


def hour_of(name: str) -> tuple[str, int]:
    """The topic and the beginning of the hour, in hours, that a name of `ByHour` stands for."""
    topic, _, hour = name.rpartition(_BETWEEN)
    return topic, int(hour)


def _with_hours(batch: pa.RecordBatch, length_ns: int) -> pa.RecordBatch:
    """The batch with the name of topic and hour as its topic."""
    column, numbers = batch.column("topic"), batch.column("arrival_ns").to_numpy() // length_ns
    first, pairs = int(numbers.min(initial=0)), fleet.PairNumbers()
    codes = pairs.numbered(column.indices.to_numpy(), (numbers - first).astype(np.int32))
    names, hours_of = column.dictionary.take(pa.array(pairs.topics)).to_pylist(), (pairs.values + first).tolist()
    named = pa.array([f"{name}{_BETWEEN}{hour}" for name, hour in zip(names, hours_of, strict=True)], pa.string())
    place = batch.schema.get_field_index("topic")
    return batch.set_column(place, "topic", pa.DictionaryArray.from_arrays(pa.array(codes), named))
