"""Stores of formats 1 and 2, which had a table for each kind of thing: their rows as documents."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from srtm.control.keeping.keeper import key

if TYPE_CHECKING:
    import sqlite3

FORMATS = (1, 2)
_TABLES = ("members", "topics", "remains", "publishers", "paused", "audit")
_SINCE_2 = """
ALTER TABLE members ADD COLUMN dead INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics DROP COLUMN sequence;
ALTER TABLE topics ADD COLUMN birth INTEGER NOT NULL DEFAULT 0;
ALTER TABLE topics ADD COLUMN former TEXT NOT NULL DEFAULT '{}';
"""
_ADDED = """
CREATE TABLE IF NOT EXISTS remains (topic TEXT PRIMARY KEY, shares TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS paused (topic TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at_ns INTEGER NOT NULL, who TEXT NOT NULL, action TEXT NOT NULL,
    arguments TEXT NOT NULL
);
"""


def documents(db: sqlite3.Connection, version: int) -> dict[str, bytes | None]:
    """All documents of a store of an older format; a transaction must be open."""
    for statement in (*(_SINCE_2.split(";") if version == 1 else ()), *_ADDED.split(";")):
        db.execute(statement)
    found: dict[str, Any] = {}
    for name, value in db.execute("SELECT key, value FROM meta WHERE key <> 'version'"):
        found[key("count", name)] = value
    columns = "name, host, tcp_port, http_port, incarnation, draining, dead"
    for name, host, tcp_port, http_port, incarnation, draining, dead in db.execute(f"SELECT {columns} FROM members"):
        found[key("member", name)] = {
            "host": host,
            "tcp_port": tcp_port,
            "http_port": http_port,
            "incarnation": incarnation,
            "draining": bool(draining),
            "dead": bool(dead),
        }
    for topic, shares in db.execute("SELECT topic, shares FROM remains"):
        found[key("topic", topic)] = {"remains": json.loads(shares)}
    paused = {topic for (topic,) in db.execute("SELECT topic FROM paused")}
    columns = "name, contract, pool_ntok, shares, former, opened, fitted, birth"
    for name, contract, pool_ntok, shares, former, opened, fitted, birth in db.execute(f"SELECT {columns} FROM topics"):
        found[key("topic", name)] = {
            "contract": json.loads(contract),
            "birth": birth,
            "pool_ntok": pool_ntok,
            "shares": json.loads(shares),
            "former": json.loads(former),
            "opened": bool(opened),
            "paused": name in paused,
            "fitted": json.loads(fitted) if fitted else None,
        }
    rows = db.execute("SELECT topic, id, declared, broker, settled FROM publishers")
    for topic, publisher, declared, broker, settled in rows:
        document = {"declared": json.loads(declared), "broker": broker, "settled": bool(settled)}
        found[key("publisher", topic, publisher)] = document
    for number, at_ns, who, action, arguments in db.execute("SELECT number, at_ns, who, action, arguments FROM audit"):
        document = {"number": number, "at_ns": at_ns, "who": who, "action": action, "arguments": json.loads(arguments)}
        found[key("action", f"{number % 1000:03d}")] = document
    return {each: json.dumps(document).encode() for each, document in found.items()}


def drop(db: sqlite3.Connection) -> None:
    """Drop the tables of older formats."""
    for table in _TABLES:
        db.execute(f"DROP TABLE IF EXISTS {table}")
    db.execute("DELETE FROM meta WHERE key <> 'version'")
