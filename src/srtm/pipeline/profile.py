"""Profile: per topic, what was sent, how bursty it was and the token bucket that it needs; what `model.profile` says.

Stretches of the trace (`reading`) are scanned in parallel as if nothing came before them, then joined; where work is
left over from the stretch before, a second run corrects its histogram. A topic that cannot be profiled does not take
the others with it: its error stands in its line of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from srtm.model import burst
from srtm.model import profile as model
from srtm.model.bucket import TokenBucket
from srtm.model.defaults import HEADROOM, QUANTILE
from srtm.pipeline.traces.chunks import (
    PART_FIELDS,
    SCAN_FIELDS,
    Part,
    add_counts,
    as_parts,
    corrected,
    correcting,
    entering_states,
    parts_by_topic,
    publishers_by_topic,
    scanned_at,
    scanning,
    widening,
)
from srtm.pipeline.traces.reading import Frame, Span, opened
from srtm.units import NANO_PER_TOKEN, Number, histogram_percentile

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from srtm.pipeline.traces.reading import Files, Trace

COLUMNS = ("topic", "publisher", "arrival_ns")
_KEPT = 2**19  # messages at the beginning of a stretch that travel to the driver: some megabytes,
_KEPT_IN_ALL = 2**23  # of all stretches together
_REACH_NS = burst.WINDOWS_NS[-1]
_RESULT = (
    "topic string, messages long, publishers long, rate double, r double, b double, first_ns long, last_ns long,"
    " envelope array<struct<window_ns: long, messages: long>>, batches array<struct<size: long, count: long>>,"
    " error string"
)


@dataclass(frozen=True, slots=True)
class TopicProfile:
    """One topic's line: what was sent and what it needs, or why that cannot be said."""

    topic: str
    messages: int
    publishers: int = 0
    rate_mps: float = 0.0
    bucket: TokenBucket | None = None
    first_ns: int = 0
    last_ns: int = 0
    envelope: dict[int, int] = field(default_factory=dict)  # length of a window in ns → messages in the fullest
    batches: dict[int, int] = field(default_factory=dict)  # messages that a publisher sent at once → how often
    error: str | None = None

    def peak_mps(self, window_ns: int) -> float:
        """The peak rate over windows of this length, which is one of the envelope's."""
        return self.envelope[window_ns] * 1e9 / window_ns

    def batch_size(self, quantile: Number) -> int:
        """The size that such a share of the batches does not exceed."""
        counts = np.zeros(max(self.batches, default=0) + 1, np.int64)
        for size, count in self.batches.items():
            counts[size] = count
        return histogram_percentile(counts, quantile)


def profile(
    trace: Trace,
    spark: SparkSession | None = None,
    *,
    headroom: Number = HEADROOM,
    quantile: Number = QUANTILE,
) -> list[TopicProfile]:
    """The profile of every topic of a trace: a DataFrame, or a path to be read with the session."""
    with opened(trace, spark, COLUMNS) as source:
        return profile_source(source, headroom, quantile)


def profile_source(source: Files | Frame, headroom: Number, quantile: Number) -> list[TopicProfile]:
    """`profile` of a trace that is open."""
    spans = source.spans()
    rates = {topic: model.token_rate(model.mean_rate(*span), headroom) for topic, span in spans.items()}
    scanned = source.run(
        scanning(rates, min(_KEPT, _KEPT_IN_ALL // source.tasks)), SCAN_FIELDS, COLUMNS, before_ns=_REACH_NS
    )
    parts, publishers = as_parts(scanned), publishers_by_topic(scanned)
    parts += _corrections(source, parts, rates)
    parts += _across_ranges(source, parts)
    lines = [
        _joined(topic, spans[topic], publishers.get(topic, 0), rates[topic], its_parts, quantile)
        for topic, its_parts in parts_by_topic(parts).items()
    ]
    faults = [TopicProfile(topic, 0, error=error) for topic, error in source.faults.items()]
    return sorted([*lines, *faults], key=lambda line: line.topic)


def profile_frame(trace: DataFrame, *, headroom: Number = HEADROOM, quantile: Number = QUANTILE) -> DataFrame:
    """`profile` from DataFrame to DataFrame, for notebooks."""
    rows = [
        (
            line.topic,
            line.messages,
            line.publishers,
            line.rate_mps,
            line.bucket.r if line.bucket else None,
            line.bucket.b if line.bucket else None,
            line.first_ns,
            line.last_ns,
            list(line.envelope.items()),
            list(line.batches.items()),
            line.error,
        )
        for line in profile(trace, headroom=headroom, quantile=quantile)
    ]
    return trace.sparkSession.createDataFrame(rows, _RESULT)


def _corrections(source: Files | Frame, parts: list[Part], rates: dict[str, int]) -> list[Part]:
    """What the states before parts change, from the parts' beginnings or, where these are too short, from the trace."""
    entering = entering_states(parts, rates)
    found, open_ = [], {}
    for part in parts:
        state = entering.get((part.topic, part.first_ns))
        if state is None:
            continue
        correction = corrected(part, scanned_at(rates[part.topic]), state)
        if correction is None:
            open_[part.topic, part.first_ns] = state
        else:
            found.append(correction)
    if open_:
        at = [first_ns for _, first_ns in open_]
        found += as_parts(source.run(correcting(rates, open_), PART_FIELDS, ("topic", "arrival_ns"), at=at))
    return found


def _across_ranges(source: Files | Frame, parts: list[Part]) -> list[Part]:
    """Envelopes of what lies around the cuts between ranges, which no task has seen whole."""
    if not isinstance(source, Frame):
        return []
    cuts = {
        topic: [part.first_ns for part in its_parts if part.messages][1:]
        for topic, its_parts in parts_by_topic(parts).items()
    }
    cuts = {topic: times for topic, times in cuts.items() if times}
    return as_parts(source.run_around(cuts, _REACH_NS, widening, PART_FIELDS)) if cuts else []


def _joined(topic: str, span: Span, publishers: int, r_mtps: int, parts: list[Part], quantile: Number) -> TopicProfile:
    if errors := [part.error for part in parts if part.error]:
        return TopicProfile(topic, span.messages, error=errors[0])
    counts = batches = np.zeros(1, np.int64)
    envelope = np.zeros(len(burst.WINDOWS_NS), np.int64)
    for part in parts:
        counts, batches = add_counts(counts, _ints(part.counts)), add_counts(batches, _ints(part.batches))
        if part.envelope:
            envelope = np.maximum(envelope, _ints(part.envelope))
    return TopicProfile(
        topic,
        span.messages,
        publishers,
        float(model.mean_rate(*span)),
        TokenBucket(r_mtps, histogram_percentile(counts, quantile) * NANO_PER_TOKEN),
        span.first_ns,
        span.last_ns,
        dict(zip(burst.WINDOWS_NS, envelope.tolist(), strict=True)),
        {size: int(batches[size]) for size in np.flatnonzero(batches).tolist()},
    )


def _ints(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, np.int64)
