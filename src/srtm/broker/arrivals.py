"""The live arrivals of topics under contract: a bounded stream by offsets, which `srtm advise` reads.

In: messages that topics released or dropped, turn by turn, kept as plain columns: both are demand, and the release of
one that was dropped is its arrival. Out: the rows of an offset range, as Arrow. The stream begins when somebody asks
for it, and ends by itself when nobody has read it for five minutes; until then it listens where a recording does. Its
id names the start of the broker and of the stream, so offsets of another stream are never taken for its own. It holds
about a million rows; older ones fall out, and those that nobody had read are counted.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from srtm.errors import LogReplaced, OffsetTrimmed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from srtm.broker.message import Message
    from srtm.broker.recorder import Recorder

log = logging.getLogger(__name__)

MOST_ROWS = 2**20  # some 25 megabytes
CHUNK_ROWS = 2**14  # that fall out together, and share the numbers of names
IDLE_S = 300.0  # without a reader: long enough for one to restart
_AT_ONCE = 64  # messages whose columns are filled together; until then, their bodies are kept, too


class Tapped(Protocol):
    """The place where a recording and the stream listen to released messages: a turn."""

    loop: asyncio.AbstractEventLoop
    now_ns: Callable[[], int]
    recorder: Recorder | Arrivals | None


class Extent(NamedTuple):
    """The oldest offset, the next one, the id of the stream, and how many rows fell out before anybody read them."""

    begin: int
    end: int
    log: str
    lost: int


class _Numbers(dict[Any, int]):
    """Numbers from 0 for keys, in the order in which they come."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class Chunk:
    """Consecutive rows in columns; `first` is the offset of the first. A chunk that a reader has seen grows no more.

    `runs` has the topics of consecutive rows, with the birth of their contract, and how many rows each run has. Rows
    that are `held` are not in the other columns yet.
    """

    __slots__ = ("arrival_ns", "first", "held", "publisher", "publishers", "release_ns", "runs")

    def __init__(self, first: int) -> None:
        self.first = first
        self.runs: list[tuple[str, int, int]] = []
        self.publishers = _Numbers()
        self.publisher = array("i")
        self.arrival_ns, self.release_ns = array("q"), array("q")
        self.held: list[Message] = []

    @property
    def end(self) -> int:
        """The offset after the last row."""
        return self.first + len(self.arrival_ns) + len(self.held)

    def add(self, topic: str, birth: int, messages: list[Message]) -> None:
        """Append rows. Comprehensions over many messages at once are several times as fast as a loop."""
        runs, held = self.runs, self.held
        if runs and runs[-1][0] == topic and runs[-1][1] == birth:
            runs[-1] = (topic, birth, runs[-1][2] + len(messages))
        else:
            runs.append((topic, birth, len(messages)))
        held += messages
        if len(held) >= _AT_ONCE:
            self.fill()

    def fill(self) -> None:
        """Fill the columns with the rows that are held."""
        held, number = self.held, self.publishers
        self.publisher.fromlist([number[message.publisher] for message in held])
        self.arrival_ns.fromlist([message.arrival_ns for message in held])
        self.release_ns.fromlist([message.release_ns for message in held])
        held.clear()


