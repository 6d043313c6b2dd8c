"""`python -m bench.advise [live|cost] [--pairs 30]`: `srtm advise` on a live cluster, and what it costs brokers.

live: publishers that declare nothing register one by one and fill broker after broker, so each broker gets whole
correlation groups. The access delay of that topic before and after `srtm advise --auto groups` found the groups; how
long that took, and how long it took to report a contract of half of what a second topic needs; then the advisor is
killed with SIGKILL and started again, and what both lives read is compared with what brokers streamed.

cost: processor time of a broker for each message, with its stream of arrivals off and on, in turns of five seconds at
one broker under one load; at the end of five seconds, the stream is read as the advisor reads it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from bench import host
from bench.measure import show
from srtm.cli.servers.trials import cpu_ns
from srtm.control.local.cluster import LocalCluster, LocalOptions
from srtm.model.profile import profile
from srtm.units import NS_PER_S
from srtm.workload.publishers import Population, Workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SRTM = [sys.executable, "-m", "srtm"]
GROUP, GROUPS = 20, 3
GROUPED = Workload((Population(GROUP * GROUPS, 10.0, 10, "poisson", GROUP),), 120 * NS_PER_S, seed=1)
HALF = Workload((Population(10, 20.0, 10, "poisson", prefix="h"),), 120 * NS_PER_S, seed=2)


@asynccontextmanager
async def started(brokers: int, *controller_flags: str) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    """A cluster on free ports, and a client of its controller."""
    quiet = ["--log-level", "error"]
    flags = [*quiet, *controller_flags]
    local = LocalOptions(brokers, free_ports=True, controller_flags=flags, broker_flags=quiet, web_port=None)
    async with (
        LocalCluster(local) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=30.0, trust_env=False) as api,
    ):
        yield cluster, api


@asynccontextmanager
async def running(*arguments: str, out: Path | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """A verb of srtm, killed at the end with everything that it started."""
    with (out or Path(os.devnull)).open("ab") as said:
        process = await asyncio.create_subprocess_exec(
            *SRTM, *arguments, stdout=said, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def load(topic: str, workload: Workload, url: str, seconds: int) -> list[str]:
    """The command line of a load whose publishers declare nothing."""
    (population,) = workload.populations
    command = ["load", topic, "--publishers", str(population.publishers), "--rate", str(population.rate_mps)]
    command += ["--batch", str(population.batch), "--group-size", str(population.group_size)]
    command += ["--prefix", population.prefix, "--seed", str(workload.seed), "--duration", f"{seconds}s"]
    return [*command, "--no-declare", "--no-create", "--controller", url]


async def until(holds: Callable[[], Any], patience_s: float = 180.0) -> float:
    """Seconds until something is true."""
    began = time.monotonic()
    while not await holds():
        if time.monotonic() - began > patience_s:
            raise SystemExit("waited in vain")
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def access_p99_ms(api: httpx.AsyncClient, seconds: int = 20) -> float:
    """The median over some seconds of the p99 access delay, which is that of the ten seconds before each."""
    found: list[float] = []
    for _ in range(seconds):
        await asyncio.sleep(1)
        found.append((await api.get("/v1/topics/grouped")).json()["access_ms"]["p99"])
    return statistics.median(found)


async def streamed(cluster: LocalCluster) -> tuple[int, int]:
    """Messages that brokers have streamed, and those lost to a slow reader."""
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as http:
        held = [(await http.get(f"{cluster.http(child)}/srtm/arrivals")).json() for child in cluster.brokers]
    return sum(each["end"] for each in held), sum(each["lost"] for each in held)


def messages_read(out: Path) -> int:
    """Messages of all batches, each counted once."""
    whole = out.read_text().rpartition("\n")[0]
    return sum({line["batch"]: line["messages"] for line in map(json.loads, whole.splitlines())}.values())


async def live(options: argparse.Namespace) -> None:
    """Groups found, placement changed, half a contract reported, the advisor killed."""
    rows: list[list[str]] = []
    async with AsyncExitStack() as stack:
        cluster, api = await stack.enter_async_context(started(GROUPS + 1, "--mcap-mps", str(GROUP)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for topic, workload, part in (("grouped", GROUPED, 1.0), ("half", HALF, 0.5)):
            bucket = profile(workload.arrivals().times_ns).bucket
            terms = {"r": part * bucket.r, "b": part * bucket.b, "slo_ms": 100, "fit": "none"}
            (await api.put(f"/v1/topics/{topic}", json=terms)).raise_for_status()
            rows.append([f"contract of {topic!r}", f"({terms['r']:g}/s, {terms['b']:g})"])
        for publisher in GROUPED.publishers():
            body = {"publishers": [{"id": publisher.id}]}
            (await api.post("/v1/topics/grouped/publishers", json=body)).raise_for_status()
        async with AsyncExitStack() as loads:
            await loads.enter_async_context(running(*load("grouped", GROUPED, cluster.url, 600)))
            await asyncio.sleep(20)
            before = await access_p99_ms(api)
            out = folder / "advise.jsonl"
            command = ["advise", "--auto", "groups", "--json", "--every", options.every, "--controller", cluster.url]
            command += ["--folder", str(folder / "state")]
            async with running(*command, out=out) as driver:

                async def reads() -> bool:
                    return out.stat().st_size > 0

                async def event(kind: str) -> bool:
                    found = (await api.get("/v1/topics/grouped")).json()["events"]
                    return any(each["kind"] == kind for each in found)

                async def advised(topic: str, kind: str) -> bool:
                    found = (await api.get(f"/v1/topics/{topic}/advice")).json()["advice"]
                    return any(each["kind"] == kind for each in found)

                rows.append(["first batch after the start of the command", f"{await until(reads):.1f} s"])
                began = time.monotonic()
                await loads.enter_async_context(running(*load("half", HALF, cluster.url, 600)))
                small = asyncio.create_task(until(lambda: advised("half", "contract-too-small")))
                await until(lambda: advised("grouped", "groups-found"))
                rows.append(["groups found, after the first batch", f"{time.monotonic() - began:.1f} s"])
                await until(lambda: event("regrouped"))
                rows.append(["placement changed, after the first batch", f"{time.monotonic() - began:.1f} s"])
                rows.append(["half a contract reported, after its first message", f"{await small:.1f} s"])
                await asyncio.sleep(20)
                after = await access_p99_ms(api)
                rows.append(["p99 access of 'grouped' before and after", f"{before:.1f} ms, {after:.1f} ms"])
                events = (await api.get("/v1/topics/grouped")).json()["events"]
                rows.append(["event", next(each["text"] for each in events if each["kind"] == "regrouped")])
                os.killpg(driver.pid, signal.SIGKILL)
            lines = len(out.read_text().splitlines())
            await stack.enter_async_context(running(*command, out=out))

            async def more() -> bool:
                return len(out.read_text().splitlines()) > lines + 3

            rows.append(["three more batches after kill -9 and restart", f"{await until(more):.1f} s"])

        async def all_read() -> bool:
            return messages_read(out) == (await streamed(cluster))[0]

        await until(all_read)
        total, lost = await streamed(cluster)
        rows.append(["messages streamed, read by both lives, lost", f"{total:,}, {messages_read(out):,}, {lost:,}"])
    show("srtm advise on a live cluster", ["", "measured"], rows)


@asynccontextmanager
async def switched(cluster: LocalCluster) -> AsyncIterator[tuple[int, httpx.AsyncClient]]:
    """A broker whose stream can be switched off, and a client of it."""
    controller = f"127.0.0.1:{cluster.controller.ports['TCP']}"
    flags = ["--host", "127.0.0.1", "--name", "b", "--broadcast-address", "127.0.0.1", "--log-level", "error"]
    flags += ["--tcp-port", "0", "--http-port", "0", "--controller", controller]
    command = [sys.executable, "-m", "bench.switched", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        places = (await process.stdout.readline()).decode().partition(": ")[2].split(", ")
        address = next(place.split()[1] for place in places if place.startswith("HTTP "))
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30.0, trust_env=False) as http:
            yield process.pid, http
    finally:
        process.terminate()
        await process.wait()


class Metered:
    """A broker, by the processor time that its messages take in windows of time."""

    def __init__(self, pid: int, http: httpx.AsyncClient, window_s: int) -> None:
        self._pid, self._http, self._window_s = pid, http, window_s

    async def busy(self) -> bool:
        """Whether messages have come for a while."""
        return await self._messages() > 5_000

    async def _messages(self) -> int:
        topics = (await self._http.get("/stats?format=json&topic=t&include_clients=false")).json()["topics"] or []
        return sum(each["message_count"] for each in topics)

    async def _read(self) -> None:
        """Read the stream as the advisor does."""
        held = (await self._http.get("/srtm/arrivals")).json()
        for at in range(held["begin"], held["end"], 50_000):
            (await self._http.get("/srtm/arrivals/read", params={"begin": at, "limit": 50_000})).raise_for_status()

    async def us(self, *, on: bool) -> float:
        """Microseconds of the processor for each message of a window, with the stream on or off."""
        if on:
            (await self._http.get("/srtm/arrivals")).raise_for_status()
        else:
            os.kill(self._pid, signal.SIGUSR1)
        await asyncio.sleep(0.2)
        used, counted = -cpu_ns(self._pid), -await self._messages()
        await asyncio.sleep(self._window_s)
        if on:
            await self._read()
        used, counted = used + cpu_ns(self._pid), counted + await self._messages()
        return used / counted / 1e3


async def pairs(batch: int, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Windows with the stream off and on, in pairs at one broker; every other pair begins with the stream on."""
    async with AsyncExitStack() as stack:
        cluster, api = await stack.enter_async_context(started(0))
        pid, http = await stack.enter_async_context(switched(cluster))
        await until(lambda: _alive(api))
        (await api.put("/v1/topics/t", json={"r": 1e6, "b": 1e5, "slo_ms": 1000, "fit": "none"})).raise_for_status()
        population = Population(100, options.rate / 100, batch, "poisson")
        workload = Workload((population,), NS_PER_S, seed=1)
        seconds = (2 * options.pairs + 10) * (options.seconds + 1)
        await stack.enter_async_context(running(*load("t", workload, cluster.url, seconds)))
        broker = Metered(pid, http, options.seconds)
        await until(broker.busy)
        for on in (True, False):  # the first rows that are read also load pyarrow
            await broker.us(on=on)
        found = []
        for number in range(options.pairs):
            order = (False, True) if number % 2 == 0 else (True, False)
            taken = {on: await broker.us(on=on) for on in order}
            found.append((taken[False], taken[True]))
        return found


