"""`srtm spark` as a user runs it: a server, a command that uses it, and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from srtm.cli.app import run


def srtm(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "srtm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.processes
def test_up_is_used_until_down(tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    assert run(["trace", "synth", "--publishers", "10", "--duration", "5s", "--out", str(trace)]) == 0
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    nowhere = cache | {"JAVA_HOME": "/nonexistent"}  # with which a Spark of one's own does not start
    up = srtm("spark", "up", "--idle", "10m", "--json", **cache)
    try:
        assert up.returncode == 0, up.stderr
        facts = json.loads(up.stdout)
        assert facts["running"]
        assert facts["idle_s"] == 600
        assert json.loads(srtm("spark", "status", "--json", **cache).stdout) == facts
        assert "token" not in up.stdout
        used = srtm("profile", trace, "--json", **nowhere)
        assert used.returncode == 0, used.stderr
        assert json.loads(used.stdout)["topics"][0]["publishers"] == 10
        assert "JAVA_HOME=/nonexistent" in srtm("profile", trace, SRTM_SPARK_SERVER="off", **nowhere).stderr
        assert "JAVA_HOME=/nonexistent" in srtm("profile", trace, "--master", "local[1]", **nowhere).stderr
    finally:
        down = srtm("spark", "down", **cache)
    assert down.stdout == f"stopped process {facts['pid']}\n"
    assert srtm("spark", "status", **cache).stdout == "no server is running; start one with srtm spark up\n"
    assert srtm("spark", "down", **cache).stdout == "no server is running\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("profile t.parquet --spark-conf memory", "write spark.name=value"),
        ("spark up --idle never", "'never' is not a duration"),
        ("spark up --idle 0s", "must be above 0"),
    ],
)
def test_bad_usage_is_exit_code_2(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments.split()) == 2
    assert said in capsys.readouterr().err
