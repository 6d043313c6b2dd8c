"""The live world at real speed: a load on real sockets, on brokers whose service is this machine's.

In: a population of publishers, scaled to the machine. Out: the trace of each broker with the shares that it had in
force.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from srtm import program
from srtm.client.cluster import Cluster
from srtm.client.load import Load, LoadOptions, declared
from srtm.errors import ControlError, InputError
from srtm.lab.live.cluster import TOPIC, crossed, late_ms, read, record, running, shares_of
from srtm.lab.world import PAPERS_RULE
from srtm.model.profile import profile
from srtm.units import NS_PER_S
from srtm.workload.publishers import Population, Workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from srtm.control.local.cluster import LocalCluster
    from srtm.lab.live.cluster import Ints, Part
    from srtm.model.bucket import TokenBucket

_SETTLE_S = 30.0  # limit until every broker has its share
_POLL_S = 0.25
_SLO_MS = 20.0  # nothing depends on it: shares are fixed


def refuse_unless_positive(scale: Any) -> None:
    """InputError that lists every field that is not a positive number."""
    wrong = [
        f"{each.name} must be positive, not {value}"
        for each in fields(scale)
        if not 0 < (value := getattr(scale, each.name)) < float("inf")
    ]
    if wrong:
        raise InputError("; ".join(wrong))


@dataclass(frozen=True, slots=True)
class Live:
    """The scale of a live run. Publishers send single messages."""

    publishers: int = 400
    rate_mps: float = 5.0
    seconds: float = 20.0

    def __post_init__(self) -> None:
        """Refuse anything that is not positive."""
        refuse_unless_positive(self)

    @property
    def name(self) -> str:
        """Part of the key of kept rows, and a description of the scale."""
        return f"live, {self.publishers} publishers of {self.rate_mps:g} msg/s, {self.seconds:g} s"

    def workload(self, seed: int) -> Workload:
        """The traffic at this scale."""
        return Workload((Population(self.publishers, self.rate_mps),), round(self.seconds * NS_PER_S), seed)

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
        return program.run(_steady(workload, bucket, k, flags, stalls))


async def _steady(
    workload: Workload, bucket: TokenBucket, k: int, flags: Sequence[str], stalls: Stalls | None
) -> Observed:
    async with running(k, broker_flags=flags) as (cluster, folder), Cluster(cluster.url) as controller:
        wish = {"policy": "lb", "fit": "none", "adapt": False, "slo_ms": _SLO_MS}
        topic = await create(controller, workload, bucket, wish)
        load = Load(LoadOptions(TOPIC, workload), controller)
        await record(cluster, "start")
        async with _stalling(cluster, stalls):
            report = await load.go(lambda _: None)
        await record(cluster, "stop")
        late = await crossed(cluster)
        after = await controller.request("GET", f"/v1/topics/{TOPIC}")
        if shares_of(after) != shares_of(topic):
            raise ControlError(f"shares changed during the measurement: {shares_of(topic)} to {shares_of(after)}")
        homes = await places(controller)
        parts = read(folder, shares_of(after), {name: number for number, name in enumerate(homes)})
        return Observed(after, parts, late_ms(load), report.lost, late, load.schedule.written_ns, homes)


async def create(
    controller: Cluster, workload: Workload, bucket: TokenBucket, wish: Mapping[str, Any]
) -> dict[str, Any]:
    """Create the topic, and wait until its whole bucket is in force."""
    publishers = [asdict(spec) for spec in declared(workload)]
    document = {"r": bucket.r, "b": bucket.b, "publishers": publishers, **wish}
    topic: dict[str, Any] = await controller.request("PUT", f"/v1/topics/{TOPIC}", document)
    until = time.monotonic() + _SETTLE_S
    while sum(share.b_ntok for share in shares_of(topic).values()) < bucket.b_ntok:
        if time.monotonic() > until:
            raise ControlError(f"brokers still lack shares after {_SETTLE_S:g} s; the topic is {topic['state']}")
        await asyncio.sleep(_POLL_S)
        topic = await controller.request("GET", f"/v1/topics/{TOPIC}")
    return topic


async def places(controller: Cluster) -> dict[str, str]:
    """The broker of each publisher."""
    found = (await controller.request("GET", f"/v1/topics/{TOPIC}/publishers"))["publishers"]
    return {each["id"]: each["broker"] for each in found}


@dataclass(frozen=True, slots=True)
class Stalls:
    """Stalls of the first broker's process: their length, and the time between them."""

    length_ms: float
    every_ms: float


@dataclass(frozen=True, slots=True)
class Observed:
    """A run: the topic by the controller, the traces of brokers, and the p99 lateness of the load itself.

    Also the number of lost messages and of messages read out of order, the times at which messages were written, and
    the broker of each publisher.
    """

    topic: Mapping[str, Any]
    parts: Mapping[str, Part]
    late_p99_ms: float
    lost: int = 0
    crossed: int = 0
    written_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    places: Mapping[str, str] = field(default_factory=dict)


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
