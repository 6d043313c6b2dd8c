"""The file of a broker's log: SQLite in WAL mode, one file for all topics, in a folder that one process holds.

Opens and checks it, makes and upgrades its tables, and turns SQLite's errors into ours.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

from srtm import locks
from srtm.errors import LogError, LogFull

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = "log.sqlite"
PAGE = 4096
_LOCK = "lock"
_APPLICATION = 0x5352544D  # "SRTM"
_VERSION = 4

_KNOWN = """
CREATE TABLE known (
    topic TEXT NOT NULL, channel TEXT NOT NULL, paused INTEGER NOT NULL, r_mtps INTEGER, b_ntok INTEGER,
    PRIMARY KEY (topic, channel)
) STRICT, WITHOUT ROWID;
"""
_UPGRADES = {  # from a version to the next
    1: "ALTER TABLE topic ADD COLUMN retention TEXT;",
    2: _KNOWN,
    3: "ALTER TABLE topic ADD COLUMN log TEXT; UPDATE topic SET log = lower(hex(randomblob(8)));",
}
_SCHEMA = f"""{_KNOWN}
CREATE TABLE topic (id INTEGER PRIMARY KEY, name TEXT UNIQUE, begin INTEGER NOT NULL, retention TEXT, log TEXT) STRICT;
CREATE TABLE batch (
    key INTEGER PRIMARY KEY, messages INTEGER NOT NULL, newest_ns INTEGER NOT NULL, total INTEGER NOT NULL,
    crc INTEGER NOT NULL, data BLOB NOT NULL
) STRICT;
CREATE TABLE channel (
    topic INTEGER NOT NULL, name TEXT NOT NULL, low INTEGER NOT NULL, above BLOB NOT NULL, PRIMARY KEY (topic, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE queue (topic TEXT NOT NULL, channel TEXT, crc INTEGER NOT NULL, data BLOB NOT NULL) STRICT;
"""


def connect(path: Path, lock: int) -> sqlite3.Connection:
    """Open the file for writing, with its tables; LogError if it is missing, damaged, or not ours."""
    held = _was_held(path, lock)
    with errors(path, "open"):
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1)
        try:
            _prepare(db, path, held=held)
        except BaseException:
            db.close()
            raise
    locks.sign(lock, f"holds {FILE}")
    return db


def _was_held(path: Path, lock: int) -> bool:
    """Whether the folder held a log before; LogError if its file has gone since."""
    try:
        held = os.pread(lock, 5, 0) == b"holds"
        wal = path.with_name(FILE + "-wal")
        is_empty = not path.exists() or not path.stat().st_size
        if is_empty and (held or (wal.exists() and wal.stat().st_size)):
            raise _missing(path)
    except OSError as error:
        raise LogError(f"cannot read {path.parent}: {error.strerror}", path=str(path.parent)) from None
    return held


def _missing(path: Path) -> LogError:
    return LogError(
        f"{path} is missing or empty, but {path.parent} held a log: restore the file from a copy, or remove"
        f" the folder to start without its messages",
        path=str(path),
    )


def _prepare(db: sqlite3.Connection, path: Path, *, held: bool) -> None:
    run = db.execute
    run(f"PRAGMA page_size = {PAGE}")
    run("PRAGMA secure_delete = OFF")
    if run("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise LogError(f"{path}: this file system cannot hold a write-ahead log", path=str(path))
    run("PRAGMA synchronous = FULL")  # fsync at every commit; NORMAL would lose the newest at a power failure
    run("PRAGMA fullfsync = ON")  # macOS, where a plain fsync stops at the drive's cache
    run("PRAGMA wal_autocheckpoint = 0")
    run("PRAGMA journal_size_limit = 67108864")
    run("PRAGMA cache_size = -8192")
    if not run("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        if held:
            raise _missing(path)
        db.executescript(
            f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION}; COMMIT"
        )
        _sync_folder(path.parent)
    application, version = (run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    while application == _APPLICATION and version in _UPGRADES:
        db.executescript(f"BEGIN; {_UPGRADES[version]} PRAGMA user_version = {version + 1}; COMMIT")
        version += 1
    if (application, version) != (_APPLICATION, _VERSION):
        raise LogError(
            f"{path} is not a log of this version of SRTM (application {application:#x}, version {version}):"
            f" start the broker on another folder",
            path=str(path),
        )
    run("BEGIN IMMEDIATE")
    run(f"PRAGMA user_version = {_VERSION}")  # SQLite opens a file that may not be written, and says so only here
    run("ROLLBACK")


@contextmanager
def errors(path: Path, doing: str) -> Iterator[None]:
    """Raise SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise _ours(path, doing, error) from None


def place(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one at its path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def vanished(path: Path) -> LogError:
    """Return the error of a file that is no longer where it was opened: what is written would be lost with it."""
    return LogError(
        f"{path} was removed, moved or replaced while the broker uses it: put it back, or stop the broker, restore"
        f" {path.parent} from a copy, and start it again",
        path=str(path),
    )


def lock(folder: Path) -> int:
    """Make the folder, and hold it for this process until the descriptor is closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)
        held = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LogError(
            f"cannot use {folder} for the log: {error.strerror}; name a folder that this user may write to",
            path=str(folder),
        ) from None
    if holder := locks.other_holder(held):
        os.close(held)
        raise LogError(
            f"{folder} is in use by {holder}: give each broker a folder of its own", path=str(folder), holder=holder
        )
    return held


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damaged(path: Path, what: str) -> LogError:
    """Return the error of a file whose content has changed."""
    return LogError(
        f"{path} is damaged ({what}): restore it from a copy, or save what is left with"
        f" `sqlite3 {path} .recover`; nothing was changed",
        path=str(path),
    )


def _ours(path: Path, doing: str, error: sqlite3.Error) -> LogError:
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    facts = {"path": str(path), "sqlite": getattr(error, "sqlite_errorname", type(error).__name__)}
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(path.parent)):
        return LogFull(f"no room to {doing} {path}: free some of the disk, or keep fewer messages", **facts)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(path, str(error))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LogError(f"cannot {doing} {path}: another program holds it; close that program", **facts)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return LogError(f"cannot {doing} {path}: {error}; let this user write to the folder", **facts)
    return LogError(f"cannot {doing} {path}: {error} ({facts['sqlite']}); see the system's log of disk errors", **facts)


def _is_full(folder: Path) -> bool:
    """Whether a failure without a better reason comes from a full disk."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < 64 << 10
