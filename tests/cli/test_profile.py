"""`srtm profile` as a user runs it: in a process of its own, with a Spark of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtm.cli.app import run
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter
from srtm.units import percentile
from srtm.workload.trace import load


def srtm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "srtm", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.processes
@pytest.mark.parametrize(("flags", "quantile"), [(["--quantile", "0.99"], "0.99"), ([], "0.995")])
def test_a_profile_is_the_smallest_bucket_that_lets_enough_pass(
    flags: list[str], quantile: str, tmp_path: Path
) -> None:
    """The paper's rule and the default end to end: synth, profile, then the trace through the bucket of brokers."""
    path = tmp_path / "t.parquet"
    assert run(["trace", "synth", "--batch", "10", "--group-size", "25", "--duration", "20s", "--out", str(path)]) == 0
    done = srtm("profile", path, "--json", *flags)
    assert done.returncode == 0, done.stderr
    (topic,) = json.loads(done.stdout)["topics"]
    (known,) = load(path)
    times = known.arrivals.times_ns.tolist()
    assert topic["topic"] == "topic"
    assert (topic["messages"], topic["publishers"]) == (len(times), 1_000)

    def tail_ns(b: float) -> int:
        limiter = Limiter(TokenBucket.of(topic["r"], b), times[0])
        return percentile(scan.as_arrivals([limiter.admit(at) - at for at in times]), quantile)

    assert tail_ns(topic["b"]) == 0
    assert tail_ns(topic["b"] - 1) > 0


@pytest.mark.processes
def test_one_bad_topic_is_an_error_and_the_rest_is_printed(tmp_path: Path) -> None:
    columns = {
        "topic": pa.array(["good", "bad"]),
        "publisher": pa.array(["p", "p"]),
        "arrival_ns": pa.array([5, None], pa.int64()),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    done = srtm("profile", tmp_path / "t.parquet")
    assert done.returncode == 1
    assert "srtm: topic 'bad': 1 of 1 messages have no arrival_ns" in done.stderr
    assert "good" in done.stdout


@pytest.mark.processes
def test_a_trace_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = srtm("profile", tmp_path / "nowhere")
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"srtm: no trace at {tmp_path / 'nowhere'}: check the path")


@pytest.mark.processes
def test_a_store_keeps_hours_and_prints_them_without_the_trace(tmp_path: Path) -> None:
    path, store = tmp_path / "t.parquet", tmp_path / "store"
    assert run(["trace", "synth", "--publishers", "20", "--duration", "90m", "--out", str(path)]) == 0
    added = srtm("profile", path, "--store", store, "--groups", "--json")
    assert added.returncode == 0, added.stderr
    document = json.loads(added.stdout)
    assert document["added_hours"] == [0, 3_600 * 10**9]
    path.unlink()
    again = srtm("profile", "--store", store, "--json")
    assert json.loads(again.stdout)["periods"] == document["periods"]
    (period,) = document["periods"]
    assert (period["topic"], period["publishers"]) == ("topic", 20)
    assert 1 <= period["b_at_least"] <= period["b"]
    assert period["observed_ns"] == pytest.approx(5_400 * 10**9, rel=0.01)
    assert period["rate"] == pytest.approx(period["messages"] / 5_400, rel=0.01)
    hours = json.loads(srtm("profile", "--store", store, "--every", "1h", "--json").stdout)["periods"]
    assert sum(hour["messages"] for hour in hours) == period["messages"]
    assert [hour["rate_change"] is None for hour in hours] == [True, False]
    shown = srtm("profile", "--store", store, "--from", "1970-01-01T01")
    assert "3600 s" in shown.stdout
    refused: list[tuple[list[str | Path], str]] = [
        (["--store", store, "--from", "soon"], "'soon' is not a date or time"),
        (["--store", store, "--to", "1970-01-01"], "holds no hour of this time"),
        (["--store", store, "--every", "90m"], "whole hours"),
        ([path, "--every", "1h"], "name it with --store"),
        ([], "no trace"),
    ]
    for flags, said in refused:
        done = srtm("profile", *flags)
        assert done.returncode == 2, done.stdout
        assert said in done.stderr
