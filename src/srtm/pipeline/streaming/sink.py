"""Spark as a publisher: publishes the column `body` with the client's placement and back-off.

In: the rows of a partition, and Spark's ids of the query, the batch and the partition. Out: acknowledged messages. A
task that is run again publishes its rows again, with the same keys (ADR 14). A partition is one publisher, with the
same id in every batch. The partitions of a query send together, so they form one correlation group.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from srtm.client.sync import Publisher
from srtm.errors import InputError, PipelineError
from srtm.pipeline.streaming.logs import Away, Refused, ask, patiently

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from srtm.pipeline.streaming.settings import Keys, Settings

MOST_MESSAGES, MOST_BYTES = 1_000, 1 << 20  # per MPUB
MOST_WAITING = 8  # unanswered MPUBs per task
MOST_PUBLISHERS = 1_000  # connections per task, if rows name their publishers
_LOOK_S = 1.0
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"  # in which Spark tells its tasks


@dataclass
class Published(WriterCommitMessage):
    """The number of messages one task published."""

    messages: int


class BatchWriter(DataSourceArrowWriter):
    """Publishes a DataFrame once; in its keys, the query is this write and the batch is 0."""

    def __init__(self, settings: Settings, schema: StructType) -> None:
        self._settings = settings
        self._query = str(uuid.uuid4())
        _check(schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish a partition; returns when every message is acknowledged."""
        return _write(self._settings, self._query, 0, iterator, passing=True)


