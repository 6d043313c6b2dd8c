"""What tasks do for `penalty`: how long the messages of all topics waited, and would have waited with one bucket.

A task sends tables of numbers (`traces.parts`): a row for each topic, window of time and broker, with −1 for all of
them together; and samples of the delays of each topic and broker, from which the driver derives the quantiles of the
whole run (`traces.quantiles`). Brokers are numbered by the task, which sends their names first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from srtm.model import fleet
from srtm.pipeline.traces.parts import packed, table_of
from srtm.pipeline.traces.quantiles import sampled
from srtm.pipeline.traces.scanning import summarised
from srtm.units import ranks
from srtm.workload.gathered import Names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from srtm.model.timeline import Timelines
    from srtm.pipeline.traces.batches import Batches, Ints, Work
    from srtm.pipeline.traces.topics import Indices, Topics

QUANTILES = ("0.50", "0.95", "0.99")
SUMS = ("messages", "waiting", "high", "low", "p50", "p95", "p99", "longest_ns")  # of the total: high · 2³² + low
EVERY = -1  # the number of all brokers together
_HALF = 32


class Entering(NamedTuple):
    """Rows (topic, first time of a stretch, backlog and time of the state before it), in order."""

    rows: Ints

    def put(self, states: Ints, topics: Ints, first_ns: Ints) -> None:
        """Begin topics that a task sees for the first time."""
        new = states[topics, fleet.LAST] == fleet.NEVER
        places = fleet.find_rows(self.rows, topics[new], first_ns[new])
        assert (places >= 0).all(), "a stretch begins elsewhere than in the first run"
        states[topics[new], :2] = self.rows[places, 2:]


class Delays(NamedTuple):
    """A batch of messages by topic and time, those of an instant by release and broker."""

    topics: Indices
    brokers: Indices
    times: Ints
    split: Ints
    one: Ints

    @property
    def kinds(self) -> tuple[Ints, Ints]:
        """The delays as recorded, and with one bucket."""
        return self.split, self.one


def summarising(topics: Topics, timelines: Timelines) -> Work:
    """Work over batches of (topic, arrival_ns): the summary of each stretch, as if nothing came before it."""

    def work(_: int, batches: Batches) -> Batches:
        nothing = np.empty(0, np.int64)

        def wait(times: Ints, segments: Ints, states: Ints) -> None:
            timelines.waits(times, segments, states, nothing)

        yield from packed({"topics": summarised(topics, "arrival_ns", batches, wait)})

    return work


def summing(topics: Topics, timelines: Timelines, entering: Entering, window_ns: int) -> Work:
    """Work over whole windows: their sums, samples of all delays, and topics that cannot be judged."""

    def work(_: int, batches: Batches) -> Batches:
        names, states = Names(), fleet.no_states(len(topics))
        early = np.zeros(len(topics), np.int64)
        windows: list[pa.Table] = []
        samples: list[pa.Table] = []
        partial: list[pa.Table] = []
        for found in _delays(topics, timelines, entering, states, names, batches):
            early += np.bincount(found.topics[found.split < 0], minlength=len(topics))
            windows += _window_sums(found, window_ns)
            for each, rest in _samples(found):
                samples.append(each)
                partial.append(rest)
        late = np.flatnonzero(early)
        yield from packed(
            {
                "names": table_of(name=names.all),
                **{part: pa.concat_tables(some) for part, some in _parts(windows, samples, partial) if some},
                "early": table_of(topic=late, messages=early[late]),
                "overflows": table_of(topic=np.flatnonzero(states[:, fleet.PEAK] > 2**62)),
            }
        )

    return work


def _parts(*some: list[pa.Table]) -> Iterator[tuple[str, list[pa.Table]]]:
    return zip(("windows", "samples", "partial"), some, strict=True)


def collecting(topics: Topics, timelines: Timelines, entering: Entering, wanted: Wanted) -> Work:
    """Work over whole windows: the delays that may be a quantile, and how many lie below."""

    def work(_: int, batches: Batches) -> Batches:
        names, states = Names(), fleet.no_states(len(topics))
        below, inside = np.zeros(wanted.above.shape, np.int64), []
        for found in _delays(topics, timelines, entering, states, names, batches):
            for of_all in (wanted.keys_of_topics(found), wanted.keys_of_brokers(found, names.all)):
                mine = np.flatnonzero(of_all >= 0)
                keys = of_all[mine]
                for one, delays in enumerate(kind[mine] for kind in found.kinds):
                    for q in range(len(QUANTILES)):
                        above, upto = wanted.above[keys, one, q], wanted.upto[keys, one, q]
                        below[:, one, q] += np.bincount(keys[delays <= above], minlength=len(below))
                        chosen = (delays > above) & (delays <= upto)
                        slots = (keys[chosen] * 2 + one) * len(QUANTILES) + q
                        inside.append(table_of(slot=slots, value=delays[chosen]))
        if inside:
            yield from packed({"inside": pa.concat_tables(inside), "below": table_of(count=below.ravel())})

    return work


class Wanted(NamedTuple):
    """Bounds of quantiles that are still open, by key, kind of delay and quantile; `keys` has rows (topic, broker).

    Of a quantile of a key that is not open, both bounds are equal, and nothing lies between them.
    """

    keys: Ints
    brokers: pa.StringArray
    above: Ints
    upto: Ints

    def keys_of_topics(self, found: Delays) -> Ints:
        """The key of each message's topic, all brokers together; −1 if it is not wanted."""
        return fleet.find_rows(self.keys, found.topics.astype(np.int64), np.full(len(found.topics), EVERY, np.int64))

    def keys_of_brokers(self, found: Delays, names: pa.StringArray) -> Ints:
        """The key of each message's topic and broker; −1 if it is not wanted."""
        numbers = pc.index_in(names, value_set=self.brokers).to_numpy().astype(np.int64)
        return fleet.find_rows(self.keys, found.topics.astype(np.int64), numbers[found.brokers])