async def _alive(api: httpx.AsyncClient) -> bool:
    return any(each["status"] == "alive" for each in (await api.get("/v1/brokers")).json()["brokers"])


async def cost(options: argparse.Namespace) -> None:
    """Processor time for each message, with the stream off and on."""
    rows = []
    for batch in options.batches:
        print(host.jitter_line())
        found = await pairs(batch, options)
        off, on = (statistics.median(each) for each in zip(*found, strict=True))
        more = sorted(with_stream / without - 1 for without, with_stream in found)
        # An interval that has the median with 95 %, whatever the distribution: places by the binomial's normal limit.
        reach = round(0.98 * len(more) ** 0.5)
        low, high = more[max(0, len(more) // 2 - reach)], more[min(len(more) - 1, (len(more) - 1) // 2 + reach)]
        quarters = statistics.quantiles(more, n=4)
        rows.append(
            [
                str(batch),
                f"{off:.2f}",
                f"{on:.2f}",
                f"{statistics.median(more):+.1%}",
                f"{low:+.1%} to {high:+.1%}",
                f"{quarters[0]:+.1%} to {quarters[2]:+.1%}",
            ]
        )
    title = f"CPU of a broker for each message, µs, at {options.rate:,.0f} msg/s; {options.pairs} pairs of windows"
    show(
        f"{title} of {options.seconds} s",
        ["batch", "off", "on", "more: median", "95 % of it", "half of the pairs"],
        rows,
    )


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(prog="bench.advise", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["live", "cost"])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seconds", type=int, default=5, help="length of a window, as `srtm advise --every`")
    parser.add_argument("--rate", type=float, default=5_000.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--every", default="5s")
    options = parser.parse_args()
    print(host.describe(1))
    for name, run in {"live": live, "cost": cost}.items():
        if options.what in (None, name):
            asyncio.run(run(options))


if __name__ == "__main__":
    main()
