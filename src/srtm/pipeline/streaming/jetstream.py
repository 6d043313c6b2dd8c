"""The JetStream stream that holds a topic's messages: which it is, its extent, its rows.

In: NATS servers. Out: the same as for brokers' logs (`logs.py`), with sequence numbers of the stream as offsets.

Invariant: the same offset range gives the same rows, whichever server delivers them and however often one is lost.
- Each range is read through its own short-lived consumer. Consumers number what they deliver: a gap in the numbers is
  a message lost in transit, and the range is read again from there.
- A replica may lag behind; only the stream's leader can say that a range has no more rows.
- A stream is identified by its name and creation time. A stream deleted and created again raises LogReplaced.
- Sequence numbers without a message are skipped: they belong to other topics, or that message was deleted. If the
  stream begins after them, they were discarded, and raise OffsetTrimmed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_to_bytes

from srtm.errors import InputError, LogError, LogReplaced, OffsetTrimmed, PipelineError
from srtm.pipeline.streaming.link import Link
from srtm.pipeline.streaming.logs import Away, Contract, Logs, Refused, patiently
from srtm.pipeline.streaming.positions import Extent
from srtm.protocol import engine as engines
from srtm.protocol import nats
from srtm.protocol.nats import Delivered, Msg
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    import pyarrow as pa

    from srtm.pipeline.streaming.settings import Settings
    from srtm.protocol.engine import EngineAddress

_EXPIRES_S = 2  # of a request to a consumer; shorter than the reply timeout, so that the server says so
_ROWS, _BYTES = 2_000, 2 * nats.MAX_BODY  # per request
_IDLE_S = 30  # after which a server forgets a consumer whose reader was killed
_NOT_FOUND = 404
_STREAM = re.compile(r"[^\s.*>/\\]+")
_LIMITS = "remove the option, and set limits on the stream itself"
_RETENTION = "only a stream with retention limits can be read again"
_NATS = "use NATS servers, for example nats://host:4222,host:4222"


class Streams(Logs):
    """The stream of a topic, presented as the log of a broker of that name."""

    noun = "stream"

    def __init__(self, settings: Settings, engine: str) -> None:
        super().__init__(settings)
        if settings.trim_on_commit:
            raise InputError(f"trimOnCommit: the stream of topic {settings.topic!r} may have other readers; {_LIMITS}")
        self._engine = engine
        self._address = address_of(engine)

    def look(self, *, strict: bool = False) -> dict[str, str]:
        """The streams that have the topic as a subject; looked up once."""
        del strict
        if not self._urls:
            with Link(self._address) as link:
                names = link.ask("$JS.API.STREAM.NAMES", subject=self._settings.topic).get("streams") or []
            self._urls = dict.fromkeys(names, self._engine)
        return self._urls

    def url(self, broker: str, timeout_s: float) -> str:
        """The address of the engine."""
        del broker, timeout_s
        return self._engine

    def contract(self) -> Contract | None:
        """The topic's bucket, from the controller or from the configured brokers."""
        return self._contract({url: url for url in self._settings.brokers})

    def extent(self, broker: str) -> Extent | None:
        """The extent of a stream; None if it does not exist."""
        if not _STREAM.fullmatch(broker):
            return None
        try:
            with Link(self._address) as link:
                found = link.ask(f"$JS.API.STREAM.INFO.{broker}")
        except Refused as refused:
            if refused.status == _NOT_FOUND:
                return None
            raise _explained(refused, self._settings.topic, broker) from None
        if (retention := found["config"]["retention"]) != "limits":  # our consumer would make it forget messages
            where = f"stream {broker!r} of topic {self._settings.topic!r}"
            raise InputError(
                f"{where} deletes messages that its consumers have finished (retention {retention}): {_RETENTION}"
            )
        return _extent(found)


def read(
    engine: str,
    stream: str,
    topic: str,
    begin: int,
    end: int,
    timeout_s: float,
    log: str | None = None,
    *,
    strict: bool,
) -> Iterator[pa.RecordBatch]:
    """The rows of an offset range; with `strict`, OffsetTrimmed before the first row after a discarded one.

    `log` is the time the stream was created: LogReplaced if it is another stream.
    """
    cursor = _Cursor(address_of(engine), stream, topic, begin, end, log, strict=strict)
    try:
        while cursor.at < end:
            try:
                rows = patiently(cursor.pull, timeout_s)
            except Refused as refused:
                raise _explained(refused, topic, stream) from None
            if rows:
                yield _batch(topic, rows)
    finally:
        cursor.close()


class _Row(NamedTuple):
    sequence: int
    stored_ns: int
    message: Msg


