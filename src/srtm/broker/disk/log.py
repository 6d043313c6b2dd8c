"""The durable log of a broker's `disk` topics: append, read a range, trim; and the progress of each channel.

In: messages by topic, from the loop. Out: the first offset, once they are on disk (`done`, called on the loop). Offsets
of a log start at 0 and have no gaps. A topic that is deleted and created again has another log, with another id. One
thread writes: whatever arrives during one commit makes up the next (group commit), so the loop never waits for a disk.
Any thread may read at the same time.

- A message is visible to `read` and counted by `end` only when it is durable.
- A failed commit leaves nothing behind: the next messages get its offsets, and the next commit tries again.
- Progress is saved from time to time; an unfinished message never counts as finished.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from srtm.broker.disk.batch import Piece, Record, check, cut, decode, encode
from srtm.broker.disk.cursor import Cursor
from srtm.broker.disk.rows import Known, Retention, TopicState
from srtm.broker.disk.store import Store
from srtm.broker.disk.work import Append, Call, Done, LogOptions, Progress, Work
from srtm.broker.disk.writer import Writer
from srtm.errors import InputError, LogError, LogReplaced, OffsetTrimmed, SRTMError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

__all__ = ["Known", "Log", "LogOptions", "LogStatistics", "Record", "Retention", "SavedQueue"]

QUEUE_BYTES = 4 << 20  # bodies in one row of a saved queue


@dataclass(frozen=True, slots=True)
class LogStatistics:
    """The writer's work since the log was opened."""

    waiting: int
    messages: int
    commits: int
    failures: int
    checkpoints: int
    checkpoint_max_ns: int
    commit_last_ns: int
    wal_bytes: int


class SavedQueue(NamedTuple):
    """A piece of a queue that was saved when the broker stopped."""

    number: int
    topic: str
    channel: str | None
    records: list[Record]


