"""The same jobs on this machine, on a standalone cluster started from the PySpark wheel, and through Spark Connect."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from srtm.model.bucket import TokenBucket
from srtm.model.scan import access_delays
from srtm.workload.publishers import Arrivals, Population, Workload
from srtm.workload.trace import Recorded
from tests.conftest import ROOT
from tests.pipeline.jobs import OF_FRAMES, OF_PATHS, SLICES, SLOWLY, run_all
from tests.pipeline.runtime.standalone import Cluster, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from srtm.pipeline.runtime.server import Server


class Disturbed(NamedTuple):
    """What jobs said on a cluster, undisturbed and while an executor was killed; how that went."""

    said: dict[str, str]
    said_slowly: dict[str, str]
    running_when_killed: bool
    executors: int
    begun: int


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two brokers recorded."""
    folder = tmp_path_factory.mktemp("trace") / "run"
    workload = Workload((Population(100, 100.0, 10, "poisson", 20),), 10 * 10**9, seed=4)
    folder.mkdir()
    arrivals = workload.arrivals()
    for number in range(2):
        here = np.flatnonzero(arrivals.publisher_of % 2 == number)
        its_own = Arrivals(arrivals.times_ns[here], arrivals.publisher_of[here])
        released = its_own.times_ns + access_delays(its_own.times_ns, TokenBucket.of(5_500, 50))
        rows = Recorded("topic", f"broker-{number}", workload.publishers(), its_own, released, released)
        rows.write(folder / f"{number}.parquet", {})
    return folder


@pytest.fixture(scope="module")
def here(spark: SparkSession, trace: Path) -> dict[str, str]:
    """What the jobs say on two cores of this machine."""
    return run_all(trace, spark)


@pytest.fixture(scope="module")
def on_cluster(spark_cluster: Cluster, trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """One run of the jobs on the cluster, and one more in the middle of which an executor is killed."""
    folder = tmp_path_factory.mktemp("slowly")
    command = [sys.executable, "-m", "tests.pipeline.jobs", spark_cluster.master, str(trace), str(folder)]
    before = spark_cluster.executors_ever()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(list(folder.iterdir())) >= 2 or process.poll() is not None)
        victim, *_ = spark_cluster.executors() or [0]
        running = process.poll() is None and victim != 0
        if running:
            os.kill(victim, signal.SIGKILL)
        said, log = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, log[-2000:]
    results = json.loads(said)
    begun = len(list(folder.iterdir()))
    return Disturbed(results["said"], results["said slowly"], running, spark_cluster.executors_ever() - before, begun)


def through_connect(server: Server, trace: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.pipeline.jobs", server.url, str(trace)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, str] = json.loads(done.stdout)["said"]
    return said


def test_the_jobs_say_something(here: dict[str, str]) -> None:
    assert here.keys() == OF_PATHS.keys() | OF_FRAMES.keys()
    assert all("topic='topic'" in said and "error='" not in said for said in here.values())


def test_a_cluster_says_what_this_machine_says(on_cluster: Disturbed, here: dict[str, str]) -> None:
    assert on_cluster.said == here


def test_a_connect_server_says_what_this_machine_says(
    connect_server: Server, trace: Path, here: dict[str, str]
) -> None:
    assert through_connect(connect_server, trace) == here


def test_killing_an_executor_in_the_middle_changes_nothing(on_cluster: Disturbed, here: dict[str, str]) -> None:
    assert on_cluster.running_when_killed
    assert on_cluster.executors == 3  # two, and one in the place of the one that was killed
    assert on_cluster.begun > SLICES  # tasks of the one that was killed were run again
    assert on_cluster.said_slowly == {name: here[name] for name in SLOWLY}