class _Cursor:
    """A position in an offset range of a stream; `pull` returns the rows from there on and advances it."""

    def __init__(
        self,
        address: EngineAddress,
        stream: str,
        topic: str,
        begin: int,
        end: int,
        log: str | None,
        *,
        strict: bool,
    ) -> None:
        self.at = begin
        self._log = log
        self._address, self._stream, self._topic, self._end, self._strict = address, stream, topic, end, strict
        self._link: Link | None = None
        self._consumer = ""
        self._delivered = self._pending = 0  # of this consumer

    def close(self) -> None:
        """Delete the consumer and close the connection."""
        if self._link is None:
            return
        with self._link as link, suppress(Away):  # then the server expires the consumer
            if self._consumer:
                link.send(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}")
        self._link, self._consumer = None, ""

    def pull(self) -> list[_Row]:
        """The next rows; none at the end of the range. After `Away`, call it again."""
        try:
            link = self._link or self._open()
            found = self._some(link) if self._pending else []
            rows = [row for row in found if row.sequence < self._end]
            if not found:
                self._confirm_end(link)
            after = rows[-1].sequence + 1 if rows and rows == found else self._end
            if self._strict and (missing := _first_missing(self.at, after, rows)) is not None:
                self._confirm_kept(link, missing)
        except BaseException:
            self.close()
            raise
        self.at = after
        return rows

    def _open(self) -> Link:
        self._link = link = Link(self._address)
        wanted = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.at,
            "ack_policy": "none",
            "filter_subject": self._topic,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _IDLE_S * NS_PER_S,
        }
        subject = f"$JS.API.CONSUMER.CREATE.{self._stream}"
        made = link.ask(subject, stream_name=self._stream, config=wanted)
        self._consumer, self._delivered, self._pending = made["name"], 0, made["num_pending"]
        self._extent(link)  # checked after the consumer exists, so that it belongs to the right stream
        return link

    def _extent(self, link: Link) -> Extent:
        """The extent of the stream; LogReplaced if it is not the one this range belongs to."""
        extent = _extent(link.ask(f"$JS.API.STREAM.INFO.{self._stream}"))
        if self._log is not None and extent.log is not None and extent.log != self._log:
            where = f"stream {self._stream!r} of topic {self._topic!r}"
            raise LogReplaced(f"{where} was deleted and created again; offset {self.at} is lost")
        return extent

    def _some(self, link: Link) -> list[_Row]:
        """The rows that one request brings; they may reach past the end of the range."""
        most, rows = min(_ROWS, self._end - self.at), list[_Row]()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        link.send(subject, batch=most, max_bytes=_BYTES, expires=_EXPIRES_S * NS_PER_S)
        while len(rows) < most and self._pending and (not rows or rows[-1].sequence < self._end - 1):
            message = link.next()
            if not message.reply.startswith(nats.ACK_PREFIX):  # the request is finished
                if rows:
                    break
                raise Away(f"{self._address} delivers nothing: {message.status}")
            told = Delivered.by(message.reply)
            self._delivered, self._pending = self._delivered + 1, told.pending
            if told.number != self._delivered:
                raise Away(f"{self._address} lost messages in transit")
            rows.append(_Row(told.sequence, told.stored_ns, message))
        return rows

    def _confirm_end(self, link: Link) -> None:
        """Check that the leader, too, has no more rows in the range: a replica may lag."""
        try:
            subject = f"$JS.API.STREAM.MSG.GET.{self._stream}"
            found = link.ask(subject, seq=self.at, next_by_subj=self._topic)["message"]["seq"]
        except Refused as refused:
            if refused.status != _NOT_FOUND:
                raise
            self._extent(link)
            return
        if found < self._end:
            raise Away(f"{self._address}: message {found} of stream {self._stream!r} is not on all servers yet")

    def _confirm_kept(self, link: Link, missing: int) -> None:
        """Check that a missing offset never had a row of this topic, rather than being discarded."""
        begin = self._extent(link).begin
        if begin > missing:
            where = f"topic {self._topic!r} at stream {self._stream!r}"
            raise OffsetTrimmed(f"{where} no longer holds offset {missing}: it begins at {begin}", begin=begin)


def _first_missing(begin: int, end: int, rows: list[_Row]) -> int | None:
    if len(rows) == end - begin:
        return None
    return next((at for at, row in enumerate(rows, begin) if row.sequence != at), begin + len(rows))


def _extent(info: dict[str, Any]) -> Extent:
    return Extent(max(1, info["state"]["first_seq"]), info["state"]["last_seq"] + 1, info.get("created"))


def _batch(topic: str, rows: list[_Row]) -> pa.RecordBatch:
    """Rows as Arrow; a message that did not come through SRTM has no broker or publisher, and JetStream's time."""
    import pyarrow as pa

    messages = [row.message for row in rows]
    columns = {
        "topic": pa.repeat(pa.scalar(topic, pa.string()), len(rows)),
        "publisher": pa.array([_name(message.value(nats.PUBLISHER)) for message in messages], pa.string()),
        "body": pa.array([message.body for message in messages], pa.binary()),
        "broker": pa.array([_name(message.value(nats.BROKER)) or None for message in messages], pa.string()),
        "offset": pa.array([row.sequence for row in rows], pa.int64()),
        "arrival_ns": pa.array([_arrival_ns(row) for row in rows], pa.int64()),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


@lru_cache(maxsize=4096)
def _name(value: bytes) -> str:
    return unquote_to_bytes(value).decode("utf-8", "replace")


def _arrival_ns(row: _Row) -> int:
    said = row.message.value(nats.ARRIVAL)
    return int(said) if said.isdigit() and len(said) < 19 + 1 else row.stored_ns


def address_of(engine: str) -> EngineAddress:
    """The NATS servers that an option names."""
    found = engines.parse(engine)
    if found is None or found.kind != "nats":
        raise InputError(f"engine {engines.hidden(engine)!r} keeps no messages to read again: {_NATS}")
    return found


def _explained(refused: Refused, topic: str, stream: str) -> Exception:
    where = f"stream {stream!r} of topic {topic!r}"
    if refused.status == _NOT_FOUND:
        return LogError(f"{where} no longer exists")
    return PipelineError(
        f"{where} cannot be read: {refused}"
    )  # nothing is lost, so failOnDataLoss=false must not skip it
