"""Spark as a reader of topics on disk or in JetStream: offsets, offset ranges as partitions, rows as Arrow batches.

In: the positions that Spark last committed, and how many rows it may have. Out: the next positions, and partitions that
depend on two positions alone, so that a batch that is run again reads the same rows in the same partitions.

A position is, for each broker, the offset of its next message and the log it belongs to (`positions.py`): a topic that
was deleted and created again has another log, whose offsets mean other messages. A new broker joins with its oldest
offset, and its rows come with the next batch, so the offset ranges of every batch are in Spark's own log before they
are read. If an engine has the messages, its stream takes the place of the broker, and sequence numbers that of offsets.
A query of several topics has a position for each broker of each (`several.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from srtm.errors import InputError, LogError, LogReplaced, OffsetTrimmed, PipelineError, SRTMError
from srtm.model.apportion import apportion
from srtm.net.backoff import Backoff
from srtm.pipeline.streaming import jetstream, positions
from srtm.pipeline.streaming.logs import Away, Contract, Logs, patiently, read
from srtm.pipeline.streaming.positions import Extent, Position, Positions
from srtm.pipeline.streaming.several import find
from srtm.units import NS_PER_US

if TYPE_CHECKING:
    import pyarrow as pa

    from srtm.pipeline.streaming.positions import Offsets
    from srtm.pipeline.streaming.settings import Settings

logger = logging.getLogger(__name__)

SCHEMA = (
    "topic string, publisher string, body binary, arrival timestamp, broker string, offset bigint, arrival_ns bigint"
)
CATCH_UP_S = 10.0  # of messages at the contract's rate that a batch may hold, however soon it follows the last
FREE_ROWS = 500_000  # that a batch may hold without a contract
_REMEDY = "set option failOnDataLoss to false to continue with the messages that are left"
_REPLACED = "was deleted and created again, or its broker started with an empty disk"


@dataclass(repr=False)
class OffsetRange(InputPartition):
    """Offsets [begin, end) of the log of one broker, or of a stream; `url` tells which."""

    topic: str
    broker: str
    url: str
    begin: int
    end: int
    log: str | None = None


class _Reading:
    """The common base of batch and stream readers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: Logs | None = None

    @property
    def _logs(self) -> Logs:
        """Where the topics' messages are; looked up until a broker has the topic."""
        if self._found is None:
            self._found = patiently(lambda: find(self._settings), self._settings.timeout_s)
        return self._found or Logs(self._settings)

    def _extents(self) -> dict[str, Extent]:
        """The extents of the logs of all brokers, each of which must respond."""
        settings = self._settings

        def look() -> dict[str, Extent]:
            logs = self._logs
            brokers = logs.look(strict=True)
            found = {broker: extent for broker in brokers if (extent := logs.extent(broker)) is not None}
            held = {logs.part(name)[0] for name in found}
            if missing := [topic for topic in logs.unknown(brokers) if topic not in held]:
                raise InputError(f"no {logs.noun} has topic {missing[0]!r}: check the name, or create the topic first")
            return found

        return patiently(look, settings.timeout_s)

    def _ranges(self, start: Positions, end: Positions) -> list[OffsetRange]:
        """Partitions of the rows between two positions, a function of these alone."""
        rows, timeout_s = self._settings.rows_per_partition, self._settings.timeout_s
        found: list[OffsetRange] = []
        for broker, to in sorted(end.items()):
            at = start.get(broker, to)
            for begin in range(at.offset, at.offset + at.rows_to(to), rows):
                url, end_of = self._logs.url(broker, timeout_s), min(begin + rows, to.offset)
                found.append(OffsetRange(*self._logs.part(broker), url, begin, end_of, to.log or at.log))
        return found

    def _rows(self, wanted: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition; runs on executors."""
        import pyarrow as pa

        if not isinstance(wanted, OffsetRange):  # Spark's own, if a batch has no partitions
            return
        settings, at = self._settings, wanted.begin
        if not wanted.url.startswith("http"):
            yield from self._rows_of_stream(wanted)
            return
        try:
            for batch in read(wanted.url, wanted.broker, wanted.topic, at, wanted.end, settings.timeout_s, wanted.log):
                at += batch.num_rows
                yield _shaped(batch, pa.repeat(pa.scalar(wanted.broker, pa.string()), batch.num_rows))
        except LogError as problem:
            if settings.fail_on_data_loss:
                raise type(problem)(f"{problem}: {_REMEDY}") from None
            kept = self._kept(wanted, at)
            logger.warning("%s; continuing at offset %d of %d", problem, kept, wanted.end)
            if at < kept < wanted.end:
                yield from self._rows(replace(wanted, begin=kept))

    def _rows_of_stream(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        settings, strict = self._settings, self._settings.fail_on_data_loss
        what = wanted.url, wanted.broker, wanted.topic, wanted.begin, wanted.end, settings.timeout_s, wanted.log
        try:
            for batch in jetstream.read(*what, strict=strict):
                yield _shaped(batch, batch.column("broker"))
        except LogError as problem:
            if strict:
                raise type(problem)(f"{problem}: {_REMEDY}") from None
            logger.warning("%s; continuing without these messages", problem)

    def _kept(self, wanted: OffsetRange, at: int) -> int:
        """The first offset, from `at` on, that a broker still holds."""
        logs = Logs(replace(self._settings, topic=wanted.topic, topics=(), pattern=None))
        logs.adopt(wanted.broker, wanted.url)
        extent = patiently(lambda: logs.extent(wanted.broker), self._settings.timeout_s)
        there = extent and extent.end >= wanted.end and Position(at, wanted.log).may_be_of(extent.log)
        return max(at, extent.begin) if extent and there else wanted.end

    def _check(self, broker: str, position: Position, extent: Extent | None) -> None:
        """Refuse a position that the log does not have, unless failOnDataLoss is false."""
        if not self._settings.fail_on_data_loss:
            return
        topic, name = self._logs.part(broker)
        where, at = f"topic {topic!r} at {self._logs.noun} {name!r}", position.offset
        if extent is None:
            raise LogError(f"{where} no longer exists; messages after offset {at} are lost: {_REMEDY}")
        if not position.may_be_of(extent.log):
            why = "was deleted and created again" if self._logs.noun == "stream" else _REPLACED
            raise LogReplaced(f"{where} {why}; messages after offset {at} are lost: {_REMEDY}")
        if at < extent.begin:
            raise OffsetTrimmed(f"{where} no longer holds offset {at}: it begins at {extent.begin}: {_REMEDY}")
        if at > extent.end:
            raise LogError(f"{where} has no offset {at}: it ends at {extent.end}; was its log deleted? {_REMEDY}")


class BatchReader(_Reading, DataSourceReader):
    """Reads the rows between `startingOffsets` and `endingOffsets`, as of the planning of the query."""

    def partitions(self) -> Sequence[InputPartition]:
        """The offset ranges of each broker."""
        extents, settings = self._extents(), self._settings
        start = _first(extents, settings.starting)
        end = {broker: Position(extent.end, extent.log) for broker, extent in extents.items()}
        if not isinstance(settings.ending, str):
            ending = _of_logs(positions.read(settings.ending), extents)
            end = {broker: ending.get(broker, Position(0, extent.log)) for broker, extent in extents.items()}
            for broker, at in ending.items():
                behind = max(at.offset, start[broker].offset if broker in start else 0)
                self._check(broker, Position(behind, at.log), extents.get(broker))
        for broker, at in start.items():
            if broker in end and (at.rows_to(end[broker]) or not at.may_be_of(end[broker].log)):
                self._check(broker, at, extents.get(broker))
        return self._ranges(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, in order of offsets."""
        return self._rows(partition)


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic as a stream. It lives as long as the query, in a process beside the driver."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._contract: Contract | None = None
        self._asked_s: float | None = None
        self._away: dict[str, _Absence] = {}
        self._target: Positions | None = None
        self._newest: Positions = {}

    def initialOffset(self) -> Offsets:
        """Where a query without a checkpoint begins."""
        return positions.write(_first(self._extents(), self._settings.starting))

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxRowsPerTrigger`, or the rows that the contract lets through in ten seconds."""
        if self._settings.max_rows is not None:
            return ReadMaxRows(self._settings.max_rows)
        self._contract = patiently(lambda: self._logs.contract(), self._settings.timeout_s)
        if self._contract is None:
            return ReadMaxRows(FREE_ROWS)
        return ReadMaxRows(max(1, int(self._contract.b + CATCH_UP_S * self._contract.r)))

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """The end of the next batch: as many rows as the limit allows, taken from each broker in proportion.

        In proportion, so that brokers with more messages do not fall behind the others in time.
        """
        begin = positions.read(start)
        extents = self._present(begin)
        self._newest = {**begin, **{broker: Position(extent.end, extent.log) for broker, extent in extents.items()}}
        joining = {
            broker: Position(extent.begin, extent.log) for broker, extent in extents.items() if broker not in begin
        }
        ends: Positions = {}
        for broker, at in begin.items():
            extent = extents.get(broker)
            if extent is None:
                ends[broker] = at
            elif extent.end < at.offset or not at.may_be_of(extent.log):  # it joins again, with its new log
                ends[broker] = Position(extent.begin, extent.log)
            else:
                ends[broker] = Position(extent.end, extent.log)
        if self._target is not None:
            ends = {broker: self._no_further(broker, begin[broker], end) for broker, end in ends.items()}
            joining = {broker: at for broker, at in joining.items() if broker in self._target}
        return positions.write({**_limited(begin, ends, self._most_rows(limit)), **joining})

    def _no_further(self, broker: str, at: Position, end: Position) -> Position:
        """The end, limited to the target of a query with trigger availableNow."""
        assert self._target is not None
        target = self._target.get(broker)
        if target is None or not target.may_be_of(end.log):
            return at
        if not at.may_be_of(end.log):
            return end
        return Position(min(end.offset, max(at.offset, target.offset)), end.log)

    def prepareForTriggerAvailableNow(self) -> None:
        """Make the current ends of the logs the target of the query."""
        self._target = {broker: Position(extent.end, extent.log) for broker, extent in self._extents().items()}

    def reportLatestOffset(self) -> Offsets | None:
        """The ends of the logs, for the query's progress."""
        return positions.write(self._newest) or None

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        """The offset ranges of each broker."""
        return self._ranges(positions.read(start), positions.read(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, in order of offsets."""
        return self._rows(partition)

    def commit(self, end: Offsets) -> None:
        """Spark has finished everything before `end`; with trimOnCommit, brokers delete it."""
        if not self._settings.trim_on_commit:
            return
        for broker, before in positions.read(end).items():
            try:
                self._logs.url(broker, 0.0)
                self._logs.trim(broker, before)
            except (Away, SRTMError) as problem:  # the next commit trims these, too
                logger.warning("BROKER(%s): cannot trim the log (%s); trying again at the next commit", broker, problem)

    def _most_rows(self, limit: ReadLimit) -> int | None:
        """How many rows the next batch may have; the default limit grows with the time since the last batch.

        The contract lets through b + r·Δt in Δt, so a query with a trigger of more than ten seconds keeps up, too.
        """
        now_s = time.monotonic()
        waited_s, self._asked_s = now_s - (self._asked_s or now_s), now_s
        if isinstance(limit, ReadAllAvailable):
            return None
        if not isinstance(limit, ReadMaxRows):
            raise PipelineError(f"format srtm limits batches by rows, not by {type(limit).__name__}")
        more_s = max(0.0, waited_s - CATCH_UP_S) if self._contract else 0.0
        return limit.max_rows + int(more_s * self._contract.r if self._contract else 0)

    def _present(self, start: Positions) -> dict[str, Extent]:
        """The extents of the brokers that respond now. The others keep their position, for a limited time."""
        found: dict[str, Extent] = {}
        try:
            brokers = set(self._logs.look()) | start.keys()
            self._away.pop("", None)
        except Away as problem:
            if not start:
                self._missed("", problem)
            logger.warning("%s; continuing with the known brokers", problem)
            brokers = set(start)
        for broker in sorted(brokers):
            absence = self._away.get(broker)
            if absence and time.monotonic() < absence.again_s:
                continue
            try:
                extent = self._logs.extent(broker)
            except (Away, KeyError) as problem:  # KeyError: not listed since the query started
                self._missed(broker, problem)
                continue
            self._away.pop(broker, None)
            if broker in start:
                self._check(broker, start[broker], extent)
            if extent is not None:
                found[broker] = extent
        return found

    def _missed(self, broker: str, problem: Exception) -> None:
        """A broker, or the controller (''), did not respond: try again later, and give up after the timeout."""
        absence = self._away.setdefault(broker, _Absence(time.monotonic(), Backoff()))
        away_s, timeout_s = time.monotonic() - absence.since_s, self._settings.timeout_s
        absence.again_s = time.monotonic() + absence.backoff.next_s()
        if away_s > timeout_s and (self._settings.fail_on_data_loss or not broker):
            topic, name = self._logs.part(broker) if broker else ("", "")
            name = f"{self._logs.noun} {name!r} of topic {topic!r}" if broker else self._settings.controller
            text = str(problem) if isinstance(problem, Away) else "its address is unknown"
            remedy = f"start it, wait longer with option timeout, or {_REMEDY}" if broker else "start it"
            raise PipelineError(f"no response from {name} for {away_s:.0f} s ({text}): {remedy}")


@dataclass
class _Absence:
    """Since when a broker has not responded, and when to try again."""

    since_s: float
    backoff: Backoff
    again_s: float = 0.0


def _first(extents: dict[str, Extent], starting: str | Offsets) -> Positions:
    if starting == "latest":
        return {name: Position(extent.end, extent.log) for name, extent in extents.items()}
    earliest = {name: Position(extent.begin, extent.log) for name, extent in extents.items()}
    return earliest if isinstance(starting, str) else earliest | _of_logs(positions.read(starting), extents)


def _of_logs(given: Positions, extents: dict[str, Extent]) -> Positions:
    """Positions that a user wrote; a plain number is an offset of the current log."""
    logs = {name: extent.log for name, extent in extents.items()}
    return {name: Position(at.offset, at.log or logs.get(name)) for name, at in given.items()}


def _limited(start: Positions, ends: Positions, most: int | None) -> Positions:
    """The ends, limited to `most` rows, shared out in proportion to the rows available."""
    rows = {broker: start[broker].rows_to(end) for broker, end in ends.items()}
    if most is None or sum(rows.values()) <= most:
        return ends
    shares = dict(zip(rows, apportion(most, list(rows.values())), strict=True))
    return {
        broker: Position(start[broker].offset + shares[broker], end.log) if rows[broker] else end
        for broker, end in ends.items()
    }


def _shaped(batch: pa.RecordBatch, brokers: pa.Array) -> pa.RecordBatch:
    """Rows of a log or stream in the schema of the format."""
    import pyarrow as pa
    import pyarrow.compute as pc

    micros = pc.divide(batch.column("arrival_ns"), NS_PER_US).cast(pa.timestamp("us", tz="UTC"))
    columns = {
        "topic": batch.column("topic"),
        "publisher": batch.column("publisher"),
        "body": batch.column("body"),
        "arrival": micros,
        "broker": brokers,
        "offset": batch.column("offset"),
        "arrival_ns": batch.column("arrival_ns"),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
