"""`python -m bench.lending [--runs 3]`: a topic spread over four brokers, with and without lending, in turn.

A live cluster for each run: publishers are placed by `lb`, singly or in batches, and r and b are what their schedule
needs. Ten seconds are recorded: p99 access delay is that of the recorded messages, over all brokers and at the worst.
Beside it stands what static shares and one bucket would have done to the very same arrivals, so that a host that sends
in clumps does not decide. `srtm conformance` judges the recordings of all runs at the end. CPU is that of all brokers
for each message, from the moment at which all publishers are connected until recording begins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pyarrow.parquet as pq

from bench import host, peers
from bench.measure import show
from srtm.cli.servers.trials import cpu_ns
from srtm.control.local.cluster import LocalCluster, LocalOptions
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.units import NS_PER_MS, percentile

if TYPE_CHECKING:
    from collections.abc import Mapping

SRTM = [sys.executable, "-m", "srtm"]
RECORDED_S = 10  # the controller's window of access delays


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run came to."""

    access_ms: float
    worst_ms: float
    static_ms: float  # by the law, over the same arrivals
    single_ms: float
    cpu_us: float
    asks: float  # for each message
    lost: float  # part of the tokens that were lent
    round_trip_ms: float
    late_ms: float
    chosen: str
    r: float
    b: float