def _delays(
    topics: Topics, timelines: Timelines, entering: Entering, states: Ints, names: Names, batches: Batches
) -> Iterator[Delays]:
    """How long every message waited, and would have waited with one bucket."""
    for batch in batches:
        numbers, brokers = topics.numbered(batch.column("topic")), names.numbered(batch.column("broker"))
        times, releases = batch.column("arrival_ns").to_numpy(), batch.column("release_ns").to_numpy()
        if numbers.min(initial=0) < 0:
            numbers, brokers, times, releases = _taken(numbers >= 0, numbers, brokers, times, releases)
        if not len(numbers):
            continue
        if (numbers != numbers[0]).any():
            by_topic, _ = fleet.sorted_by_topic(numbers, np.arange(len(numbers)), len(topics))
            numbers, brokers, times, releases = _taken(by_topic, numbers, brokers, times, releases)
        in_order = _tied(numbers, brokers, times, releases, names.all)
        if in_order is not None:
            numbers, brokers, times, releases = _taken(in_order, numbers, brokers, times, releases)
        begins = np.flatnonzero(np.diff(numbers, prepend=-1))
        here, ends = numbers[begins].astype(np.int64), np.append(begins[1:], len(numbers))
        entering.put(states, here, times[begins])
        one = np.empty(len(times), np.int64)
        timelines.waits(times, np.column_stack([here, begins, ends]), states, one)
        yield Delays(numbers, brokers, times, releases - times, one)


