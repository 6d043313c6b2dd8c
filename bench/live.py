"""A live cluster on this machine under a city's load, and what its brokers say is in force, look by look.

At each of 50 junctions, four sensors report together whenever the light changes, ten messages each: 1,000 messages a
second on average, under the contract (1300/s, 460).

Everything is timed by the wall clock, because brokers stamp what they record with it.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from srtm.client import Cluster, Publisher, Subscriber
from srtm.control.local.cluster import LocalCluster, LocalOptions
from srtm.errors import SRTMError

TOPIC = "traffic"
JUNCTIONS, SENSORS = 50, 4
LANES = 10  # that a sensor counts; each is a message of its report
CHANGES_S = 0.5  # of a light, a second
R, B = 1300.0, 460.0
SLO_MS = 50.0
BROKERS = 4
LOOK_S = 0.02
ANSWER_S = 1.0  # that a broker may take before a look goes on without it
PATIENCE_S = 60.0  # with a controller that is being started again
MOST_IN_FLIGHT = 100  # reports of a sensor without an answer, before it skips one
ENOUGH, PART = 0.99, 0.5  # of r at placed brokers together, and of its part at each of them


@dataclass(frozen=True)
class Wish:
    """A contract, and the load that fits it: how many messages each report of a sensor has."""

    policy: str
    r: float
    b: float
    lanes: int = LANES

    def body(self, durability: str) -> dict[str, Any]:
        """As the controller takes it."""
        wish = {"r": self.r, "b": self.b, "policy": self.policy, "slo_ms": SLO_MS, "durability": durability}
        return {**wish, "publishers": sensors(self.lanes)}


def sensors(lanes: int = LANES) -> list[dict[str, Any]]:
    """All sensors, as the controller wants them declared: who bursts together is in `group`."""
    return [
        {
            "id": f"junction-{junction}/sensor-{sensor}",
            "group": f"junction-{junction}",
            "rate": CHANGES_S * lanes,
            "batch": lanes,
        }
        for junction in range(JUNCTIONS)
        for sensor in range(SENSORS)
    ]


@dataclass(frozen=True)
class Look:
    """What a controller and all brokers said between two instants; nothing is in force where nobody answers."""

    began_s: float
    ended_s: float
    opened: bool
    placed: dict[str, int]  # publishers by broker
    connected: dict[str, int]
    shares: dict[str, tuple[float, float]]

    def serves(self, wish: Wish) -> bool:
        """Whether this contract is in force where publishers are placed, and not the one before it."""
        there, everybody = [self.shares.get(name, (0.0, 0.0))[0] for name in self.placed], sum(self.placed.values())
        parts = zip(there, self.placed.values(), strict=True)
        return ENOUGH * wish.r <= sum(there) <= wish.r + 1e-6 and all(
            r >= PART * wish.r * publishers / everybody for r, publishers in parts
        )


class Watch:
    """Looks at a topic again and again."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.looks: list[Look] = []
        self._cluster = cluster
        self._http = httpx.AsyncClient(timeout=ANSWER_S, trust_env=False)

    async def run(self) -> None:
        """Until it is cancelled."""
        urls = {child.name: self._cluster.http(child) for child in self._cluster.brokers}
        query = f"/stats?format=json&topic={TOPIC}&include_clients=false"
        async with self._http:
            while True:
                began_s = time.time()
                seen, *found = await asyncio.gather(
                    self._asked(f"{self._cluster.url}/v1/topics/{TOPIC}"),
                    *(self._asked(url + query) for url in urls.values()),
                )
                shares = {name: _share(said) for name, said in zip(urls, found, strict=True)}
                placed, connected = (
                    {each["broker"]: each[what] for each in seen.get("brokers", ()) if each[what]}
                    for what in ("publishers", "connected")
                )
                opened = seen.get("state", "opening") != "opening"
                self.looks.append(Look(began_s, time.time(), opened, placed, connected, shares))
                await asyncio.sleep(max(0.0, LOOK_S - (time.time() - began_s)))

    async def until(self, since_s: float, wish: Wish, patience_s: float) -> bool:
        """Wait until a look that began after an instant serves; gives whether there was one."""
        ends_s, number = time.time() + patience_s, len(self.looks)
        while time.time() < ends_s:
            if any(look.began_s >= since_s and look.serves(wish) for look in self.looks[number:]):
                return True
            number = len(self.looks)
            await asyncio.sleep(LOOK_S)
        return False

    def between(self, begin_s: float, end_s: float) -> list[Look]:
        """Looks that began and ended within; older ones are forgotten."""
        self.looks = [look for look in self.looks if look.began_s >= begin_s]
        return [look for look in self.looks if look.ended_s <= end_s]

    async def _asked(self, url: str) -> dict[str, Any]:
        with suppress(httpx.HTTPError):
            answer = await self._http.get(url)
            return answer.json() if answer.status_code == httpx.codes.OK else {}
        return {}


