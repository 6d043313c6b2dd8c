"""Penalty: what splitting the bucket cost a recorded run, per topic, broker and window of time.

Each message waited `release_ns − arrival_ns` for its token. The wait it would have had with one bucket follows from the
arrivals of the whole topic and (r, b), by the law. Messages of the same instant go through that bucket in order of
release, then of broker. All numbers are those of `model.penalty.recorded`.

It takes at most three runs, each over all topics at once: summaries of the stretches, which give the state that each
starts from; the delays, summed window by window; and, for quantiles of the whole run that the sums leave open, the
values they lie between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from srtm.errors import InputError
from srtm.model import fleet, scan, timeline
from srtm.model.timeline import Timelines
from srtm.pipeline.traces.contracts import held_by
from srtm.pipeline.traces.delays import (
    EVERY,
    QUANTILES,
    SUMS,
    Entering,
    Wanted,
    collecting,
    summarising,
    summing,
)
from srtm.pipeline.traces.joining import renumbered
from srtm.pipeline.traces.lines import Lines
from srtm.pipeline.traces.parts import PART_FIELDS, joined, rows_of
from srtm.pipeline.traces.quantiles import Samples, narrowed, selected
from srtm.pipeline.traces.reading import opened
from srtm.units import NS_PER_S, ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from srtm.pipeline.traces.batches import Ints
    from srtm.pipeline.traces.contracts import Contracts
    from srtm.pipeline.traces.files import Files
    from srtm.pipeline.traces.frames import Frame
    from srtm.pipeline.traces.reading import Trace
    from srtm.pipeline.traces.topics import Faults, Topics

COLUMNS = ("topic", "arrival_ns", "broker", "release_ns")
WINDOW_NS = 60 * NS_PER_S
_SUMMARY = ("messages", "first_ns", "last_ns", "backlog")
_ADDED, _HIGH, _LOW, _POINTS, _LONGEST = slice(0, 4), 2, 3, slice(4, 7), 7  # of SUMS


@dataclass(frozen=True, slots=True)
class Waits:
    """How long messages waited for tokens."""

    messages: int
    waiting: int  # messages that waited at all
    total_ns: int
    p50: int
    p95: int
    p99: int
    longest_ns: int

    @classmethod
    def of(cls, sums: Ints) -> Waits:
        """The waits of a row of SUMS."""
        messages, waiting, high, low, *others = sums.tolist()
        return cls(messages, waiting, (high << 32) + low, *others)


@dataclass(frozen=True, slots=True)
class Cost:
    """The recorded waits, and those with one bucket instead."""

    split: Waits
    one: Waits

    @property
    def penalty_ns(self) -> int:
        """What the split cost, over all messages."""
        return self.split.total_ns - self.one.total_ns


@dataclass(frozen=True, slots=True)
class Window:
    """A window of a topic's time: what the split cost in it, overall and at each broker."""

    begin_ns: int
    whole: Cost
    brokers: dict[str, Cost]


@dataclass(frozen=True, slots=True)
class TopicPenalty:
    """One topic's account, or an error."""

    topic: str
    messages: int
    whole: Cost | None = None
    brokers: dict[str, Cost] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    error: str | None = None

    def worst(self, count: int = 5) -> list[Window]:
        """The costliest windows, worst first."""
        return sorted(self.windows, key=lambda window: (-window.whole.penalty_ns, window.begin_ns))[:count]


