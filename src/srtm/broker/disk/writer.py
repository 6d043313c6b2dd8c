"""The thread that commits: it takes all work that has arrived since the last commit, and makes it durable at once.

In: appends, progress of channels and other work, in order, from a queue. Out: an answer to each, after the commit.
The thread survives every disk error: waiting callers get the error, and work without a caller is tried again.
"""

from __future__ import annotations

import logging
import queue
import time
import zlib
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from srtm.broker.disk.batch import cut, encode
from srtm.broker.disk.file import PAGE
from srtm.broker.disk.rows import MAX_TOPICS, Batch, TopicState
from srtm.broker.disk.store import Store
from srtm.broker.disk.work import Answer, Append, Call, Done, LogOptions, Progress, Work
from srtm.errors import LogError, LogFull, SRTMError

if TYPE_CHECKING:
    import sqlite3

    from srtm.broker.disk.rows import Known, Retention

logger = logging.getLogger(__name__)

_LAST_SLICES = 64  # trimmed at most when closing; a later trim repeats the rest
_SLICE_WAL = 64 * PAGE  # about as much as trimming a slice writes
_REPEAT_S = 60.0  # before a problem that lasts is logged again


@dataclass(slots=True)
class _Group:
    """The appends of one commit, by topic in order of arrival."""

    by_topic: dict[str, list[Append]] = field(default_factory=dict)
    messages: int = 0
    bytes: int = 0

    def add(self, append: Append) -> None:
        self.by_topic.setdefault(append.topic, []).append(append)
        self.messages += len(append.records)
        self.bytes += append.bytes


@dataclass(slots=True)
class Counts:
    """Counters of the thread, and its last problem; other threads may read them."""

    answered: int = 0
    messages: int = 0
    commits: int = 0
    failures: int = 0
    checkpoints: int = 0
    commit_last_ns: int = 0
    checkpoint_max_ns: int = 0
    problem: str | None = None  # why the last write failed; None if it did not


@dataclass(slots=True)
class _Owed:
    """Unsaved progress of channels."""

    rows: dict[tuple[str, str], tuple[int, bytes] | None] = field(default_factory=dict)
    urgent: bool = False
    since_s: float = 0.0

    def add(self, progress: Progress) -> None:
        if not self.rows:
            self.since_s = time.monotonic()
        self.rows.update(progress.rows)
        self.urgent |= progress.urgent

    def is_due(self, save_s: float) -> bool:
        return bool(self.rows) and (self.urgent or time.monotonic() - self.since_s >= save_s)

    def forget(self, topic: str) -> None:
        self.rows = {key: row for key, row in self.rows.items() if key[0] != topic}


