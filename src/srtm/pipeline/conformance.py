"""Conformance: whether a recorded run kept to (r, b); `model.timeline.largest_excess` for runs of any size.

It judges release times, of each topic as a whole over all its brokers: no window may hold more messages than b + r·Δt.
Tasks check stretches in parallel, each for the windows that begin and end in it. A second run checks the windows that
reach into a stretch from before, as far as they matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from srtm.errors import SRTMError
from srtm.model import scan, timeline
from srtm.model.timeline import Excess, Timeline
from srtm.pipeline.traces.batches import batch_of, by_topic
from srtm.pipeline.traces.contracts import held_by
from srtm.pipeline.traces.reading import opened
from srtm.pipeline.traces.summaries import until_rejoined
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from srtm.model.scan import State
    from srtm.pipeline.traces.batches import Batches, Ints, Work
    from srtm.pipeline.traces.contracts import Contracts
    from srtm.pipeline.traces.files import Files
    from srtm.pipeline.traces.frames import Frame
    from srtm.pipeline.traces.reading import Trace
    from srtm.pipeline.traces.summaries import Both

COLUMNS = ("topic", "release_ns")
_FIELDS = (
    "topic string, messages long, first_ns long, last_ns long, backlog long, excess_ptok long, at_ns long, error string"
)
_RESULT = "topic string, messages long, conforms boolean, excess double, at_ns long, error string"


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


class _TopicStretch(NamedTuple):
    """One topic in one stretch: its summary, and its worst window."""

    topic: str
    messages: int = 0
    first_ns: int = 0
    last_ns: int = 0
    backlog: int = 0
    excess_ptok: int = 0
    at_ns: int = 0
    error: str | None = None

    @property
    def summary(self) -> scan.Summary:
        return scan.Summary(self.messages, self.first_ns, self.last_ns, self.backlog)


def conformance(trace: Trace, contracts: Contracts, spark: SparkSession | None = None) -> list[TopicConformance]:
    """The verdict on every topic of a recorded trace: a DataFrame, or a path that the session reads."""
    with opened(trace, spark, COLUMNS, "release_ns") as source:
        return conformance_source(source, contracts)


def conformance_source(source: Files | Frame, contracts: Contracts) -> list[TopicConformance]:
    """`conformance` of an open trace."""
    topics, faults = source.topics()
    counts = topics.counts()
    held, errors = held_by(contracts, counts)
    stretches = _received(source.run(_checking(held), _FIELDS, COLUMNS))
    entering = _entering(stretches, held)
    if entering:
        again = source.run(_checking_again(held, entering), _FIELDS, COLUMNS, at=[at for _, at in entering])
        stretches += _received(again)
    lines = [_verdict(topic, counts[topic], list(its_own)) for topic, its_own in _by_topic(stretches)]
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


def _checking(contracts: Mapping[str, Timeline]) -> Work:
    """Work over batches of (topic, release_ns): the windows that begin and end in a stretch."""

    def work(_: int, batches: Batches) -> Batches:
        stretches: dict[str, _TopicStretch] = {}
        for batch in batches:
            for topic, rows in by_topic(batch):
                before = stretches.get(topic)
                if topic in contracts and (before is None or before.error is None):
                    stretches[topic] = _checked(topic, rows, contracts[topic], before)
        yield batch_of(_FIELDS, list(stretches.values()))

    return work


def _checked(topic: str, rows: pa.RecordBatch, contract: Timeline, before: _TopicStretch | None) -> _TopicStretch:
    """The stretch `before` with these rows added to it."""
    state = scan.State(before.backlog, before.last_ns) if before else None
    try:
        summary, excess, state = timeline.check(rows.column("release_ns").to_numpy(), contract, state)
    except SRTMError as error:
        return _TopicStretch(topic, error=str(error))
    found = _TopicStretch(topic, *summary, int(excess.tokens * PICO_PER_TOKEN), excess.at_ns)
    if before is None:
        return found
    worse = found if found.excess_ptok > before.excess_ptok else before
    return before._replace(
        messages=before.messages + summary.messages,
        last_ns=state.last_ns,
        backlog=state.backlog,
        excess_ptok=worse.excess_ptok,
        at_ns=worse.at_ns,
    )


def _checking_again(contracts: Mapping[str, Timeline], entering: Mapping[tuple[str, int], State]) -> Work:
    """Work over batches of (topic, release_ns): the windows that reach into a stretch, while those are fuller."""

    def work(_: int, batches: Batches) -> Batches:
        found = []

        def proceed(topic: str, times: Ints, after: State, alone: State | None) -> Both | None:
            try:
                reaching = timeline.check(times, contracts[topic], after)
            except SRTMError as error:
                found.append(_TopicStretch(topic, error=str(error)))
                return None
            worst = reaching.excess
            found.append(_TopicStretch(topic, excess_ptok=int(worst.tokens * PICO_PER_TOKEN), at_ns=worst.at_ns))
            return reaching.state, timeline.check(times, contracts[topic], alone).state

        until_rejoined(batches, "release_ns", entering, proceed)
        yield batch_of(_FIELDS, found)

    return work


def _entering(stretches: list[_TopicStretch], contracts: Mapping[str, Timeline]) -> dict[tuple[str, int], State]:
    """The states that reach into stretches, by topic and first time."""
    states = {}
    for topic, grouped in _by_topic(stretches):
        its_own = list(grouped)
        if any(stretch.error for stretch in its_own):
            continue
        state = timeline.BEGINNING
        for stretch in its_own:
            if timeline.work_before(stretch.summary, state, contracts[topic]):
                states[topic, stretch.first_ns] = state
            state = timeline.checked_state(stretch.summary, state, contracts[topic])
    return states


def _verdict(topic: str, messages: int, stretches: list[_TopicStretch]) -> TopicConformance:
    if errors := [stretch.error for stretch in stretches if stretch.error]:
        return TopicConformance(topic, messages, error=errors[0])
    worst = max(stretches, key=lambda stretch: (stretch.excess_ptok, -stretch.at_ns))
    return TopicConformance(topic, messages, Excess(Fraction(worst.excess_ptok, PICO_PER_TOKEN), worst.at_ns))


def _received(table: pa.Table) -> list[_TopicStretch]:
    return [_TopicStretch(**row) for row in table.to_pylist()]


def _by_topic(stretches: Iterable[_TopicStretch]) -> Iterator[tuple[str, Iterator[_TopicStretch]]]:
    ordered = sorted(stretches, key=lambda stretch: (stretch.topic, stretch.first_ns))
    return groupby(ordered, key=lambda stretch: stretch.topic)