class Log:
    """The log of one broker. All methods but `read` and `pieces` belong to the thread of the loop."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop | None, options: LogOptions) -> None:
        self._store = store
        self._loop = loop
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._answer = _call_all if loop is None else self._post
        self._handed = 0
        self._writer = Writer(store, self._work, options, self._answer)
        self._topics = self._writer.topics
        self._deleting: Counter[str] = Counter()  # pending deletions by topic
        self._changed: set[Cursor] = set()
        self._cursors: dict[tuple[str, str], Cursor] = {}
        for saved in store.channels():
            cursor = Cursor(saved.topic, saved.channel, saved.low, self._changed).restore(saved.above)
            # Skip offsets trimmed before the progress was saved, or by a retention that does not wait for channels.
            cursor.lost = cursor.skip_to(self.begin(saved.topic))
            self._cursors[saved.topic, saved.channel] = cursor
        self._closed = False
        self._thread = threading.Thread(target=self._writer.run, name="srtm-log", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, folder: Path, loop: asyncio.AbstractEventLoop | None = None, options: LogOptions | None = None
    ) -> Log:
        """Open or create the log in a folder. Callbacks run on the loop, or without one on the writer's thread."""
        store = Store(folder)
        try:
            return cls(store, loop, options or LogOptions())
        except BaseException:
            store.close()
            raise

    def append_nowait(self, topic: str, records: Sequence[Record], done: Done) -> None:
        """Append messages; `done` gets the offset of the first once all are durable, or a LogError."""
        if not records:
            raise InputError("an append needs at least one message", topic=topic)
        self._put(Append(topic, records, check(records), done))
        self._handed += len(records)

    async def append(self, topic: str, records: Sequence[Record]) -> int:
        """Append messages; return the offset of the first once all are durable."""
        assert self._loop is not None, "open the log with the loop that waits for it"
        appended: asyncio.Future[int] = self._loop.create_future()
        self.append_nowait(topic, records, lambda result: _settle(appended, result))
        return await appended

    def append_wait(self, topic: str, records: Sequence[Record]) -> int:
        """Append messages like `append`, for callers without a loop."""
        appended: Future[int] = Future()
        self.append_nowait(topic, records, lambda result: _settle(appended, result))
        return appended.result()

    @property
    def topics(self) -> list[str]:
        """The topics that have a log."""
        return [topic for topic in list(self._topics) if topic not in self._deleting]

    def begin(self, topic: str) -> int:
        """Return the oldest offset that is kept; equals `end` if there is none."""
        state = self._state(topic)
        return state.begin if state else 0

    def end(self, topic: str) -> int:
        """Return the offset of the next message; everything before it is durable."""
        state = self._state(topic)
        return state.end if state else 0

    def size(self, topic: str) -> int:
        """Return about how many bytes a topic occupies."""
        state = self._state(topic)
        return state.size if state else 0

    def identity(self, topic: str) -> str | None:
        """Return the id of a topic's log, which changes if the topic is deleted and created again."""
        state = self._state(topic)
        return state.log if state else None

    def _state(self, topic: str) -> TopicState | None:
        """Return the state of a topic; None from its deletion on, even before the writer carries it out."""
        return None if topic in self._deleting else self._topics.get(topic)

    def read(
        self, topic: str, begin: int, limit: int = 1_000, max_bytes: int = 1 << 20, *, log: str | None = None
    ) -> list[Record]:
        """Return messages from offset `begin` on: at most `limit`, at most `max_bytes` of bodies but at least one.

        The list is empty at the end of the log. Raise LogReplaced if the topic no longer has the given `log`. Call this
        from long-lived threads, because each keeps a connection, but not from the loop: it waits for the disk.
        """
        state = self.check_offset(topic, begin, log)
        return self._store.read(state, begin, limit, max_bytes) if begin < state.end and limit > 0 else []

    def pieces(
        self, topic: str, begin: int, limit: int = 1_000, max_bytes: int = 1 << 20, *, log: str | None = None
    ) -> list[Piece]:
        """Return the messages of `read` as columns, many times faster."""
        state = self.check_offset(topic, begin, log)
        return self._store.pieces(state, begin, limit, max_bytes) if begin < state.end and limit > 0 else []

    def check_offset(self, topic: str, offset: int, log: str | None = None) -> TopicState:
        """Raise LogError for an offset that the topic no longer holds or does not hold yet; its end is valid."""
        state = self._state(topic) or TopicState(0)
        if log is not None and log != state.log:
            raise LogReplaced(
                f"topic {topic!r} no longer has log {log!r}, which held offset {offset}: the topic was deleted and"
                f" created again, or its broker started with an empty disk",
                topic=topic,
                offset=offset,
                log=log,
            )
        if offset < state.begin:
            raise OffsetTrimmed(
                f"topic {topic!r} no longer holds offset {offset}: it begins at {state.begin}",
                topic=topic,
                offset=offset,
                begin=state.begin,
            )
        if offset > state.end:
            raise LogError(
                f"topic {topic!r} has no offset {offset}: it ends at {state.end}; was its log removed?",
                topic=topic,
                offset=offset,
                end=state.end,
            )
        return state

    def cursor(self, topic: str, channel: str, start: int | None = None) -> Cursor:
        """Return a channel's progress; a new one starts at `start` or the end, and is durable before later appends."""
        cursor = self._cursors.get((topic, channel))
        if cursor is None:
            cursor = Cursor(topic, channel, self.end(topic) if start is None else start, self._changed)
            self._cursors[topic, channel] = cursor
            self._put(Progress({(topic, channel): (cursor.low, b"")}, urgent=True))
        return cursor

    def cursors(self, topic: str) -> list[Cursor]:
        """Return the progress of every channel of a topic."""
        return [cursor for cursor in self._cursors.values() if cursor.topic == topic]

    def save_cursors(self) -> None:
        """Save progress that changed; call this from time to time."""
        if self._changed:
            rows = {(cursor.topic, cursor.channel): (cursor.low, cursor.encode()) for cursor in self._changed}
            self._changed.clear()
            self._put(Progress({**rows}))

    def delete_channel(self, topic: str, channel: str) -> None:
        """Delete a channel's progress."""
        cursor = self._cursors.pop((topic, channel), None)
        if cursor is not None:
            self._changed.discard(cursor)
            cursor.changed = set()
            self._put(Progress({(topic, channel): None}, urgent=True))

    def delete_topic(self, topic: str, done: Done = lambda _: None) -> None:
        """Delete a topic with its channels and messages; a new one of its name gets another log, from offset 0."""
        for cursor in self.cursors(topic):
            self.delete_channel(topic, cursor.channel)
        self._deleting[topic] += 1

        def deleted(result: Any) -> None:
            self._deleting -= Counter([topic])
            done(result)

        self._put(Call(lambda: self._writer.delete(topic), deleted, self._answer))

    def trim(self, topic: str, before: int, done: Done = lambda _: None) -> None:
        """Delete everything below an offset; the space is reused."""
        self._put(Call(lambda: self._writer.trim(topic, before), done, self._answer))

    def keep(self, topic: str, retention: Retention | None, done: Done = lambda _: None) -> None:
        """Create a topic unless it exists, and set its own retention, or none."""
        self._put(Call(lambda: self._writer.keep(topic, retention), done, self._answer))

    def retention(self, topic: str) -> Retention | None:
        """Return a topic's own retention."""
        state = self._state(topic)
        return state.retention if state else None

    def retain(self, topic: str, retention: Retention, now_ns: int, done: Done = lambda _: None) -> None:
        """Trim a topic by its retention; call this from time to time.

        If the retention limits size or age, `done` gets the new begin.
        """
        if retention.acknowledged and (cursors := self.cursors(topic)):
            low = min(cursor.low for cursor in cursors)
            if low > self.begin(topic):
                self.trim(topic, low)
        if retention.limited:
            before_ns = None if retention.max_age_ns is None else now_ns - retention.max_age_ns
            run = partial(self._writer.retain, topic, retention.max_bytes, before_ns)
            self._put(Call(run, done, self._answer))

    def remember(self, known: dict[str, list[Known]], done: Done) -> None:
        """Save everything that is known of some topics."""
        self._put(Call(partial(self._writer.remember, known), done, self._answer))

    def known(self) -> dict[str, list[Known]]:
        """Return what `remember` saved; waits for the disk."""
        found: dict[str, list[Known]] = self.call(self._store.known)
        return found

    def save_queues(self, queues: Iterable[tuple[str, str | None, Sequence[Record]]]) -> None:
        """Save messages of memory topics and their channels when the broker stops; waits for the disk."""
        self.call(lambda: self._store.save_queues(_pieces(queues)))

    def load_queues(self) -> list[SavedQueue]:
        """Return what `save_queues` saved, without deleting it; waits for the disk."""
        rows = self.call(self._store.load_queues)
        return [SavedQueue(number, topic, channel, decode(data)) for number, topic, channel, data in rows]

    def drop_queues(self, numbers: Sequence[int]) -> None:
        """Delete pieces of saved queues."""
        self._put(Call(lambda: self._store.drop_queues(numbers), lambda _: None, self._answer))

    def look(self) -> None:
        """Check in the background whether the disk can be written; call this from time to time."""
        self._put(Call(self._writer.look, lambda _: None, self._answer))

    @property
    def problem(self) -> str | None:
        """Why the log cannot be written; None if it can."""
        return self._writer.counts.problem

    def call(self, run: Callable[[], Any] = lambda: None) -> Any:
        """Run something on the writer's thread after all earlier work, and wait for its result."""
        finished: Future[Any] = Future()
        self._put(Call(run, lambda result: _settle(finished, result), _call_all))
        return finished.result()

    def check(self) -> None:
        """Read the whole file; raise LogError if it is damaged."""
        self.call(self._store.check)

    def statistics(self) -> LogStatistics:
        """Return a snapshot."""
        writer = self._writer
        return LogStatistics(
            self._handed - writer.counts.answered,
            writer.counts.messages,
            writer.counts.commits,
            writer.counts.failures,
            writer.counts.checkpoints,
            writer.counts.checkpoint_max_ns,
            writer.counts.commit_last_ns,
            self._store.wal_bytes(),
        )

    def close(self) -> None:
        """Commit all pending work, save progress, and end the writer."""
        if self._closed:
            return
        self.save_cursors()
        self._closed = True
        self._work.put(None)
        self._thread.join()
        self._store.close()

    def _put(self, work: Append | Call | Progress) -> None:
        if self._closed:
            raise LogError(f"the log in {self._store.folder} is closed", path=str(self._store.folder))
        self._work.put(work)

    def _post(self, answers: list[tuple[Done, Any]]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended, and with it every waiter
            self._loop.call_soon_threadsafe(_call_all, answers)


def _pieces(queues: Iterable[tuple[str, str | None, Sequence[Record]]]) -> Iterator[tuple[str, str | None, bytes]]:
    for topic, channel, records in queues:
        if records:
            check(records)
            for piece in cut(records, QUEUE_BYTES):
                yield topic, channel, encode(piece)


def _call_all(answers: list[tuple[Done, Any]]) -> None:
    for done, result in answers:
        try:
            done(result)
        except Exception:  # must not stop the other callbacks or the writer
            logger.exception("LOG: a callback failed")


def _settle(waiting: asyncio.Future[Any] | Future[Any], result: Any) -> None:
    if waiting.cancelled():
        return
    if isinstance(result, SRTMError):
        waiting.set_exception(result)
    else:
        waiting.set_result(result)
