"""Conformance: whether a recorded run kept to (r, b); `model.timeline.largest_excess` for runs of any size.

It judges release times, of each topic as a whole over all its brokers: no window may hold more messages than b + r·Δt.
Tasks check stretches in parallel, each for the windows that begin and end in it. A second run checks the windows that
reach into a stretch from before, as far as they matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from srtm.model import fleet, scan, timeline
from srtm.model.timeline import Excess, Timelines
from srtm.pipeline.traces.contracts import held_by
from srtm.pipeline.traces.parts import PART_FIELDS, joined, packed, table_of
from srtm.pipeline.traces.reading import opened
from srtm.pipeline.traces.scanning import Followed, summarised
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from srtm.pipeline.traces.batches import Batches, Ints, Work
    from srtm.pipeline.traces.contracts import Contracts
    from srtm.pipeline.traces.files import Files
    from srtm.pipeline.traces.frames import Frame
    from srtm.pipeline.traces.reading import Trace
    from srtm.pipeline.traces.topics import Topics

COLUMNS = ("topic", "release_ns")
_RESULT = "topic string, messages long, conforms boolean, excess double, at_ns long, error string"
_SUMMARY = ("messages", "first_ns", "last_ns", "backlog")
_WORST = ("topic", "excess_ptok", "at_ns")


@dataclass(frozen=True, slots=True)
class TopicConformance:
    """One topic's verdict: the window that exceeded (r, b) by most or came closest to it, or an error."""

    topic: str
    messages: int
    excess: Excess | None = None
    error: str | None = None

    @property
    def conforms(self) -> bool:
        """Whether no window held more than b + r·Δt."""
        return self.excess is not None and self.excess.conforms


def conformance(trace: Trace, contracts: Contracts, spark: SparkSession | None = None) -> list[TopicConformance]:
    """The verdict on every topic of a recorded trace: a DataFrame, a path or a URI."""
    with opened(trace, spark, COLUMNS, "release_ns") as source:
        return conformance_source(source, contracts)


def conformance_source(source: Files | Frame, contracts: Contracts) -> list[TopicConformance]:
    """`conformance` of an open trace."""
    everything, faults = source.topics()
    held, errors = held_by(contracts, everything.names.to_pylist())
    errors |= timeline.refused(held)
    counts = everything.counts()
    topics = everything.only(np.array([name not in errors for name in counts], np.bool_))
    timelines = Timelines.of([held[name] for name in topics.names.to_pylist()])
    parts = joined(source.run(_checking(topics, timelines), PART_FIELDS, COLUMNS))["topics"]
    found = [np.column_stack([parts[name].to_numpy() for name in _WORST])]
    overflows = [parts["topic"].to_numpy()[parts["peak"].to_numpy() > scan.HIGHEST]]
    entering = _entering(parts, timelines)
    if len(entering):
        work = _checking_again(topics, timelines, entering)
        again = joined(source.run(work, PART_FIELDS, COLUMNS, at=entering[:, 1].tolist()))
        found.append(np.column_stack([again["worst"][name].to_numpy() for name in _WORST]))
        overflows.append(again["overflows"]["topic"].to_numpy())
    for number in np.unique(np.concatenate(overflows)).tolist():
        name = topics.names[number].as_py()
        errors[name] = str(scan.overflow(held[name].start.pico_law))
    lines = [line for line in _verdicts(topics, np.concatenate(found)) if line.topic not in errors]
    lines += [TopicConformance(topic, counts[topic], error=error) for topic, error in errors.items()]
    lines += [TopicConformance(topic, messages, error=error) for topic, (messages, error) in faults.items()]
    return sorted(lines, key=lambda line: line.topic)


def conformance_frame(trace: DataFrame, contracts: Contracts) -> DataFrame:
    """`conformance` from DataFrame to DataFrame, for notebooks."""
    rows = [
        (
            line.topic,
            line.messages,
            line.conforms,
            float(line.excess.tokens) if line.excess else None,
            line.excess.at_ns if line.excess else None,
            line.error,
        )
        for line in conformance(trace, contracts)
    ]
    return trace.sparkSession.createDataFrame(rows, _RESULT)


def _checking(topics: Topics, timelines: Timelines) -> Work:
    """Work over batches of (topic, release_ns): the windows that begin and end in a stretch."""

    def work(_: int, batches: Batches) -> Batches:
        worst = _no_worst(len(topics))

        def check(times: Ints, segments: Ints, states: Ints) -> None:
            timelines.check(times, segments, states, worst)

        found = summarised(topics, "release_ns", batches, check)
        for name, values in zip(_WORST[1:], worst[found["topic"].to_numpy()].T, strict=True):
            found = found.append_column(name, pa.array(values.copy()))
        yield from packed({"topics": found})

    return work


def _checking_again(topics: Topics, timelines: Timelines, entering: Ints) -> Work:
    """Work over batches of (topic, release_ns): the windows that reach into a stretch, while those are fuller."""

    def work(_: int, batches: Batches) -> Batches:
        followed, worst = Followed(topics, "release_ns", entering), _no_worst(len(topics))
        for batch in batches:
            times, segments = followed.segments(batch)
            timelines.check(times, segments, followed.after, worst)
            timelines.check(times, segments, followed.alone, _no_worst(len(topics)))
            if followed.done():
                break
        here = np.flatnonzero(worst[:, 0] != fleet.NEVER)
        found = table_of(topic=here, excess_ptok=worst[here, 0], at_ns=worst[here, 1])
        yield from packed({"worst": found, "overflows": table_of(topic=followed.overflows())})

    return work


def _no_worst(topics: int) -> Ints:
    worst = np.zeros((topics, 2), np.int64)
    worst[:, 0] = fleet.NEVER
    return worst


def _entering(stretches: pa.Table, timelines: Timelines) -> Ints:
    """Rows (topic, first time, state before the stretch) of the stretches that windows reach into."""
    topics = stretches["topic"].to_numpy()
    summaries = np.column_stack([stretches[name].to_numpy() for name in _SUMMARY])
    order = np.lexsort((summaries[:, 1], topics))
    topics, summaries = topics[order], summaries[order]
    states = timelines.entering(topics, summaries)
    reached = states[:, 2] > 0
    return np.column_stack([topics, summaries[:, 1], states[:, :2]])[reached]


def _verdicts(topics: Topics, worst: Ints) -> list[TopicConformance]:
    """The worst window of each topic, the first of several, from rows (topic, excess, its end)."""
    worst = worst[np.lexsort((worst[:, 2], -worst[:, 1], worst[:, 0]))]
    first = worst[np.flatnonzero(np.diff(worst[:, 0], prepend=-1))] if len(worst) else worst
    names, messages = topics.names.take(pa.array(first[:, 0])).to_pylist(), topics.messages[first[:, 0]].tolist()
    return [
        TopicConformance(name, count, Excess(Fraction(excess, PICO_PER_TOKEN), at_ns))
        for name, count, excess, at_ns in zip(names, messages, *first[:, 1:].T.tolist(), strict=True)
    ]
