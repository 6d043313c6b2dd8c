"""Profile: per topic, what it sent, how bursty that was and the token bucket it needs; the numbers of `model.profile`.

Tasks scan the stretches of the trace (`traces.reading`) in parallel as if nothing came before them, and the driver
joins them. If a stretch starts with a backlog from the one before, a second run corrects its histogram. A topic that
cannot be profiled does not fail the others: its error is in its line of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from srtm.model import burst
from srtm.model import profile as model
from srtm.model.bucket import TokenBucket
from srtm.model.defaults import HEADROOM, QUANTILE
from srtm.pipeline.traces.frames import Frame
from srtm.pipeline.traces.reading import opened
from srtm.pipeline.traces.summaries import (
    SCAN_FIELDS,
    STRETCH_FIELDS,
    TopicStretch,
    add_counts,
    as_stretches,
    corrected,
    correcting,
    entering_states,
    publishers_by_topic,
    scanned_at,
    scanning,
    stretches_by_topic,
    widening,
)
from srtm.units import NANO_PER_TOKEN, Number, histogram_percentile

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from srtm.pipeline.traces.files import Files
    from srtm.pipeline.traces.reading import Trace
    from srtm.pipeline.traces.stretches import Span

COLUMNS = ("topic", "publisher", "arrival_ns")
_KEPT = 2**19  # messages at the beginning of a stretch that go to the driver: some megabytes
_KEPT_IN_ALL = 2**23  # over all stretches
_REACH_NS = burst.WINDOWS_NS[-1]
_RESULT = (
    "topic string, messages long, publishers long, rate double, r double, b double, first_ns long, last_ns long,"
    " envelope array<struct<window_ns: long, messages: long>>, batches array<struct<size: long, count: long>>,"
    " error string"
)


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


def profile(
    trace: Trace,
    spark: SparkSession | None = None,
    *,
    headroom: Number = HEADROOM,
    quantile: Number = QUANTILE,
) -> list[TopicProfile]:
    """The profile of every topic of a trace: a DataFrame, or a path that the session reads."""
    with opened(trace, spark, COLUMNS) as source:
        return profile_source(source, headroom, quantile)


def profile_source(source: Files | Frame, headroom: Number, quantile: Number) -> list[TopicProfile]:
    """`profile` of an open trace."""
    spans = source.spans()
    rates = {topic: model.token_rate(model.mean_rate(*span), headroom) for topic, span in spans.items()}
    scanned = source.run(
        scanning(rates, min(_KEPT, _KEPT_IN_ALL // source.tasks)), SCAN_FIELDS, COLUMNS, before_ns=_REACH_NS
    )
    stretches, publishers = as_stretches(scanned), publishers_by_topic(scanned)
    stretches += _corrections(source, stretches, rates)
    stretches += _across_cuts(source, stretches)
    lines = [
        _joined(topic, spans[topic], publishers.get(topic, 0), rates[topic], its_own, quantile)
        for topic, its_own in stretches_by_topic(stretches).items()
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


def _corrections(source: Files | Frame, stretches: list[TopicStretch], rates: dict[str, int]) -> list[TopicStretch]:
    """What the states before stretches change, from the stretches' beginnings or, if too short, from the trace."""
    entering = entering_states(stretches, rates)
    found, open_ = [], {}
    for stretch in stretches:
        state = entering.get((stretch.topic, stretch.first_ns))
        if state is None:
            continue
        correction = corrected(stretch, scanned_at(rates[stretch.topic]), state)
        if correction is None:
            open_[stretch.topic, stretch.first_ns] = state
        else:
            found.append(correction)
    if open_:
        at = [first_ns for _, first_ns in open_]
        found += as_stretches(source.run(correcting(rates, open_), STRETCH_FIELDS, ("topic", "arrival_ns"), at=at))
    return found


def _across_cuts(source: Files | Frame, stretches: list[TopicStretch]) -> list[TopicStretch]:
    """Envelopes of the arrivals around cuts between stretches, which no task has seen together."""
    if not isinstance(source, Frame):
        return []
    cuts = {
        topic: [stretch.first_ns for stretch in its_own if stretch.messages][1:]
        for topic, its_own in stretches_by_topic(stretches).items()
    }
    cuts = {topic: times for topic, times in cuts.items() if times}
    return as_stretches(source.run_around(cuts, _REACH_NS, widening, STRETCH_FIELDS)) if cuts else []


def _joined(
    topic: str, span: Span, publishers: int, r_mtps: int, stretches: list[TopicStretch], quantile: Number
) -> TopicProfile:
    if errors := [stretch.error for stretch in stretches if stretch.error]:
        return TopicProfile(topic, span.messages, error=errors[0])
    counts = batches = np.zeros(1, np.int64)
    envelope = np.zeros(len(burst.WINDOWS_NS), np.int64)
    for stretch in stretches:
        counts, batches = add_counts(counts, _ints(stretch.counts)), add_counts(batches, _ints(stretch.batches))
        if stretch.envelope:
            envelope = np.maximum(envelope, _ints(stretch.envelope))
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
