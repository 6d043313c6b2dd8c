"""The same openings with processes and sockets, on this machine: see `bench.opening`."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq

from bench.opening import BROKERS, BUCKET, ENOUGH, FIRST_S, MCAP_MPS, PART, PUBLISHERS, RATE_MPS, TOPIC, Opened
from srtm import program
from srtm.client import Cluster, Publisher
from srtm.control.local.cluster import Child, LocalCluster, LocalOptions
from srtm.errors import SRTMError
from srtm.units import NS_PER_MS, NS_PER_S

LOOK_S = 0.002
SETTLED_S = 1.5  # after which brokers are known, and publishers send


def wanted(policy: str, *, named: bool) -> dict[str, Any]:
    """A contract as the controller takes it."""
    publishers = [
        {"id": f"p{number}", "group": f"g{number // 4}", "rate": RATE_MPS}
        for number in range(PUBLISHERS if named else 0)
    ]
    return {"r": BUCKET.r, "b": BUCKET.b, "policy": policy, "fit": "none", "publishers": publishers}


class LiveOpening:
    """A cluster of processes in which a contract opens."""

    def __init__(self, cluster: LocalCluster, http: httpx.AsyncClient, policy: str, seed: int) -> None:
        self.put_s = 0.0  # by the wall clock, which brokers stamp with
        self.stopped: Child | None = None
        self._cluster, self._http, self._policy = cluster, http, policy
        self._rng = random.Random(seed)
        self._looks: list[tuple[float, dict[str, float]]] = []
        self._sending: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return f"{self._cluster.url}/v1/topics/{TOPIC}"

    @property
    def running(self) -> list[Child]:
        return [child for child in self._cluster.brokers if child is not self.stopped]

    async def put(self, *, named: bool) -> None:
        self.put_s = time.time()
        answer = await self._http.put(self.url, json=wanted(self._policy, named=named))
        answer.raise_for_status()

    async def remove(self) -> None:
        (await self._http.delete(self.url)).raise_for_status()

    def stop(self, child: Child) -> None:
        """Let a process stand still."""
        assert child.process is not None
        self.stopped = child
        child.process.send_signal(signal.SIGSTOP)

    async def record(self, verb: str) -> None:
        for child in self.running:
            query = f"?file={child.name}.parquet" if verb == "start" else ""
            (await self._http.post(f"{self._cluster.http(child)}/srtm/trace/{verb}{query}")).raise_for_status()

    async def connect(self, stack: AsyncExitStack) -> None:
        """Let all publishers find their brokers, and send."""
        places = await stack.enter_async_context(Cluster(self._cluster.url))
        publishers = [
            Publisher(TOPIC, controller=places, id=f"p{number}", group=f"g{number // 4}", rate=RATE_MPS)
            for number in range(PUBLISHERS)
        ]
        stack.push_async_callback(_all, [publisher.abort for publisher in publishers])
        self._sending = [asyncio.create_task(self._send(publisher)) for publisher in publishers]
        stack.callback(lambda: [task.cancel() for task in self._sending])

    async def look(self, seconds: float) -> None:
        """Ask brokers what is in force, again and again."""
        query = f"/stats?format=json&topic={TOPIC}&include_clients=false"
        ends_s = time.time() + seconds
        while time.time() < ends_s:
            found = await asyncio.gather(*(self._http.get(self._cluster.http(child) + query) for child in self.running))
            shares = {child.name: _r(said.json()) for child, said in zip(self.running, found, strict=True)}
            self._looks.append((time.time(), shares))
            await asyncio.sleep(LOOK_S)

    async def judged(self, traces: Path) -> Opened:
        """What was in force when, and how long messages waited."""
        seen = (await self._http.get(self.url)).json()
        placed = {each["broker"]: each["publishers"] for each in seen["brokers"] if each["publishers"]}
        running = {child.name for child in self.running}
        found = Opened()
        before_s = self.put_s
        for at_s, shares in self._looks:
            there = {name: shares[name] for name in placed.keys() & running}
            if sum(there.values()) >= ENOUGH * BUCKET.r and all(
                r >= PART * BUCKET.r * placed[name] / PUBLISHERS for name, r in there.items()
            ):
                found.in_force_s = at_s - self.put_s if found.in_force_s is None else found.in_force_s
            elif found.in_force_s is not None:
                found.dips_s += at_s - before_s
            before_s = at_s
        # One look asks brokers one after the other, so each counts with the smaller of what it said in two looks.
        for (_, one), (_, two) in pairwise(self._looks):
            together = sum(min(one[name], two[name]) for name in one)
            found.exceeded = found.exceeded or together > BUCKET.r + 0.001 * BROKERS
        begin_ns = round(self.put_s * NS_PER_S)
        for path in traces.glob("*.parquet"):
            table = pq.read_table(path)
            arrival_ns, release_ns = (table[name].to_numpy() for name in ("arrival_ns", "release_ns"))
            first = (arrival_ns >= begin_ns) & (arrival_ns < begin_ns + FIRST_S * NS_PER_S)
            found.delays_ms += ((release_ns - arrival_ns)[first] / NS_PER_MS).tolist()
        return found

    async def _send(self, publisher: Publisher) -> None:
        rng = random.Random(self._rng.random())
        await publisher.open()
        at_s = time.time()
        while True:
            at_s += rng.expovariate(RATE_MPS)
            await asyncio.sleep(at_s - time.time())
            with suppress(SRTMError):
                await publisher.publish(b"x" * 100)


def _r(said: dict[str, Any]) -> float:
    return next((topic["srtm"]["r"] or 0.0 for topic in said.get("topics", ())), 0.0)


async def _all(actions: list[Callable[[], Awaitable[None]]]) -> None:
    await asyncio.gather(*(action() for action in actions), return_exceptions=True)


async def named_before(world: LiveOpening, stack: AsyncExitStack) -> None:
    await world.put(named=True)
    await world.look(0.1)
    await world.connect(stack)
    await world.look(FIRST_S)


async def sending_already(world: LiveOpening, stack: AsyncExitStack) -> None:
    await world.connect(stack)
    await asyncio.sleep(SETTLED_S)
    await world.put(named=False)
    await world.look(FIRST_S)


async def connect_at_once(world: LiveOpening, stack: AsyncExitStack) -> None:
    await world.put(named=False)
    await world.connect(stack)
    await world.look(FIRST_S)


async def created_again(world: LiveOpening, stack: AsyncExitStack) -> None:
    await world.put(named=True)
    await world.connect(stack)
    await asyncio.sleep(4 * SETTLED_S)
    await world.remove()
    await world.put(named=False)
    await world.look(FIRST_S)


async def register_later(world: LiveOpening, stack: AsyncExitStack) -> None:
    await world.put(named=False)
    await asyncio.sleep(SETTLED_S)
    world.put_s = time.time()
    await world.connect(stack)
    await world.look(FIRST_S)


async def stopped_before(world: LiveOpening, stack: AsyncExitStack) -> None:
    await world.put(named=True)
    await world.look(0.02)
    await world.connect(stack)
    await world.look(FIRST_S)


CASES: dict[str, Callable[[LiveOpening, AsyncExitStack], Awaitable[None]]] = {
    "named by PUT, connect later": named_before,
    "sending before PUT": sending_already,
    "connect at once after PUT": connect_at_once,
    "deleted and created again": created_again,
    "register when it is open": register_later,
    "a broker stopped 2 s before PUT": stopped_before,
}


@asynccontextmanager
async def _cluster(folder: Path) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    quiet = ["--log-level", "error"]
    options = LocalOptions(
        BROKERS,
        trace_folder=folder,
        free_ports=True,
        controller_flags=[*quiet, "--mcap-mps", str(MCAP_MPS)],
        broker_flags=quiet,
        web_port=None,
    )
    async with LocalCluster(options) as cluster, httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        yield cluster, http


async def opened(case: str, policy: str, seed: int) -> Opened:
    """One run, in a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-opening-") as name:
        traces = Path(name)
        async with _cluster(traces) as (cluster, http):
            world = LiveOpening(cluster, http, policy, seed)
            await asyncio.sleep(SETTLED_S + random.Random(seed).random())
            if CASES[case] is stopped_before:
                world.stop(cluster.brokers[1])
                await asyncio.sleep(2)
            await world.record("start")
            try:
                async with AsyncExitStack() as stack:
                    await CASES[case](world, stack)
                    await world.record("stop")
            finally:
                if world.stopped is not None and world.stopped.process is not None:
                    world.stopped.process.send_signal(signal.SIGCONT)
            return await world.judged(traces)


def measured(case: str, policy: str, seed: int) -> Opened:
    """One run, from outside of a loop."""
    return program.run(opened(case, policy, seed))
