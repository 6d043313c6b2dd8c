"""The controller's store: topics with their contracts and shares, publishers with their places, brokers.

In: changes, each committed (and synced to disk) before the call returns. Out: everything, at the next start. SQLite
makes sure that the file is never half written. The shares in the store are the most that brokers may have in force.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from srtm import locks
from srtm.control.access.token import Role, Token
from srtm.control.members import DeclaredPublisher, Member
from srtm.control.placing import fitted as fittings
from srtm.control.placing.layout import Places
from srtm.control.topic import ManagedTopic
from srtm.errors import ControlError
from srtm.model.bucket import TokenBucket
from srtm.model.split import within
from srtm.model.transfer import Remains, Transfer, scaled
from srtm.protocol.exchange import Contract

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_VERSION = 2
_FILE = "controller.sqlite"
_LOCK = "lock"
_CLOSED = "closed"  # a file that says that there are tokens, in case the store is lost
_AUDITED = 1_000  # actions kept in the audit log
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS members (
    name TEXT PRIMARY KEY, host TEXT NOT NULL, tcp_port INTEGER NOT NULL, http_port INTEGER NOT NULL,
    incarnation INTEGER NOT NULL, draining INTEGER NOT NULL, dead INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS topics (
    name TEXT PRIMARY KEY, contract TEXT NOT NULL, pool_ntok INTEGER NOT NULL, shares TEXT NOT NULL,
    opened INTEGER NOT NULL, fitted TEXT, birth INTEGER NOT NULL DEFAULT 0, former TEXT NOT NULL DEFAULT '{}'
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS remains (topic TEXT PRIMARY KEY, shares TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS publishers (
    topic TEXT NOT NULL, id TEXT NOT NULL, declared TEXT NOT NULL, broker TEXT, settled INTEGER NOT NULL,
    PRIMARY KEY (topic, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS paused (topic TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY, id TEXT NOT NULL, role TEXT NOT NULL, digest BLOB NOT NULL, created_ns INTEGER NOT NULL,
    expires_ns INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at_ns INTEGER NOT NULL, who TEXT NOT NULL, action TEXT NOT NULL,
    arguments TEXT NOT NULL
);
"""


_FROM_1 = """
ALTER TABLE members ADD COLUMN dead INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics DROP COLUMN sequence;
ALTER TABLE topics ADD COLUMN birth INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics ADD COLUMN former TEXT NOT NULL DEFAULT '{}';
"""


