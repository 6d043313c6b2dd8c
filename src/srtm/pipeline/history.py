"""The store of profiles: hours of topics, kept as summaries, and folds of them to days, months or any period.

`add` sums up the hours of a trace (`traces.hourly`) on Spark and puts them into the store (`stored`). `fold` needs no
Spark and reads one hour at a time. Messages, publishers and batches of a period are exact. Its rate is over the time
that traces cover, from the topic's first hour to its last: each trace from its first message to its last, of any topic.
r is a rate of a grid (`model.hours`), less than a fifth above mean rate times headroom. b is enough at this r; the
smallest b that is enough lies between `b_at_least` and b. A window of the envelope that lies across two hours is not
seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from srtm.errors import InputError
from srtm.model import burst, fleet, hours, scan
from srtm.model.bucket import TokenBucket
from srtm.model.defaults import HEADROOM, QUANTILE
from srtm.model.drift import drift
from srtm.model.latency import bins_of
from srtm.model.profile import token_rates
from srtm.pipeline.groups import COLUMNS, groups_source
from srtm.pipeline.stored import SCHEMA, Store, flat, lists
from srtm.pipeline.traces.hourly import ByHour, hour_of, summing_up
from srtm.pipeline.traces.joining import renumbered, tallies, widest
from srtm.pipeline.traces.parts import PART_FIELDS, rows_of
from srtm.pipeline.traces.reading import opened
from srtm.units import NANO_PER_TOKEN, NS_PER_S, Number, ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

    from srtm.pipeline.groups import TopicGroups
    from srtm.pipeline.traces.batches import Ints
    from srtm.pipeline.traces.reading import Trace
    from srtm.pipeline.traces.topics import Faults

_COLUMNS = ("topic", "publisher", "arrival_ns")
_LIGHT = ["topic", "messages", "first_ns", "last_ns"]
_SEEN = ["hour_ns", "seen_from_ns", "seen_until_ns"]
_HEAVY = [*_LIGHT, "envelope", "batch_sizes", "batch_counts", "publishers"]
_NEEDS = ["place", "backlogs", "clear", "bins", "needs", "counts"]


@dataclass(frozen=True, slots=True)
class Period:
    """A topic in a period of time: what it sent, and the bucket it needs."""

    topic: str
    begin_ns: int
    end_ns: int
    observed_ns: int  # of the time between, at least a second
    messages: int
    publishers: int
    rate_mps: float
    bucket: TokenBucket
    b_at_least: int
    envelope: dict[int, int] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)


def add(store: Store, trace: Trace, spark: SparkSession, *, with_groups: bool = False) -> tuple[list[int], Faults]:
    """Put the hours of a trace into the store; returns these hours, and the topics that cannot be summed up.

    With groups, it also finds the groups of every hour, and puts them beside it.
    """
    with opened(trace, spark, COLUMNS, grain_ns=hours.HOUR_NS) as source:
        topics, faults = source.topics()
        received = source.run(summing_up(topics, hours.HOUR_NS), PART_FIELDS, _COLUMNS)
        names, parts = renumbered(received, "publisher")
        added = store.put(_rows(topics.names, names, parts)) if parts else []
        if with_groups:
            _add_groups(store, groups_source(ByHour(source, hours.HOUR_NS)))
    return added, faults


def _add_groups(store: Store, lines: list[TopicGroups]) -> None:
    found: dict[int, dict[str, dict[str, str]]] = {}
    for line in lines:
        if line.error is None:
            topic, hour = hour_of(line.topic)
            group_of = {name: group.name for group in line.groups for name in group.publishers}
            found.setdefault(hour * hours.HOUR_NS, {})[topic] = group_of
    for hour_ns, topics in found.items():
        store.put_groups(hour_ns, topics)


class GroupDrift(NamedTuple):
    """The groups found in the last hour of a period that has any, and how they differ from those of the one before."""

    groups: int
    agreement: float | None  # adjusted Rand index over publishers of both
    moved: int


def group_drift(store: Store, lines: Sequence[Period]) -> list[GroupDrift | None]:
    """The groups of each period, which are in order of topic and time; None if the store has none."""
    known: dict[int, dict[str, dict[str, str]]] = {}

    def found(line: Period) -> dict[str, str] | None:
        for hour in range(line.end_ns - hours.HOUR_NS, line.begin_ns - 1, -hours.HOUR_NS):
            if hour not in known:
                known[hour] = store.groups(hour)
            if line.topic in known[hour]:
                return known[hour][line.topic]
        return None

    drifts: list[GroupDrift | None] = []
    topic, before = "", None
    for line in lines:
        topic, before = (topic, before) if line.topic == topic else (line.topic, None)
        now = found(line)
        if now is None:
            drifts.append(None)
            continue
        count = len(set(now.values()))
        compared = None if before is None else drift(before.keys() | now.keys(), before, now)
        drifts.append(
            GroupDrift(count, None, 0)
            if compared is None
            else GroupDrift(count, compared.agreement, len(compared.moved))
        )
        before = now
    return drifts


def _rows(topics: pa.StringArray, names: pa.StringArray, parts: dict[str, pa.Table]) -> pa.Table:
    """What tasks found, as rows of the store."""
    found, rates, bins = parts["hours"], parts["rates"], parts["bins"]
    counts = {name: found[name].to_numpy() for name in ("rates", "batches", "publishers")}
    ends = np.cumsum(counts["rates"])
    each = np.concatenate([[0], np.cumsum(rates["bins"].to_numpy())])
    of_hours = each[ends] - each[ends - counts["rates"]]  # bins of all rates of an hour
    kinds = {name: SCHEMA.field(name).type for name in SCHEMA.names}
    envelopes = rows_of(found["envelope"], len(burst.WINDOWS_NS))
    clear = rows_of(rates["clear"], hours.LEVELS).ravel()
    columns = {
        "topic": topics.take(found["topic"].combine_chunks()),
        **{name: found[name].combine_chunks() for name in (*_LIGHT[1:], *_SEEN)},
        "envelope": pa.FixedSizeListArray.from_arrays(pa.array(envelopes.ravel()), envelopes.shape[1]),
        "batch_sizes": lists(parts["batches"]["size"].to_numpy(), counts["batches"], kinds["batch_sizes"]),
        "batch_counts": lists(parts["batches"]["count"].to_numpy(), counts["batches"], kinds["batch_counts"]),
        "publishers": lists(
            names.take(parts["publishers"]["publisher"].combine_chunks()), counts["publishers"], kinds["publishers"]
        ),
        "place": found["place"].combine_chunks().cast(pa.int32()),
        "backlogs": lists(rates["backlog"].to_numpy(), counts["rates"], kinds["backlogs"]),
        "clear": lists(clear, counts["rates"] * hours.LEVELS, kinds["clear"]),
        "bins": lists(rates["bins"].to_numpy(), counts["rates"], kinds["bins"]),
        "needs": lists(bins["bin"].to_numpy(), of_hours, kinds["needs"]),
        "counts": lists(bins["messages"].to_numpy(), of_hours, kinds["counts"]),
    }
    return pa.table(columns, schema=SCHEMA)


def fold(
    store: Store,
    *,
    begin_ns: int | None = None,
    end_ns: int | None = None,
    every_ns: int | None = None,
    headroom: Number = HEADROOM,
    quantile: Number = QUANTILE,
) -> list[Period]:
    """Every topic in every period of this length, or over all stored hours that begin in [begin, end)."""
    if every_ns is not None and (every_ns < hours.HOUR_NS or every_ns % hours.HOUR_NS):
        raise InputError("a period must be whole hours: write 1h, 24h, …")
    held = [
        hour for hour in store.hours() if (begin_ns is None or hour >= begin_ns) and (end_ns is None or hour < end_ns)
    ]
    if not held:
        raise InputError(
            f"the store {store.name} holds no hour of this time; add a trace with srtm profile TRACE --store"
        )
    found = [line for some in _periods(held, every_ns) for line in _folded(store, some, headroom, quantile)]
    return sorted(found, key=lambda line: (line.topic, line.begin_ns))


def _periods(held: list[int], every_ns: int | None) -> Iterator[list[int]]:
    if every_ns is None:
        yield held
        return
    for begin in sorted({hour - hour % every_ns for hour in held}):
        yield [hour for hour in held if begin <= hour < begin + every_ns]


class _Sent:
    """What topics sent in some hours, numbered in order of name."""

    def __init__(self, store: Store, held: Sequence[int]) -> None:
        whole = pa.concat_tables([store.read(hour, [*_LIGHT, *_SEEN]) for hour in held])
        totals = whole.group_by("topic").aggregate([("messages", "sum"), ("hour_ns", "min"), ("hour_ns", "max")])
        totals = totals.sort_by("topic").combine_chunks()
        self.names = totals["topic"].combine_chunks()
        self.messages = totals["messages_sum"].to_numpy()
        self.begins_ns = totals["hour_ns_min"].to_numpy()
        self.ends_ns = totals["hour_ns_max"].to_numpy() + hours.HOUR_NS
        seen = np.column_stack([whole[name].to_numpy() for name in _SEEN[1:]])
        self.observed_ns = hours.observed_ns(seen, self.begins_ns, self.ends_ns)

    def numbered(self, table: pa.Table) -> Ints:
        """The number of each row's topic."""
        numbers: Ints = pc.index_in(table["topic"].combine_chunks(), value_set=self.names).to_numpy().astype(np.int64)
        return numbers