class _Sums(NamedTuple):
    """Rows of one topic and broker (EVERY for all) each: what they are of, and their SUMS by kind of delay."""

    topics: Ints
    brokers: Ints
    begins_ns: Ints  # of their windows
    values: Ints

    def only(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> _Sums:
        """Some of the rows, or all in another order."""
        return _Sums(*(column[chosen] for column in self))

    def cost(self, row: int) -> Cost:
        """The cost of a row."""
        return Cost(Waits.of(self.values[row, 0]), Waits.of(self.values[row, 1]))


class Penalties(Lines[TopicPenalty]):
    """The accounts of all topics in order of name, kept as columns."""

    def __init__(self, topics: Topics, brokers: pa.StringArray, wholes: _Sums, windows: _Sums, faults: Faults) -> None:
        """`wholes` in order of topic and broker, `windows` in order of topic, time and broker."""
        super().__init__(topics.names, faults)
        self._topics, self._brokers, self._wholes, self._windows = topics, brokers, wholes, windows

    def _line(self, number: int) -> TopicPenalty:
        def of(sums: _Sums) -> range:
            return range(*np.searchsorted(sums.topics, [number, number + 1]).tolist())

        windows = groupby(of(self._windows), key=lambda row: int(self._windows.begins_ns[row]))
        return TopicPenalty(
            self._topics.names[number].as_py(),
            int(self._topics.messages[number]),
            *self._costs(self._wholes, of(self._wholes)),
            [Window(begin_ns, *self._costs(self._windows, list(rows))) for begin_ns, rows in windows],
        )

    def _fault(self, topic: str, messages: int, error: str) -> TopicPenalty:
        return TopicPenalty(topic, messages, error=error)

    def _costs(self, sums: _Sums, rows: range | list[int]) -> tuple[Cost, dict[str, Cost]]:
        """The cost over all brokers, which comes first, and that of each."""
        whole, *others = rows
        return sums.cost(whole), {self._brokers[int(sums.brokers[row])].as_py(): sums.cost(row) for row in others}

    def table(self) -> pa.Table:
        """A row for each topic, window and broker; null means all windows, or all brokers."""
        both = _Sums(*(np.concatenate(columns) for columns in zip(self._wholes, self._windows, strict=True)))
        both = both.only(np.lexsort((both.brokers, both.begins_ns, both.topics)))
        split, one = both.values[:, 0], both.values[:, 1]
        named, timed = both.brokers != EVERY, both.begins_ns != fleet.NEVER
        points = {f"{name}_ns": split[:, place] for place, name in enumerate(SUMS) if name in ("p50", "p95", "p99")}
        rows = {
            "topic": self._topics.names.take(pa.array(both.topics)),
            "broker": self._brokers.take(pa.array(both.brokers, mask=~named)),
            "begin_ns": pa.array(both.begins_ns, mask=~timed),
            "messages": split[:, 0],
            "waited_ns": (split[:, _HIGH] << 32) + split[:, _LOW],
            "one_bucket_ns": (one[:, _HIGH] << 32) + one[:, _LOW],
            **points,
            "longest_ns": split[:, _LONGEST],
            "error": pa.nulls(len(split), pa.string()),
        }
        whole = pa.table({name: pa.array(column) for name, column in rows.items()})
        faulty = [{"topic": topic, "messages": messages, "error": error} for topic, (messages, error) in self._faults]
        return pa.concat_tables([whole, pa.Table.from_pylist(faulty, whole.schema)])


def penalty(
    trace: Trace,
    contracts: Contracts,
    spark: SparkSession | None = None,
    *,
    window_ns: int = WINDOW_NS,
) -> Penalties:
    """The account of every topic of a recorded trace: a DataFrame, a path or a URI."""
    if not 1 <= window_ns <= scan.LATEST_NS:
        raise InputError(f"window = {window_ns} ns: it must be a positive time of at most 146 years")
    with opened(trace, spark, COLUMNS, grain_ns=window_ns) as source:
        return penalty_source(source, contracts, window_ns)


def penalty_source(source: Files | Frame, contracts: Contracts, window_ns: int = WINDOW_NS) -> Penalties:
    """`penalty` of an open trace."""
    everything, faults = source.topics()
    held, errors = held_by(contracts, everything.names.to_pylist())
    errors |= timeline.refused(held)
    counts = everything.counts()
    topics = everything.only(np.array([name not in errors for name in counts], np.bool_))
    timelines = Timelines.of([held[name] for name in topics.names.to_pylist()])
    stretches = joined(source.run(summarising(topics, timelines), PART_FIELDS, ("topic", "arrival_ns")))["topics"]
    entering = _entering(stretches, timelines)
    received = source.run(summing(topics, timelines, entering, window_ns), PART_FIELDS, COLUMNS)
    brokers, parts = renumbered(received, "broker")
    overflows = [stretches["topic"].to_numpy()[stretches["peak"].to_numpy() > scan.HIGHEST]]
    overflows.append(parts["overflows"]["topic"].to_numpy())
    names = topics.names
    for number in np.unique(np.concatenate(overflows)).tolist():
        name = names[number].as_py()
        errors[name] = str(scan.overflow(held[name].start.pico_law))
    windows = _windows(parts)
    for number, total in _too_large(windows):
        text = f"the delays of a window add up to {total} ns: check the units, or choose a shorter window"
        errors.setdefault(names[number].as_py(), text)
    early = parts["early"].group_by("topic").aggregate([("messages", "sum")])
    for number, messages in zip(early["topic"].to_pylist(), early["messages_sum"].to_pylist(), strict=True):
        name = names[number].as_py()
        text = f"{messages} of {counts[name]} messages were released before they arrived: check clocks and units"
        errors.setdefault(name, text)
    sound = np.array([name not in errors for name in names.to_pylist()], np.bool_)
    windows = windows.only(sound[windows.topics])
    wholes = _wholes(windows)
    if len(wholes.topics):
        _put_quantiles(source, (topics, timelines, entering), brokers, wholes, parts)
    places = np.cumsum(sound) - 1
    wholes, windows = (sums._replace(topics=places[sums.topics]) for sums in (wholes, windows))
    faults |= {name: (counts[name], error) for name, error in errors.items()}
    return Penalties(topics.only(sound), brokers, wholes, windows, faults)


def penalty_frame(trace: DataFrame, contracts: Contracts, *, window_ns: int = WINDOW_NS) -> DataFrame:
    """`penalty` from DataFrame to DataFrame, for notebooks: a row per topic, window and broker; null means all."""
    return trace.sparkSession.createDataFrame(penalty(trace, contracts, window_ns=window_ns).table())


def _entering(stretches: pa.Table, timelines: Timelines) -> Entering:
    """The state that each stretch of a topic starts from."""
    topics = stretches["topic"].to_numpy()
    summaries = np.column_stack([stretches[name].to_numpy() for name in _SUMMARY])
    order = np.lexsort((summaries[:, 1], topics))
    topics, summaries = topics[order], summaries[order]
    return Entering(np.column_stack([topics, summaries[:, 1], timelines.waiting(topics, summaries)]))


def _windows(parts: dict[str, pa.Table]) -> _Sums:
    """The sums of all windows, in order of topic, time and broker."""
    if "windows" not in parts:
        nothing = np.empty(0, np.int64)
        return _Sums(nothing, nothing, nothing, np.empty((0, 2, len(SUMS)), np.int64))
    table = parts["windows"]
    values = np.stack([rows_of(table[kind], len(SUMS)) for kind in ("split", "one")], axis=1)
    topics, brokers, begins_ns = (table[name].to_numpy() for name in ("topic", "broker", "begin_ns"))
    sums = _Sums(topics, brokers, begins_ns, values)
    return sums.only(np.lexsort((sums.brokers, sums.begins_ns, sums.topics)))


def _too_large(windows: _Sums) -> list[tuple[int, int]]:
    """Topics with delays in a window that add up to more than 2**62 ns, and their sum."""
    high, low = windows.values[:, :, _HIGH], windows.values[:, :, _LOW]
    rows, kinds = np.nonzero(high + (low >> 32) > 2**30)
    return [
        (int(windows.topics[row]), (int(high[row, kind]) << 32) + int(low[row, kind]))
        for row, kind in zip(rows, kinds, strict=True)
    ]


def _wholes(windows: _Sums) -> _Sums:
    """The sums over all windows, in order of topic and broker, with quantiles still to come."""
    windows = windows.only(np.lexsort((windows.brokers, windows.topics)))
    new = np.ones(len(windows.topics), np.bool_)
    new[1:] = (np.diff(windows.topics) != 0) | (np.diff(windows.brokers) != 0)
    firsts = np.flatnonzero(new)
    wholes = windows.only(firsts)
    wholes.begins_ns[:] = fleet.NEVER
    if len(firsts):
        wholes.values[:, :, _ADDED] = np.add.reduceat(windows.values[:, :, _ADDED], firsts)
        wholes.values[:, :, _LONGEST] = np.maximum.reduceat(windows.values[:, :, _LONGEST], firsts)
    return wholes


def _put_quantiles(
    source: Files | Frame,
    known: tuple[Topics, Timelines, Entering],
    brokers: pa.StringArray,
    wholes: _Sums,
    parts: dict[str, pa.Table],
) -> None:
    """The quantiles of the whole run, from samples and, for those that these leave open, from the trace."""
    keys = np.column_stack([wholes.topics, wholes.brokers])
    samples, complete = _samples(keys, parts)
    messages = wholes.values[:, 0, 0]
    wanted = np.stack([ranks(messages, q) for q in QUANTILES], axis=1)  # by key and quantile
    bounds = [narrowed(samples, np.repeat(wanted[:, q], 2), complete) for q in range(len(QUANTILES))]
    shape = len(keys), 2, len(QUANTILES)
    above = np.stack([bound.above for bound in bounds], axis=1).reshape(shape)
    upto = np.stack([bound.upto for bound in bounds], axis=1).reshape(shape)
    wholes.values[:, :, _POINTS] = upto
    left = upto != above + 1
    some = np.flatnonzero(left.any(axis=(1, 2)))
    if not len(some):
        return
    left = left[some]
    asked = Wanted(keys[some], brokers, np.where(left, above[some], upto[some]), upto[some])
    found = joined(source.run(collecting(*known, asked), PART_FIELDS, COLUMNS))
    below = found["below"]["count"].to_numpy().reshape(-1, left.size).sum(axis=0)
    slots, inside = np.flatnonzero(left), found["inside"]
    places = np.broadcast_to(wanted[some][:, None], left.shape).ravel()[slots] - 1 - below[slots]
    values = selected(np.searchsorted(slots, inside["slot"].to_numpy()), inside["value"].to_numpy(), places)
    points = upto[some]
    points[left] = values
    wholes.values[some, :, _POINTS] = points


def _samples(keys: Ints, parts: dict[str, pa.Table]) -> tuple[Samples, NDArray[np.bool_]]:
    """The samples of all tasks by key and kind of delay, in order, and which of these are complete."""

    def slots(table: pa.Table) -> Ints:
        """2 · key + kind; negative if a topic is not among the keys."""
        found = fleet.find_rows(keys, table["topic"].to_numpy(), table["broker"].to_numpy())
        return found * 2 + np.asarray(table["one"].to_numpy(), np.int64)

    table, complete = parts["samples"], np.ones(2 * len(keys), np.bool_)
    partial = slots(parts["partial"])
    complete[partial[partial >= 0]] = False
    of, values = slots(table), table["value"].to_numpy()
    order = np.lexsort((values, of))
    order = order[of[order] >= 0]
    return Samples(of[order], values[order], *(table[name].to_numpy()[order] for name in ("least", "most"))), complete
