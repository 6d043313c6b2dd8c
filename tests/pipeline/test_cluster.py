"""The same jobs on this machine, on a standalone cluster started from the PySpark wheel, and through Spark Connect."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyspark
import pytest

from srtm.model.bucket import TokenBucket
from srtm.model.scan import access_delays
from srtm.pipeline.java import java_home
from srtm.workload.publishers import Arrivals, Population, Workload
from srtm.workload.trace import Recorded
from tests.conftest import ROOT
from tests.pipeline.jobs import OF_FRAMES, OF_PATHS, SLICES, run_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from srtm.pipeline.server import Server


class Cluster(NamedTuple):
    master: str
    workers: list[int]
    folder: Path

    def executors(self) -> list[int]:
        """The processes of executors that run now."""
        children = [pid for worker in self.workers for pid in children_of(worker)]
        return [pid for pid in children if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def executors_ever(self) -> int:
        """Executors that were started, each of which has a folder of its own."""
        return len(list(self.folder.glob("worker-*/app-*/*")))


class Disturbed(NamedTuple):
    """What jobs said on a cluster, undisturbed and while an executor was killed; how that went."""

    said: dict[str, str]
    said_slowly: dict[str, str]
    running_when_killed: bool
    executors: int
    begun: int


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive_workers(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/", timeout=5) as answer:
            return int(json.load(answer)["aliveworkers"])
    except OSError:
        return 0


def wait_for(what: Callable[[], object], within_s: float = 180) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    home = Path(pyspark.__file__).parent
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "512m",
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
    }
    port, page = free_port(), free_port()
    master = f"spark://127.0.0.1:{port}"
    daemons = [f"master.Master --host 127.0.0.1 --port {port} --webui-port {page}"] + [
        f"worker.Worker --host 127.0.0.1 --cores 1 --memory 1g --webui-port 0 --work-dir {folder}/worker-{n} {master}"
        for n in (1, 2)
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for daemon in daemons:
            command = [str(home / "bin" / "spark-class"), *f"org.apache.spark.deploy.{daemon}".split()]
            with (folder / f"{len(processes)}.log").open("w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        wait_for(lambda: alive_workers(page) == 2)
        yield Cluster(master, [process.pid for process in processes[1:]], folder)
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(timeout=60)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two brokers recorded."""
    folder = tmp_path_factory.mktemp("trace") / "run"
    workload = Workload((Population(100, 100.0, 10, "poisson", 20),), 30 * 10**9, seed=4)
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
def on_cluster(cluster: Cluster, trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """One run of the jobs on the cluster, and one more in the middle of which an executor is killed."""
    folder = tmp_path_factory.mktemp("slowly")
    command = [sys.executable, "-m", "tests.pipeline.jobs", cluster.master, str(trace), str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: len(list(folder.iterdir())) >= 2 or process.poll() is not None)
        victim, *_ = cluster.executors() or [0]
        running = process.poll() is None and victim != 0
        if running:
            os.kill(victim, signal.SIGKILL)
        said, log = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, log[-2000:]
    results = json.loads(said)
    begun = len(list(folder.iterdir()))
    return Disturbed(results["said"], results["said slowly"], running, cluster.executors_ever(), begun)


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


def test_a_connect_server_says_what_this_machine_says(server: Server, trace: Path, here: dict[str, str]) -> None:
    assert through_connect(server, trace) == here


def test_killing_an_executor_in_the_middle_changes_nothing(on_cluster: Disturbed, here: dict[str, str]) -> None:
    assert on_cluster.running_when_killed
    assert on_cluster.executors == 3  # two, and one in the place of the one that was killed
    assert on_cluster.begun > SLICES  # tasks of the one that was killed were run again
    assert on_cluster.said_slowly == {name: here[name] for name in OF_FRAMES}