class Arrivals:
    """The stream of one broker, from its first reader on. It passes everything on to a recording beside it."""

    def __init__(
        self,
        turn: Tapped,
        started_ns: int,
        birth: Callable[[str], int | None],
        most_rows: int = MOST_ROWS,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        """`birth` returns the contract that a topic is under now; `started_ns` tells starts of the broker apart."""
        self.log = f"{started_ns}-{turn.now_ns()}"
        self.lost = 0
        self.recorder: Recorder | None = turn.recorder if not isinstance(turn.recorder, Arrivals) else None
        self._turn = turn
        self._birth = birth
        self._most_rows, self._chunk_rows = most_rows, chunk_rows
        self._chunks = deque([Chunk(0)])  # the last one grows
        self._read_upto = 0
        self._asked_s = turn.loop.time()
        self._timer = turn.loop.call_later(IDLE_S, self._look)
        turn.recorder = self

    def released(self, topic: str, messages: list[Message]) -> None:
        """A topic released messages."""
        if self.recorder is not None:
            self.recorder.released(topic, messages)
        self._take(topic, messages)

    def dropped(self, topic: str, messages: list[Message]) -> None:
        """A topic dropped messages, instead of making them wait for tokens."""
        if messages:
            self._take(topic, messages)

    def _take(self, topic: str, messages: list[Message]) -> None:
        birth = self._birth(topic)
        if birth is None:
            return
        chunk = self._chunks[-1]
        if len(chunk.arrival_ns) + len(chunk.held) >= self._chunk_rows:
            chunk = self._cut()
        chunk.add(topic, birth, messages)

    def sent(self, messages: list[Message], sent_ns: int) -> None:
        """Messages were written to a subscriber."""
        if self.recorder is not None:
            self.recorder.sent(messages, sent_ns)

    def extent(self) -> Extent:
        """What the stream holds; asking for it keeps the stream alive."""
        self._asked_s = self._turn.loop.time()
        return Extent(self._chunks[0].first, self._chunks[-1].end, self.log, self.lost)

    def read(self, begin: int, limit: int, log: str | None = None) -> list[tuple[Chunk, int, int]]:
        """Rows from an offset on, as parts of chunks that no longer change: (chunk, first row, row after the last).

        LogReplaced if the offset belongs to another stream, OffsetTrimmed if rows from there on fell out.
        """
        held = self.extent()
        if log is not None and log != self.log:
            raise LogReplaced("the stream of arrivals began anew: its broker restarted, or nobody had read it")
        if begin < held.begin:
            raise OffsetTrimmed(f"the stream of arrivals begins at offset {held.begin}: earlier rows fell out")
        end = min(begin + limit, held.end)
        self._read_upto = max(self._read_upto, end)
        parts = [
            (chunk, max(begin, chunk.first) - chunk.first, min(end, chunk.end) - chunk.first)
            for chunk in self._chunks
            if chunk.first < end and chunk.end > begin
        ]
        if end > self._chunks[-1].first:
            self._cut()
        return parts

    async def stop(self) -> None:
        """End the stream and the recording beside it."""
        recorder = self.recorder
        self.close()
        if recorder is not None:
            await recorder.stop()

    def close(self) -> None:
        """End the stream; a recording beside it goes on."""
        self._timer.cancel()
        if self._turn.recorder is self:
            self._turn.recorder = self.recorder
        self._chunks = deque([Chunk(self._chunks[-1].end)])

    def _cut(self) -> Chunk:
        chunks = self._chunks
        chunks[-1].fill()
        chunks.append(Chunk(chunks[-1].end))
        while chunks[-1].first - chunks[0].first > self._most_rows:
            gone = chunks.popleft()
            unread = gone.end - max(gone.first, min(gone.end, self._read_upto))
            if unread and not self.lost:
                log.warning("ARRIVALS: its reader is too slow, and arrivals are lost to it; messages are not affected")
            self.lost += unread
        return chunks[-1]

    def _look(self) -> None:
        left_s = self._asked_s + IDLE_S - self._turn.loop.time()
        if left_s > 0:
            self._timer = self._turn.loop.call_later(left_s, self._look)
        else:
            log.info("ARRIVALS: nobody has read them for %g s; the stream ends", IDLE_S)
            self.close()


def stream_of(turn: Tapped) -> Arrivals | None:
    """The stream of arrivals, if it is on."""
    return turn.recorder if isinstance(turn.recorder, Arrivals) else None


def recording_of(turn: Tapped) -> Recorder | None:
    """The recording that runs, if there is one."""
    return turn.recorder.recorder if isinstance(turn.recorder, Arrivals) else turn.recorder


def record(turn: Tapped, recorder: Recorder | None) -> None:
    """Begin a recording, or end it, beside the stream if that is on."""
    if isinstance(turn.recorder, Arrivals):
        turn.recorder.recorder = recorder
    else:
        turn.recorder = recorder


def packed(parts: list[tuple[Chunk, int, int]], broker: str, groups: Mapping[str, str | None]) -> bytes:
    """Rows as an Arrow stream, a batch for each part; `groups` are those that publishers declared."""
    import numpy as np
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        [
            ("topic", text),
            ("birth", pa.int64()),
            ("publisher", text),
            ("group", text),
            ("arrival_ns", pa.int64()),
            ("broker", text),
            ("release_ns", pa.int64()),
        ]
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        for chunk, low, high in parts:
            publisher = np.frombuffer(chunk.publisher, np.int32)[low:high]
            arrival_ns, release_ns = (
                np.frombuffer(each, np.int64)[low:high] for each in (chunk.arrival_ns, chunk.release_ns)
            )
            topic = np.repeat(np.arange(len(chunk.runs), dtype=np.int32), [run[2] for run in chunk.runs])[low:high]
            births = np.array([birth for _, birth, _ in chunk.runs], np.int64)
            names = pa.array(list(chunk.publishers), pa.string())
            declared = pa.array([groups.get(name) for name in chunk.publishers], pa.string()).dictionary_encode()
            columns = [
                pa.array([name for name, _, _ in chunk.runs], pa.string()).dictionary_encode().take(pa.array(topic)),
                pa.array(births[topic]),
                pa.DictionaryArray.from_arrays(publisher, names),
                declared.take(pa.array(publisher)),
                pa.array(arrival_ns),
                pa.DictionaryArray.from_arrays(np.zeros(high - low, np.int32), pa.array([broker])),
                pa.array(release_ns),
            ]
            stream.write_batch(pa.record_batch(columns, schema=schema))
    return bytes(sink.getvalue())
