"""The live world: a cluster of processes on this machine, a load on real sockets, and the traces of its brokers.

In: a population of publishers, scaled to the machine, and how to place their topic. Out: the trace of each broker with
the shares that it had in force. Each run starts its own cluster on free ports and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pyarrow as pa

from srtm import program
from srtm.client.cluster import Cluster
from srtm.client.load import Load, LoadOptions, declared
from srtm.control.local.cluster import LocalCluster, LocalOptions
from srtm.errors import ControlError, InputError
from srtm.lab.world import PAPERS_RULE
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.model.profile import profile
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Population, Workload
from srtm.workload.trace import batches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from numpy.typing import NDArray

    from srtm.client.load import LoadReport

    Ints = NDArray[np.int64]

TOPIC = "live"
# Columns of every live result: the load's own lateness, and the host's gaps just before the run (`srtm latency`).
NOISE = {"late_p99_ms": "load late p99 ms", "gap_ms": "longest gap ms", "in_gaps": "time in gaps"}
_SETTLE_S = 30.0  # limit until every broker has its share
_CALM_S = 60.0  # the headroom of r empties a backlog slowly
_SPARE_S = 150.0
_POLL_S = 0.25
_ANSWER_S = 60.0  # a stalled host answers late
_LEASE_S = "300"  # longer than a run: a stall of the host must not cut the measured shares


@dataclass(frozen=True, slots=True)
class Live:
    """The scale of a live run. Publishers send single messages; `mcap_mps` is the declared capacity of a broker."""

    publishers: int = 400
    rate_mps: float = 5.0
    seconds: float = 20.0
    brokers: int = 4
    slo_ms: float = 20.0
    mcap_mps: float = 800.0
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        """List everything that is wrong at once."""
        wrong = [
            f"{each.name} must be positive, not {value}"
            for each in fields(self)
            if not 0 < (value := getattr(self, each.name)) < float("inf")
        ]
        if wrong:
            raise InputError("; ".join(wrong))

    @property
    def longest_s(self) -> float:
        """Duration that a load needs to connect, be fitted and be recorded."""
        return self.patience_s + self.seconds + _SPARE_S

    @property
    def name(self) -> str:
        """Part of the key of kept rows, and a description of the scale."""
        return (
            f"live, {self.publishers} publishers of {self.rate_mps:g} msg/s, {self.seconds:g} s,"
            f" {self.brokers} brokers of {self.mcap_mps:g} msg/s, SLO {self.slo_ms:g} ms,"
            f" at most {self.patience_s:g} s for a fit"
        )

    def workload(self, seed: int, *, group_size: int = 1, seconds: float | None = None) -> Workload:
        """The traffic at this scale."""
        population = Population(self.publishers, self.rate_mps, group_size=group_size)
        return Workload((population,), round((seconds or self.seconds) * NS_PER_S), seed)

    def steady(
        self,
        workload: Workload,
        k: int,
        quantile: str = PAPERS_RULE,
        *,
        kernel_time: bool = True,
        stalls: Stalls | None = None,
    ) -> Observed:
        """Run the whole load split evenly over k brokers, with fixed shares."""
        bucket = profile(workload.arrivals().times_ns, quantile=quantile).bucket
        flags = [] if kernel_time else ["--no-kernel-time"]
        wish = {"policy": "lb", "fit": "none", "adapt": False}
        return program.run(self._steady(workload, bucket, k, wish, flags, stalls))

    def fitted(
        self, workload: Workload, policy: str, quantile: str, *, fit: str = "model", record: bool = True
    ) -> Observed:
        """Run the load until the Load Distributor has placed it, then record it for a while."""
        bucket = profile(workload.arrivals().times_ns, quantile=quantile).bucket
        return program.run(self._fitted(workload, bucket, {"policy": policy, "fit": fit}, record=record))

    async def _steady(
        self,
        workload: Workload,
        bucket: TokenBucket,
        k: int,
        wish: dict[str, Any],
        flags: Sequence[str],
        stalls: Stalls | None,
    ) -> Observed:
        async with _cluster(k, flags) as (cluster, folder), Cluster(cluster.url) as controller:
            topic = await self._create(controller, workload, bucket, wish)
            load = Load(LoadOptions(TOPIC, workload), controller)
            await _each(cluster, "start")
            async with _stalling(cluster, stalls):
                report = await load.go(lambda _: None)
            await _each(cluster, "stop")
            crossed = await _crossed(cluster)
            after = await controller.request("GET", f"/v1/topics/{TOPIC}")
            if _shares(after) != _shares(topic):
                raise ControlError(f"shares changed during the measurement: {_shares(topic)} to {_shares(after)}")
            places = (await controller.request("GET", f"/v1/topics/{TOPIC}/publishers"))["publishers"]
            homes = {each["id"]: each["broker"] for each in places}
            return Observed(
                after, _read(folder, after), _late_ms(load), report.lost, crossed, load.schedule.written_ns, homes
            )

    async def _fitted(self, workload: Workload, bucket: TokenBucket, wish: dict[str, Any], *, record: bool) -> Observed:
        flags = ["--mcap-mps", f"{self.mcap_mps:g}"]
        async with _cluster(self.brokers, [], flags) as (cluster, folder), Cluster(cluster.url) as controller:
            await self._create(controller, workload, bucket, wish)
            load = Load(LoadOptions(TOPIC, workload), controller)
            sending = asyncio.create_task(load.go(lambda _: None))
            try:
                topic = await self._placed(controller, sending)
                if record:
                    await _calm(controller)
                    await _each(cluster, "start")
                    await asyncio.wait([sending], timeout=self.seconds)
                    await _each(cluster, "stop")
                    topic = await controller.request("GET", f"/v1/topics/{TOPIC}")
                if sending.done():
                    sending.result()
                    raise ControlError(
                        f"the load ended before the topic was fitted; raise --patience above {self.patience_s:g}s"
                    )
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            return Observed(topic, _read(folder, topic) if record else {}, _late_ms(load))

    async def _create(
        self, controller: Cluster, workload: Workload, bucket: TokenBucket, wish: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Create the topic, and wait until its whole bucket is in force."""
        publishers = [asdict(spec) for spec in declared(workload)]
        document = {"r": bucket.r, "b": bucket.b, "slo_ms": self.slo_ms, "publishers": publishers, **wish}
        topic: dict[str, Any] = await controller.request("PUT", f"/v1/topics/{TOPIC}", document)
        until = time.monotonic() + _SETTLE_S
        while sum(share.b_ntok for share in _shares(topic).values()) < bucket.b_ntok:
            if time.monotonic() > until:
                raise ControlError(f"brokers still lack shares after {_SETTLE_S:g} s; the topic is {topic['state']}")
            await asyncio.sleep(_POLL_S)
            topic = await controller.request("GET", f"/v1/topics/{TOPIC}")
        return topic

    async def _placed(self, controller: Cluster, sending: asyncio.Task[LoadReport]) -> dict[str, Any]:
        """The topic after its fitting, or at the end of patience."""
        until = time.monotonic() + self.patience_s
        while True:
            topic: dict[str, Any] = await controller.request("GET", f"/v1/topics/{TOPIC}")
            if topic["fitted"] or sending.done() or time.monotonic() > until:
                return topic
            await asyncio.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Stalls:
    """Stalls of the first broker's process: their length, and the time between them."""

    length_ms: float
    every_ms: float


