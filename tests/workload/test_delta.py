"""Delta tables by their active files; the logs are written as the protocol of Delta describes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtm.errors import TraceError
from srtm.workload.uris import files_of

PROTOCOL = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}
METADATA = {"metaData": {"id": "1", "partitionColumns": [], "configuration": {}}}


def added(path: str, **more: Any) -> dict[str, Any]:
    return {"add": {"path": path, "partitionValues": {}, "size": 1, "dataChange": True, **more}}


def removed(path: str) -> dict[str, Any]:
    return {"remove": {"path": path, "dataChange": True}}


def commit(table: Path, version: int, *actions: dict[str, Any]) -> None:
    log = table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020}.json").write_text("\n".join(json.dumps(action) for action in actions) + "\n")


def checkpoint(table: Path, name: str, *actions: dict[str, Any]) -> None:
    entry = pa.struct([("path", pa.string()), ("partitionValues", pa.map_(pa.string(), pa.string()))])
    settings = pa.struct([("id", pa.string()), ("configuration", pa.map_(pa.string(), pa.string()))])
    protocol = pa.struct([("minReaderVersion", pa.int32())])
    schema = pa.schema([("add", entry), ("metaData", settings), ("protocol", protocol), ("remove", entry)])
    pq.write_table(pa.Table.from_pylist(list(actions), schema), table / "_delta_log" / name)


def names(table: Path) -> list[str]:
    return [str(Path(file).relative_to(table)) for file in files_of(table)]


def test_only_files_of_the_newest_version_count(tmp_path: Path) -> None:
    commit(tmp_path, 0, PROTOCOL, METADATA, added("a.parquet"), added("b.parquet"))
    assert names(tmp_path) == ["a.parquet", "b.parquet"]
    commit(tmp_path, 1, removed("a.parquet"), added("topic=a%252Fb/c%20d.parquet", partitionValues={"topic": "a/b"}))
    (tmp_path / "left-over.parquet").touch()
    assert names(tmp_path) == ["b.parquet", "topic=a%2Fb/c d.parquet"]
    assert files_of(tmp_path.as_uri()) == files_of(tmp_path)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_checkpoint_takes_the_place_of_the_commits_before_it(parts: int, tmp_path: Path) -> None:
    commit(tmp_path, 4, removed("b.parquet"), added("d.parquet"))
    rows: list[dict[str, Any]] = [PROTOCOL, METADATA, added("a.parquet"), added("b.parquet"), removed("c.parquet")]
    for number in range(parts):
        name = f"{3:020}.checkpoint" + (f".{number + 1:010}.{parts:010}" if parts > 1 else "") + ".parquet"
        checkpoint(tmp_path, name, *rows[number::parts])
    checkpoint(tmp_path, f"{2:020}.checkpoint.0000000001.0000000002.parquet", added("old.parquet"))  # not complete
    assert names(tmp_path) == ["a.parquet", "d.parquet"]


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        ([added("a.parquet", deletionVector={"storageType": "u"})], "deletion vectors"),
        ([{"metaData": {"configuration": {"delta.columnMapping.mode": "name"}}}], "column mapping"),
        ([{"protocol": {"minReaderVersion": 3, "readerFeatures": ["v2Checkpoint", "typeWidening"]}}], "typeWidening"),
        ([added("s3://elsewhere/a.parquet")], "outside of its folder"),
        ([added("a.parquet", partitionValues={"topic": "a"})], "do not name the column 'topic'"),
        ([{"add": {}}], "damaged at version 0"),
    ],
)
def test_what_a_list_of_files_cannot_say_is_refused(actions: list[Any], said: str, tmp_path: Path) -> None:
    commit(tmp_path, 0, *actions)
    with pytest.raises(TraceError, match=rf"is a Delta table .*{said}.*: pass the DataFrame"):
        files_of(tmp_path)


def test_gaps_and_newer_kinds_of_logs_are_refused(tmp_path: Path) -> None:
    commit(tmp_path, 1, added("a.parquet"))
    with pytest.raises(TraceError, match="whose log has gaps"):
        files_of(tmp_path)
    commit(tmp_path, 0, PROTOCOL)
    assert names(tmp_path) == ["a.parquet"]
    (tmp_path / "_delta_log" / f"{2:020}.checkpoint.0b6ba4c0.parquet").touch()
    with pytest.raises(TraceError, match="checkpoint of version 2"):
        files_of(tmp_path)
    empty = tmp_path / "empty"
    commit(empty, 0, PROTOCOL, METADATA)
    with pytest.raises(TraceError, match="without files"):
        files_of(empty)
