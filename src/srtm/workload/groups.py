"""Files of correlation groups, which `srtm groups --out` writes and placement reads.

JSON: `{"groups": [{"group": "junction-17", "publishers": ["p1", "p2"], "confidence": 0.97, "topic": "t"}]}`. An entry
without a topic applies to every topic, which suits files written by hand. A publisher is in at most one group of a
topic, and in no entry if it has none. Other keys are ignored.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from srtm.errors import GroupsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from srtm.model.placement import Publisher

_TOLD = 5  # problems listed in an error


def write_groups(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document of groups; the file is complete or absent."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise GroupsError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from None
    finally:
        partial.unlink(missing_ok=True)


def read_groups(path: Path, topic: str | None = None) -> dict[str, str]:
    """The group of each publisher of a topic that has one; `topic` is optional if the file has only one."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise GroupsError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from None
    except ValueError as error:  # not JSON, or not text
        raise GroupsError(f"{path} is not JSON: {error}", path=str(path)) from None
    problems = list(_problems(document))
    if problems:
        more = f"; and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
        raise GroupsError(f"{path} is not a groups file: {'; '.join(problems[:_TOLD])}{more}", path=str(path))
    topics = sorted({entry["topic"] for entry in _entries(document) if entry.get("topic") is not None})
    if topic is None and len(topics) > 1:
        raise GroupsError(f"{path} has groups of several topics; choose one: {', '.join(topics)}", path=str(path))
    if topic is not None and topics and topic not in topics:
        raise GroupsError(f"unknown topic {topic!r}; topics of {path}: {', '.join(topics)}", path=str(path))
    wanted = (None, topic) if topic is not None else (None, *topics)
    return {
        publisher: entry["group"]
        for entry in document["groups"]
        if entry.get("topic") in wanted
        for publisher in entry["publishers"]
    }


def with_groups(publishers: Iterable[Publisher], group_of: Mapping[str, str]) -> list[Publisher]:
    """The publishers with these groups instead of their declared ones; those without an entry get none."""
    return [replace(publisher, group=group_of.get(publisher.id)) for publisher in publishers]


def _entries(document: dict[str, Any]) -> list[dict[str, Any]]:
    """All entries of a valid document that may name a topic."""
    return [*document["groups"], *(entry for entry in document.get("topics") or [] if isinstance(entry, dict))]


def _problems(document: Any) -> Iterable[str]:
    """The problems of a document, entry by entry."""
    entries = document.get("groups") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        yield 'it must be an object with a list under "groups"'
        return
    seen: dict[str, dict[str | None, str]] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            yield f"entry {number} is {entry!r}, not an object"
            continue
        topic, group, publishers = entry.get("topic"), entry.get("group"), entry.get("publishers")
        if topic is not None and not isinstance(topic, str):
            yield f"entry {number}: the topic must be a name, not {topic!r}"
            continue
        if not isinstance(group, str) or not group:
            yield f"entry {number}: the group must have a name, not {group!r}"
            continue
        if not isinstance(publishers, list) or not all(isinstance(name, str) and name for name in publishers):
            yield f"group {group!r}: the publishers must be a list of names"
            continue
        confidence = entry.get("confidence", 1)
        if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
            yield f"group {group!r}: the confidence must lie between 0 and 1, not {confidence!r}"
        for name in publishers:
            before = seen.setdefault(name, {})
            rivals = before.values() if topic is None else [before[key] for key in (topic, None) if key in before]
            yield from (f"publisher {name!r} is in both {rival!r} and {group!r}" for rival in rivals if rival != group)
            before[topic] = group