@dataclass(frozen=True, slots=True)
class Part:
    """The trace of one broker in order of arrival, and its share."""

    share: TokenBucket
    arrival_ns: Ints
    release_ns: Ints
    total_ns: Ints  # from arrival to the first subscriber, of those that were sent to one

    @property
    def access_ns(self) -> Ints:
        """How long messages waited for tokens."""
        return self.release_ns - self.arrival_ns

    def simulated_ns(self) -> Ints:
        """The same by the model, from the recorded arrivals."""
        return scan.access_delays(self.arrival_ns, self.share)

    def unexplained(self) -> int:
        """How many messages the law does not release when they were, in the order in which they were read.

        A message that is read after one with a later stamp counts as of that instant (docs/adr/0011-arrival-times.md).
        """
        order = np.lexsort((-self.arrival_ns, self.release_ns))
        counted_ns = np.maximum.accumulate(self.arrival_ns[order])
        released_ns = counted_ns + scan.access_delays(counted_ns, self.share)
        return int(np.count_nonzero(released_ns != self.release_ns[order]))


@dataclass(frozen=True, slots=True)
class Observed:
    """A run: the topic by the controller, the traces of brokers, and the p99 lateness of the load itself.

    For a load that ran to its end, also the number of lost messages and of messages read out of order, the times at
    which messages were written, and the broker of each publisher.
    """

    topic: Mapping[str, Any]
    parts: Mapping[str, Part]
    late_p99_ms: float
    lost: int = 0
    crossed: int = 0
    written_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    places: Mapping[str, str] = field(default_factory=dict)


