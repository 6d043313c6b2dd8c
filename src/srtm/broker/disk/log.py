"""The durable log of a broker's `disk` topics: append, read a range, trim; and how far each channel came.

In: messages by topic, from the loop. Out: the first offset, once they are on the disk (`done`, on the loop again).
Offsets of a log start at 0 and have no gaps. A topic that is deleted and created again has another log, with another
id. One thread writes: whatever was handed over while it committed is the next commit (group commit), so the loop never
waits for a disk. Reads go on beside it, from any thread.

- A message is visible to `read` and counted by `end` only when it is durable.
- A failed commit leaves nothing behind: its offsets are given to the next messages, and the next commit tries again.
- What was finished is saved now and then; what was not finished is never taken for finished.
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

from srtm.broker.disk.batch import Record, check, cut, decode, encode
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
    """What the writer did since the log was opened."""

    waiting: int
    messages: int
    commits: int
    failures: int
    checkpoints: int
    checkpoint_max_ns: int
    commit_last_ns: int
    wal_bytes: int


class SavedQueue(NamedTuple):
    """A piece of a queue that was kept over a stop."""

    number: int
    topic: str
    channel: str | None
    records: list[Record]


class Log:
    """The log of one broker. All methods but `read` belong to the thread of the loop."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop | None, options: LogOptions) -> None:
        self._store = store
        self._loop = loop
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._answer = _call_all if loop is None else self._post
        self._handed = 0
        self._writer = Writer(store, self._work, options, self._answer)
        self._topics = self._writer.topics
        self._deleting: Counter[str] = Counter()  # topics whose deletion is yet to be carried out, how often
        self._changed: set[Cursor] = set()
        self._cursors: dict[tuple[str, str], Cursor] = {}
        for saved in store.channels():
            cursor = Cursor(saved.topic, saved.channel, saved.low, self._changed).restore(saved.above)
            # Trimmed after it was finished and before that was saved, or by a retention that does not wait for it.
            cursor.lost = cursor.skip_to(self.begin(saved.topic))
            self._cursors[saved.topic, saved.channel] = cursor
        self._closed = False
        self._thread = threading.Thread(target=self._writer.run, name="srtm-log", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, folder: Path, loop: asyncio.AbstractEventLoop | None = None, options: LogOptions | None = None
    ) -> Log:
        """Recover what the folder holds, or start it. `done` is called on the loop, or else on the writer's thread."""
        store = Store(folder)
        try:
            return cls(store, loop, options or LogOptions())
        except BaseException:
            store.close()
            raise

    def append_nowait(self, topic: str, records: Sequence[Record], done: Done) -> None:
        """Hand messages over; `done` gets the offset of the first once all are durable, or the LogError why not."""
        if not records:
            raise InputError("an append needs at least one message", topic=topic)
        self._put(Append(topic, records, check(records), done))
        self._handed += len(records)

    async def append(self, topic: str, records: Sequence[Record]) -> int:
        """The offset of the first of these messages, once all are durable."""
        assert self._loop is not None, "open the log with the loop that waits for it"
        appended: asyncio.Future[int] = self._loop.create_future()
        self.append_nowait(topic, records, lambda result: _settle(appended, result))
        return await appended

    def append_wait(self, topic: str, records: Sequence[Record]) -> int:
        """The same for callers without a loop."""
        appended: Future[int] = Future()
        self.append_nowait(topic, records, lambda result: _settle(appended, result))
        return appended.result()

    @property
    def topics(self) -> list[str]:
        """The topics that have a log."""
        return [topic for topic in list(self._topics) if topic not in self._deleting]

    def begin(self, topic: str) -> int:
        """The oldest offset that is kept; equals `end` if none is."""
        state = self._state(topic)
        return state.begin if state else 0

    def end(self, topic: str) -> int:
        """The offset that the next message will get; everything before it is durable."""
        state = self._state(topic)
        return state.end if state else 0

    def size(self, topic: str) -> int:
        """Bytes that are kept of a topic, about."""
        state = self._state(topic)
        return state.size if state else 0

    def identity(self, topic: str) -> str | None:
        """Which log a topic has: another one if it was deleted and made again, here or on another disk."""
        state = self._state(topic)
        return state.log if state else None

    def _state(self, topic: str) -> TopicState | None:
        """What is there of a topic; nothing from when it was deleted, though the writer may come to that later."""
        return None if topic in self._deleting else self._topics.get(topic)

    def read(
        self, topic: str, begin: int, limit: int = 1_000, max_bytes: int = 1 << 20, *, log: str | None = None
    ) -> list[Record]:
        """The messages at begin, begin + 1, …: at most `limit`, at most `max_bytes` of bodies but at least one.

        With `log`, those of that log alone: LogReplaced if the topic has another one by now.
        Empty at the end of the log. From any thread that lives on (each keeps a connection); it waits for the disk, so
        not from the loop's.
        """
        state = self.check_offset(topic, begin, log)
        return self._store.read(state, begin, limit, max_bytes) if begin < state.end and limit > 0 else []

    def check_offset(self, topic: str, offset: int, log: str | None = None) -> TopicState:
        """Refuse an offset that the topic no longer holds, or does not hold yet; its end may be read from."""
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
        """A channel's progress. A new one starts at `start` (or the end); no later append is durable without it."""
        cursor = self._cursors.get((topic, channel))
        if cursor is None:
            cursor = Cursor(topic, channel, self.end(topic) if start is None else start, self._changed)
            self._cursors[topic, channel] = cursor
            self._put(Progress({(topic, channel): (cursor.low, b"")}, urgent=True))
        return cursor

    def cursors(self, topic: str) -> list[Cursor]:
        """The channels of a topic."""
        return [cursor for cursor in self._cursors.values() if cursor.topic == topic]

    def save_cursors(self) -> None:
        """Hand over the progress that changed; to be called every now and then."""
        if self._changed:
            rows = {(cursor.topic, cursor.channel): (cursor.low, cursor.encode()) for cursor in self._changed}
            self._changed.clear()
            self._put(Progress({**rows}))

    def delete_channel(self, topic: str, channel: str) -> None:
        """Forget a channel."""
        cursor = self._cursors.pop((topic, channel), None)
        if cursor is not None:
            self._changed.discard(cursor)
            cursor.changed = set()
            self._put(Progress({(topic, channel): None}, urgent=True))

    def delete_topic(self, topic: str, done: Done = lambda _: None) -> None:
        """Forget a topic with its channels and messages; one of the same name has another log, from offset 0."""
        for cursor in self.cursors(topic):
            self.delete_channel(topic, cursor.channel)
        self._deleting[topic] += 1

        def deleted(result: Any) -> None:
            self._deleting -= Counter([topic])
            done(result)

        self._put(Call(lambda: self._writer.delete(topic), deleted, self._answer))

    def trim(self, topic: str, before: int, done: Done = lambda _: None) -> None:
        """Let go of everything below an offset; the space is used again."""
        self._put(Call(lambda: self._writer.trim(topic, before), done, self._answer))

    def keep(self, topic: str, retention: Retention | None, done: Done = lambda _: None) -> None:
        """Let a topic be there, with a retention of its own or without."""
        self._put(Call(lambda: self._writer.keep(topic, retention), done, self._answer))

    def retention(self, topic: str) -> Retention | None:
        """What a topic was told to keep."""
        state = self._state(topic)
        return state.retention if state else None

    def retain(self, topic: str, retention: Retention, now_ns: int, done: Done = lambda _: None) -> None:
        """Trim a topic to what is to be kept; to be called every now and then.

        Where size or age decide, `done` gets the begin that there is then.
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
        """Write down all that is known of some topics."""
        self._put(Call(partial(self._writer.remember, known), done, self._answer))

    def known(self) -> dict[str, list[Known]]:
        """What was written down of topics; waits for the disk."""
        found: dict[str, list[Known]] = self.call(self._store.known)
        return found

    def save_queues(self, queues: Iterable[tuple[str, str | None, Sequence[Record]]]) -> None:
        """Keep the messages of memory topics, or of channels of them, over a stop; waits for the disk."""
        self.call(lambda: self._store.save_queues(_pieces(queues)))

    def load_queues(self) -> list[SavedQueue]:
        """What `save_queues` kept; it is kept on. Waits for the disk."""
        rows = self.call(self._store.load_queues)
        return [SavedQueue(number, topic, channel, decode(data)) for number, topic, channel, data in rows]

    def drop_queues(self, numbers: Sequence[int]) -> None:
        """Keep these pieces of saved queues no longer."""
        self._put(Call(lambda: self._store.drop_queues(numbers), lambda _: None, self._answer))

    def call(self, run: Callable[[], Any] = lambda: None) -> Any:
        """Run something on the writer's thread after all that was handed over, and wait for it."""
        finished: Future[Any] = Future()
        self._put(Call(run, lambda result: _settle(finished, result), _call_all))
        return finished.result()

    def check(self) -> None:
        """Read the whole file, and raise what is found to be damaged."""
        self.call(self._store.check)

    def statistics(self) -> LogStatistics:
        """A snapshot."""
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
        """Commit what was handed over, save progress, and end the writer."""
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
        with suppress(RuntimeError):  # the loop has ended, and with it all who wait
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
        except Exception:  # one that fails must not keep the others, or the writer, from going on
            logger.exception("LOG: a callback failed")


def _settle(waiting: asyncio.Future[Any] | Future[Any], result: Any) -> None:
    if waiting.cancelled():
        return
    if isinstance(result, SRTMError):
        waiting.set_exception(result)
    else:
        waiting.set_result(result)
