"""A standalone cluster, started from the PySpark wheel."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyspark

from srtm.pipeline.runtime.archive import JVM_OPTIONS
from srtm.pipeline.runtime.java import java_home
from tests.pipeline.runtime.namespace import Namespace

HOME = Path(pyspark.__file__).parent
# A driver on it: executors that fit its workers and start quickly, and few tasks, because data in tests is small.
OPTIONS = {
    "spark.sql.shuffle.partitions": "4",
    "spark.executor.memory": "1g",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": " ".join(JVM_OPTIONS),
}


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


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive_workers(host: str, port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/json/", timeout=5) as answer:
            return int(json.load(answer)["aliveworkers"])
    except (OSError, ValueError):  # it is not there yet, or its pages are not all
        return 0


def wait_for(what: Callable[[], object], within_s: float = 300) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.05)


def environment(host: str) -> dict[str, str]:
    """What Spark's own programs need: a Java, a Python and an address."""
    return os.environ | {
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": host,
        "SPARK_DAEMON_MEMORY": "512m",
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_JAVA_OPTS": " ".join(JVM_OPTIONS),
    }


@contextmanager
def standalone(folder: Path, apart: Namespace | None = None) -> Iterator[Cluster]:
    """A master and two workers, which end with the block; they work in a folder.

    Apart, the one worker runs in a namespace, where it does not know this package either.
    """
    host, its_host = (apart.outside, apart.inside) if apart else ("127.0.0.1", "127.0.0.1")
    port, page = free_port(), free_port()
    master = f"spark://{host}:{port}"
    processes: list[subprocess.Popen[bytes]] = []

    def start(daemon: str, at: str, before: Sequence[str] = ()) -> None:
        known = environment(at)
        if apart:
            known.pop("PYTHONPATH", None)
        command = [*before, str(HOME / "bin" / "spark-class"), *f"org.apache.spark.deploy.{daemon}".split()]
        with (folder / f"{len(processes)}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=known, stdout=log, stderr=log))

    try:
        start(f"master.Master --host {host} --port {port} --webui-port {page}", host)
        for number in (1,) if apart else (1, 2):
            options = f"--host {its_host} --cores 1 --memory 1g --webui-port 0 --work-dir {folder}/worker-{number}"
            start(f"worker.Worker {options} {master}", its_host, apart.enter if apart else ())
        wait_for(lambda: alive_workers(host, page) == len(processes) - 1)
        yield Cluster(master, [process.pid for process in processes[1:]], folder)
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(timeout=60)
