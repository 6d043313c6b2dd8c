"""`python -m bench.crowding [--runs 3] [--full]`: a lax topic comes to the brokers of a strict one, as real processes.

A controller and two brokers. A topic with an SLO of 2 ms runs for half a minute, then one with 50 ms and batches comes.
Each second of the strict topic, as its broker counts it, is within its SLO or not; the longest time above it counts.
With `--full`, the controller believes that brokers are slow: the strict topic, with six times the rate, needs both,
and a batch of the lax one would hold it up for too long. So the lax one must be refused, by its neighbour's name.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from itertools import groupby
from typing import Any

import httpx

from bench import host
from bench.measure import show
from srtm.control.local.cluster import LocalCluster, LocalOptions

STRICT_MS, LAX_MS = 2.0, 50.0
STRICT = ("--publishers", "40", "--rate", "10", "--batch", "1", "--group-size", "1", "--slo-p99", f"{STRICT_MS}ms")
LAX = ("--publishers", "100", "--rate", "20", "--batch", "10", "--group-size", "1", "--slo-p99", f"{LAX_MS}ms")
ALONE_S, TOGETHER_S = 30, 60
SLOW_HOST = "100000,180000,200000"
FULL_RATE = ("--rate", "60")
POLL_S = 2.0


class Watch:
    """The seconds of the strict topic at all brokers."""

    def __init__(self, cluster: LocalCluster, http: httpx.AsyncClient) -> None:
        self._cluster, self._http = cluster, http
        self._p99_ms: dict[int, float] = {}  # by second, of the slowest broker

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            for child in self._cluster.brokers:
                query = "/stats?format=json&topic=strict&include_clients=false"
                said = (await self._http.get(self._cluster.http(child) + query)).json()
                for topic in said["topics"]:
                    for second in topic["srtm"]["seconds"]:
                        number = second["at_ns"] // 10**9
                        if second["total_ns"]:
                            p99_ms = second["total_ns"]["p99"] / 1e6
                            self._p99_ms[number] = max(p99_ms, self._p99_ms.get(number, 0.0))
            await asyncio.sleep(POLL_S)

    @property
    def late(self) -> list[bool]:
        """Whether each second was above the SLO."""
        return [self._p99_ms[number] > STRICT_MS for number in sorted(self._p99_ms)]


async def load(cluster: LocalCluster, topic: str, flags: tuple[str, ...], seconds: int, seed: int) -> str:
    """Load a topic; returns what the load says at its end."""
    command = [sys.executable, "-m", "srtm", "load", topic, *flags, "--duration", f"{seconds}s", "--seed", str(seed)]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--prefix", topic, "--controller", cluster.url),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return said.decode()


async def run(seed: int, *, full: bool) -> list[str]:
    """One run, as a row of the table."""
    flags = ["--log-level", "error", *(("--broker-model", SLOW_HOST, "--mcap-mps", "3000") if full else ())]
    options = LocalOptions(
        2, free_ports=True, controller_flags=flags, broker_flags=["--log-level", "error"], web_port=None
    )
    async with LocalCluster(options) as cluster, httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        watch = Watch(cluster, http)
        watching = asyncio.create_task(watch.run())
        if full:  # tokens enough for both brokers, so that only the brokers' time is short
            wish = {"r": 4_000, "b": 400, "slo_ms": STRICT_MS}
            (await http.put(f"{cluster.url}/v1/topics/strict", json=wish)).raise_for_status()
        strict = asyncio.create_task(
            load(cluster, "strict", (*STRICT, *(FULL_RATE if full else ())), ALONE_S + TOGETHER_S + 5, seed)
        )
        await asyncio.sleep(ALONE_S)
        alone = sum(watch.late)
        said = await load(cluster, "lax", LAX, TOGETHER_S, seed + 1)
        topics: dict[str, dict[str, Any]] = {
            name: (await http.get(f"{cluster.url}/v1/topics/{name}")).json() for name in ("strict", "lax")
        }
        explained = (await http.get(f"{cluster.url}/v1/topics/lax/explain")).json()
        strict.cancel()
        watching.cancel()
        await asyncio.gather(strict, watching, return_exceptions=True)
    longest = max((len(list(each)) for late, each in groupby(watch.late) if late), default=0)
    places = {
        name: "+".join(each["broker"] for each in topic["brokers"] if each["publishers"])
        for name, topic in topics.items()
    }
    reason = explained["refused"] or (said.strip().splitlines() or [""])[-1]
    met = bool(topics["lax"]["fitted"] and topics["lax"]["fitted"]["met"])
    return [
        str(seed),
        str(longest),
        f"{alone}",
        f"{sum(watch.late)} of {len(watch.late)}",
        *places.values(),
        str(met),
        reason,
    ]


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--full", action="store_true")
    asked = parser.parse_args()
    print(host.describe(2))
    rows = [asyncio.run(run(seed, full=asked.full)) for seed in range(1, 1 + asked.runs)]
    columns = ["seed", "longest s above", "alone", "all", "strict at", "lax at", "lax fitted", "refusal"]
    show(f"a topic with p99 ≤ {STRICT_MS:g} ms, beside one with {LAX_MS:g} ms", columns, rows)


if __name__ == "__main__":
    main()
