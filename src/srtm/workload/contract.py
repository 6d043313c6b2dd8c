"""Contract files: (r, b) of each topic, and how it changed.

    {"topics": [{"topic": "traffic", "r": 11000, "b": 6001, "changes": [{"at_ns": 5000000000, "r": …, "b": …}]}]}

`srtm profile --json` writes such a file, without changes; its other keys are ignored.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from srtm.errors import InputError
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline

if TYPE_CHECKING:
    from pathlib import Path


_OF_PROFILES = {"messages", "publishers", "rate", "error", "first_ns", "last_ns", "batch", "peak_rates", "envelope"}
_KNOWN = {"topic", "r", "b", "changes", *_OF_PROFILES}


def read_contracts(path: Path) -> dict[str, Timeline]:
    """The timeline of (r, b) of every topic in the file."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read the contract file {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"the contract file {path} is not JSON: {error}") from None
    topics = document.get("topics") if isinstance(document, dict) else None
    if not isinstance(topics, list) or not topics:
        raise InputError(f'{path} is not a contract file: it must hold {{"topics": [{{"topic", "r", "b"}}, …]}}')
    contracts: dict[str, Timeline] = {}
    for number, entry in enumerate(topics):
        where = f"{path}, topic {number}"
        name = entry.get("topic") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise InputError(f"{where}: 'topic' must be a name")
        if name in contracts:
            raise InputError(f"{where}: {name!r} occurs twice")
        if unknown := sorted(entry.keys() - _KNOWN):
            raise InputError(f"{where}: unknown key {unknown[0]!r}; known: topic, r, b, changes")
        if entry.get("r") is None and entry.get("error"):
            continue  # a topic that `srtm profile` could not profile
        contracts[name] = _timeline(entry, f"{path}, topic {name!r}")
    return contracts


def _timeline(entry: dict[str, Any], where: str) -> Timeline:
    changes = entry.get("changes", [])
    if not isinstance(changes, list) or not all(
        isinstance(change, dict) and change.keys() == {"at_ns", "r", "b"} and type(change["at_ns"]) is int
        for change in changes
    ):
        raise InputError(f"{where}: 'changes' must be a list of {{'at_ns', 'r', 'b'}}, at_ns in whole nanoseconds")
    times = [change["at_ns"] for change in changes]
    if times != sorted(set(times)):
        raise InputError(f"{where}: 'changes' must be at different times, in order, not at {times}")
    try:
        return Timeline(_bucket(entry), tuple((change["at_ns"], _bucket(change)) for change in changes))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _bucket(entry: dict[str, Any]) -> TokenBucket:
    missing = [name for name in ("r", "b") if type(entry.get(name)) not in (int, float)]
    if missing:
        raise InputError(f"{' and '.join(missing)} must be given as numbers")
    return TokenBucket.of(entry["r"], entry["b"])
