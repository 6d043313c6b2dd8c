"""Profile: per topic, what it sent, how bursty that was and the token bucket it needs; the numbers of `model.profile`.

Tasks scan the stretches of the trace (`traces.reading`) in parallel as if nothing came before them, and the driver
joins them. If a stretch starts with a backlog from the one before, a second run corrects its histogram. A small trace
is one stretch, whose task does all of this by itself. A topic that cannot be profiled does not fail the others: its
error is in its line of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from srtm.model import burst, fleet, scan
from srtm.model import profile as model
from srtm.model.bucket import TokenBucket
from srtm.model.defaults import HEADROOM, QUANTILE
from srtm.pipeline.traces.files import Files
from srtm.pipeline.traces.frames import Frame
from srtm.pipeline.traces.held import Held
from srtm.pipeline.traces.joining import Stretches, corrections, publishers_of, tallies, values_at, widest
from srtm.pipeline.traces.lines import Lines
from srtm.pipeline.traces.parts import PART_FIELDS, joined, packed, rows_of, table_of
from srtm.pipeline.traces.reading import opened
from srtm.pipeline.traces.scanning import REACH_NS, correcting, scanned_at, scanning, widening
from srtm.pipeline.traces.topics import Topics
from srtm.units import MILLI_PER_TOKEN, NANO_PER_TOKEN, NS_PER_S, Number, histogram_percentile, ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from srtm.pipeline.traces.batches import Batches, Ints, Work
    from srtm.pipeline.traces.reading import Trace
    from srtm.pipeline.traces.topics import Faults

COLUMNS = ("topic", "publisher", "arrival_ns")
_KEPT = 2**20  # messages at the beginning of a stretch that go to the driver: some megabytes
_KEPT_IN_ALL = 2**23  # over all stretches
_BATCHES = ("topic", "size", "count")
_FAULTS = pa.schema([("topic", pa.string()), ("messages", pa.int64()), ("error", pa.string())])


@dataclass(frozen=True, slots=True)
class TopicProfile:
    """One topic's line: what it sent and the bucket it needs, or an error."""

    topic: str
    messages: int
    publishers: int = 0
    rate_mps: float = 0.0
    bucket: TokenBucket | None = None
    first_ns: int = 0
    last_ns: int = 0
    envelope: dict[int, int] = field(default_factory=dict)  # length of a window in ns → messages in the fullest
    batches: dict[int, int] = field(default_factory=dict)  # messages a publisher sent at once → how often
    error: str | None = None

    def peak_mps(self, window_ns: int) -> float:
        """The peak rate over windows of this length, which is one of the envelope's."""
        return self.envelope[window_ns] * 1e9 / window_ns

    def batch_size(self, quantile: Number) -> int:
        """The batch size at a quantile."""
        counts = np.zeros(max(self.batches, default=0) + 1, np.int64)
        for size, count in self.batches.items():
            counts[size] = count
        return histogram_percentile(counts, quantile)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The profiles of topics, column by column; `batches` has rows (topic, size, count), in order."""

    topics: Topics
    publishers: Ints
    rates: Ints
    b: Ints
    envelopes: Ints
    batches: Ints

    def only(self, chosen: NDArray[np.bool_]) -> _Columns:
        """The profiles of some topics."""
        places, of_chosen = np.cumsum(chosen) - 1, chosen[self.batches[:, 0]]
        batches = self.batches[of_chosen]
        batches[:, 0] = places[batches[:, 0]]
        publishers, rates, b = self.publishers[chosen], self.rates[chosen], self.b[chosen]
        return _Columns(self.topics.only(chosen), publishers, rates, b, self.envelopes[chosen], batches)

    def parts(self) -> dict[str, pa.Table]:
        """What a task sends to the driver."""
        narrow = np.int32 if self.envelopes.max(initial=0) < 2**31 else np.int64
        topics = table_of(
            topic=self.topics.names,
            messages=self.topics.messages,
            first_ns=self.topics.first_ns,
            last_ns=self.topics.last_ns,
            publishers=self.publishers,
            rate=self.rates,
            b=self.b,
            envelope=self.envelopes.astype(narrow),
        )
        batches = table_of(**{name: self.batches[:, place].copy() for place, name in enumerate(_BATCHES)})
        return {"topics": topics, "batches": batches}

    @classmethod
    def received(cls, parts: dict[str, pa.Table]) -> _Columns:
        """What a task sent."""
        table, batches = parts["topics"], parts["batches"]
        messages, first_ns, last_ns, publishers, rates, b = (
            table[name].to_numpy() for name in table.schema.names[1:-1]
        )
        return cls(
            Topics(table["topic"].combine_chunks(), messages, first_ns, last_ns),
            publishers,
            rates,
            b,
            rows_of(table["envelope"], len(burst.WINDOWS_NS)).astype(np.int64),
            np.column_stack([batches[name].to_numpy() for name in _BATCHES]),
        )

    def line(self, number: int) -> TopicProfile:
        """The profile of one topic."""
        messages, first_ns, last_ns = (int(column[number]) for column in self.topics[1:])
        begin, end = np.searchsorted(self.batches[:, 0], [number, number + 1])
        return TopicProfile(
            self.topics.names[number].as_py(),
            messages,
            int(self.publishers[number]),
            float(model.mean_rate(messages, first_ns, last_ns)),
            TokenBucket(int(self.rates[number]), int(self.b[number]) * NANO_PER_TOKEN),
            first_ns,
            last_ns,
            dict(zip(burst.WINDOWS_NS, self.envelopes[number].tolist(), strict=True)),
            dict(self.batches[begin:end, 1:].tolist()),
        )

    def table(self) -> pa.Table:
        """All of them as an Arrow table."""
        topics, count = self.topics, len(self.topics)
        spans = np.maximum(topics.last_ns - topics.first_ns, NS_PER_S)
        windows = np.tile(np.array(burst.WINDOWS_NS), count)
        starts = np.arange(count + 1) * len(burst.WINDOWS_NS)
        batch_starts = np.searchsorted(self.batches[:, 0], np.arange(count + 1))
        return pa.table(
            {
                "topic": topics.names,
                "messages": topics.messages,
                "publishers": self.publishers,
                "rate": topics.messages.astype(object) * NS_PER_S / spans,
                "r": self.rates / MILLI_PER_TOKEN,
                "b": self.b.astype(np.float64),
                "first_ns": topics.first_ns,
                "last_ns": topics.last_ns,
                "envelope": _structs(starts, window_ns=windows, messages=self.envelopes.ravel()),
                "batches": _structs(batch_starts, size=self.batches[:, 1], count=self.batches[:, 2]),
                "error": pa.nulls(count, pa.string()),
            },
        )


def _structs(starts: Ints, **fields: Ints) -> pa.ListArray:
    values = pa.StructArray.from_arrays([pa.array(np.ascontiguousarray(field)) for field in fields.values()], fields)
    return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), values)


class Profiles(Lines[TopicProfile]):
    """The lines of all topics in order of name, kept as columns."""

    def __init__(self, columns: _Columns, faults: Faults) -> None:
        super().__init__(columns.topics.names, faults)
        self._columns = columns

    def _line(self, number: int) -> TopicProfile:
        return self._columns.line(number)

    def _fault(self, topic: str, messages: int, error: str) -> TopicProfile:
        return TopicProfile(topic, messages, error=error)

    def table(self) -> pa.Table:
        """The lines as an Arrow table; of a topic with an error, only topic, messages and error are not null."""
        whole = self._columns.table()
        rows = [{"topic": topic, "messages": messages, "error": error} for topic, (messages, error) in self._faults]
        faulty = pa.Table.from_pylist(rows, whole.schema)
        return pa.concat_tables([whole, faulty]).take(pa.array(self._order))


def profile(
    trace: Trace,
    spark: SparkSession | None = None,
    *,
    headroom: Number = HEADROOM,
    quantile: Number = QUANTILE,
) -> Profiles:
    """The profile of every topic of a trace: a DataFrame, a path or a URI."""
    with opened(trace, spark, COLUMNS, joined=True) as source:
        return profile_source(source, headroom, quantile)


def profile_source(source: Files | Frame, headroom: Number, quantile: Number) -> Profiles:
    """`profile` of an open trace."""
    if isinstance(source, Files) and source.small:
        parts = joined(source.run(_alone(headroom, quantile), PART_FIELDS, COLUMNS))
        faults = {row["topic"]: (row["messages"], row["error"]) for row in parts["faults"].to_pylist()}
        return Profiles(_Columns.received(parts), faults)
    return Profiles(*_profiled(source, headroom, quantile))


def _alone(headroom: Number, quantile: Number) -> Work:
    """Work over batches of (topic, publisher, arrival_ns) that are the whole trace."""

    def work(_: int, batches: Batches) -> Batches:
        columns, faults = _profiled(Held(batches), headroom, quantile)
        rows = [{"topic": topic, "messages": messages, "error": error} for topic, (messages, error) in faults.items()]
        yield from packed({**columns.parts(), "faults": pa.Table.from_pylist(rows, _FAULTS)})

    return work


def _profiled(source: Files | Frame | Held, headroom: Number, quantile: Number) -> tuple[_Columns, Faults]:
    topics, faults = source.topics()
    rates = model.token_rates(topics.messages, topics.first_ns, topics.last_ns, headroom)
    laws = fleet.laws_of(rates)
    kept = min(_KEPT, _KEPT_IN_ALL // source.tasks) if source.tasks > 1 else 0
    scanned = source.run(scanning(topics, laws, kept), PART_FIELDS, COLUMNS, before_ns=REACH_NS)
    parts = joined(scanned)
    stretches = Stretches.of(parts)
    changes, overflows = _corrections(source, topics, laws, stretches)
    overflows = np.concatenate([overflows, stretches.topics[stretches.peaks > scan.HIGHEST]])
    needs = tallies(parts["needs"], changes)
    b = values_at(needs, ranks(topics.messages, quantile))
    columns = _Columns(
        topics,
        publishers_of(scanned, len(topics)),
        rates,
        np.maximum(b, 1),
        _envelopes(source, topics, stretches),
        tallies(parts["sizes"]),
    )
    for number in np.unique(overflows).tolist():
        faults[topics.names[number].as_py()] = (
            int(topics.messages[number]),
            str(scan.overflow(scanned_at(rates[number]).law)),
        )
    sound = np.ones(len(topics), np.bool_)
    sound[overflows] = False
    return columns if sound.all() else columns.only(sound), faults


def profile_frame(trace: DataFrame, *, headroom: Number = HEADROOM, quantile: Number = QUANTILE) -> DataFrame:
    """`profile` from DataFrame to DataFrame, for notebooks."""
    found = profile(trace, headroom=headroom, quantile=quantile)
    return trace.sparkSession.createDataFrame(found.table())


def _corrections(source: Files | Frame | Held, topics: Topics, laws: Ints, stretches: Stretches) -> tuple[Ints, Ints]:
    """What the states before stretches change, from the stretches' beginnings or, if too short, from the trace."""
    changes, still_open, overflows = corrections(stretches, laws)
    if len(still_open):
        at = still_open[:, 1].tolist()
        work = correcting(topics, laws, still_open)
        parts = joined(source.run(work, PART_FIELDS, ("topic", "arrival_ns"), at=at))
        changes = tallies(parts["needs"], changes)
        overflows = np.concatenate([overflows, parts["overflows"]["topic"].to_numpy()])
    return changes, overflows


def _envelopes(source: Files | Frame | Held, topics: Topics, stretches: Stretches) -> Ints:
    """The envelope of each topic, with the arrivals around cuts between stretches that no task has seen together."""
    found, envelopes = stretches.topics, stretches.envelopes
    if isinstance(source, Frame):
        cut = np.flatnonzero(np.diff(found) == 0) + 1
        if len(cut):
            around = source.run_around(topics, found[cut], stretches.summaries[cut, 1], REACH_NS, widening, PART_FIELDS)
            more = joined(around)["envelopes"]
            found = np.concatenate([found, more["topic"].to_numpy()])
            envelopes = np.concatenate([envelopes, rows_of(more["envelope"], len(burst.WINDOWS_NS))])
    return widest(found, envelopes, len(topics))
