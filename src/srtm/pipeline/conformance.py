"""Conformance: did a recorded run keep to (r, b)? What `model.timeline.largest_excess` says, for runs of any size.

Judged on release times, for each topic as a whole over all its brokers: no window may hold more messages than
b + r·Δt. Stretches are checked in parallel, each for the windows that begin and end in it; where windows reach in from
before, a second run checks those, as far as they matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from srtm.errors import SRTMError
from srtm.model import scan, timeline
from srtm.model.timeline import Excess, Piece, Timeline
from srtm.pipeline.traces.chunks import until_rejoined
from srtm.pipeline.traces.reading import batch_of, by_topic, opened
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from srtm.model.scan import State
    from srtm.pipeline.traces.chunks import Both, Ints
    from srtm.pipeline.traces.reading import Batches, Files, Frame, Trace, Work

    Contracts = Mapping[str, Timeline] | Timeline  # of each topic, or the same for all

COLUMNS = ("topic", "release_ns")
_FIELDS = (
    "topic string, messages long, first_ns long, last_ns long, backlog long, excess_ptok long, at_ns long, error string"
)
_RESULT = "topic string, messages long, conforms boolean, excess double, at_ns long, error string"


@dataclass(frozen=True, slots=True)
class TopicConformance:
    """One topic's verdict: the window that exceeded (r, b) by most or came closest to it, or why there is none."""

    topic: str
    messages: int
    excess: Excess | None = None
    error: str | None = None

    @property
    def conforms(self) -> bool:
        """No window held more than it might."""
        return self.excess is not None and self.excess.conforms


class _Part(NamedTuple):
    topic: str
    messages: int = 0
    first_ns: int = 0
    last_ns: int = 0
    backlog: int = 0
    excess_ptok: int = 0
    at_ns: int = 0
    error: str | None = None

    @property
    def piece(self) -> Piece:
        return Piece(self.messages, self.first_ns, self.last_ns, self.backlog)


def conformance(trace: Trace, contracts: Contracts, spark: SparkSession | None = None) -> list[TopicConformance]:
    """The verdict on every topic of a recorded trace: a DataFrame, or a path to be read with the session."""
    with opened(trace, spark, COLUMNS, "release_ns") as source:
        return conformance_source(source, contracts)


def conformance_source(source: Files | Frame, contracts: Contracts) -> list[TopicConformance]:
    """`conformance` of a trace that is open."""
    spans = source.spans()
    if isinstance(contracts, Timeline):
        contracts = dict.fromkeys(spans, contracts)
    parts = _parts(source.run(_checking(contracts), _FIELDS, COLUMNS))
    entering = _entering(parts, contracts)
    if entering:
        again = source.run(_checking_again(contracts, entering), _FIELDS, COLUMNS, at=[at for _, at in entering])
        parts += _parts(again)
    lines = [_verdict(topic, spans[topic].messages, list(its_parts)) for topic, its_parts in _by_topic(parts)]
    lines += [TopicConformance(topic, 0, error=error) for topic, error in source.faults.items()]
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
        parts: dict[str, _Part] = {}
        for batch in batches:
            for topic, rows in by_topic(batch):
                part = parts.get(topic)
                if part is None or part.error is None:
                    parts[topic] = _checked(topic, rows, contracts.get(topic), part)
        yield batch_of(_FIELDS, list(parts.values()))

    return work


def _checked(topic: str, rows: pa.RecordBatch, contract: Timeline | None, part: _Part | None) -> _Part:
    """A part with more rows behind it."""
    if contract is None:
        return _Part(topic, error="there is no contract (r, b) for this topic")
    before = scan.State(part.backlog, part.last_ns) if part else None
    try:
        piece, excess, state = timeline.check(rows.column("release_ns").to_numpy(), contract, before)
    except SRTMError as error:
        return _Part(topic, error=str(error))
    found = _Part(topic, *piece, int(excess.tokens * PICO_PER_TOKEN), excess.at_ns)
    if part is None:
        return found
    worse = found if found.excess_ptok > part.excess_ptok else part
    return part._replace(
        messages=part.messages + piece.messages,
        last_ns=state.last_ns,
        backlog=state.backlog,
        excess_ptok=worse.excess_ptok,
        at_ns=worse.at_ns,
    )


def _checking_again(contracts: Mapping[str, Timeline], entering: Mapping[tuple[str, int], State]) -> Work:
    """Work over batches of (topic, release_ns): the windows that reach into a stretch, while these are the fuller."""

    def work(_: int, batches: Batches) -> Batches:
        found = []

        def go_on(topic: str, times: Ints, after: State, alone: State | None) -> Both | None:
            try:
                reaching = timeline.check(times, contracts[topic], after)
            except SRTMError as error:
                found.append(_Part(topic, error=str(error)))
                return None
            worst = reaching.excess
            found.append(_Part(topic, excess_ptok=int(worst.tokens * PICO_PER_TOKEN), at_ns=worst.at_ns))
            return reaching.state, timeline.check(times, contracts[topic], alone).state

        until_rejoined(batches, "release_ns", entering, go_on)
        yield batch_of(_FIELDS, found)

    return work


def _entering(parts: list[_Part], contracts: Mapping[str, Timeline]) -> dict[tuple[str, int], State]:
    """The states that reach into parts, by topic and first time."""
    states = {}
    for topic, grouped in _by_topic(parts):
        its_parts = list(grouped)
        if any(part.error for part in its_parts):
            continue
        state = timeline.BEGINNING
        for part in its_parts:
            if timeline.work_before(part.piece, state, contracts[topic]):
                states[topic, part.first_ns] = state
            state = timeline.checked_state(part.piece, state, contracts[topic])
    return states


def _verdict(topic: str, messages: int, parts: list[_Part]) -> TopicConformance:
    if errors := [part.error for part in parts if part.error]:
        return TopicConformance(topic, messages, error=errors[0])
    worst = max(parts, key=lambda part: (part.excess_ptok, -part.at_ns))
    return TopicConformance(topic, messages, Excess(Fraction(worst.excess_ptok, PICO_PER_TOKEN), worst.at_ns))


def _parts(table: pa.Table) -> list[_Part]:
    return [_Part(**row) for row in table.to_pylist()]


def _by_topic(parts: Iterable[_Part]) -> Iterator[tuple[str, Iterator[_Part]]]:
    return groupby(sorted(parts, key=lambda part: (part.topic, part.first_ns)), key=lambda part: part.topic)
