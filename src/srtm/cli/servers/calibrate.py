"""`srtm calibrate`: what messages cost a broker on this host, how many it can carry, and how well that predicts."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from srtm.cli.common import SLO_P99, AsJson, Slo, new_table, print_json, print_table
from srtm.cli.extras import require
from srtm.cli.latency import jitter
from srtm.cli.servers.trials import Kind, Point, a_broker, fitted
from srtm.errors import BrokerError, InputError
from srtm.units import NS_PER_S, format_ns, parse_duration_ns

if TYPE_CHECKING:
    from srtm.model.broker_models import ServiceModel

_RATE_MPS = 2_000.0  # low enough that nothing queues
_LADDER = (0.25, 0.5, 0.75, 1.0)  # fractions of the model's mcap at which single messages are tried
_PART = 0.5  # of what the model's broker can do at most, for loads without an mcap


def calibrate(
    slo_p99: Slo = SLO_P99,
    duration: Annotated[str, typer.Option(metavar="DURATION", help="Length of each load")] = "5s",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Calibration file to write, for --calibration")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the capacity of a broker on this host.

    The command starts a broker and sends one load after another through it. From three loads, in memory and on disk, it
    fits the costs of waking the broker's loop, of a read and of a message. Then it predicts other loads, and prints
    the prediction beside the measurement. mcap is the highest measured rate of single messages in memory whose p99
    stayed within --slo-p99. If no load did, the command writes no file and exits with code 1.

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
    with Console(stderr=True).status("starting a broker") as status, a_broker(each_ns) as trial:
        status.update("loads for the fit, in memory")
        memory, points = fitted(trial, "memory", _RATE_MPS)
        status.update("loads for the fit, on disk")
        disk, on_disk = fitted(trial, "disk", _RATE_MPS)
        model_mps = memory.service.mcap_mps(slo_ns)
        # An SLO that even an idle broker misses says nothing of the rates to try.
        kinds = [Kind(part * (model_mps or _PART * memory.service.most_mps(1))) for part in _LADDER]
        kinds += [
            Kind(_PART * found.service.most_mps(batch), batch, durability)
            for durability, batch, found in (("memory", 10, memory), ("disk", 1, disk), ("disk", 10, disk))
        ]
        compared = []
        for kind in kinds:
            status.update(f"a load that the fit does not know: {kind}")
            point, seen = trial.measured(kind)
            found = disk if kind.durability == "disk" else memory
            compared.append((kind, point, found.predicted_ns(seen.times_ns, seen.publisher_of)))
        status.update("the host alone")
        longest_ns, lost = jitter()
    ladder = [point for kind, point, _ in compared if kind.durability == "memory"]
    mcap_mps = held_mps([*points, *ladder], slo_ns, model_mps)
    document: dict[str, Any] = {
        **asdict(memory.service),
        "disk": asdict(disk.service),
        "tail": {"memory": round(memory.tail, 3), "disk": round(disk.tail, 3)},
        "slo_ns": slo_ns,
        "mcap_mps": mcap_mps,
        "model_mps": round(model_mps, 1),
        "points": [_as_json(point) for point in (*points, *on_disk)],
        "predictions": [
            {"durability": kind.durability, "predicted_p50_ns": p50_ns, "predicted_p99_ns": p99_ns, **_as_json(point)}
            for kind, point, (p50_ns, p99_ns) in compared
        ],
        "jitter": {"longest_ns": longest_ns, "lost": lost},
    }
    if out is not None and mcap_mps is not None:
        out.write_text(json.dumps(document) + "\n")
    if as_json:
        print_json(document)
    else:
        _print(document, memory.service, disk.service, slo_ns, compared)
    tried = [*points, *on_disk, *(point for _, point, _ in compared)]
    if late := sum(point.late for point in tried):
        print(
            f"srtm: the load generator was late in {late} of {len(tried)} loads, so their p99 says little about the"
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


def _as_json(point: Point) -> dict[str, Any]:
    return {
        "rate": point.rate_mps,
        "batch": point.batch,
        "cpu_ns": point.cpu_ns,
        "p50_ns": point.p50_ns,
        "p99_ns": point.p99_ns,
        "lateness_p99_ns": point.late_ns,
        "late": point.late,
    }


def _print(
    document: dict[str, Any],
    memory: ServiceModel,
    disk: ServiceModel,
    slo_ns: int,
    compared: list[tuple[Kind, Point, tuple[int, int]]],
) -> None:
    for name, model in (("memory", memory), ("disk", disk)):
        wake = f"{format_ns(model.wake_ns)} to wake up and {format_ns(model.rest_ns)} after"
        costs = f"{wake}, {format_ns(model.read_ns)} per read"
        print(f"{name}: {costs}, {format_ns(model.message_ns)} per message, base {format_ns(model.base_ns)}")
    mcap = "none" if document["mcap_mps"] is None else f"{document['mcap_mps']:,} msg/s"
    print(f"mcap = {mcap} for p99 ≤ {format_ns(slo_ns)} (model: {document['model_mps']:,} msg/s)")
    heads = ("load", "CPU per message", "p50", "predicted", "error", "p99", "predicted", "error", "lateness p99")
    table = new_table(*heads, caption="loads that the fit does not know")
    for kind, point, predicted_ns in compared:
        median, tail = point.error(predicted_ns)
        table.add_row(
            str(kind),
            format_ns(point.cpu_ns),
            format_ns(point.p50_ns),
            format_ns(predicted_ns[0]),
            f"{median:+.0%}",
            format_ns(point.p99_ns),
            format_ns(predicted_ns[1]),
            f"{tail:+.0%}",
            format_ns(point.late_ns),
        )
    print_table(table)
    longest_ns, lost = document["jitter"]["longest_ns"], document["jitter"]["lost"]
    print(f"host alone: longest gap {format_ns(longest_ns)}, {lost:.2%} of the time lost")
