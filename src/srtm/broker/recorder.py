"""Records a run as a trace (`workload/trace.py`), one row per message; off unless requested.

In: messages that topics released and messages written to subscribers, turn by turn, kept as plain columns. Out: a
Parquet file, complete or absent, written by a thread. A row is closed once its message is written to its first
subscriber, or after two seconds without `sent_ns`. Memory is bounded: a disk that is too slow ends the recording. The
file's metadata lists under `srtm.births` the contracts of each topic: the release that each began with, and its birth,
so a contract that was deleted and created again counts as two. `srtm.lent` lists what was lent to and borrowed from
each peer meanwhile: release times show lent tokens already, but not where they came from.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from array import array
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from srtm.errors import SRTMError, TraceError
from srtm.workload.trace import BROKER_KEY, MOVED_KEY, RECORDED_SCHEMA, Moved, encoded, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from srtm.broker.message import Message

CUT_S = 1.0
PATIENCE_CUTS = 2  # then rows are written even if no subscriber got their messages
_ROW_GROUP = 1_000_000
_MOST_WAITING = 32  # chunks that may wait for the disk


class Chunk:
    """Rows of about a second, in columns; `first` is the number of the first row in the recording."""

    __slots__ = ("arrival_ns", "first", "publisher", "release_ns", "sent_ns", "topic")

    def __init__(self, first: int) -> None:
        self.first = first
        self.topic = array("i")
        self.publisher = array("i")
        self.arrival_ns = array("q")
        self.release_ns = array("q")
        self.sent_ns = array("q")  # 0: not yet


@dataclass(slots=True)
class _Notes:
    """The metadata that the file holds for each topic."""

    births: dict[str, list[tuple[int, int | None]]] = field(default_factory=dict)
    moved: dict[str, dict[str, Moved]] = field(default_factory=dict)  # by peer


class Recorder:
    """One recording, from `start` to `stop`."""

    def __init__(
        self,
        path: Path,
        broker: str,
        groups: Mapping[str, str | None],
        loop: asyncio.AbstractEventLoop,
        birth: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        """`birth` returns the contract that a topic is under now."""
        self.path = path
        self.rows = 0
        self.problem: SRTMError | None = None
        self._broker = broker
        self._groups = groups
        self._loop = loop
        self._birth = birth
        self._notes = _Notes()
        self._topics: dict[str, int] = {}
        self._publishers: dict[str, int] = {}
        self._open: dict[bytes, int] = {}  # rows of messages not sent to any subscriber yet
        self._chunks = deque([Chunk(0)])  # the last one grows
        self._to_write: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="srtm-recorder", daemon=True)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the thread that writes the file."""
        self._thread.start()
        self._timer = self._loop.call_later(CUT_S, self._on_time)

    def released(self, topic: str, messages: list[Message]) -> None:
        """A topic released messages: they have their tokens."""
        chunk, publishers, opened = self._chunks[-1], self._publishers, self._open
        code = self._topics.setdefault(topic, len(self._topics))
        births, birth = self._notes.births.setdefault(topic, []), self._birth(topic)
        if messages and (not births or births[-1][1] != birth):
            births.append((messages[0].release_ns, birth))
        row = self.rows
        for message in messages:
            publisher = publishers.get(message.publisher)
            if publisher is None:
                publisher = publishers[message.publisher] = len(publishers)
            chunk.topic.append(code)
            chunk.publisher.append(publisher)
            chunk.arrival_ns.append(message.arrival_ns)
            chunk.release_ns.append(message.release_ns)
            chunk.sent_ns.append(0)
            opened[message.id] = row
            row += 1
        self.rows = row

    def dropped(self, topic: str, messages: list[Message]) -> None:
        """A topic dropped messages: a run is what was released, so they are not in it."""

    def shifted(self, topic: str, peer: str, at_ns: int, ptok: int) -> None:
        """Tokens of a topic came from a peer, or went there if `ptok` is negative."""
        del at_ns
        moved = self._notes.moved.setdefault(topic, {})
        lent, borrowed = moved.get(peer, Moved(0, 0))
        moved[peer] = Moved(lent + max(0, -ptok), borrowed + max(0, ptok))

    def sent(self, messages: list[Message], sent_ns: int) -> None:
        """Messages were written to a subscriber."""
        close, chunk = self._open.pop, self._chunks[-1]
        first, sent = chunk.first, chunk.sent_ns
        for message in messages:
            row = close(message.id, None)
            if row is None:
                continue
            if row >= first:
                sent[row - first] = sent_ns
            else:
                older = next(each for each in reversed(self._chunks) if each.first <= row)
                older.sent_ns[row - older.first] = sent_ns

    def _on_time(self) -> None:
        self._cut()
        self._timer = self._loop.call_later(CUT_S, self._on_time)

    def _cut(self) -> None:
        self._chunks.append(Chunk(self.rows))
        while len(self._chunks) > PATIENCE_CUTS + 1:
            self._hand_over(self._chunks.popleft())

    def _hand_over(self, chunk: Chunk) -> None:
        end = chunk.first + len(chunk.topic)
        unsent = list(takewhile(lambda entry: entry[1] < end, self._open.items()))  # in order of rows
        for message_id, _ in unsent:
            del self._open[message_id]
        if self._to_write.qsize() > _MOST_WAITING and self.problem is None:
            self.problem = TraceError(f"cannot write {self.path}: the disk is too slow", path=str(self.path))
        if chunk.topic and self.problem is None:
            self._to_write.put(chunk)

    async def stop(self) -> None:
        """Write the remaining rows, and wait until the file is complete; TraceError if it cannot be written."""
        if self._timer:
            self._timer.cancel()
        while self._chunks:
            self._hand_over(self._chunks.popleft())
        self._to_write.put(None)
        await self._loop.run_in_executor(None, self._thread.join)
        if self.problem:
            raise self.problem

    def _write(self) -> None:
        """Write chunks as row groups, on the thread, until None arrives."""
        about = {BROKER_KEY: self._broker}
        try:
            with writing(self.path, RECORDED_SCHEMA, about) as writer:
                held: list[Chunk] = []
                while (chunk := self._to_write.get()) is not None:
                    held.append(chunk)
                    if sum(len(each.topic) for each in held) >= _ROW_GROUP:
                        writer.write_batch(self._rows_of(held), row_group_size=_ROW_GROUP)
                        held.clear()
                if held:
                    writer.write_batch(self._rows_of(held), row_group_size=_ROW_GROUP)
                about["srtm.births"] = json.dumps(self._notes.births)
                if self._notes.moved:
                    about[MOVED_KEY] = json.dumps(self._notes.moved)
                if self.problem:
                    raise self.problem
        except SRTMError as problem:
            self.problem = problem
        except (OSError, pa.ArrowException) as error:
            self.problem = TraceError(f"cannot write {self.path}: {error}", path=str(self.path))

    def _rows_of(self, chunks: list[Chunk]) -> pa.RecordBatch:
        """Return the rows in order of arrival, then of release."""

        def column(name: str, kind: type[np.signedinteger]) -> np.ndarray:
            return np.concatenate([np.frombuffer(getattr(chunk, name), kind) for chunk in chunks])

        arrival_ns, release_ns = column("arrival_ns", np.int64), column("release_ns", np.int64)
        order = np.lexsort((release_ns, arrival_ns))
        topic, publisher = column("topic", np.int32)[order], column("publisher", np.int32)[order]
        sent_ns = column("sent_ns", np.int64)[order]
        names = list(self._publishers)  # the loop may append names, but has already appended those of these rows
        groups = [self._groups.get(name) for name in names]
        known = sorted({group for group in groups if group is not None})
        number = {group: index for index, group in enumerate(known)}
        group = np.array([-1 if each is None else number[each] for each in groups], np.int32)[publisher]
        columns = [
            pa.DictionaryArray.from_arrays(topic, pa.array(list(self._topics), pa.string())),
            pa.DictionaryArray.from_arrays(publisher, pa.array(names, pa.string())),
            pa.DictionaryArray.from_arrays(pa.array(group, mask=group < 0), pa.array(known, pa.string())),
            pa.array(arrival_ns[order]),
            pa.DictionaryArray.from_arrays(np.zeros(len(order), np.int32), pa.array([self._broker])),
            pa.array(release_ns[order]),
            pa.array(sent_ns, mask=sent_ns == 0),
        ]
        return pa.record_batch(columns, schema=encoded(RECORDED_SCHEMA))