class StreamWriter(DataSourceStreamArrowWriter):
    """Publishes batch after batch of a query."""

    def __init__(self, settings: Settings, schema: StructType) -> None:
        self._settings = settings
        _check(schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish a partition; returns when every message is acknowledged."""
        task = _task()
        query, batch = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
        if query is None or batch is None:
            raise PipelineError(f"Spark does not tell the batch id ({_BATCH}): use Spark 4.2 or later")
        return _write(self._settings, query, int(batch), iterator, passing=False)


def _write(
    settings: Settings, query: str, batch: int, rows: Iterator[pa.RecordBatch], *, passing: bool
) -> WriterCommitMessage:
    partition = _task().partitionId()
    wrap = wrapper(settings.keys, query, batch, partition)
    sequence = 0
    with ExitStack() as stack:
        own = None if passing else f"spark-{query}-{partition}"
        sender = _Sender(settings, f"spark-{query}", own, partition, stack)
        for some in rows:
            publishers = some.column("publisher") if "publisher" in some.schema.names else None
            for begin in range(0, some.num_rows, MOST_MESSAGES):
                bodies = some.column("body").slice(begin, MOST_MESSAGES).cast("binary").to_pylist()
                names = publishers.slice(begin, MOST_MESSAGES).to_pylist() if publishers else [None] * len(bodies)
                for name, body in zip(names, bodies, strict=True):
                    if not body:
                        what = "a null" if body is None else "an empty"
                        raise InputError(
                            f"row {sequence} of partition {partition} has {what} body: filter such rows out"
                        )
                    sender.add(name, wrap(body, sequence))
                    sequence += 1
                sender.flush()
        sender.wait(0)
    return Published(sequence)


class _Sender:
    """The publishers of a task: its own, and those its rows name."""

    def __init__(self, settings: Settings, group: str, own: str | None, partition: int, stack: ExitStack) -> None:
        self._settings = settings
        self._own = own
        self._stack = stack
        self._options: dict[str, Any] = {
            "group": settings.group or group,
            "rate": settings.rate,
            "batch": 1,
            "timeout_s": settings.timeout_s,
        }
        if settings.brokers:
            self._options["broker"] = patiently(lambda: _broker_of(settings.brokers, partition), settings.timeout_s)
        else:
            self._options |= {"controller": settings.controller, "token": settings.token}
        self._publishers: dict[str | None, Publisher] = {}
        self._bodies: dict[str | None, list[bytes]] = {}
        self._sizes: dict[str | None, int] = {}
        self._waiting: deque[tuple[Publisher, Future[None]]] = deque()

    def add(self, name: str | None, body: bytes) -> None:
        """Take a message; those of one publisher keep their order."""
        size = self._sizes.get(name, 0) + len(body)
        if size > MOST_BYTES and self._bodies.get(name):
            self._publish(name)
            size = len(body)
        self._bodies.setdefault(name, []).append(body)
        self._sizes[name] = size

    def flush(self) -> None:
        """Publish all messages taken so far."""
        for name in list(self._bodies):
            self._publish(name)

    def wait(self, most: int) -> None:
        """Wait until at most so many MPUBs are unanswered."""
        while len(self._waiting) > most:
            publisher, answer = self._waiting.popleft()
            self._settle(publisher, answer)

    def _publish(self, name: str | None) -> None:
        bodies, _ = self._bodies.pop(name), self._sizes.pop(name)
        publisher = self._publisher(name)
        self._waiting.append((publisher, publisher.publish_later(bodies)))
        self.wait(MOST_WAITING)

    def _publisher(self, name: str | None) -> Publisher:
        found = self._publishers.get(name)
        if found is None:
            if len(self._publishers) == MOST_PUBLISHERS:
                remedy = (
                    "repartition('publisher') spreads them over tasks; without that column each task is one publisher"
                )
                raise InputError(f"more than {MOST_PUBLISHERS} publishers in one partition: {remedy}")
            found = Publisher(self._settings.topic, id=name if name is not None else self._own, **self._options)
            self._publishers[name] = self._stack.enter_context(found)
        return found

    def _settle(self, publisher: Publisher, answer: Future[None]) -> None:
        """Wait for an answer: as long as it takes while connected to a broker, otherwise up to the timeout."""
        until: float | None = None
        while True:
            try:
                answer.result(_LOOK_S)
                return
            except TimeoutError:
                now_s = time.monotonic()
                until = None if publisher.address else until or now_s + self._settings.timeout_s
                if until is not None and now_s >= until:
                    raise PipelineError(
                        f"no broker has accepted messages of topic {self._settings.topic!r} for "
                        f"{self._settings.timeout_s:g} s: start one, or wait longer with option timeout"
                    ) from None


def wrapper(keys: Keys, query: str, batch: int, partition: int) -> Callable[[bytes, int], bytes]:
    """The function that adds keys to bodies."""
    begin = json.dumps({"query": query, "batch": batch, "partition": partition})[:-1].encode() + b', "sequence": '

    def field(body: bytes, sequence: int) -> bytes:
        text = body.strip()
        if not (text.startswith(b"{") and text.endswith(b"}")):
            remedy = "publish to_json(struct(…)), or use keys=envelope"
            raise InputError(f"keys=field needs bodies that are JSON objects, not {body[:40]!r}: {remedy}")
        inside = text[1:-1].strip()
        return b'{%b%b"srtm": %b%d}}' % (inside, b", " if inside else b"", begin, sequence)

    def envelope(body: bytes, sequence: int) -> bytes:
        return b'{"body": "%b", "srtm": %b%d}}' % (base64.b64encode(body), begin, sequence)

    return {"none": lambda body, _: body, "field": field, "envelope": envelope}[keys]


def _check(schema: StructType) -> None:
    """Refuse columns that would not be published, and a missing or unsuitable body."""
    types = {each.name: each.dataType.simpleString() for each in schema}
    problems = [f"a message has no column {name!r}" for name in types if name not in ("body", "publisher")]
    if types.get("body") not in ("binary", "string"):
        problems.append(f"column 'body' must be binary or string, but is {types.get('body', 'missing')}")
    if types.get("publisher", "string") != "string":
        problems.append(f"column 'publisher' must be string, but is {types['publisher']}")
    if problems:
        raise InputError(f"format srtm: {'; '.join(problems)}: select(…) the column to publish as body")


def _broker_of(urls: tuple[str, ...], partition: int) -> str:
    """Where a partition publishes without a controller: brokers in turn, skipping those that do not respond."""
    problem: Exception = Away("no broker responds")
    for turn in range(len(urls)):
        url = urls[(partition + turn) % len(urls)]
        try:
            port = int(json.loads(ask(f"{url}/info"))["tcp_port"])
        except Away as away:
            problem = away
            continue
        except (Refused, ValueError, KeyError, TypeError):
            raise InputError(f"{url} is not a broker: give its HTTP address, for example 127.0.0.1:4151") from None
        host = urlsplit(url).hostname or ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    raise problem


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "only Spark tasks write rows"
    return task
