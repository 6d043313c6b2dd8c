"""`srtm calibrate`: what a broker on this host costs, and what it can carry."""

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

from srtm.cli.common import AsJson, new_table, print_json, print_table
from srtm.cli.extras import require
from srtm.cli.latency import jitter
from srtm.errors import BrokerError, InputError
from srtm.units import NS_PER_S, format_ns, parse_duration_ns

if TYPE_CHECKING:
    from srtm.client.load import LoadReport
    from srtm.model.service import ServiceModel

_PUBLISHERS = 100
_RATE_MPS = 2_000.0  # little enough that nothing queues
_LADDER = (0.25, 0.5, 0.75, 1.0)  # of the model's mcap: where it is compared with what happens


@dataclass(frozen=True, slots=True)
class Point:
    """A load that was tried."""

    rate_mps: float
    batch: int
    cpu_ns: float  # of the broker, for each message
    p50_ns: int
    p99_ns: int
    late_ns: int
    late: bool  # the load itself took a considerable part of it


def calibrate(
    slo_p99: Annotated[str, typer.Option(help="The tail latency that mcap is for; ms unless it has a unit.")] = "1ms",
    duration: Annotated[str, typer.Option(help="How long each load is tried.")] = "5s",
    out: Annotated[Path | None, typer.Option(help="A file for srtm controller --calibration.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a broker on this host: w for each read, s for each message, and the highest rate for an SLO.

    A broker is started for it, and one load after the other sent through it. The rate is one that was tried and held;
    exit code 1, and no file, if none did. Example:

        srtm calibrate --slo-p99 1ms --out calibration.json
    """
    require("re2", "httpx")
    slo_ns, each_ns = parse_duration_ns(slo_p99, bare="ms"), parse_duration_ns(duration)
    if each_ns < NS_PER_S:
        raise InputError(f"--duration {duration}: a load takes at least 1s to say anything")
    if out is not None and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        raise InputError(f"--out {out}: give the name of a file that can be written, in a folder that exists")
    with Console(stderr=True).status("starting a broker") as status, _broker() as (address, pid):
        status.update("single messages")
        single = _tried(address, pid, _RATE_MPS, 1, each_ns)
        status.update("batches of 10")
        tens = _tried(address, pid, _RATE_MPS, 10, each_ns)
        model = _fitted(single, tens)
        model_mps = model.mcap_mps(slo_ns)
        points = [single, tens]
        for part in _LADDER:
            status.update(f"{part:.0%} of what the model says")
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
            f"srtm: {late} of {len(points)} loads were late themselves, so that their p99 says little about the broker:"
            " calibrate on a host with a core to spare",
            file=sys.stderr,
        )
    if mcap_mps is None:
        remedy = "allow more with --slo-p99, or calibrate on a quieter host"
        raise BrokerError(f"no load that was tried kept p99 ≤ {format_ns(slo_ns)}, so that there is no mcap: {remedy}")


def held_mps(points: list[Point], slo_ns: int, most_mps: float) -> float | None:
    """The highest rate that was tried and kept the SLO, and no more than the model allows; None if there is none."""
    held = [point.rate_mps for point in points if point.batch == 1 and point.p99_ns <= slo_ns]
    return round(min(max(held), most_mps), 1) if held and most_mps > 0 else None


def _print(document: dict[str, object], model: ServiceModel, slo_ns: int, points: list[Point]) -> None:
    mcap = "none" if document["mcap_mps"] is None else f"{document['mcap_mps']:,} msg/s"
    print(
        f"w = {format_ns(model.read_ns)} a read, s = {format_ns(model.message_ns)} a message, base"
        f" {format_ns(model.base_ns)}; mcap = {mcap} for p99 ≤ {format_ns(slo_ns)}"
        f" (the model says {document['model_mps']:,})"
    )
    table = new_table("msg/s", "batch", "CPU a message", "p50", "p99", "of it the load's own")
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
    print(f"this host alone: longest gap {format_ns(longest_ns)}, {lost:.2%} of the time lost")


def _fitted(single: Point, tens: Point) -> ServiceModel:
    """A read of m messages costs w + m·s: two loads give both. What is left of the median is not the broker's CPU."""
    from srtm.model.service import ServiceModel

    ten_ns = 10 * tens.cpu_ns
    message_ns = max(1, round((ten_ns - single.cpu_ns) / 9))
    read_ns = max(1, round(single.cpu_ns - message_ns))
    return ServiceModel(read_ns, message_ns, max(0, round(single.p50_ns - single.cpu_ns)))


def _tried(address: str, pid: int, rate_mps: float, batch: int, duration_ns: int) -> Point:
    before = _cpu_ns(pid)
    report = asyncio.run(_load(address, rate_mps, batch, duration_ns))
    cpu_ns = _cpu_ns(pid) - before
    if report.total is None or report.lateness is None:
        raise BrokerError("nothing came back from the broker that was to be measured")
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
    """A broker of its own, and its process."""
    command = [sys.executable, "-m", "srtm", "broker", "--name", "calibrated", "--tcp-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "TCP " not in line:
                raise BrokerError("no broker could be started: see its message above")
            yield line.partition("TCP ")[2].partition(",")[0], process.pid
        finally:
            process.terminate()
            process.wait(10)
