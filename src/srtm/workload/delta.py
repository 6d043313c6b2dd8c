"""The files of a Delta table that count: its log of JSON commits and Parquet checkpoints, read without Delta.

In: the table's folder. Out: the active files of the newest version. A table that needs more than a list of files to be
read right (deletion vectors, columns under other names, checkpoints of version 2) is refused: Spark reads those.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from pyarrow import fs

from srtm.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LOG = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet")
_OTHER_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\..+\.(?:parquet|json)")
# What a reader may have to know: the first two are checked file by file, the others do not matter here.
_CHECKED = {"deletionVectors", "columnMapping", "timestampNtz", "vacuumProtocolCheck"}
_REMEDY = "pass the DataFrame that Spark reads from it to the function in Python"


def active_files(files: fs.FileSystem, folder: str, name: str) -> list[str]:
    """Paths of the files of the newest version; `name` is the table's, for errors."""

    def refused(why: str) -> TraceError:
        return TraceError(f"{name} is a Delta table {why}: {_REMEDY}", path=name)

    found = [entry.base_name for entry in files.get_file_info(fs.FileSelector(f"{folder}/{LOG}"))]
    checkpoint, parts = _newest_checkpoint(found)
    if max((_version(_OTHER_CHECKPOINT, log) for log in found), default=-1) > checkpoint:
        raise refused("with a checkpoint of version 2")
    commits = sorted(version for log in found if (version := _version(_COMMIT, log)) > checkpoint)
    if commits != list(range(checkpoint + 1, checkpoint + 1 + len(commits))) or (checkpoint < 0 and not commits):
        raise refused("whose log has gaps")
    active: dict[str, dict[str, Any]] = {}
    for part in parts:
        with files.open_input_file(f"{folder}/{LOG}/{part}") as stream:
            table = pq.read_table(stream)
        kept = [column for column in ("protocol", "metaData", "add") if column in table.column_names]
        _apply(active, table.select(kept).to_pylist(), refused)
    for version in commits:
        with files.open_input_stream(f"{folder}/{LOG}/{version:020}.json") as stream:
            lines = stream.read().splitlines()
        try:
            _apply(active, [json.loads(line) for line in lines if line.strip()], refused)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise refused(f"whose log is damaged at version {version}") from None
    paths = []
    for path, entry in active.items():
        if entry.get("deletionVector"):
            raise refused("with deleted rows in files that it still uses (deletion vectors)")
        if "://" in path or path.startswith("/"):
            raise refused("with files outside of its folder (a shallow clone)")
        columns = dict(entry.get("partitionValues") or {})
        if missing := [column for column in columns if f"{column}=" not in path]:
            raise refused(f"whose folders do not name the column {missing[0]!r}")
        paths.append(f"{folder}/{unquote(path)}")
    return sorted(paths)


def _newest_checkpoint(found: list[str]) -> tuple[int, list[str]]:
    """The version of the newest complete checkpoint, and its parts; −1 without one."""
    parts: dict[tuple[int, int], list[str]] = {}
    for log in found:
        if match := _CHECKPOINT.fullmatch(log):
            parts.setdefault((int(match[1]), int(match[2] or 1)), []).append(log)
    complete = [key for key, some in parts.items() if len(some) == key[1]]
    return (max(complete)[0], sorted(parts[max(complete)])) if complete else (-1, [])


def _version(pattern: re.Pattern[str], log: str) -> int:
    """The version of a file of the log; −1 if it is of another kind. A classic checkpoint is not one of version 2."""
    match = pattern.fullmatch(log)
    return int(match[1]) if match and not (pattern is _OTHER_CHECKPOINT and _CHECKPOINT.fullmatch(log)) else -1


def _apply(active: dict[str, dict[str, Any]], actions: Iterable[dict[str, Any]], refused: Any) -> None:
    """Carry out the actions of a commit or checkpoint, in order."""
    for kind, action in _actions(actions):
        if kind == "protocol":
            if features := set(action.get("readerFeatures") or ()) - _CHECKED:
                raise refused(f"that needs {', '.join(sorted(features))}")
        elif kind == "metaData":
            if dict(action.get("configuration") or {}).get("delta.columnMapping.mode", "none") != "none":
                raise refused("whose columns have other names in its files (column mapping)")
        elif kind == "add":
            active[action["path"]] = action
        elif kind == "remove":
            active.pop(action["path"], None)


def _actions(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for row in rows:
        for kind, action in row.items():
            if action is not None:
                yield kind, action