async def run(topic: str, batch: int, rule: str, seed: int, options: argparse.Namespace, folder: Path) -> Seen:
    """One cluster, one load; what brokers record goes to the folder."""
    quiet = ["--log-level", "error"]
    local = LocalOptions(
        options.brokers,
        free_ports=True,
        controller_flags=quiet,
        broker_flags=quiet,
        web_port=None,
        trace_folder=folder,
    )
    command = [*SRTM, "load", topic, "--publishers", str(options.publishers)]
    command += ["--rate", str(options.rate), "--batch", str(batch), "--group-size", "1", "--seed", str(seed)]
    command += ["--duration", f"{options.seconds}s", "--policy", "lb", "--fit", "none", "--slo-p99", options.slo]
    async with LocalCluster(local) as cluster, httpx.AsyncClient(timeout=30.0, trust_env=False) as http:
        load = await asyncio.create_subprocess_exec(
            *command,
            *("--lending", rule, "--controller", cluster.url, "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        if options.realtime:
            for pid in (load.pid, *(child.process.pid for child in cluster.brokers if child.process)):
                os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
        await asyncio.sleep(options.settle)
        used, messages = -_used_ns(cluster), -await _messages(cluster, http, topic)
        await asyncio.sleep(options.seconds - options.settle - RECORDED_S - 2)
        used, messages = used + _used_ns(cluster), messages + await _messages(cluster, http, topic)
        await _record(cluster, http, "start", topic)
        await asyncio.sleep(RECORDED_S)
        seen = (await http.get(f"{cluster.url}/v1/topics/{topic}")).json()
        await _record(cluster, http, "stop", topic)
        out, _ = await load.communicate()
    report = json.loads(out)
    lent = seen["lending"]
    return Seen(
        *_access_ms(folder, topic, seen),
        used / messages / 1e3,
        lent["asked"] / report["received"],
        lent["lost"] / lent["lent"] if lent["lent"] else 0.0,
        lent["rtt_ms"]["p50"] if lent["rtt_ms"] else 0.0,
        report["lateness_ms"]["p99"],
        lent["chosen"],
        seen["r"],
        seen["b"],
    )


def _access_ms(folder: Path, topic: str, seen: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """p99 access delays of all recorded messages, at the worst broker, with static shares, and with one bucket."""
    shares = [(each["broker"], TokenBucket.of(each["r"], each["b"])) for each in seen["brokers"] if each["r"]]
    traces = [pq.read_table(folder / f"{topic}-{broker}.parquet").to_pydict() for broker, _ in shares]
    arrivals = [np.array(trace["arrival_ns"], np.int64) for trace in traces]
    waits = [np.array(trace["release_ns"], np.int64) - times for trace, times in zip(traces, arrivals, strict=True)]
    static = [scan.access_delays(np.sort(a), share) for a, (_, share) in zip(arrivals, shares, strict=True)]
    single = scan.access_delays(np.sort(np.concatenate(arrivals)), TokenBucket.of(seen["r"], seen["b"]))
    p99s = (
        percentile(np.concatenate(waits), "0.99"),
        max(percentile(each, "0.99") for each in waits),
        percentile(np.concatenate(static), "0.99"),
        percentile(single, "0.99"),
    )
    all_ms, worst_ms, static_ms, single_ms = (each / NS_PER_MS for each in p99s)
    return all_ms, worst_ms, static_ms, single_ms


def _used_ns(cluster: LocalCluster) -> int:
    return sum(cpu_ns(child.process.pid) for child in cluster.brokers if child.process)


async def _messages(cluster: LocalCluster, http: httpx.AsyncClient, topic: str) -> int:
    count = 0
    for child in cluster.brokers:
        stats = (await http.get(f"{cluster.http(child)}/stats", params={"format": "json", "topic": topic})).json()
        count += sum(each["message_count"] for each in stats["topics"])
    return count


async def _record(cluster: LocalCluster, http: httpx.AsyncClient, verb: str, topic: str) -> None:
    for child in cluster.brokers:
        file = f"{topic}-{child.name}.parquet"
        (await http.post(f"{cluster.http(child)}/srtm/trace/{verb}", params={"file": file})).raise_for_status()


def conformance(folder: Path, contracts: Mapping[str, Seen]) -> dict[str, Any]:
    """What `srtm conformance` says of each topic, and its exit code under an empty name."""
    path = folder.with_suffix(".json")
    path.write_text(json.dumps({"topics": [{"topic": t, "r": each.r, "b": each.b} for t, each in contracts.items()]}))
    command = [*SRTM, "conformance", str(folder), "--contract", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return {"": done.returncode, **{each["topic"]: each for each in json.loads(done.stdout)["topics"]}}


def main() -> None:
    """Run in turns, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.lending", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--settle", type=int, default=8, help="seconds until CPU is counted")
    parser.add_argument("--brokers", type=int, default=4)
    parser.add_argument("--publishers", type=int, default=400)
    parser.add_argument("--rate", type=float, default=5.0, help="messages per second of a publisher")
    parser.add_argument("--slo", default="20ms", help="p99 that `auto` aims at")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--rules", nargs="+", default=["off", "auto", "when_waiting", "early"])
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    options = parser.parse_args()
    options.realtime = peers.can_be_realtime()
    print(host.describe(options.seed))
    print("kernel round trip: median {:.0f} µs, p99 {:.0f} µs".format(*host.round_trip_us()))
    print(f"{'SCHED_RR' if options.realtime else 'ordinary priority'}; load average {os.getloadavg()[0]:.1f}")
    found: defaultdict[tuple[int, str], dict[str, Seen]] = defaultdict(dict)
    with tempfile.TemporaryDirectory(prefix="srtm-bench-") as name:
        folder = Path(name) / "traces"
        turns = product(range(options.seed, options.seed + options.runs), options.batches, options.rules)
        for seed, batch, rule in turns:
            topic = f"{rule}-{batch}-{seed}"
            seen = asyncio.run(run(topic, batch, rule, seed, options, folder))
            found[batch, rule][topic] = seen
            print(f"run {seed}, batches of {batch}, {rule}: {seen}", flush=True)
        judged = conformance(folder, {topic: seen for runs in found.values() for topic, seen in runs.items()})
    columns = [
        "load, lending",
        "p99 access ms",
        "static",
        "one bucket",
        "worst broker",
        "CPU µs/msg",
        "asks/msg",
        "lost",
        "round trip ms",
    ]
    rows = []
    numbers = [each.name for each in fields(Seen) if each.type == "float"]
    for (batch, rule), runs in found.items():
        each = {name: statistics.median(getattr(seen, name) for seen in runs.values()) for name in numbers}
        chosen = sorted({seen.chosen for seen in runs.values()})
        excess = max(judged[topic]["excess"] for topic in runs)
        kept = f"{sum(judged[topic]['conforms'] for topic in runs)} of {len(runs)}, at most {excess:.2f}"
        rows.append(
            [
                f"batches of {batch}, {rule}" + (f" ({', '.join(chosen)})" if rule == "auto" else ""),
                ", ".join(f"{seen.access_ms:.2f}" for seen in runs.values()),
                ", ".join(f"{seen.static_ms:.2f}" for seen in runs.values()),
                ", ".join(f"{seen.single_ms:.2f}" for seen in runs.values()),
                f"{each['worst_ms']:.2f}",
                ", ".join(f"{seen.cpu_us:.0f}" for seen in runs.values()),
                f"{each['asks']:.3f}",
                f"{each['lost']:.0%}",
                f"{each['round_trip_ms']:.2f}",
                kept,
            ]
        )
    columns.append("conform, excess")
    show(f"{options.brokers} brokers, lb, {options.publishers * options.rate:,.0f} msg/s", columns, rows)
    print(f"srtm conformance: exit code {judged['']}")
    longest, lost = host.jitter_us()
    print(f"host jitter afterwards: longest gap {longest:.0f} µs, {lost:.2f} % of a second lost in gaps over 50 µs")
    print("kernel round trip afterwards: median {:.0f} µs, p99 {:.0f} µs".format(*host.round_trip_us()))


if __name__ == "__main__":
    main()
