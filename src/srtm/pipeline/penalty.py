"""Penalty: what splitting the bucket cost a recorded run, per topic, broker and window of time.

Each message waited `release_ns − arrival_ns` for its token. The wait it would have had with one bucket follows from the
arrivals of the whole topic and (r, b), by the law. Messages of the same instant go through that bucket in order of
release, then of broker. All numbers are those of `model.penalty.recorded`.

It takes at most three runs: summaries of the stretches, which give the state that each starts from; the delays, summed
window by window; and, for quantiles of the whole run that the sums leave open, the values they lie between.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from srtm.errors import InputError, SRTMError
from srtm.model import scan, timeline
from srtm.pipeline.traces.batches import batch_of, by_topic
from srtm.pipeline.traces.contracts import held_by
from srtm.pipeline.traces.quantiles import Bounds, Samples, narrowed, selected
from srtm.pipeline.traces.reading import opened
from srtm.units import NS_PER_S, percentiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from srtm.model.timeline import Timeline
    from srtm.pipeline.traces.batches import Batches, Ints, Work
    from srtm.pipeline.traces.contracts import Contracts
    from srtm.pipeline.traces.files import Files
    from srtm.pipeline.traces.frames import Frame
    from srtm.pipeline.traces.reading import Trace

COLUMNS = ("topic", "arrival_ns", "broker", "release_ns")
WINDOW_NS = 60 * NS_PER_S
QUANTILES = ("0.50", "0.95", "0.99")
_SUMMARY_FIELDS = "topic string, messages long, first_ns long, last_ns long, backlog long, error string"
_SUM_FIELDS = (
    "topic string, broker string, begin_ns long, one boolean, messages long, waiting long, total_ns long, p50 long,"
    " p95 long, p99 long, longest_ns long, values binary, places binary, complete boolean, error string"
)
_BETWEEN_FIELDS = "topic string, broker string, one boolean, quantile string, below long, values binary"
_RESULT = (
    "topic string, broker string, begin_ns long, messages long, waited_ns long, one_bucket_ns long, p50_ns long,"
    " p95_ns long, p99_ns long, longest_ns long, error string"
)


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
    def of(cls, delays_ns: Ints) -> Waits:
        """The summary of these delays."""
        total = _exact_sum(delays_ns)
        p50, p95, p99 = percentiles(delays_ns, QUANTILES)
        return cls(len(delays_ns), int((delays_ns > 0).sum()), total, p50, p95, p99, int(delays_ns.max()))


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


class _Key(NamedTuple):
    """Whose delays: a topic's, or those of its messages at one broker; as recorded, or with one bucket."""

    topic: str
    broker: str | None
    one: bool


class _Delays(NamedTuple):
    """A batch of one topic's messages, in order of arrival."""

    topic: str
    times: Ints
    waits: dict[bool, Ints]
    brokers: dict[str, NDArray[np.bool_]]


def penalty(
    trace: Trace,
    contracts: Contracts,
    spark: SparkSession | None = None,
    *,
    window_ns: int = WINDOW_NS,
) -> list[TopicPenalty]:
    """The account of every topic of a recorded trace: a DataFrame, a path or a URI."""
    if not 1 <= window_ns <= scan.LATEST_NS:
        raise InputError(f"window = {window_ns} ns: it must be a positive time of at most 146 years")
    with opened(trace, spark, COLUMNS, grain_ns=window_ns) as source:
        return penalty_source(source, contracts, window_ns)


def penalty_source(source: Files | Frame, contracts: Contracts, window_ns: int = WINDOW_NS) -> list[TopicPenalty]:
    """`penalty` of an open trace."""
    topics, faults = source.topics()
    counts = topics.counts()
    held, errors = held_by(contracts, counts)
    summaries = source.run(_summarising(held), _SUMMARY_FIELDS, COLUMNS).to_pylist()
    errors |= {row["topic"]: row["error"] for row in summaries if row["error"]}
    good = {topic: contract for topic, contract in held.items() if topic not in errors}
    entering = _entering((row for row in summaries if row["topic"] in good), good)
    rows = source.run(_summing(good, entering, window_ns), _SUM_FIELDS, COLUMNS).to_pylist()
    errors |= {row["topic"]: row["error"] for row in rows if row["error"]}
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["topic"] not in errors and row["begin_ns"] is not None:
            by_name[row["topic"]].append(row)
    wholes = _wholes(source, good, entering, [r for r in rows if r["begin_ns"] is None and r["topic"] not in errors])
    lines = [_account(topic, counts[topic], its, wholes) for topic, its in by_name.items()]
    lines += [TopicPenalty(topic, counts[topic], error=error) for topic, error in errors.items()]
    lines += [TopicPenalty(topic, messages, error=error) for topic, (messages, error) in faults.items()]
    return sorted(lines, key=lambda line: line.topic)