class Store:
    """What survives the controller."""

    def __init__(self, folder: str | Path | None = None, *, anew: bool = False) -> None:
        """Open the store in a folder, or one in memory; `anew` starts an empty one and keeps the old file beside it."""
        self.path = Path(folder) / _FILE if folder is not None else None
        self._lock = _locked(self.path) if self.path is not None else None
        # Whether it has tokens, or had some when it was lost.
        self.closed = self.path is not None and self.path.with_name(_CLOSED).exists()
        salvaged = _tokens_in(self.path) if anew and self.path is not None else []
        self.aside = _set_aside(self.path) if anew and self.path is not None else None
        try:
            self._open()
            for token in salvaged:
                self.save_token(token)
        except BaseException:
            self._unlock()
            raise

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
        if found and found[0] == 1:
            self._db.executescript(_FROM_1)
        elif found and found[0] != _VERSION:
            raise ControlError(
                f"{self.path} has format {found[0]}, but this version of SRTM reads format {_VERSION}; run the version"
                " that wrote it"
            )
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('version', ?)", (_VERSION,))

    def close(self) -> None:
        """Close the file and release its lock."""
        self._db.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def next_epoch(self, first: int = 1) -> int:
        """The epoch of this start: larger than any before, and at least `first`."""
        return self._next("epoch", first)

    def next_birth(self, first: int = 1) -> int:
        """The birth of a new contract: larger than any before, and at least `first`."""
        return self._next("birth", first)

    def _next(self, key: str, first: int) -> int:
        found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        number = max(first, int(found[0]) + 1 if found else 1)
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, number))
        return number

    def save_member(self, member: Member) -> None:
        """Save a broker."""
        where = (member.name, member.host, member.tcp_port, member.http_port)
        row = (*where, member.incarnation, member.draining, member.status == "dead")
        self._db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def delete_member(self, name: str) -> None:
        """Delete a broker."""
        self._db.execute("DELETE FROM members WHERE name = ?", (name,))

    def members(self, mcap_mps: float) -> list[Member]:
        """All brokers."""
        rows = self._db.execute(
            "SELECT name, host, tcp_port, http_port, incarnation, draining, dead FROM members"
        ).fetchall()
        return [
            Member(
                name,
                host,
                tcp_port,
                http_port,
                mcap_mps,
                status="dead" if dead else "silent",
                incarnation=incarnation,
                draining=bool(draining),
            )
            for name, host, tcp_port, http_port, incarnation, draining, dead in rows
        ]

    def save_topic(self, topic: ManagedTopic) -> None:
        """Save a topic's contract, and the most that brokers may have in force."""
        self._db.execute("BEGIN")
        self._db.execute(
            "INSERT OR REPLACE INTO topics (name, contract, pool_ntok, shares, opened, fitted, birth, former)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                topic.name,
                _text(topic.contract),
                topic.transfer.pool_ntok,
                _shares_text(topic.transfer.booked),
                topic.opened,
                json.dumps(fittings.described(topic.fitting.last)) if topic.fitting.last else None,
                topic.birth,
                _shares_text(topic.transfer.former.shares),
            ),
        )
        self._db.execute("DELETE FROM remains WHERE topic = ?", (topic.name,))
        self._db.execute("DELETE FROM paused WHERE topic = ?", (topic.name,))
        if topic.paused:
            self._db.execute("INSERT INTO paused VALUES (?)", (topic.name,))
        self._db.execute("COMMIT")

    def delete_topic(self, name: str, remains: Remains) -> None:
        """Delete a topic, and save `remains`: what brokers may have in force until they know."""
        self._db.execute("BEGIN")
        row = (name, _shares_text(remains.shares))
        self._db.execute("INSERT OR REPLACE INTO remains VALUES (?, ?)", row)
        self._db.execute("DELETE FROM paused WHERE topic = ?", (name,))
        self._db.execute("DELETE FROM topics WHERE name = ?", (name,))
        self._db.execute("DELETE FROM publishers WHERE topic = ?", (name,))
        self._db.execute("COMMIT")

    def delete_remains(self, name: str) -> None:
        """Delete what was kept of a contract that is over: every broker knows."""
        self._db.execute("DELETE FROM remains WHERE topic = ?", (name,))

    def remains(self) -> dict[str, Remains]:
        """What brokers may have in force of contracts that are over, by topic."""
        rows = self._db.execute("SELECT topic, shares FROM remains").fetchall()
        found = {topic: _shares(shares) for topic, shares in rows}
        return {topic: Remains(shares, doubtful=frozenset(shares)) for topic, shares in found.items()}

    def topics(self, numbers: Iterator[int] | None = None) -> list[ManagedTopic]:
        """All topics with their publishers; `numbers` numbers the grants of all of them."""
        publishers: defaultdict[str, list[tuple[DeclaredPublisher, str | None, bool]]] = defaultdict(list)
        for topic, _, declared, broker, settled in self._db.execute("SELECT * FROM publishers"):
            publishers[topic].append((DeclaredPublisher(**json.loads(declared)), broker, bool(settled)))
        paused = {topic for (topic,) in self._db.execute("SELECT topic FROM paused")}
        found = []
        rows = self._db.execute("SELECT name, contract, pool_ntok, shares, former, opened, fitted, birth FROM topics")
        for name, contract, pool_ntok, shares, former, opened, fitted, birth in rows.fetchall():
            promised = msgspec.json.decode(contract, type=Contract)
            held = _shares(shares)
            whole = promised.bucket  # may be less than is held, if the contract was just changed
            wanted = held if within(whole, held.values()) else scaled(whole, held)
            remains = Remains(_shares(former))
            transfer = Transfer(whole, held, wanted, numbers=numbers, pool_ntok=pool_ntok, remains=remains, kept=True)
            topic = ManagedTopic(name, promised, birth, transfer, 1, bool(opened), paused=name in paused)
            topic.sharing.stale = False
            topic.layout.publishers = {each.id: each for each, _, _ in publishers[name]}
            places = {each.id: broker for each, broker, _ in publishers[name] if broker is not None}
            topic.layout.place = Places(name, places)
            topic.fitting.settled = frozenset(each.id for each, _, settled in publishers[name] if settled)
            topic.fitting.last = fittings.read(json.loads(fitted)) if fitted else None
            found.append(topic)
        return found

    def save_publishers(self, topic: ManagedTopic, ids: Iterable[str]) -> None:
        """Save publishers of a topic with their places."""
        layout, settled = topic.layout, topic.fitting.settled
        rows = [
            (topic.name, name, _text(layout.publishers[name]), layout.place.get(name), name in settled)
            for name in ids
            if name in layout.publishers
        ]
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO publishers VALUES (?, ?, ?, ?, ?)", rows)
        self._db.execute("COMMIT")

    def delete_publisher(self, topic: ManagedTopic, publisher: str) -> None:
        """Delete a publisher."""
        self._db.execute("DELETE FROM publishers WHERE topic = ? AND id = ?", (topic.name, publisher))

    @property
    def lasting(self) -> bool:
        """Whether a restarted controller finds what it keeps."""
        return self.path is not None

    def save_token(self, token: Token) -> None:
        """Save a token, without its secret."""
        if self.path is not None:
            self.path.with_name(_CLOSED).touch(mode=0o600)
            self.closed = True
        row = (token.name, token.id, token.role.value, token.digest, token.created_ns, token.expires_ns)
        self._db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, ?)", row)

    def delete_token(self, name: str) -> None:
        """Delete a token."""
        self._db.execute("DELETE FROM tokens WHERE name = ?", (name,))
        if self.path is not None and not self.tokens():
            self.path.with_name(_CLOSED).unlink(missing_ok=True)
            self.closed = False

    def tokens(self) -> list[Token]:
        """All tokens."""
        return _tokens(self._db)

    def note_action(self, at_ns: int, who: str, action: str, arguments: dict[str, Any]) -> None:
        """Add an action to the audit log, which keeps the last thousand."""
        self._db.execute("BEGIN")
        made = self._db.execute(
            "INSERT INTO audit (at_ns, who, action, arguments) VALUES (?, ?, ?, ?)",
            (at_ns, who, action, json.dumps(arguments)),
        )
        self._db.execute("DELETE FROM audit WHERE number <= ?", ((made.lastrowid or 0) - _AUDITED,))
        self._db.execute("COMMIT")

    def actions(self) -> list[tuple[int, str, str, dict[str, Any]]]:
        """The audit log, newest first: time, address, action, arguments."""
        rows = self._db.execute("SELECT at_ns, who, action, arguments FROM audit ORDER BY number DESC")
        return [(at_ns, who, action, json.loads(arguments)) for at_ns, who, action, arguments in rows]


def _tokens(db: sqlite3.Connection) -> list[Token]:
    rows = db.execute("SELECT name, id, role, digest, created_ns, expires_ns FROM tokens").fetchall()
    return [Token(name, number, Role(role), digest, *times) for name, number, role, digest, *times in rows]


def _tokens_in(path: Path) -> list[Token]:
    """The tokens of a store that is set aside; none if they cannot be read: then its folder says that there were."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return _tokens(db)
    except (sqlite3.Error, ValueError):
        return []


def _set_aside(path: Path) -> Path | None:
    """Rename a store out of the way; returns its new path."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{_FILE}.{number}")).exists():
        number += 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(_FILE + suffix).unlink(missing_ok=True)
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
    locks.sign(lock, f"holds {_FILE}")
    return lock


def _shares_text(shares: Mapping[str, TokenBucket]) -> str:
    return json.dumps({name: [share.r_mtps, share.b_ntok] for name, share in shares.items()})


def _shares(text: str) -> dict[str, TokenBucket]:
    return {broker: TokenBucket(*share) for broker, share in json.loads(text).items()}


def _text(kept: Contract | DeclaredPublisher) -> str:
    return msgspec.json.encode(kept).decode()
