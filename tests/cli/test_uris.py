"""Traces by URI through the command line: local files, a real server of S3's protocol, and Hadoop's file systems."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from srtm.cli.app import run
from srtm.errors import TraceError
from srtm.workload.publishers import Arrivals, Population, Workload
from srtm.workload.trace import Recorded, load
from tests.cli.verbs import VERBS
from tests.conftest import PARTS, ROOT, require
from tests.pipeline.runtime.standalone import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOPIC = "a/b ü=50%"


class S3(NamedTuple):
    """A server, and the environment in which programs use it."""

    address: str
    environment: dict[str, str]
    files: fs.FileSystem

    def allow(self, requests: int) -> None:
        """Answer so many more requests of anybody; later ones must have the key of a user."""
        header = {"Content-Type": "text/plain"}
        body = str(requests).encode()
        asked = urllib.request.Request(f"{self.address}/moto-api/reset-auth", body, header, method="POST")
        urllib.request.urlopen(asked, timeout=30).close()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    require("moto_server")
    log = tmp_path_factory.mktemp("s3") / "log"
    command = [PARTS["moto_server"].path or "", "--host", "127.0.0.1", "--port", "0"]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        wait_for(lambda: "Running on" in log.read_text() or process.poll() is not None)
        found = re.search(r"Running on http://(\S+)", log.read_text())
        assert found, log.read_text()
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        files = fs.S3FileSystem(
            endpoint_override=found[1],
            scheme="http",
            region="us-east-1",
            access_key="key",
            secret_key="secret",
            allow_bucket_creation=True,
        )
        yield S3(f"http://{found[1]}", {"AWS_ENDPOINT_URL": f"http://{found[1]}", **keys}, files)
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def in_s3(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, with its environment in this process."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two brokers recorded: in `plain/run`, and in `hive/run` with the topic as the name of a folder."""
    folder = tmp_path_factory.mktemp("runs")
    hive = folder / "hive/run" / f"topic={quote(TOPIC, safe='')}"
    (folder / "plain/run").mkdir(parents=True)
    hive.mkdir(parents=True)
    workload = Workload((Population(20, 10.0, 10, "poisson", 10),), 5 * 10**9, seed=4)
    arrivals = workload.arrivals()
    for number in range(2):
        here = np.flatnonzero(arrivals.publisher_of % 2 == number)
        its_own = Arrivals(arrivals.times_ns[here], arrivals.publisher_of[here])
        at = its_own.times_ns
        name = f"{number} of 2.parquet"
        Recorded(TOPIC, f"b{number}", workload.publishers(), its_own, at, at).write(folder / "plain/run" / name, {})
        pq.write_table(pq.read_table(folder / "plain/run" / name).drop_columns("topic"), hive / name)
    return folder


def uploaded(s3: S3, folder: Path, bucket: str) -> None:
    s3.files.create_dir(bucket)
    fs.copy_files(str(folder), bucket, destination_filesystem=s3.files)


def test_every_verb_says_the_same_of_every_uri(s3: S3, runs: Path) -> None:
    uploaded(s3, runs, "runs")
    mounted = {"spark.hadoop.fs.viewfs.mounttable.runs.link./plain": (runs / "plain").as_uri()}
    traces = [
        str(runs / "plain/run"),
        (runs / "hive/run").as_uri(),
        "s3://runs/plain/run",
        "s3a://runs/hive/run",
        "viewfs://runs/plain/run",
    ]
    command = [sys.executable, "-m", "tests.cli.verbs", json.dumps(mounted), *traces]
    environment = {**os.environ, **s3.environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    first, *others = found.values()
    assert first["profile"][1]["topics"][0]["topic"] == TOPIC
    assert [first[verb][0] for verb in VERBS] == [0] * len(VERBS)
    for trace, said in zip(traces[1:], others, strict=True):
        assert said == first, trace


def test_a_command_reads_from_s3(s3: S3, runs: Path) -> None:
    """As users run it: in a process of its own, with a Spark of its own."""
    uploaded(s3, runs, "alone")
    command = [sys.executable, "-m", "srtm", "profile", "s3a://alone/hive/run", "--json", "--master", "local[1]"]
    environment = {**os.environ, **s3.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (known,) = load(runs / "plain/run")
    (topic,) = json.loads(done.stdout)["topics"]
    assert (topic["topic"], topic["messages"]) == (TOPIC, len(known.arrivals.times_ns))


def failed(trace: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a verb ends with before Spark starts."""
    assert run(["profile", trace]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_errors_of_s3_are_one_line_with_a_remedy(in_s3: S3, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uploaded(in_s3, runs, "errors")
    in_s3.files.create_dir("errors/empty")
    with in_s3.files.open_output_stream("errors/not.parquet") as file:
        file.write(b"not Parquet")
    nowhere = "srtm: cannot read s3://nowhere/run: its bucket does not exist: check the name, "
    assert failed("s3://nowhere/run", capsys).startswith(nowhere)
    assert failed("s3://nowhere", capsys).startswith(nowhere.replace("/run", ""))
    missing = "srtm: no trace at s3a://errors/none: bucket errors holds nothing of that name"
    assert failed("s3a://errors/none", capsys) == missing
    assert failed("s3://errors/empty", capsys) == "srtm: folder s3://errors/empty holds no .parquet file"
    assert "unknown scheme 's4'; known schemes: file, s3" in failed("s4://errors/plain", capsys)
    with pytest.raises(TraceError, match=r"s3://errors/not\.parquet is not a readable Parquet file"):
        load("s3://errors/not.parquet")
    in_s3.allow(0)
    try:
        denied = (
            "srtm: cannot read s3://errors/plain: permission denied: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
        assert failed("s3://errors/plain", capsys).startswith(denied)
    finally:
        in_s3.allow(10**9)
    assert len(load("s3://errors/hive/run")) == 1