def penalty_frame(trace: DataFrame, contracts: Contracts, *, window_ns: int = WINDOW_NS) -> DataFrame:
    """`penalty` from DataFrame to DataFrame, for notebooks: a row per topic, window and broker; null means all."""
    rows: list[tuple[object, ...]] = []
    for line in penalty(trace, contracts, window_ns=window_ns):
        if line.whole is None:
            rows.append((line.topic, None, None, line.messages, *[None] * 6, line.error))
            continue
        accounts: list[tuple[str | None, int | None, Cost]] = [
            (None, None, line.whole),
            *((broker, None, cost) for broker, cost in line.brokers.items()),
        ]
        for window in line.windows:
            accounts.append((None, window.begin_ns, window.whole))
            accounts += [(broker, window.begin_ns, cost) for broker, cost in window.brokers.items()]
        for broker, begin_ns, cost in accounts:
            was, total_ns = cost.split, cost.one.total_ns
            tail = (was.p50, was.p95, was.p99, was.longest_ns, None)
            rows.append((line.topic, broker, begin_ns, was.messages, was.total_ns, total_ns, *tail))
    return trace.sparkSession.createDataFrame(rows, _RESULT)


def _summarising(contracts: Mapping[str, Timeline]) -> Work:
    def work(_: int, batches: Batches) -> Batches:
        summaries: dict[str, scan.Summary] = {}
        errors: dict[str, str] = {}
        for batch in batches:
            for topic, rows in by_topic(batch):
                if topic not in contracts or topic in errors:
                    continue
                try:
                    times = rows.column("arrival_ns").to_numpy()
                    summaries[topic] = timeline.summarise(times, contracts[topic], summaries.get(topic))
                except SRTMError as error:
                    errors[topic] = str(error)
        yield batch_of(
            _SUMMARY_FIELDS,
            [(topic, *summary, None) for topic, summary in summaries.items() if topic not in errors]
            + [(topic, 0, 0, 0, 0, error) for topic, error in errors.items()],
        )

    return work


def _entering(
    rows: Iterable[Mapping[str, Any]], contracts: Mapping[str, Timeline]
) -> dict[tuple[str, int], scan.State]:
    """The state that each stretch of a topic starts from, by topic and first time."""
    by_name: dict[str, list[scan.Summary]] = defaultdict(list)
    for row in rows:
        by_name[str(row["topic"])].append(scan.Summary(*(row[name] for name in scan.Summary._fields)))
    states = {}
    for topic, summaries in by_name.items():
        state = timeline.BEGINNING
        for summary in sorted(summaries, key=lambda summary: summary.first_ns):
            states[topic, summary.first_ns] = state
            state = timeline.left_by(summary, state, contracts[topic])
    return states


def _delays(
    contracts: Mapping[str, Timeline], entering: Mapping[tuple[str, int], scan.State], batches: Batches
) -> Iterator[_Delays]:
    """How long every message waited, and would have waited with one bucket."""
    states: dict[str, scan.State] = {}
    for batch in batches:
        for topic, rows in by_topic(batch):
            if topic not in contracts:
                continue
            times = rows.column("arrival_ns").to_numpy()
            names = rows.column("broker").dictionary.to_pylist()
            order = _released_order(rows, times, names)
            brokers = rows.column("broker").indices.to_numpy()[order]
            state = states.get(topic) or entering[topic, int(times[0])]
            one, states[topic] = timeline.waits(times, contracts[topic], state)
            split = rows.column("release_ns").to_numpy()[order] - times
            masks = {names[code]: brokers == code for code in np.unique(brokers).tolist()}
            yield _Delays(topic, times, {False: split, True: one}, masks)


def _released_order(rows: pa.RecordBatch, times: Ints, names: list[str]) -> NDArray[np.intp]:
    """The order of rows by arrival, then release, then broker."""
    place = np.argsort(np.argsort(np.array(names)))
    brokers = place[rows.column("broker").indices.to_numpy()]
    return np.lexsort((brokers, rows.column("release_ns").to_numpy(), times))


def _summing(contracts: Mapping[str, Timeline], entering: Mapping[tuple[str, int], scan.State], window_ns: int) -> Work:
    """Work over whole windows: a row per window and broker, and the samples of all."""

    def work(_: int, batches: Batches) -> Batches:
        for found in _delays(contracts, entering, batches):
            try:
                yield batch_of(_SUM_FIELDS, [*_window_rows(found, window_ns), *_sample_rows(found)])
            except SRTMError as error:
                yield batch_of(_SUM_FIELDS, [(found.topic, *[None] * 13, str(error))])

    return work


def _window_rows(found: _Delays, window_ns: int) -> Iterator[tuple[object, ...]]:
    if early := int((found.waits[False] < 0).sum()):
        count = len(found.times)
        raise InputError(f"{early} of {count} messages were released before they arrived: check clocks and units")
    numbers = found.times // window_ns
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    for low, high in pairwise(cuts):
        begin_ns = int(numbers[low]) * window_ns
        for one, delays in found.waits.items():
            yield _row(_Key(found.topic, None, one), begin_ns, delays[low:high])
            for broker, mask in found.brokers.items():
                here = delays[low:high][mask[low:high]]
                if len(here):
                    yield _row(_Key(found.topic, broker, one), begin_ns, here)


