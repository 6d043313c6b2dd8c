"""Trials: a broker of its own on this host, and loads on it, one after another."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from srtm.errors import BrokerError
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from srtm.client.load import LoadReport
    from srtm.model.calibration import Calibrated, Observed
    from srtm.workload.publishers import Workload

_PUBLISHERS = 100


@dataclass(frozen=True, slots=True)
class Kind:
    """A load: its rate over all topics, its batches, and where messages are kept."""

    rate_mps: float
    batch: int = 1
    durability: str = "memory"
    topics: int = 1

    def workloads(self, duration_ns: int) -> list[Workload]:
        """The traffic of each topic."""
        from srtm.workload.publishers import Population, Workload

        each_mps = self.rate_mps / _PUBLISHERS / self.topics
        population = Population(_PUBLISHERS, each_mps, self.batch)
        return [Workload((population,), duration_ns, seed=number) for number in range(1, self.topics + 1)]

    def __str__(self) -> str:
        shape = "single" if self.batch == 1 else f"by {self.batch}"
        topics = "" if self.topics == 1 else f", {self.topics} topics"
        return f"{self.rate_mps:,.0f}/s {shape}, {self.durability}{topics}"


@dataclass(frozen=True, slots=True)
class Point:
    """One measured load."""

    rate_mps: float
    batch: int
    cpu_ns: float  # of the broker, for each message
    p50_ns: int
    p99_ns: int
    late_ns: int
    late: bool  # the load generator caused a considerable part of the latency

    def error(self, predicted_ns: tuple[int, int]) -> tuple[float, float]:
        """By which part a prediction of p50 and p99 is too long (positive) or too short."""
        return predicted_ns[0] / self.p50_ns - 1, predicted_ns[1] / self.p99_ns - 1


class Trial:
    """A running broker, and how to put it under load."""

    def __init__(self, address: str, http: str, pid: int, duration_ns: int) -> None:
        self.address = address
        self._http = http
        self._pid = pid
        self._duration_ns = duration_ns
        self._topics = 0

    def measured(self, kind: Kind) -> Point:
        """Put the broker under a load, and measure it."""
        names = [self._topic(kind.durability) for _ in range(kind.topics)]
        before_ns = _cpu_ns(self._pid)
        reports = asyncio.run(self._load(names, kind.workloads(self._duration_ns)))
        cpu_ns = _cpu_ns(self._pid) - before_ns
        totals = [report.total for report in reports if report.total is not None]
        lates = [report.lateness for report in reports if report.lateness is not None]
        if len(totals) < len(reports) or len(lates) < len(reports):
            raise BrokerError("no message came back from the broker under test; see its log above")
        return Point(
            sum(report.rate for report in reports),
            kind.batch,
            cpu_ns / sum(report.received for report in reports),
            round(sum(total.p50 for total in totals) / len(totals)),
            round(sum(total.p99 for total in totals) / len(totals)),
            max(late.p99 for late in lates),
            any(report.bottleneck for report in reports),
        )

    def observed(self, kind: Kind) -> tuple[Point, Observed]:
        """The same, for a fit."""
        from srtm.model.calibration import Observed

        point = self.measured(kind)
        return point, Observed(*self._arrivals(kind), point.cpu_ns, point.p50_ns, point.p99_ns)

    def predicted_ns(self, kind: Kind, found: Calibrated) -> tuple[int, int]:
        """p50 and p99 of a load by a fitted model."""
        return found.predicted_ns(*self._arrivals(kind))

    def _arrivals(self, kind: Kind) -> tuple[Any, Any]:
        """The traffic of all topics: they share the loop."""
        found = [workload.arrivals() for workload in kind.workloads(self._duration_ns)]
        times = np.concatenate([each.times_ns for each in found])
        senders = np.concatenate([each.publisher_of + n * _PUBLISHERS for n, each in enumerate(found)])
        order = np.argsort(times, kind="stable")
        return times[order], senders[order].astype(np.int32)

    async def _load(self, names: list[str], workloads: list[Workload]) -> list[LoadReport]:
        from srtm.client.load import Load, LoadOptions

        loads = [
            Load(LoadOptions(name, workload, brokers=(self.address,)), None)
            for name, workload in zip(names, workloads, strict=True)
        ]
        return await asyncio.gather(*(load.go(lambda _: None) for load in loads))

    def _topic(self, durability: str) -> str:
        self._topics += 1
        name = f"calibration-{self._topics}"
        wish = f"http://{self._http}/topic/create?topic={name}&durability={durability}"
        with urllib.request.urlopen(urllib.request.Request(wish, method="POST"), timeout=10):
            return name


@contextmanager
def a_broker(duration_ns: int) -> Iterator[Trial]:
    """A broker to measure, with a folder for disk topics beside the current one's temporary files."""
    command = [sys.executable, "-m", "srtm", "broker", "--name", "calibrated", "--tcp-port", "0", "--http-port", "0"]
    with (
        tempfile.TemporaryDirectory(prefix="srtm-calibrate-") as folder,
        subprocess.Popen([*command, "--data-path", folder], stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "TCP " not in line:
                raise BrokerError("the broker did not start; see its message above")
            tcp, http = (line.partition(f"{kind} ")[2].partition(",")[0].strip() for kind in ("TCP", "HTTP"))
            yield Trial(tcp, http, process.pid, duration_ns)
        finally:
            process.terminate()
            process.wait(10)


def fitted(trial: Trial, durability: str, slow_mps: float, batch: int = 10) -> tuple[Calibrated, list[Point]]:
    """Fit the model on three loads."""
    from srtm.model.calibration import calibrated

    slow = Kind(slow_mps, 1, durability)
    single, first = trial.observed(slow)
    batches, second = trial.observed(replace(slow, batch=batch))
    fast, third = trial.observed(replace(slow, rate_mps=min(NS_PER_S / single.cpu_ns, 6 * slow_mps)))
    return calibrated(first, second, batch, third), [single, batches, fast]


def _cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())
    except (OSError, ValueError, IndexError):  # a kernel without it counts in ticks
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * NS_PER_S // os.sysconf("SC_CLK_TCK")
