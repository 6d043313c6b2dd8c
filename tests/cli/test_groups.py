"""`srtm groups` as a user runs it: in a process of its own, with a Spark of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtm.cli.app import run
from srtm.model.correlation import Group
from srtm.pipeline.groups import TopicGroups
from srtm.workload.groups import read_groups


def srtm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "srtm", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("groups") / "t.parquet"
    options = ["--publishers", "60", "--batch", "10", "--group-size", "6", "--jitter", "4ms", "--duration", "60s"]
    assert run(["trace", "synth", *options, "--out", str(path)]) == 0
    return path


@pytest.mark.processes
def test_groups_are_printed_written_and_read_with_drift_and_bad_topics(trace: Path, tmp_path: Path) -> None:
    """One publisher declares another group than it bursts with, and one topic has a message without a time."""
    rows = pq.read_table(trace)
    declared = [
        "p-g1" if name == "p00" else group
        for name, group in zip(rows["publisher"].to_pylist(), rows["group"].to_pylist(), strict=True)
    ]
    rows = rows.set_column(rows.schema.get_field_index("group"), "group", pa.array(declared, pa.string()))
    bad = {"topic": ["bad"], "publisher": ["p"], "group": [None], "arrival_ns": [None]}
    columns = pa.schema([field.with_nullable(True) for field in rows.schema])
    pq.write_table(pa.concat_tables([rows.cast(columns), pa.table(bad, columns)]), tmp_path / "t.parquet")
    out = tmp_path / "groups.json"
    done = srtm("groups", tmp_path / "t.parquet", "--out", out)
    assert done.returncode == 1
    assert "srtm: topic 'bad': 1 of 1 messages have no arrival_ns" in done.stderr
    assert "topic: 10 groups with 60 of 60 publishers" in done.stdout
    assert "p-g1 is split into g-p06 (6), g-p00 (1)" in done.stdout
    assert "p00 moved from p-g1 to g-p00" in done.stdout
    told = json.loads(out.read_text())
    assert all(set(entry) >= {"group", "publishers", "confidence"} for entry in told["groups"])
    assert told["drift"][0]["moved"] == [{"publisher": "p00", "declared": "p-g1", "found": "g-p00"}]
    group_of = read_groups(out, "topic")
    assert len(group_of) == 60
    assert {group_of[f"p{number:02}"] for number in range(6)} == {"g-p00"}


def test_json_is_what_is_written(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = TopicGroups("t", 40, 4, (Group(("a", "b"), 0.875),))
    monkeypatch.setattr("srtm.cli.traces.groups.spark_for", lambda *_: nullcontext((None, None)))
    monkeypatch.setattr("srtm.pipeline.groups.groups", lambda *_, **__: [line])
    out = tmp_path / "groups.json"
    assert run(["groups", str(trace), "--json", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(out.read_text())
    entry = {"topic": "t", "group": "g-a", "publishers": ["a", "b"], "confidence": 0.875, "period_s": None}
    assert told["groups"] == [entry]


def test_bad_usage_is_told_before_spark_starts(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["groups", str(trace), "--window", "2s", "--significance", "7"]) == 2
    told = capsys.readouterr().err
    assert "tolerance" in told
    assert "significance" in told
    assert run(["groups", str(trace), "--window", "soon"]) == 2
    assert run(["groups", str(trace), "--out", str(tmp_path / "no" / "g.json")]) == 2
    (tmp_path / "g.json").write_text("mine")
    assert run(["groups", str(trace), "--out", str(tmp_path / "g.json")]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "g.json").read_text() == "mine"
    assert run(["groups", str(tmp_path / "nowhere")]) == 1


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["groups", "--help"]) == 0
    assert "srtm groups trace.parquet --window 20ms --out groups.json" in capsys.readouterr().out