def _row(key: _Key, begin_ns: int, delays: Ints) -> tuple[object, ...]:
    waits = Waits.of(delays)
    numbers = (waits.messages, waits.waiting, waits.total_ns, waits.p50, waits.p95, waits.p99, waits.longest_ns)
    return (key.topic, key.broker, begin_ns, key.one, *numbers, None, None, None, None)


def _sample_rows(found: _Delays) -> Iterator[tuple[object, ...]]:
    for key, delays in _by_key(found):
        samples = Samples.of(delays)
        data = (samples.values.tobytes(), samples.places.tobytes(), samples.complete)
        yield (key.topic, key.broker, None, key.one, len(delays), *[None] * 6, *data, None)


def _by_key(found: _Delays) -> Iterator[tuple[_Key, Ints]]:
    for one, delays in found.waits.items():
        yield _Key(found.topic, None, one), delays
        for broker, mask in found.brokers.items():
            yield _Key(found.topic, broker, one), delays[mask]


def _wholes(
    source: Files | Frame,
    contracts: Mapping[str, Timeline],
    entering: Mapping[tuple[str, int], scan.State],
    rows: list[dict[str, Any]],
) -> dict[_Key, list[int]]:
    """The quantiles over the whole run."""
    samples: dict[_Key, list[Samples]] = defaultdict(list)
    for row in rows:
        values, places = (np.frombuffer(row[name], np.int64) for name in ("values", "places"))
        key = _Key(row["topic"], row["broker"], row["one"])
        samples[key].append(Samples(values, places, row["messages"], row["complete"]))
    bounds = {(key, q): narrowed(its_own, q) for key, its_own in samples.items() for q in QUANTILES}
    found = {place: bound.upto for place, bound in bounds.items()}
    still_open = {place: bound for place, bound in bounds.items() if not bound.settled}
    if still_open:
        between: dict[tuple[_Key, str], list[Ints]] = defaultdict(list)
        below: dict[tuple[_Key, str], int] = defaultdict(int)
        for row in source.run(_collecting(contracts, entering, still_open), _BETWEEN_FIELDS, COLUMNS).to_pylist():
            place = _Key(row["topic"], row["broker"], row["one"]), row["quantile"]
            between[place].append(np.frombuffer(row["values"], np.int64))
            below[place] += row["below"]
        for key, q in still_open:
            total = sum(some.total for some in samples[key])
            found[key, q] = selected(between[key, q], below[key, q], total, q)
    return {key: [found[key, q] for q in QUANTILES] for key in samples}


def _collecting(
    contracts: Mapping[str, Timeline],
    entering: Mapping[tuple[str, int], scan.State],
    wanted: Mapping[tuple[_Key, str], Bounds],
) -> Work:
    def work(_: int, batches: Batches) -> Batches:
        for found in _delays(contracts, entering, batches):
            rows = []
            for key, delays in _by_key(found):
                for q in QUANTILES:
                    bounds = wanted.get((key, q))
                    if bounds:
                        inside = delays[(delays > bounds.above) & (delays <= bounds.upto)]
                        rows.append((*key, q, int((delays <= bounds.above).sum()), inside.tobytes()))
            yield batch_of(_BETWEEN_FIELDS, rows)

    return work


def _account(topic: str, messages: int, rows: list[dict[str, Any]], wholes: Mapping[_Key, list[int]]) -> TopicPenalty:
    windows: dict[int, dict[_Key, Waits]] = defaultdict(dict)
    in_all: dict[_Key, list[Waits]] = defaultdict(list)
    for row in rows:
        key = _Key(topic, row["broker"], row["one"])
        numbers = ("messages", "waiting", "total_ns", "p50", "p95", "p99", "longest_ns")
        windows[row["begin_ns"]][key] = each = Waits(*(row[name] for name in numbers))
        in_all[key].append(each)
    whole, brokers = _costs(topic, {key: _total(waits, wholes[key]) for key, waits in in_all.items()})
    listed = [Window(begin_ns, *_costs(topic, waits)) for begin_ns, waits in sorted(windows.items())]
    return TopicPenalty(topic, messages, whole, brokers, listed)


def _costs(topic: str, waits: Mapping[_Key, Waits]) -> tuple[Cost, dict[str, Cost]]:
    names: list[str | None] = [None, *sorted({key.broker for key in waits if key.broker is not None})]
    costs = {name: Cost(waits[_Key(topic, name, False)], waits[_Key(topic, name, True)]) for name in names}
    return costs[None], {name: cost for name, cost in costs.items() if name is not None}


def _total(waits: list[Waits], quantiles: list[int]) -> Waits:
    p50, p95, p99 = quantiles
    return Waits(
        sum(each.messages for each in waits),
        sum(each.waiting for each in waits),
        sum(each.total_ns for each in waits),
        p50,
        p95,
        p99,
        max(each.longest_ns for each in waits),
    )


def _exact_sum(values: Ints) -> int:
    """The sum of non-negative values, exact even beyond 64 bits."""
    total = (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())
    if total > 2**62:
        raise InputError(f"the delays of a window add up to {total} ns: check the units, or choose a shorter window")
    return total
