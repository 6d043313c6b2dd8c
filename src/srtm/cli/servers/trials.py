"""Trials: a broker of its own on this host, and loads on it, one after another."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import BrokerError
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from srtm.client.load import Load
    from srtm.model.calibration import Calibrated, Observed
    from srtm.workload.publishers import Workload

    Ints = NDArray[np.int64]

_PUBLISHERS = 100
_BATCH = 10
_FASTER = 8  # at most: the load generator must keep up
_CALM_S = 1.0


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
        self._address, self._http, self._pid = address, http, pid
        self._duration_ns = duration_ns
        self._topics = 0
        time.sleep(_CALM_S)
        before_ns = cpu_ns(pid)
        time.sleep(_CALM_S)
        self._idle = (cpu_ns(pid) - before_ns) / (_CALM_S * NS_PER_S)  # processor time of a broker without messages

    def measured(self, kind: Kind) -> tuple[Point, Observed]:
        """Put the broker under a load, and measure it. Latency counts from the write, so it is not the load's own."""
        names = [self._topic(kind.durability) for _ in range(kind.topics)]
        return asyncio.run(self._measured(kind, names))

    async def _measured(self, kind: Kind, names: list[str]) -> tuple[Point, Observed]:
        from srtm.client.load import Load, LoadOptions
        from srtm.model.calibration import Observed, quantiles_of

        workloads = kind.workloads(self._duration_ns)
        loads = [
            Load(LoadOptions(name, workload, brokers=(self._address,)), None)
            for name, workload in zip(names, workloads, strict=True)
        ]
        samples: list[tuple[int, int, int]] = []  # time, processor time and deliveries, second by second

        def sample(_: object) -> None:
            came = sum(load.tally.deliveries for load in loads)
            samples.append((time.monotonic_ns(), cpu_ns(self._pid), came))

        sample(None)
        ignored = [sample, *[lambda _: None] * (len(loads) - 1)]
        reports = await asyncio.gather(*(load.go(told) for load, told in zip(loads, ignored, strict=True)))
        sample(None)
        # Whole seconds, in which no client connects; a load of one second has none.
        first, last = (samples[1], samples[-2]) if len(samples) > 3 else (samples[0], samples[-1])
        elapsed_ns, used_ns, came = (after - before for before, after in zip(first, last, strict=True))
        times, senders, took = _gathered(loads, workloads)
        if not came or not len(took) or any(report.lateness is None for report in reports):
            raise BrokerError("no message came back from the broker under test; see its log above")
        quantiles_ns = quantiles_of(took)
        _, p50_ns, _, p99_ns = quantiles_ns
        point = Point(
            sum(report.rate for report in reports),
            kind.batch,
            max(1.0, (used_ns - self._idle * elapsed_ns) / came),
            p50_ns,
            p99_ns,
            max(report.lateness.p99 for report in reports if report.lateness),
            any(report.bottleneck for report in reports),
        )
        return point, Observed(times, senders, point.cpu_ns, quantiles_ns)

    def _topic(self, durability: str) -> str:
        self._topics += 1
        name = f"calibration-{self._topics}"
        wish = f"http://{self._http}/topic/create?topic={name}&durability={durability}"
        with urllib.request.urlopen(urllib.request.Request(wish, method="POST"), timeout=10):
            return name


def _gathered(loads: Sequence[Load], workloads: Sequence[Workload]) -> tuple[Ints, NDArray[np.int32], Ints]:
    """Writes of all topics in order, with their publishers; and how long the messages took that came back."""
    times = np.concatenate([load.schedule.written_ns for load in loads])
    senders = np.concatenate(
        [
            workload.arrivals().publisher_of[: load.schedule.sent] + number * _PUBLISHERS
            for number, (load, workload) in enumerate(zip(loads, workloads, strict=True))
        ]
    )
    order = np.argsort(times, kind="stable")
    took = np.concatenate([load.tally.took_ns()[1] for load in loads])
    return times[order], senders[order].astype(np.int32), took


@contextmanager
def a_broker(duration_ns: int) -> Iterator[Trial]:
    """A broker to measure, with a temporary folder for disk topics."""
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


def fitted(trial: Trial, durability: str, slow_mps: float) -> tuple[Calibrated, list[Point]]:
    """Fit the model on three loads: few single messages, batches, and many single messages."""
    from srtm.model.calibration import calibrated

    slow = Kind(slow_mps, 1, durability)
    single, first = _quieter(trial, slow)
    batches, second = _quieter(trial, replace(slow, rate_mps=_BATCH * slow_mps, batch=_BATCH))
    fast, third = _quieter(trial, replace(slow, rate_mps=min(2 * NS_PER_S / single.cpu_ns, _FASTER * slow_mps)))
    return calibrated(first, second, third), [single, batches, fast]


def _quieter(trial: Trial, kind: Kind) -> tuple[Point, Observed]:
    """Of two turns, the one in which the host disturbed less."""
    return min((trial.measured(kind) for _ in range(2)), key=lambda found: found[0].p99_ns)


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())
    except (OSError, ValueError, IndexError):  # a kernel without it counts in ticks
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * NS_PER_S // os.sysconf("SC_CLK_TCK")
