"""A store in a SQLite file, for one controller: it leads for as long as it holds the lock of the folder.

In: documents, each change committed (and synced to disk) before `write` returns. Out: the same documents at the next
start. SQLite makes sure that the file is never half written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

from srtm import locks
from srtm.control.keeping import tables
from srtm.control.keeping.keeper import TOKENS, key
from srtm.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.control.keeping.keeper import Keeper, Leader

FILE = "controller.sqlite"
_LOCK = "lock"
_GUARDED = "closed"  # a file that says that there are tokens, in case the store is lost
_FORMAT = 3
_LAST = "\U0010ffff"  # sorts after every key
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS documents (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""


class SqliteKeeper:
    """A store in a folder, or in memory."""

    leads = True
    shared = False

    def __init__(self, folder: str | Path | None = None, *, anew: bool = False) -> None:
        """Open the store; `anew` starts an empty one and keeps the old file beside it."""
        self.path = Path(folder) / FILE if folder is not None else None
        self._lock = _locked(self.path) if self.path is not None else None
        self._guarded = self.path is not None and self.path.with_name(_GUARDED).exists()
        tokens = _tokens(self.path) if anew and self.path is not None else {}
        self.aside = _set_aside(self.path) if anew and self.path is not None else None
        try:
            self._open()
            self.write(tokens)
        except BaseException:
            self._unlock()
            raise

    @property
    def place(self) -> str:
        """The address of the store."""
        return f"sqlite:{self.path}" if self.path is not None else "memory"

    @property
    def lasting(self) -> bool:
        """Whether it is a file."""
        return self.path is not None

    @property
    def guarded(self) -> bool:
        """Whether the folder says that there are tokens."""
        return self._guarded

    @guarded.setter
    def guarded(self, on: bool) -> None:
        if self.path is None or on == self._guarded:
            return
        if on:
            self.path.with_name(_GUARDED).touch(mode=0o600)
        else:
            self.path.with_name(_GUARDED).unlink(missing_ok=True)
        self._guarded = on

    def _open(self) -> None:
        if self.path is not None and self.path.exists() and not self.path.stat().st_size:
            raise ControlError(  # SQLite would take it for a new store, and free every topic
                f"{self.path} is empty; start with --recover to rebuild it from what brokers report, or remove the"
                " file to start without contracts",
                path=str(self.path),
            )
        try:
            self._db = sqlite3.connect(self.path or ":memory:", isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            found = self._db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
            if self.path is not None and self._db.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("its pages are inconsistent")
        except (sqlite3.Error, OSError) as problem:
            raise ControlError(
                f"cannot use {self.path}: {problem}; start with --recover to set it aside and rebuild it from what"
                " brokers report",
                path=str(self.path),
            ) from None
        if found and found[0] not in (*tables.FORMATS, _FORMAT):
            raise ControlError(
                f"{self.path} has format {found[0]}, but this version of SRTM reads format {_FORMAT}; run the version"
                " that wrote it"
            )
        self._db.execute("BEGIN")
        if found and found[0] in tables.FORMATS:
            self._put(tables.documents(self._db, found[0]))
            tables.drop(self._db)
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('version', ?)", (_FORMAT,))
        self._db.execute("COMMIT")

    def read(self, prefix: str = "") -> dict[str, bytes]:
        """All documents whose keys begin with `prefix`."""
        found = self._db.execute(
            "SELECT key, value FROM documents WHERE key >= ? AND key < ?", (prefix, prefix + _LAST)
        )
        return dict(found.fetchall())

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Store these documents at once; None deletes one."""
        self._db.execute("BEGIN")
        try:
            self._put(changes)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _put(self, changes: Mapping[str, bytes | None]) -> None:
        kept = [(key, value) for key, value in changes.items() if value is not None]
        self._db.executemany("INSERT OR REPLACE INTO documents VALUES (?, ?)", kept)
        gone = [(key,) for key, value in changes.items() if value is None]
        self._db.executemany("DELETE FROM documents WHERE key = ?", gone)

    async def committed(self) -> None:
        """Return: every write was committed."""

    async def confirm(self) -> None:
        """Return: the lock is ours."""

    async def lost(self) -> None:
        """Never return: the lock is ours."""
        await asyncio.Event().wait()

    async def release(self) -> None:
        """Close the file and release its lock."""
        self.close()

    def close(self) -> None:
        """Close the file and release its lock."""
        self._db.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class SqliteKeeping:
    """A folder with a store, or none: then the store is in memory."""

    shared = False

    def __init__(self, folder: str | Path | None, *, anew: bool = False) -> None:
        self.leader: Leader | None = None
        self._folder = folder
        self._anew = anew

    async def lead(self, me: Leader) -> Keeper:
        """Open the store; ControlError if another process has it."""
        keeper = SqliteKeeper(self._folder, anew=self._anew)
        if keeper.aside is not None:
            print(f"controller: the old store is now {keeper.aside}", flush=True)
        self.leader = me
        return keeper

    async def close(self) -> None:
        """Nothing is open."""


def _tokens(path: Path) -> dict[str, bytes]:
    """The tokens of a store that is set aside; none if they cannot be read: then its folder says that there were."""
    try:
        return {name: value for name, value in snapshot(path.parent).items() if name.startswith(key(TOKENS, ""))}
    except ControlError:
        return {}


def snapshot(folder: str | Path) -> dict[str, bytes]:
    """All documents of the store in a folder, which a controller may be using; ControlError if there is none."""
    path = Path(folder) / FILE
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            copy = sqlite3.connect(":memory:", isolation_level=None)
            db.backup(copy)
        with contextlib.closing(copy):
            (version,) = copy.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
            if version in tables.FORMATS:
                return {name: kept for name, kept in tables.documents(copy, version).items() if kept is not None}
            return dict(copy.execute("SELECT key, value FROM documents").fetchall())
    except (sqlite3.Error, TypeError) as problem:
        raise ControlError(f"cannot read a store in {path}: {problem}; give the folder of a controller") from None


def _set_aside(path: Path) -> Path | None:
    """Rename a store out of the way; returns its new path."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{FILE}.{number}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(FILE + suffix).unlink(missing_ok=True)
    return aside


def _locked(path: Path) -> int:
    """Create the folder of a store, and lock it for this process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as problem:
        raise ControlError(
            f"cannot use {path.parent}: {problem.strerror}; choose a folder that this user can write to", path=str(path)
        ) from None
    if holder := locks.other_holder(lock):
        os.close(lock)
        raise ControlError(f"{path} is in use by {holder}; give each controller a folder of its own", path=str(path))
    locks.sign(lock, f"holds {FILE}")
    return lock
