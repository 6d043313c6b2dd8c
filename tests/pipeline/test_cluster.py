"""The same job on a standalone cluster of a Master and two Workers, all started from the PySpark wheel."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from srtm.pipeline.java import java_home
from srtm.workload.publishers import Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, ArrivalWriter, writing

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = """if True:
    import sys
    from srtm.pipeline.groups import groups
    from srtm.pipeline.profile import profile
    from srtm.pipeline.session import spark_session
    master, path = sys.argv[1:]
    with spark_session(master=master, options={"spark.executor.memory": "1g", "spark.executor.cores": "1"}) as spark:
        print(profile(path, spark))
        print(profile(spark.read.parquet(path).repartition(5)))
        print(groups(path, spark))
        print(groups(spark.read.parquet(path).repartition(5)))
"""


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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
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
    here = ["--host", "127.0.0.1"]
    commands = [["master.Master", *here, "--port", str(port), "--webui-port", str(page)]] + [
        [
            "worker.Worker",
            *here,
            "--cores",
            "1",
            "--memory",
            "1g",
            "--work-dir",
            str(folder / name),
            "--webui-port",
            "0",
            master,
        ]
        for name in ("one", "two")
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for daemon, *arguments in commands:
            command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{daemon}", *arguments]
            with (folder / f"{len(processes)}.log").open("w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + 90
        while alive_workers(page) < 2:
            assert time.monotonic() < deadline, "the cluster did not start"
            time.sleep(0.2)
        yield master
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(timeout=60)


def test_a_cluster_says_what_this_machine_says(cluster: str, tmp_path: Path) -> None:
    workload = Workload((Population(100, 100.0, 10, "poisson", 20),), 30 * 10**9, seed=4)
    path = tmp_path / "t.parquet"
    with writing(path, ARRIVAL_SCHEMA, {}) as writer:
        rows = ArrivalWriter(writer, "topic", workload.publishers())
        for window in workload.windows():
            rows.write(window)
        rows.flush()
    said = [
        subprocess.run([sys.executable, "-c", JOB, master, str(path)], capture_output=True, text=True, check=False)
        for master in (cluster, "local[2]")
    ]
    assert [run.returncode for run in said] == [0, 0], said[0].stderr[-2000:]
    assert said[0].stdout == said[1].stdout
    assert said[0].stdout.count("TopicProfile(") == 2
    assert said[0].stdout.count("TopicGroups(") == 2
    assert said[0].stdout.count("Group(publishers=") == 2 * 5