def _share(said: dict[str, Any]) -> tuple[float, float]:
    for topic in said.get("topics", ()):
        return topic["srtm"]["r"] or 0.0, topic["srtm"]["b"] or 0.0
    return 0.0, 0.0


def certain(looks: list[Look]) -> Iterator[tuple[float, float]]:
    """Σ r and Σ b that brokers had in force at the same time, for certain.

    One look asks brokers one after the other, and a share that moves meanwhile would be counted twice. So each broker
    counts with the smaller of what it said in two looks.
    """
    for one, two in pairwise(looks):
        pairs = [(one.shares[name], two.shares[name]) for name in one.shares]
        yield sum(min(a[0], b[0]) for a, b in pairs), sum(min(a[1], b[1]) for a, b in pairs)


class Load:
    """The city's sensors, which report whatever becomes of it, and a subscriber; counts what was answered and came."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self.lanes = LANES
        self.stopped = False
        self.skipped = self.refused = self.doubled = self.arrived = 0
        self._sent, self._came = array("H"), array("H")  # a bit a message, by report
        self._answered = bytearray()
        self._cluster = cluster
        self._seed = seed
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def reports(self) -> int:
        return len(self._sent)

    def summary(self) -> str:
        return (
            f"{self.reports:,} reports, {sum(self._answered):,} acknowledged, {self.skipped:,} skipped because"
            f" {MOST_IN_FLIGHT} waited; {self.arrived:,} messages arrived, {self.doubled:,} of them again"
        )

    def missing(self, begin: int = 0, end: int | None = None) -> int:
        """Messages of these reports that were answered, and did not come; a kill long after them may be the cause."""
        rows = zip(self._sent[begin:end], self._came[begin:end], self._answered[begin:end], strict=True)
        return sum((sent & ~came).bit_count() for sent, came, answered in rows if answered)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connect everybody, and let them report within."""
        brokers = [f"127.0.0.1:{child.ports['TCP']}" for child in self._cluster.brokers]
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(Cluster(self._cluster.url))
            subscriber = await stack.enter_async_context(Subscriber(TOPIC, "bench", brokers=brokers))
            publishers = [Publisher(TOPIC, controller=cluster, **each) for each in sensors()]
            stack.push_async_callback(_all_aborted, publishers)
            await asyncio.gather(*(publisher.open() for publisher in publishers))
            tasks = [asyncio.create_task(self._hear(subscriber))]
            for number in range(JUNCTIONS):
                here = publishers[number * SENSORS : (number + 1) * SENSORS]
                tasks.append(asyncio.create_task(self._junction(number, here)))
            stack.push_async_callback(_cancelled, tasks)
            stack.callback(lambda: [task.cancel() for task in self._under_way])
            yield

    async def drained(self, quiet_s: float = 10.0) -> None:
        """Report no more, and wait until everything has come, or nothing comes any more."""
        self.stopped = True
        arrived, since_s = -1, 0.0
        while self._under_way or self.missing():
            if self.arrived != arrived:
                arrived, since_s = self.arrived, time.time()
            if time.time() - since_s > quiet_s:
                return
            await asyncio.sleep(0.2)

    async def _junction(self, number: int, publishers: list[Publisher]) -> None:
        """Whenever the light changes, every sensor here reports."""
        rng = random.Random(f"{self._seed} {number}")
        at_s = time.time()
        while not self.stopped:
            at_s += rng.expovariate(CHANGES_S)
            await asyncio.sleep(at_s - time.time())
            for publisher in publishers:
                if publisher.in_flight >= MOST_IN_FLIGHT:
                    self.skipped += 1
                    continue
                task = asyncio.create_task(self._report(publisher))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)

    async def _report(self, publisher: Publisher) -> None:
        number = len(self._sent)
        self._sent.append((1 << self.lanes) - 1)
        self._came.append(0)
        self._answered.append(0)
        try:
            await publisher.publish_many([b"%d %d" % (number, lane) for lane in range(self.lanes)])
        except SRTMError:
            self.refused += 1
        else:
            self._answered[number] = 1

    async def _hear(self, subscriber: Subscriber) -> None:
        async for message in subscriber:
            number, lane = map(int, message.body.split())
            self.doubled += self._came[number] >> lane & 1
            self.arrived += 1
            self._came[number] |= 1 << lane
            await message.finish()


