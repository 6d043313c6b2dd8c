"""`/srtm/log*`: read and trim the log of a disk topic."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from srtm.broker.http.request import Pages, Refused, bears, flag, number, query
from srtm.broker.http.router import Json
from srtm.errors import LogError, LogReplaced, OffsetTrimmed
from srtm.net.site import CERTIFIED

if TYPE_CHECKING:
    from starlette.requests import Request

    from srtm.broker.disk.batch import Piece
    from srtm.broker.disk.durable import Durable
    from srtm.broker.disk.rows import Retention
    from srtm.broker.topic import Topic

_ROWS, _MOST_ROWS = 10_000, 100_000  # of one read: unless asked for, and at most


class Logs(Pages):
    """Endpoints for readers of a disk topic's log."""

    async def extent(self, request: Request) -> Response:
        """The offsets that the log holds: {"log", "begin", "end", "bytes", "retention"}."""
        topic, durable = self._on_disk(request)
        return Json({**asdict(durable.extent(topic)), "retention": _as_flags(durable.retention(topic))})

    async def read(self, request: Request) -> Response:
        """A range of the log as an Arrow stream: ?topic=…&begin=…&limit=…. The same range gives the same rows.

        With &log=ID, it never gives others: 410 if the topic was deleted and created again since.
        """
        topic, durable = self._on_disk(request)
        self._check_reader(request, topic)
        begin, limit = number(request, "begin"), number(request, "limit", _ROWS)
        try:
            pieces = await durable.read(topic, begin, min(limit, _MOST_ROWS), query(request).get("log"))
        except LogError as problem:
            raise _refused(problem) from None
        # Off the loop, like the read itself.
        rows = await self.broker.turn.loop.run_in_executor(None, _arrow, topic.name, begin, pieces)
        return Response(rows, media_type="application/vnd.apache.arrow.stream")

    def _check_reader(self, request: Request, topic: Topic) -> None:
        """Refuse readers that the topic's contract does not name and that do not have the control token."""
        token, identities = self.broker.options.control_token, request.scope.get(CERTIFIED, frozenset())
        why = self.broker.topics.permissions.refusal("reading", topic.name, identities, subscribes=True)
        if why is not None and (token is None or not bears(request, token)):
            raise Refused(403, f"UNAUTHORIZED: {why}")

    async def trim(self, request: Request) -> Response:
        """Delete messages before an offset: ?topic=…&before=…; with &finished=true, only those all channels finished.

        With &log=ID, only of that log.
        """
        topic, durable = self._on_disk(request)
        finished, log = flag(request, "finished", default=False), query(request).get("log")
        try:
            await durable.trim(topic, number(request, "before"), finished=finished, log=log)
        except LogError as problem:
            raise _refused(problem) from None
        return Response()

    def _on_disk(self, request: Request) -> tuple[Topic, Durable]:
        topic = self.named_topic(request)
        if topic.durable is None or self.broker.durable is None:
            raise Refused(400, "NOT_ON_DISK: only disk topics have a log")
        return topic, self.broker.durable


def _refused(problem: LogError) -> Refused:
    if isinstance(problem, OffsetTrimmed):
        return Refused(410, f"OFFSET_TRIMMED: {problem}")
    if isinstance(problem, LogReplaced):
        return Refused(410, f"LOG_REPLACED: {problem}")
    return Refused(400, f"INVALID_OFFSET: {problem}")


def _as_flags(retention: Retention) -> dict[str, Any]:
    """A retention in the words of the command line."""
    return {
        "max_bytes": retention.max_bytes,
        "max_age_ns": retention.max_age_ns,
        "retain_acknowledged": not retention.acknowledged,
    }


def _arrow(topic: str, begin: int, pieces: list[Piece]) -> bytes:
    """Rows of the log, as Spark reads them; columns stay columns, and no message becomes an object of Python."""
    import numpy as np
    import pyarrow as pa

    messages = np.array([piece.messages for piece in pieces], np.int64)
    count = int(messages.sum())
    names = [name for piece in pieces for name in piece.publishers]
    known = np.array([len(piece.publishers) for piece in pieces], np.int64)
    senders = np.frombuffer(b"".join(piece.senders for piece in pieces), "<u4")
    publishers = senders + np.repeat(np.cumsum(known) - known, messages)  # each piece numbers its own from 0
    ends = np.zeros(count + 1, np.int32)
    ends[1:] = np.cumsum(np.frombuffer(b"".join(piece.lengths for piece in pieces), "<u4"))
    bodies = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(piece.bodies for piece in pieces))]
    rows = {
        "topic": pa.repeat(pa.scalar(topic, pa.string()), count),
        "offset": pa.array(np.arange(begin, begin + count)),
        "arrival_ns": pa.array(np.frombuffer(b"".join(piece.arrivals for piece in pieces), "<i8")),
        "publisher": pa.array(names, pa.string()).take(pa.array(publishers)),
        "body": pa.Array.from_buffers(pa.binary(), count, bodies),
    }
    batch = pa.RecordBatch.from_arrays(list(rows.values()), list(rows))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())
