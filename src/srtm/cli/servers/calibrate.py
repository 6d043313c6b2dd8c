"""`srtm calibrate`: what messages cost a broker on this host, and how many it can carry."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from srtm.cli.common import SLO_P99, AsJson, Slo, new_table, print_json, print_table
from srtm.cli.extras import require
from srtm.cli.latency import jitter
from srtm.errors import BrokerError, InputError
from srtm.units import NS_PER_S, format_ns, parse_duration_ns

if TYPE_CHECKING:
    from srtm.client.load import LoadReport
    from srtm.model.broker_models import ServiceModel

_PUBLISHERS = 100
_RATE_MPS = 2_000.0  # low enough that nothing queues
_LADDER = (0.25, 0.5, 0.75, 1.0)  # fractions of the model's mcap at which it is compared with measurements


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


def calibrate(
    slo_p99: Slo = SLO_P99,
    duration: Annotated[str, typer.Option(metavar="DURATION", help="Length of each load")] = "5s",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Calibration file to write, for --calibration")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the capacity of a broker on this host.

    The command starts a broker and sends one load after another through it. It fits the cost of a read (w) and of a
    message (s), and reports the highest measured rate (mcap) whose p99 stayed within --slo-p99. If no load did, it
    writes no file and exits with code 1.

    Examples:
        srtm calibrate --slo-p99 1ms --out calibration.json
        srtm up --calibration calibration.json
    """
    require("re2", "httpx")
    slo_ns, each_ns = parse_duration_ns(slo_p99, bare="ms"), parse_duration_ns(duration)
    if each_ns < NS_PER_S:
        raise InputError(f"--duration must be at least 1s, not {duration}")
    if out is not None and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        raise InputError(f"--out: cannot write {out}; give a file in an existing, writable folder")
    with Console(stderr=True).status("starting a broker") as status, _broker() as (address, pid):
        status.update("single messages")
        single = _tried(address, pid, _RATE_MPS, 1, each_ns)
        status.update("batches of 10")
        tens = _tried(address, pid, _RATE_MPS, 10, each_ns)
        model = _fitted(single, tens)
        model_mps = model.mcap_mps(slo_ns)
        points = [single, tens]
        for part in _LADDER:
            status.update(f"{part:.0%} of the model's mcap")
            points.append(_tried(address, pid, max(100.0, part * model_mps), 1, each_ns))
        status.update("the host alone")
        longest_ns, lost = jitter()
    mcap_mps = held_mps(points, slo_ns, model_mps)
    document: dict[str, object] = {
        "read_ns": model.read_ns,
        "message_ns": model.message_ns,
        "base_ns": model.base_ns,
        "slo_ns": slo_ns,
        "mcap_mps": mcap_mps,
        "model_mps": round(model_mps, 1),
        "points": [
            {"rate": point.rate_mps, "batch": point.batch, "cpu_ns": point.cpu_ns, "p50_ns": point.p50_ns,
             "p99_ns": point.p99_ns, "lateness_p99_ns": point.late_ns, "late": point.late}
            for point in points
        ],
        "jitter": {"longest_ns": longest_ns, "lost": lost},
    }  # fmt: skip
    if out is not None and mcap_mps is not None:
        out.write_text(json.dumps(document) + "\n")
    if as_json:
        print_json(document)
    else:
        _print(document, model, slo_ns, points)
    if late := sum(point.late for point in points):
        print(
            f"srtm: the load generator was late in {late} of {len(points)} loads, so their p99 says little about the"
            " broker; calibrate on a host with a spare core",
            file=sys.stderr,
        )
    if mcap_mps is None:
        remedy = "raise --slo-p99, or calibrate on a quieter host"
        raise BrokerError(f"no measured load kept p99 ≤ {format_ns(slo_ns)}, so mcap is unknown; {remedy}")


def held_mps(points: list[Point], slo_ns: int, most_mps: float) -> float | None:
    """The highest measured rate that kept the SLO, capped by the model; None if none did."""
    held = [point.rate_mps for point in points if point.batch == 1 and point.p99_ns <= slo_ns]
    return round(min(max(held), most_mps), 1) if held and most_mps > 0 else None


def _print(document: dict[str, object], model: ServiceModel, slo_ns: int, points: list[Point]) -> None:
    mcap = "none" if document["mcap_mps"] is None else f"{document['mcap_mps']:,} msg/s"
    print(
        f"w = {format_ns(model.read_ns)} per read, s = {format_ns(model.message_ns)} per message,"
        f" base = {format_ns(model.base_ns)}; mcap = {mcap} for p99 ≤ {format_ns(slo_ns)}"
        f" (model: {document['model_mps']:,} msg/s)"
    )
    table = new_table("msg/s", "batch", "CPU per message", "p50", "p99", "load lateness p99")
    for point in points:
        table.add_row(
            f"{point.rate_mps:,.0f}",
            str(point.batch),
            format_ns(point.cpu_ns),
            format_ns(point.p50_ns),
            format_ns(point.p99_ns),
            format_ns(point.late_ns),
        )
    print_table(table)
    longest_ns, lost = document["jitter"]["longest_ns"], document["jitter"]["lost"]  # type: ignore[index]
    print(f"host alone: longest gap {format_ns(longest_ns)}, {lost:.2%} of the time lost")


def _fitted(single: Point, tens: Point) -> ServiceModel:
    """Solve w + m·s for two batch sizes m; `base` is the rest of the median, which is not the broker's CPU."""
    from srtm.model.broker_models import ServiceModel

    ten_ns = 10 * tens.cpu_ns
    message_ns = max(1, round((ten_ns - single.cpu_ns) / 9))
    read_ns = max(1, round(single.cpu_ns - message_ns))
    return ServiceModel(read_ns, message_ns, max(0, round(single.p50_ns - single.cpu_ns)))


def _tried(address: str, pid: int, rate_mps: float, batch: int, duration_ns: int) -> Point:
    before = _cpu_ns(pid)
    report = asyncio.run(_load(address, rate_mps, batch, duration_ns))
    cpu_ns = _cpu_ns(pid) - before
    if report.total is None or report.lateness is None:
        raise BrokerError("no message came back from the broker under test; see its log above")
    total, late_ns = report.total, report.lateness.p99
    return Point(report.rate, batch, cpu_ns / report.received, total.p50, total.p99, late_ns, report.bottleneck)


async def _load(address: str, rate_mps: float, batch: int, duration_ns: int) -> LoadReport:
    from srtm.client.load import Load, LoadOptions
    from srtm.workload.publishers import Population, Workload

    population = Population(_PUBLISHERS, rate_mps / _PUBLISHERS, batch)
    workload = Workload((population,), duration_ns, seed=1)
    return await Load(LoadOptions("calibration", workload, brokers=(address,)), None).go(lambda _: None)


def _cpu_ns(pid: int) -> int:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * NS_PER_S // os.sysconf("SC_CLK_TCK")


@contextmanager
def _broker() -> Iterator[tuple[str, int]]:
    """A broker to measure: its address and process id."""
    command = [sys.executable, "-m", "srtm", "broker", "--name", "calibrated", "--tcp-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "TCP " not in line:
                raise BrokerError("the broker did not start; see its message above")
            yield line.partition("TCP ")[2].partition(",")[0], process.pid
        finally:
            process.terminate()
            process.wait(10)
