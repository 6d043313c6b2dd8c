"""`python -m bench.lending [--runs 3]`: a topic spread over four brokers, with and without lending, in turn.

A live cluster for each run: publishers are placed by `lb`, singly or in batches, and r and b are what their schedule
needs. p99 access delay is that of the last ten seconds, over all brokers and at the worst. CPU is that of all brokers,
for each message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import httpx

from bench import host
from bench.measure import show
from srtm.cli.servers.trials import cpu_ns
from srtm.control.local.cluster import LocalCluster, LocalOptions

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run came to."""

    access_ms: float
    worst_ms: float
    cpu_us: float
    asks: float  # for each message
    lost: float  # part of the tokens that were lent
    round_trip_ms: float
    late_ms: float


async def run(batch: int, rule: str, seed: int, options: argparse.Namespace, folder: Path | None = None) -> Seen:
    """One cluster, one load."""
    quiet = ["--log-level", "error"]
    local = LocalOptions(
        options.brokers,
        free_ports=True,
        controller_flags=quiet,
        broker_flags=quiet,
        web_port=None,
        trace_folder=folder,
    )
    command = [sys.executable, "-m", "srtm", "load", "t", "--publishers", str(options.publishers)]
    command += ["--rate", str(options.rate), "--batch", str(batch), "--group-size", "1", "--seed", str(seed)]
    command += ["--duration", f"{options.seconds}s", "--policy", "lb", "--fit", "none", "--slo-p99", "50ms"]
    async with LocalCluster(local) as cluster, httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        load = await asyncio.create_subprocess_exec(
            *command,
            *("--lending", rule, "--controller", cluster.url, "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        before = _used_ns(cluster)
        await asyncio.sleep(options.seconds - 1)
        topic = (await http.get(f"{cluster.url}/v1/topics/t")).json()
        out, _ = await load.communicate()
        used = _used_ns(cluster) - before
    report = json.loads(out)
    lent = topic["lending"]
    return Seen(
        topic["access_ms"]["p99"],
        max(each["access_ms"]["p99"] for each in topic["brokers"] if each["access_ms"]),
        used / report["received"] / 1e3,
        lent["asked"] / report["received"],
        lent["lost"] / lent["lent"] if lent["lent"] else 0.0,
        lent["rtt_ms"]["p50"] if lent["rtt_ms"] else 0.0,
        report["lateness_ms"]["p99"],
    )


def _used_ns(cluster: LocalCluster) -> int:
    return sum(cpu_ns(child.process.pid) for child in cluster.brokers if child.process)


def main() -> None:
    """Run in turns, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.lending", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=25)
    parser.add_argument("--brokers", type=int, default=4)
    parser.add_argument("--publishers", type=int, default=400)
    parser.add_argument("--rate", type=float, default=5.0, help="messages per second of a publisher")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--rules", nargs="+", default=["off", "when_waiting", "early"])
    options = parser.parse_args()
    print(host.describe(1))
    found: defaultdict[tuple[int, str], list[Seen]] = defaultdict(list)
    for seed, batch, rule in product(range(1, 1 + options.runs), options.batches, options.rules):
        seen = asyncio.run(run(batch, rule, seed, options))
        found[batch, rule].append(seen)
        print(f"run {seed}, batches of {batch}, {rule}: {seen}", flush=True)
    columns = ["load, lending", "p99 access ms", "worst broker", "CPU µs/msg", "asks/msg", "lost", "round trip ms"]
    rows = []
    for (batch, rule), runs in found.items():
        each = {name: statistics.median(getattr(seen, name) for seen in runs) for name in Seen.__slots__}
        every = ", ".join(f"{seen.access_ms:.2f}" for seen in runs)
        rows.append(
            [
                f"batches of {batch}, {rule}",
                every,
                f"{each['worst_ms']:.2f}",
                f"{each['cpu_us']:.1f}",
                f"{each['asks']:.3f}",
                f"{each['lost']:.0%}",
                f"{each['round_trip_ms']:.2f}",
            ]
        )
    show(f"{options.brokers} brokers, lb, {options.publishers * options.rate:,.0f} msg/s", columns, rows)
    longest, lost = host.jitter_us()
    print(f"host jitter afterwards: longest gap {longest:.0f} µs, {lost:.2f} % of a second lost in gaps over 50 µs")


if __name__ == "__main__":
    main()