class Writer:
    """The work of the thread."""

    def __init__(self, store: Store, work: queue.SimpleQueue[Work], options: LogOptions, answer: Answer) -> None:
        self.topics, self._going = store.topics()
        self.counts = Counts()
        self._store = store
        self._work = work
        self._options = options
        self._answer = answer
        self._owed = _Owed()
        self._trims: dict[str, int] = {}
        self._named: list[TopicState] = []  # deleted, but still named on disk
        self._last_id = 0
        self._wal_bytes = 0
        self._quiet_until = 0.0
        self._said_s = -_REPEAT_S
        self._is_tight = not store.take_reserve(options.reserve_bytes, options.checkpoint_bytes_busy)

    def run(self) -> None:
        """Commit until None arrives in the queue."""
        options = self._options
        while (taken := self._take()) is not None:
            group = _Group()
            for work in taken:
                if isinstance(work, Append):
                    group.add(work)
                    if group.messages >= options.group_messages or group.bytes >= options.group_bytes:
                        group = self._commit(group)
                        self._housekeeping()
                elif isinstance(work, Progress):
                    self._owed.add(work)
                else:
                    group = self._commit(group)
                    self._call(work)
            self._commit(group)
            self._housekeeping()
        if self._owed.rows:
            self._commit(_Group(), always=True)
        for _ in range(_LAST_SLICES if self._trims or self._named else 0):
            self._housekeeping()

    def _take(self) -> list[Append | Call | Progress] | None:
        """Return all waiting work; wait for some, unless housekeeping is due."""
        timeout: float | None = None
        if self._trims or self._going or self._named:
            timeout = max(0.0, self._quiet_until - time.monotonic())
        elif self._owed.rows:
            timeout = self._options.save_s
        taken: list[Append | Call | Progress] = []
        try:
            work = self._work.get(timeout=timeout)
            while work is not None:
                taken.append(work)
                work = self._work.get_nowait()
        except queue.Empty:
            return taken
        if not taken:
            return None
        self._work.put(None)  # answer these first
        return taken

    def _call(self, call: Call) -> None:
        try:
            result = call.run()
        except Exception as error:
            self._failed(error)
            result = _ours(error)
        call.answer([(call.done, result)])

    def _commit(self, group: _Group, *, always: bool = False) -> _Group:
        """Make a group durable, answer it, and return an empty one."""
        if not group.messages and not always:
            return group
        began = time.perf_counter_ns()
        created: list[str] = []
        owed = self._owed.rows if always or self._owed.is_due(self._options.save_s) else {}
        try:
            if group.messages and self._is_tight:
                self._make_sure_of_room()
            batches, ends, answers = self._place(group, created)
            for (topic, _), row in owed.items():
                if row is not None:
                    self._topic(topic, created)
            if created or owed:
                with self._store.write() as db:
                    db.executemany(
                        "INSERT INTO topic VALUES (?, ?, 0, NULL, ?)",
                        [(self.topics[name].id, name, self.topics[name].log) for name in created],
                    )
                    self._write_progress(db, owed)
                    self._store.insert(batches)
            elif batches:
                self._store.append(batches)
        except Exception as error:
            self._failed(error)
            for name in created:
                del self.topics[name]
            answers = [(append.done, _ours(error)) for appends in group.by_topic.values() for append in appends]
        else:
            for state, end, total in ends:
                state.size += total - state.total
                state.total, state.end = total, end
            self._wal_bytes += 2 * PAGE * len(owed)
            owed.clear()
            self._owed.urgent &= bool(self._owed.rows)
            if group.messages:
                self.counts.problem = None
            self.counts.messages += group.messages
            self.counts.commits += 1
            self._wal_bytes += PAGE + sum(len(batch.data) + 2 * PAGE for batch in batches)
        self.counts.answered += group.messages
        self.counts.commit_last_ns = time.perf_counter_ns() - began
        if answers:
            self._answer(answers)
        return _Group()

    def _failed(self, error: Exception) -> None:
        """Count a failure, and log it from time to time; on a full disk, free the reserve for a checkpoint."""
        self.counts.failures += 1
        lasts, self.counts.problem = self.counts.problem == str(error), str(error)
        if time.monotonic() - self._said_s >= (_REPEAT_S if lasts else self._options.retry_s):
            self._said_s = time.monotonic()
            logger.warning("LOG: %s", error)
        if isinstance(error, LogFull):
            self._store.release_reserve()
            self._is_tight = True
            self._wal_bytes = max(self._wal_bytes, self._options.checkpoint_bytes_busy)

    def _make_sure_of_room(self) -> None:
        """Raise LogFull if less than the reserve is free, so that trimming and progress have the rest of the disk.

        Until the reserve is taken again, this looks before each commit at what is free on the disk and in the file.
        """
        size, store = self._options.reserve_bytes, self._store
        self._is_tight = not store.take_reserve(size, self._options.checkpoint_bytes_busy)
        if not self._is_tight:
            return
        room = store.disk_bytes() + store.free_bytes()
        if room < size <= room + store.wal_bytes():
            store.checkpoint(shrink=True)
            room = store.disk_bytes() + store.free_bytes()
        if room < size:
            raise LogFull(
                f"less than {size >> 10} KB free for {store.path}: free disk space, or retain fewer messages",
                path=str(store.path),
                free=size,
            )

    def look(self) -> None:
        """Check that the file is still there, and, after a failure, whether it can be written again."""
        self._store.check_place()
        if self.counts.problem is not None:
            if self._is_tight:
                self._make_sure_of_room()
            self._store.try_write()
            self.counts.problem = None
            logger.warning("LOG: %s can be written again", self._store.path)

    def _housekeeping(self) -> None:
        """Do work without a caller: save progress that is due, trim a slice, checkpoint."""
        try:
            limit = self._options.checkpoint_bytes if self._work.empty() else self._options.checkpoint_bytes_busy
            if self._wal_bytes >= limit:
                self._checkpoint()
            if time.monotonic() < self._quiet_until:
                return
            # Before a trim: an offset that is neither finished nor held counts as lost at the next start.
            if self._owed.is_due(self._options.save_s) or (self._owed.rows and self._trims):
                self._commit(_Group(), always=True)
            self._trim_some()
        except Exception as error:
            self._failed(error)
            self._quiet_until = time.monotonic() + self._options.retry_s

    def _checkpoint(self) -> None:
        began = time.perf_counter_ns()
        self._wal_bytes = 0
        self._store.checkpoint()
        self.counts.checkpoints += 1
        self.counts.checkpoint_max_ns = max(self.counts.checkpoint_max_ns, time.perf_counter_ns() - began)

    def _trim_some(self) -> None:
        self._unname()
        for name, before in self._trims.items():
            if self._store.trim(self.topics[name], before):
                del self._trims[name]
            self._wal_bytes += _SLICE_WAL
            return
        for state in self._going:
            if self._store.trim(state, state.end):
                self._store.forget(state)
                self._going.remove(state)
            self._wal_bytes += _SLICE_WAL
            return

    def trim(self, topic: str, before: int) -> int:
        """Trim below an offset, at once for readers and in slices on disk; return the new begin."""
        state = self.topics.get(topic)
        if state is None:
            return 0
        before = min(before, state.end)
        if before > state.begin:
            state.begin = before
            self._trims[topic] = before
        return state.begin

    def retain(self, topic: str, max_bytes: int | None, before_ns: int | None) -> int:
        """Trim by size and age, as far as one look at the oldest batches goes; return the new begin."""
        state = self.topics.get(topic)
        if state is None or topic in self._trims:
            return state.begin if state else 0
        return self.trim(topic, self._store.retained(state, max_bytes, before_ns))

    def keep(self, topic: str, retention: Retention | None) -> None:
        """Create a topic unless it exists, and set its retention."""
        created: list[str] = []
        state = self._topic(topic, created)
        try:
            self._store.keep(state, topic, retention)
        except BaseException:
            for name in created:
                del self.topics[name]
            raise
        state.retention = retention

    def delete(self, topic: str) -> None:
        """Delete a topic: its name at once and durably, its messages slice by slice.

        If the disk fails, the topic is deleted all the same, and its name is removed from the disk later.
        """
        state = self.topics.pop(topic, None)
        if state is not None:
            self._trims.pop(topic, None)
            self._owed.forget(topic)
            self._named.append(state)
            self._unname()

    def _unname(self) -> None:
        while self._named:
            self._store.unname(self._named[0])
            self._going.append(self._named.pop(0))

    def remember(self, known: dict[str, list[Known]]) -> None:
        """Save everything that is known of some topics, after all earlier deletions."""
        self._unname()
        if self._owed.urgent:
            self._commit(_Group(), always=True)
        self._store.remember(known)

    def _place(
        self, group: _Group, created: list[str]
    ) -> tuple[list[Batch], list[tuple[TopicState, int, int]], list[tuple[Done, Any]]]:
        """Return the rows of a group, the new ends of its topics, and the answers."""
        batches: list[Batch] = []
        ends: list[tuple[TopicState, int, int]] = []
        answers: list[tuple[Done, Any]] = []
        for name, appends in group.by_topic.items():
            state = self._topic(name, created)
            offset = state.end
            for append in appends:
                answers.append((append.done, offset))
                offset += len(append.records)
            records = appends[0].records
            if len(appends) > 1:
                records = [record for append in appends for record in append.records]
            offset, total = state.end, state.total
            for piece in cut(records, self._options.batch_bytes):
                data = encode(piece)
                total += len(data)
                newest = max([record.arrival_ns for record in piece])
                batches.append(Batch(state.key(offset), len(piece), newest, total, zlib.crc32(data), data))
                offset += len(piece)
            ends.append((state, offset, total))
        return batches, ends, answers

    def _topic(self, name: str, created: list[str]) -> TopicState:
        """Return a topic's state; a new topic is added to `created`, and exists once it is committed."""
        state = self.topics.get(name)
        if state is None:
            self._unname()  # a deleted topic may still have the name on disk
            used = {known.id for known in (*self.topics.values(), *self._going)}
            # Not the lowest free number: a reader may still read messages of the topic that had it.
            numbers = chain(range(self._last_id + 1, MAX_TOPICS), range(1, self._last_id + 1))
            number = next((number for number in numbers if number not in used), None)
            if number is None:
                raise LogError(f"no room for topic {name!r}: a log holds at most {MAX_TOPICS - 1} topics", topic=name)
            state = self.topics[name] = TopicState(number)
            self._last_id = number
            created.append(name)
        return state

    def _write_progress(self, db: sqlite3.Connection, owed: dict[tuple[str, str], tuple[int, bytes] | None]) -> None:
        for (topic, channel), row in owed.items():
            if row is not None:
                db.execute("INSERT OR REPLACE INTO channel VALUES (?, ?, ?, ?)", (self.topics[topic].id, channel, *row))
            elif topic in self.topics:
                db.execute("DELETE FROM channel WHERE topic = ? AND name = ?", (self.topics[topic].id, channel))


def _ours(error: Exception) -> SRTMError:
    """Return the error for waiting callers; wrap an unexpected one."""
    if isinstance(error, SRTMError):
        return error
    return LogError(f"the log failed unexpectedly: {error!r}", cause=repr(error))