@asynccontextmanager
async def _cluster(
    brokers: int, broker_flags: Sequence[str], controller_flags: Sequence[str] = ()
) -> AsyncIterator[tuple[LocalCluster, Path]]:
    """A cluster, and the folder of its traces."""
    with tempfile.TemporaryDirectory(prefix="srtm-lab-") as name:
        options = LocalOptions(
            brokers,
            trace_folder=Path(name),
            free_ports=True,
            controller_flags=["--lease-s", _LEASE_S, *controller_flags],
            broker_flags=broker_flags,
        )
        async with LocalCluster(options) as cluster:
            yield cluster, Path(name)


async def _each(cluster: LocalCluster, verb: str) -> None:
    """Start or stop recording at every broker."""
    async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as client:
        for child in cluster.brokers:
            url = f"{cluster.http(child)}/srtm/trace/{verb}"
            answer = await client.post(url, params={"file": f"{child.name}.parquet"})
            if answer.status_code != 200:
                raise ControlError(f"{url}: {answer.text}")


async def _crossed(cluster: LocalCluster) -> int:
    """Number of messages read after one with a later stamp; they count as of that stamp (docs/adr/0011)."""
    crossed = 0
    async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as client:
        for child in cluster.brokers:
            answer = await client.get(f"{cluster.http(child)}/stats", params={"format": "json", "topic": TOPIC})
            crossed += sum(topic["srtm"]["late"] for topic in answer.json()["topics"])
    return crossed


async def _calm(controller: Cluster) -> None:
    """Wait until all publishers are in place, the backlog is gone, and shares have adapted."""
    until = time.monotonic() + _CALM_S
    while time.monotonic() < until:
        topic = await controller.request("GET", f"/v1/topics/{TOPIC}")
        if topic["state"] != "moving" and topic["waiting"] == 0:
            break
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(topic["adapt_window_s"])


@asynccontextmanager
async def _stalling(cluster: LocalCluster, stalls: Stalls | None) -> AsyncIterator[None]:
    """Stall the first broker now and then, and let it run at the end."""
    process = cluster.brokers[0].process
    assert process is not None
    stalling = asyncio.create_task(_stall(process.pid, stalls)) if stalls and stalls.length_ms else None
    try:
        yield
    finally:
        if stalling is not None:
            stalling.cancel()
            await asyncio.gather(stalling, return_exceptions=True)


async def _stall(pid: int, stalls: Stalls) -> None:
    while True:
        await asyncio.sleep((stalls.every_ms - stalls.length_ms) / 1_000)
        try:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(stalls.length_ms / 1_000)
        finally:
            os.kill(pid, signal.SIGCONT)


def _shares(topic: Mapping[str, Any]) -> dict[str, TokenBucket]:
    """The shares in force at brokers."""
    return {each["broker"]: TokenBucket.of(each["r"], each["b"]) for each in topic["brokers"] if each["r"]}


def _late_ms(load: Load) -> float:
    return load.schedule.lateness.p99 / NS_PER_MS if load.schedule.lateness else 0.0


def _read(folder: Path, topic: Mapping[str, Any]) -> dict[str, Part]:
    """The traces of the brokers that had messages."""
    parts = {}
    for name, share in _shares(topic).items():
        rows = pa.Table.from_batches(batches(folder / f"{name}.parquet", ["arrival_ns", "release_ns", "sent_ns"]))
        arrival_ns, release_ns = (rows[column].to_numpy() for column in ("arrival_ns", "release_ns"))
        sent = rows.filter(rows["sent_ns"].is_valid())
        total_ns = sent["sent_ns"].to_numpy() - sent["arrival_ns"].to_numpy()
        if len(arrival_ns):
            parts[name] = Part(share, arrival_ns, release_ns, total_ns)
    return parts