class Live:
    """A cluster under load that is watched."""

    def __init__(self, folder: Path, durability: str, seed: int) -> None:
        quiet = ["--log-level", "error"]
        options = LocalOptions(
            BROKERS,
            data_path=folder / "data",
            trace_folder=folder / "traces",
            free_ports=True,
            controller_flags=quiet,
            broker_flags=quiet,
            web_port=None,
        )
        self.cluster = LocalCluster(options)
        self.watch = Watch(self.cluster)
        self.load = Load(self.cluster, seed)
        self._durability = durability

    @asynccontextmanager
    async def running(self, wish: Wish) -> AsyncIterator[None]:
        """Start everything, under a first contract."""
        async with self.cluster, httpx.AsyncClient(timeout=10.0, trust_env=False) as self._http:
            kept = f"topic={TOPIC}&durability={self._durability}"
            for child in self.cluster.brokers:  # before anybody subscribes, which would make it one in memory
                await self._ask("POST", f"{self.cluster.http(child)}/topic/create?{kept}")
            await self.replace(wish)
            async with asyncio.TaskGroup() as group, self.load.running():
                beside = (self.cluster.watch(lambda _: None), self.watch.run())
                tasks = [group.create_task(each) for each in beside]
                yield
                for task in tasks:
                    task.cancel()

    async def replace(self, wish: Wish, gap_s: float = 0.0) -> tuple[float, float]:
        """DELETE and PUT; when PUT was first sent, and when it was answered."""
        url, sent_s = f"{self.cluster.url}/v1/topics/{TOPIC}", 0.0
        while True:
            await self.remove()
            await asyncio.sleep(gap_s)
            sent_s = sent_s or time.time()
            answer = await self._ask("PUT", url, wish.body(self._durability))
            if answer.status_code != httpx.codes.CONFLICT:  # a controller that died has forgotten the DELETE
                answer.raise_for_status()
                self.load.lanes = wish.lanes
                return sent_s, time.time()

    async def remove(self) -> None:
        await self._ask("DELETE", f"{self.cluster.url}/v1/topics/{TOPIC}")

    async def record(self, verb: str, prefix: str = "") -> None:
        """Start recordings at all brokers, or stop them."""
        query = [f"?file={prefix}-{child.name}.parquet" if prefix else "" for child in self.cluster.brokers]
        urls = [f"{self.cluster.http(child)}/srtm/trace/{verb}" for child in self.cluster.brokers]
        asked = (self._ask("POST", url + what) for url, what in zip(urls, query, strict=True))
        for answer in await asyncio.gather(*asked):
            answer.raise_for_status()

    async def _ask(self, method: str, url: str, body: object = None) -> httpx.Response:
        """The answer; a process that is being started again is waited for."""
        ends_s = time.time() + PATIENCE_S
        while True:
            try:
                answer = await self._http.request(method, url, json=body)
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.time() > ends_s:
                    return answer
            except httpx.TransportError:
                if time.time() > ends_s:
                    raise
            await asyncio.sleep(LOOK_S)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _all_aborted(publishers: list[Publisher]) -> None:
    await asyncio.gather(*(publisher.abort() for publisher in publishers), return_exceptions=True)
