"""SQL statements of a broker's log: batches, cursors, queues, and facts about topics.

In: rows (`rows`). Out: the same rows after any crash. A transaction is durable once `write` returns.

| table     | a row                                                                                             |
|-----------|---------------------------------------------------------------------------------------------------|
| `topic`   | id, name (null while it is being deleted), begin: the oldest offset kept, retention or null,       |
|           | log: a random id, which distinguishes this log from an earlier one of the same name                |
| `batch`   | key = topic id · 2^48 + first offset, messages, newest arrival, bytes of the topic up to here, CRC |
| `channel` | the progress of one channel (`cursor.py`)                                                          |
| `queue`   | messages of a memory topic or channel, saved at a graceful stop                                    |
| `known`   | a topic, or with a name a channel of it, on disk or not: paused, (r, b) set by hand                |

One connection writes and checkpoints, and one thread uses it: SQLite before 3.51.3 may corrupt a file when one
connection checkpoints while another writes. Readers have connections of their own and see only what is durable.
See docs/adr/0010-durable-log.md.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from srtm.broker.disk.batch import Piece, Record, decode, piece
from srtm.broker.disk.file import FILE, PAGE, connect, damaged, errors, lock, place, vanished
from srtm.broker.disk.rows import OFFSET_BITS, Batch, Known, Retention, SavedCursor, TopicState
from srtm.errors import OffsetTrimmed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

RESERVE = "reserve"
_ROWS = 64  # batches per INSERT: each statement releases the interpreter lock, and usually one is enough
_SLICE_ROWS = 256
_SLICE_BYTES = 4 << 20
_RETAINED_ROWS = 16_384  # checked once a second: more than one second commits

_COLUMNS = "key, messages, newest_ns, total, crc, data"


class Store:
    """The open file, its lock, and its connections."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._lock = lock(folder)
        self._readers: list[tuple[sqlite3.Connection, threading.Lock]] = []  # each locked while it reads
        self._reader = threading.local()
        self._wal = self.path.with_name(FILE + "-wal")
        try:
            self._db = connect(self.path, self._lock)
            self._places = {path: place(path) for path in (self.path, self._wal)}
        except BaseException:
            os.close(self._lock)
            raise

    @contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Raise SQLite's errors as ours."""
        with errors(self.path, doing):
            yield

    def check_place(self) -> None:
        """Raise LogError if the file, or its write-ahead log, is no longer where it was opened."""
        for path, known in self._places.items():
            if place(path) != known:
                raise vanished(path)

    def try_write(self) -> None:
        """Write a little; LogError if that fails."""
        with self.write() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            db.execute(f"PRAGMA user_version = {version}")

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: durable on return, rolled back on error."""
        self.check_place()
        with self.errors("write"):
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def append(self, batches: Sequence[Batch]) -> None:
        """Make batches durable, usually by one statement, which is its own transaction."""
        if len(batches) <= _ROWS:
            self.check_place()
            with self.errors("write"):
                self._db.execute(*_insert(batches))
        else:
            with self.write():
                self.insert(batches)

    def insert(self, batches: Sequence[Batch]) -> None:
        """Add batches to the current transaction."""
        for at in range(0, len(batches), _ROWS):
            self._db.execute(*_insert(batches[at : at + _ROWS]))

    def topics(self) -> tuple[dict[str, TopicState], list[TopicState]]:
        """Return the saved topics, and those whose deletion is unfinished."""
        known, going = {}, []
        with self.errors("read"):
            rows = self._db.execute("SELECT id, name, begin, retention, log FROM topic").fetchall()
            for number, name, begin, retention, log in rows:
                state = TopicState(number, begin, begin, log=log)
                state.retention = Retention(**json.loads(retention)) if retention else None
                self._measure(state)
                if name is None:
                    going.append(state)
                else:
                    known[name] = state
        return known, going

    def _measure(self, state: TopicState) -> None:
        where = "FROM batch WHERE key >= ? AND key < ? ORDER BY key"
        first = self._db.execute(f"SELECT key, total, length(data) {where} LIMIT 1", state.keys).fetchone()
        if first is not None:
            last = Batch(*self._db.execute(f"SELECT {_COLUMNS} {where} DESC LIMIT 1", state.keys).fetchone())
            verify(self.path, last)
            state.begin = max(state.begin, first[0] - state.keys[0])
            state.end = last.key - state.keys[0] + last.messages
            state.total = last.total
            state.size = last.total - first[1] + first[2]

    def channels(self) -> list[SavedCursor]:
        """Return the saved progress of every channel."""
        find = (
            "SELECT t.name, c.name, c.low, c.above FROM channel c JOIN topic t ON t.id = c.topic WHERE t.name NOTNULL"
        )
        with self.errors("read"):
            return [SavedCursor(*row) for row in self._db.execute(find)]

    def read(self, state: TopicState, begin: int, limit: int, max_bytes: int) -> list[Record]:
        """Return messages from `begin` on: at most `limit`, at most `max_bytes` of bodies but at least one."""
        stop = min(begin + limit, state.end)
        records: list[Record] = []
        with self._batches(state, begin, stop) as batches:
            for batch in batches:
                at = begin + len(records)
                skipped = at - (batch.key - state.keys[0])
                if not 0 <= skipped < batch.messages:
                    break
                for record in decode(batch.data, skipped, skipped + stop - at):
                    max_bytes -= len(record.body)
                    if max_bytes < 0 and records:
                        return records
                    records.append(record)
        _check_found(records, state, begin, stop)
        return records

    def pieces(self, state: TopicState, begin: int, limit: int, max_bytes: int) -> list[Piece]:
        """Return the messages of `read` as columns."""
        stop, at = min(begin + limit, state.end), begin
        found: list[Piece] = []
        with self._batches(state, begin, stop) as batches:
            for batch in batches:
                skipped = at - (batch.key - state.keys[0])
                if not 0 <= skipped < batch.messages:
                    break
                some = piece(batch.data, skipped, skipped + stop - at, max_bytes, at_least=0 if found else 1)
                found.append(some)
                at += some.messages
                max_bytes -= len(some.bodies)
                if skipped + some.messages < batch.messages:
                    break
        _check_found(found, state, begin, stop)
        return found

    @contextmanager
    def _batches(self, state: TopicState, begin: int, stop: int) -> Iterator[Iterator[Batch]]:
        """Batches from the one that holds `begin` on, if it is still there, verified as they are read."""
        find = (
            f"SELECT {_COLUMNS} FROM batch"
            " WHERE key >= (SELECT max(key) FROM batch WHERE key <= ?) AND key < ? ORDER BY key"
        )
        with self.errors("read"):
            db, reading = self._connection()
        with reading, self.errors("read"):
            rows = db.execute(find, (state.key(begin), state.key(stop)))
            try:
                yield (verify(self.path, Batch(*row)) for row in rows)
            finally:
                rows.close()

    def _connection(self) -> tuple[sqlite3.Connection, threading.Lock]:
        found: tuple[sqlite3.Connection, threading.Lock] | None = getattr(self._reader, "found", None)
        if found is None:
            uri = f"{self.path.absolute().as_uri()}?mode=ro"
            db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=1)
            found = self._reader.found = db, threading.Lock()
            self._readers.append(found)
        return found

    def trim(self, state: TopicState, begin: int) -> bool:
        """Delete a slice of what lies below `begin`; return whether nothing is left there."""
        low = state.keys[0]
        with self.write() as db:
            rows = db.execute(
                "SELECT key + messages, length(data) FROM batch WHERE key >= ? AND key < ? AND key + messages <= ?"
                " ORDER BY key LIMIT ?",
                (low, state.key(begin), state.key(begin), _SLICE_ROWS),
            ).fetchall()
            taken = freed = 0
            for _, size in rows:
                taken += 1
                freed += size
                if freed >= _SLICE_BYTES:
                    break
            done = taken == len(rows) < _SLICE_ROWS
            kept = begin if done else rows[taken - 1][0] - low
            if taken:
                db.execute("DELETE FROM batch WHERE key >= ? AND key < ?", (low, rows[taken - 1][0]))
            db.execute("UPDATE topic SET begin = max(begin, ?) WHERE id = ?", (kept, state.id))
        state.size -= freed
        return done

    def retained(self, state: TopicState, max_bytes: int | None, before_ns: int | None) -> int:
        """Return the begin that keeps at most `max_bytes`, and no batch older than `before_ns`."""
        begin, held = state.begin, state.size
        with self.errors("read"):
            rows = self._db.execute(
                "SELECT key + messages, newest_ns, length(data) FROM batch WHERE key >= ? AND key < ? ORDER BY key"
                " LIMIT ?",
                (*state.keys, _RETAINED_ROWS),
            ).fetchall()
        for after, newest_ns, size in rows:
            over = max_bytes is not None and held > max_bytes
            if not over and (before_ns is None or newest_ns >= before_ns):
                break
            begin, held = max(begin, after - state.keys[0]), held - size
        return begin

    def keep(self, state: TopicState, name: str, retention: Retention | None) -> None:
        """Save a topic, perhaps a new one, and its retention."""
        text = None if retention is None else json.dumps(asdict(retention))
        with self.write() as db:
            db.execute(
                "INSERT INTO topic VALUES (?, ?, 0, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET retention = excluded.retention",
                (state.id, name, text, state.log),
            )

    def unname(self, state: TopicState) -> None:
        """Delete a topic's name, channels and facts; its messages remain, to be trimmed."""
        with self.write() as db:
            db.execute("DELETE FROM known WHERE topic = (SELECT name FROM topic WHERE id = ?)", (state.id,))
            db.execute("UPDATE topic SET name = NULL WHERE id = ?", (state.id,))
            db.execute("DELETE FROM channel WHERE topic = ?", (state.id,))

    def forget(self, state: TopicState) -> None:
        """Delete a topic without messages."""
        with self.write() as db:
            db.execute("DELETE FROM topic WHERE id = ?", (state.id,))

    def remember(self, known: dict[str, list[Known]]) -> None:
        """Save everything that is known of some topics; an empty list deletes it."""
        with self.write() as db:
            db.executemany("DELETE FROM known WHERE topic = ?", [(topic,) for topic in known])
            rows = [(topic, *row) for topic, rows in known.items() for row in rows]
            db.executemany("INSERT INTO known VALUES (?, ?, ?, ?, ?)", rows)

    def known(self) -> dict[str, list[Known]]:
        """Return everything that `remember` saved, of each topic itself first."""
        found: dict[str, list[Known]] = {}
        with self.errors("read"):
            for topic, channel, paused, r_mtps, b_ntok in self._db.execute("SELECT * FROM known ORDER BY 1, 2"):
                found.setdefault(topic, []).append(Known(channel, bool(paused), r_mtps, b_ntok))
        return found

    def save_queues(self, queues: Iterable[tuple[str, str | None, bytes]]) -> None:
        """Save the messages of queues, in order, in place of those saved before."""
        with self.write() as db:
            db.execute("DELETE FROM queue")
            rows = ((topic, channel, zlib.crc32(data), data) for topic, channel, data in queues)
            db.executemany("INSERT INTO queue VALUES (?, ?, ?, ?)", rows)

    def load_queues(self) -> list[tuple[int, str, str | None, bytes]]:
        """Return everything that `save_queues` saved, in order, each with its number."""
        with self.errors("read"):
            rows = self._db.execute("SELECT rowid, topic, channel, crc, data FROM queue ORDER BY rowid").fetchall()
        for _, topic, _, crc, data in rows:
            if zlib.crc32(data) != crc:
                raise damaged(self.path, f"the saved messages of memory topic {topic!r} are corrupt")
        return [(number, topic, channel, data) for number, topic, channel, _, data in rows]

    def drop_queues(self, numbers: Sequence[int]) -> None:
        """Delete pieces of saved queues."""
        with self.write() as db:
            db.executemany("DELETE FROM queue WHERE rowid = ?", [(number,) for number in numbers])

    def take_reserve(self, size: int, spare: int) -> bool:
        """Reserve disk space for a checkpoint on a full disk, if as much as `spare` is left; return whether it did."""
        path = self.folder / RESERVE
        try:
            if path.exists() and path.stat().st_size >= size:
                return True
            if self.disk_bytes() < size + spare:  # the next commit would fail
                return False
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError:
            self.release_reserve()
            return False
        return True

    def release_reserve(self) -> None:
        """Free the reserved disk space."""
        with suppress(OSError):
            (self.folder / RESERVE).unlink(missing_ok=True)

    def disk_bytes(self) -> int:
        """Return the free space of the disk."""
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    def free_bytes(self) -> int:
        """Return the space inside the file that trimming has freed."""
        with self.errors("read"):
            pages: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        return pages * PAGE

    def wal_bytes(self) -> int:
        """Return the size of the write-ahead log's file, which is overwritten after a checkpoint."""
        try:
            return self._wal.stat().st_size
        except OSError:
            return 0

    def checkpoint(self, *, shrink: bool = False) -> None:
        """Move the contents of the write-ahead log into the file; to `shrink` it gives its space back to the disk."""
        with self.errors("write"):
            self._db.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if shrink else 'PASSIVE'})").fetchone()

    def check(self) -> None:
        """Read everything; raise LogError if something is damaged."""
        with self.errors("read"):
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise damaged(self.path, found)
            find = f"SELECT {_COLUMNS} FROM batch"
            for row in self._db.execute(find):
                verify(self.path, Batch(*row))

    def close(self) -> None:
        """Close the readers, then the writer: the last to close runs a checkpoint."""
        for reader, reading in self._readers:
            with reading:  # a thread may still be reading
                reader.close()
        try:
            with self.errors("close"):
                self._db.close()
        finally:
            os.close(self._lock)


def verify(path: Path, batch: Batch) -> Batch:
    """Return a batch; raise LogError if it differs from what was written."""
    if zlib.crc32(batch.data) != batch.crc:
        offset = batch.key & ((1 << OFFSET_BITS) - 1)
        raise damaged(path, f"the messages at offset {offset} of topic number {batch.key >> OFFSET_BITS} are corrupt")
    return batch


def _check_found(found: Sequence[object], state: TopicState, begin: int, stop: int) -> None:
    """Raise OffsetTrimmed if messages were trimmed since the caller looked."""
    if not found and begin < stop:
        raise OffsetTrimmed(f"offset {begin} was trimmed", offset=begin, begin=state.begin)


def _insert(batches: Sequence[Batch]) -> tuple[str, list[Any]]:
    values = ", ".join(["(?, ?, ?, ?, ?, ?)"] * len(batches))
    return f"INSERT INTO batch VALUES {values}", [value for batch in batches for value in batch]