class _Fold:
    """Hours of topics, taken one after the other, at one rate for each topic."""

    def __init__(self, topics: int, r_mtps: Ints) -> None:
        self._topics, self._places = topics, np.searchsorted(hours.GRID, r_mtps)
        self._laws = fleet.laws_of(r_mtps)
        self._stretches: list[tuple[Ints, Ints, Ints]] = []  # topics, summaries, clear
        self._least = self._most = np.empty((0, 3), np.int64)
        self._batches, self._envelopes = np.empty((0, 3), np.int64), np.zeros((topics, len(burst.WINDOWS_NS)), np.int64)
        self._names = pa.array([], pa.string())
        self._pairs = np.empty(0, np.int32), np.empty(0, np.int32)

    def take(self, of: Ints, table: pa.Table) -> None:
        """Take the rows of an hour, of topics by number."""
        envelopes = rows_of(table["envelope"], len(burst.WINDOWS_NS))
        self._envelopes = np.maximum(self._envelopes, widest(of, envelopes, self._topics))
        sizes, counts = flat(table["batch_sizes"])
        often, _ = flat(table["batch_counts"])
        self._batches = tallies(self._batches, np.column_stack([np.repeat(of, counts), sizes, often]))
        names, counts = flat(table["publishers"])
        self._meet(np.repeat(of, counts), names)
        self._take_needs(of, table)

    def _meet(self, of: Ints, names: pa.StringArray) -> None:
        new = names.filter(pc.is_null(pc.index_in(names, value_set=self._names))).unique()
        self._names = pa.concat_arrays([self._names, new])
        numbers = pc.index_in(names, value_set=self._names).to_numpy().astype(np.int32)
        topics, known = self._pairs
        of_all, all_numbers = np.concatenate([topics, of.astype(np.int32)]), np.concatenate([known, numbers])
        self._pairs = fleet.distinct_pairs(of_all, all_numbers, self._topics)

    def _take_needs(self, of: Ints, table: pa.Table) -> None:
        """What each hour needs at its topic's rate, or at the nearest that it was scanned at.

        At a lower rate than its topic's, messages need no less, and one token at least; at a higher one no more, and no
        message needs more than there are messages.
        """
        messages, place = table["messages"].to_numpy(), table["place"].to_numpy().astype(np.int64)
        backlogs, rates = flat(table["backlogs"])
        wanted = self._places[of] - place
        at = np.cumsum(rates) - rates + np.clip(wanted, 0, rates - 1)
        bins = flat(table["bins"])[0]
        begins, sizes = (np.cumsum(bins) - bins)[at], bins[at]
        rows = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
        needs, counts, of_rows = flat(table["needs"])[0][rows], flat(table["counts"])[0][rows], np.repeat(of, sizes)
        slow, fast = np.repeat(wanted >= rates, sizes), np.repeat(wanted < 0, sizes)
        top = np.repeat(bins_of(messages), sizes)
        self._least = tallies(self._least, np.column_stack([of_rows, np.where(slow, 1, needs), counts]))
        self._most = tallies(self._most, np.column_stack([of_rows, np.where(fast, top, needs), counts]))
        clear = flat(table["clear"])[0].reshape(-1, hours.LEVELS)[at]
        clear = np.where((wanted < 0)[:, None], messages[:, None], clear)
        token = fleet.laws_of(hours.GRID[place + np.clip(wanted, 0, rates - 1)])[:, 1]
        tokens = np.where(wanted < 0, messages, -(-backlogs[at] // token))
        behind = np.minimum(tokens, scan.HIGHEST // self._laws[of, 1]) * self._laws[of, 1]
        behind = np.where((wanted >= 0) & (wanted < rates), backlogs[at], behind)
        summaries = np.column_stack([messages, table["first_ns"].to_numpy(), table["last_ns"].to_numpy(), behind])
        self._stretches.append((of, summaries, clear))

    def bounds_of_b(self, wanted: Ints) -> tuple[Ints, Ints]:
        """The least and the most that the need of a rank, of each topic, can be."""
        of, summaries, clear = (np.concatenate(columns) for columns in zip(*self._stretches, strict=True))
        order = np.lexsort((summaries[:, 1], of))
        of, summaries, clear = of[order], summaries[order], clear[order]
        entering = fleet.entering(of, summaries, self._laws)
        raised, tokens = hours.reached(entering, summaries, self._laws[of], clear)
        raised_of = np.bincount(of, weights=raised, minlength=self._topics).astype(np.int64)
        tokens_of = np.zeros(self._topics, np.int64)
        np.maximum.at(tokens_of, of, tokens)
        return hours.least_b(self._least, wanted), hours.most_b(self._most, wanted, raised_of, tokens_of)

    def publishers(self) -> Ints:
        """How many publishers each topic has."""
        return np.bincount(self._pairs[0], minlength=self._topics)

    def envelope(self, topic: int) -> dict[int, int]:
        """A topic's envelope."""
        return dict(zip(burst.WINDOWS_NS, self._envelopes[topic].tolist(), strict=True))

    def batches(self, topic: int) -> dict[int, int]:
        """A topic's batches by size."""
        return dict(self._batches[self._batches[:, 0] == topic, 1:].tolist())


def _folded(store: Store, held: Sequence[int], headroom: Number, quantile: Number) -> Iterator[Period]:
    sent = _Sent(store, held)
    count = len(sent.names)
    r_mtps = hours.rate_for(token_rates(sent.messages, np.zeros_like(sent.observed_ns), sent.observed_ns, headroom))
    folding = _Fold(count, r_mtps)
    for hour in held:
        table = store.read(hour, [*_HEAVY, *_NEEDS])
        folding.take(sent.numbered(table), table)
    least, most = folding.bounds_of_b(ranks(sent.messages, quantile))
    publishers = folding.publishers()
    for topic in range(count):
        messages, observed_ns = int(sent.messages[topic]), int(sent.observed_ns[topic])
        yield Period(
            sent.names[topic].as_py(),
            int(sent.begins_ns[topic]),
            int(sent.ends_ns[topic]),
            observed_ns,
            messages,
            int(publishers[topic]),
            messages * NS_PER_S / observed_ns,
            TokenBucket(int(r_mtps[topic]), max(1, int(most[topic])) * NANO_PER_TOKEN),
            max(1, int(least[topic])),
            folding.envelope(topic),
            folding.batches(topic),
        )