def _taken(rows: NDArray[Any], *columns: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return (column[rows] for column in columns)


def _tied(topics: Indices, brokers: Indices, times: Ints, releases: Ints, names: pa.StringArray) -> Ints | None:
    """The order of rows with those of the same topic and instant by release, then broker; None if they are in order."""
    places = pc.rank(names, tiebreaker="first").to_numpy().astype(np.int64)[brokers]
    same = (topics[1:] == topics[:-1]) & (times[1:] == times[:-1])
    later = (releases[1:] == releases[:-1]) & (places[1:] < places[:-1])
    wrong = same & (later | (releases[1:] < releases[:-1]))
    if not wrong.any():
        return None
    instants = np.concatenate([[0], np.cumsum(~same)])
    unsorted = np.zeros(instants[-1] + 1, np.bool_)
    unsorted[instants[1:][wrong]] = True
    rows = np.flatnonzero(unsorted[instants])
    order = np.arange(len(topics))
    order[rows] = rows[np.lexsort((places[rows], releases[rows], instants[rows]))]
    return order


class _Groups:
    """Rows in groups: those of one number, which never falls from row to row, or those of each broker in it."""

    def __init__(self, numbers: Indices, brokers: Indices | None = None) -> None:
        self._pairs: Indices | None = None
        if brokers is None:
            counts = np.bincount(numbers)
            self.numbers, self.brokers = np.arange(len(counts)), np.full(len(counts), EVERY, np.int64)
        else:
            pairs = fleet.PairNumbers()
            self._pairs = pairs.numbered(numbers, brokers)
            counts = np.bincount(self._pairs, minlength=len(pairs))
            self.numbers, self.brokers = pairs.topics.astype(np.int64), pairs.values.astype(np.int64)
        self.counts, self.ends = counts, np.cumsum(counts)

    def sorted(self, values: Ints) -> Ints:
        """Values group by group, in order within each."""
        if self._pairs is not None:
            values, _ = fleet.sorted_by_topic(self._pairs, values, len(self.counts))
        groups = np.repeat(np.arange(len(self.counts)), self.counts)
        least = int(values.min())
        span = int(values.max()) - least + 1
        if span * len(self.counts) < 2**63:  # group and value fit into one number, which sorts several times faster
            together = groups * span + (values - least)
            together.sort()
            return together - groups * span + least
        found: Ints = values[np.lexsort((values, groups))]
        return found

    def sums(self, values: Ints) -> Ints:
        """A row of SUMS for each group."""
        ordered, begins = self.sorted(values), self.ends - self.counts
        halves = [np.add.reduceat(part, begins) for part in (ordered >> _HALF, ordered & (2**_HALF - 1))]
        waiting = np.add.reduceat((ordered > 0).astype(np.int64), begins)
        points = [ordered[begins + ranks(self.counts, q) - 1] for q in QUANTILES]
        return np.column_stack([self.counts, waiting, *halves, *points, ordered[self.ends - 1]])


def _window_sums(found: Delays, window_ns: int) -> Iterator[pa.Table]:
    """Rows (topic, broker, begin of the window, sums as recorded, sums with one bucket)."""
    numbers = found.times // window_ns
    new = np.ones(len(numbers), np.bool_)
    new[1:] = (np.diff(numbers) != 0) | (np.diff(found.topics) != 0)
    windows, firsts = (np.cumsum(new) - 1).astype(np.int32), np.flatnonzero(new)
    topics, begins_ns = found.topics[firsts].astype(np.int64), numbers[firsts] * window_ns
    for groups in (_Groups(windows), _Groups(windows, found.brokers)):
        split, one = (groups.sums(delays) for delays in found.kinds)
        of = groups.numbers
        yield table_of(topic=topics[of], broker=groups.brokers, begin_ns=begins_ns[of], split=split, one=one)


def _samples(found: Delays) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Rows (topic, broker, kind, value, least, most), and (topic, broker, kind) whose samples are not complete."""
    new = np.diff(found.topics, prepend=-1) != 0
    numbers, topics = (np.cumsum(new) - 1).astype(np.int32), found.topics[new].astype(np.int64)
    for groups in (_Groups(numbers), _Groups(numbers, found.brokers)):
        of_topics = topics[groups.numbers]
        for one, delays in enumerate(found.kinds):
            samples, complete = sampled(groups.sorted(delays), groups.ends)
            rows, rest = samples.groups, np.flatnonzero(~complete)
            kind = np.full(len(rows), one)
            yield (
                table_of(
                    topic=of_topics[rows],
                    broker=groups.brokers[rows],
                    one=kind,
                    value=samples.values,
                    least=samples.least,
                    most=samples.most,
                ),
                table_of(topic=of_topics[rest], broker=groups.brokers[rest], one=np.full(len(rest), one)),
            )
