"""What live worlds have in common: a cluster of processes on this machine, and the traces that its brokers record.

Each run starts its own cluster on free ports and leaves nothing behind.
"""

from __future__ import annotations

import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pyarrow as pa

from srtm.control.local.cluster import LocalCluster, LocalOptions
from srtm.errors import ControlError
from srtm.lab.live.priority import FIRST, SECOND, hurry
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.units import NS_PER_MS
from srtm.workload.trace import batches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from numpy.typing import NDArray

    from srtm.client.load import Load

    Ints = NDArray[np.int64]

TOPIC = "live"
# Columns of every live result: the load's own lateness, and the host's gaps (`srtm latency`).
NOISE = {"late_p99_ms": "load late p99 ms", "gap_ms": "longest gap ms", "in_gaps": "time in gaps"}
_ANSWER_S = 60.0  # a stalled host answers late
_LEASE_S = "3600"  # longer than a run: a stall of the host must not cut the measured shares
_QUIET = ("--log-level", "warning")
_READY_S = 300.0  # other cells start, too
_COLUMNS = ["arrival_ns", "release_ns", "sent_ns", "publisher"]


@dataclass(frozen=True, slots=True)
class Part:
    """The trace of one broker in order of arrival, and its share."""

    share: TokenBucket
    arrival_ns: Ints
    release_ns: Ints
    sent_ns: Ints  # to the first subscriber; 0 if none got it in time
    publisher_of: NDArray[np.int32]

    @property
    def access_ns(self) -> Ints:
        """How long messages waited for tokens."""
        return self.release_ns - self.arrival_ns

    @property
    def total_ns(self) -> Ints:
        """From arrival to the first subscriber, of those that were sent to one."""
        return (self.sent_ns - self.arrival_ns)[self.sent_ns > 0]

    def simulated_ns(self) -> Ints:
        """How long messages wait for tokens by the model, from the recorded arrivals."""
        return scan.access_delays(self.arrival_ns, self.share)

    def unexplained(self) -> int:
        """How many messages the law does not release when they were, in the order in which they were read.

        A message that is read after one with a later stamp counts as of that instant (docs/adr/0011-arrival-times.md).
        """
        order = np.lexsort((-self.arrival_ns, self.release_ns))
        counted_ns = np.maximum.accumulate(self.arrival_ns[order])
        released_ns = counted_ns + scan.access_delays(counted_ns, self.share)
        return int(np.count_nonzero(released_ns != self.release_ns[order]))


@asynccontextmanager
async def running(brokers: int, **options: Any) -> AsyncIterator[tuple[LocalCluster, Path]]:
    """A cluster, and the folder of its traces; options are those of `LocalOptions`."""
    with tempfile.TemporaryDirectory(prefix="srtm-lab-") as name:
        chosen = LocalOptions(
            brokers,
            trace_folder=Path(name),
            free_ports=True,
            controller_flags=[*_QUIET, "--lease-s", _LEASE_S, *options.pop("controller_flags", ())],
            broker_flags=[*_QUIET, *options.pop("broker_flags", ())],
            web_port=None,
            ready_s=_READY_S,
            **options,
        )
        async with LocalCluster(chosen) as cluster:
            for child in (cluster.controller, *cluster.brokers):
                assert child.process is not None
                hurry(SECOND if child is cluster.controller else FIRST, child.process.pid)
            yield cluster, Path(name)


async def record(cluster: LocalCluster, verb: str) -> None:
    """Start or stop recording at every broker."""
    async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as client:
        for child in cluster.brokers:
            await _post(client, f"{cluster.http(child)}/srtm/trace/{verb}", {"file": f"{child.name}.parquet"})


async def limit(cluster: LocalCluster, shares: Mapping[str, TokenBucket]) -> None:
    """Put shares in force by hand, whatever the controller says."""
    async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as client:
        for child in cluster.brokers:
            if share := shares.get(child.name):
                terms = {"topic": TOPIC, "r": f"{share.r:.3f}", "b": f"{share.b:.9f}"}
                await _post(client, f"{cluster.http(child)}/topic/limit", terms)


async def _post(client: httpx.AsyncClient, url: str, params: Mapping[str, str]) -> None:
    answer = await client.post(url, params=params)
    if answer.status_code != 200:
        raise ControlError(f"{url}: {answer.text}")


async def crossed(cluster: LocalCluster) -> int:
    """Number of messages read after one with a later stamp; they count as of that stamp (docs/adr/0011)."""
    found = 0
    async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False) as client:
        for child in cluster.brokers:
            answer = await client.get(f"{cluster.http(child)}/stats", params={"format": "json", "topic": TOPIC})
            found += sum(topic["srtm"]["late"] for topic in answer.json()["topics"])
    return found


def shares_of(topic: Mapping[str, Any]) -> dict[str, TokenBucket]:
    """The shares in force at brokers, as the controller tells."""
    return {each["broker"]: TokenBucket.of(each["r"], each["b"]) for each in topic["brokers"] if each["r"]}


def late_ms(load: Load) -> float:
    """p99 lateness of the load itself."""
    return load.schedule.lateness.p99 / NS_PER_MS if load.schedule.lateness else 0.0


def read(folder: Path, shares: Mapping[str, TokenBucket], publishers: Mapping[str, int]) -> dict[str, Part]:
    """The traces of the brokers that had messages; publishers have numbers."""
    parts = {}
    for name, share in shares.items():
        rows = pa.Table.from_batches(batches(folder / f"{name}.parquet", _COLUMNS)).combine_chunks()
        if not len(rows):
            continue
        arrival_ns, release_ns = (rows[column].to_numpy() for column in ("arrival_ns", "release_ns"))
        who = np.array([publishers[name] for name in rows["publisher"].to_pylist()], np.int32)
        order = np.argsort(arrival_ns, kind="stable")
        sent_ns = rows["sent_ns"].fill_null(0).to_numpy()
        parts[name] = Part(share, arrival_ns[order], release_ns[order], sent_ns[order], who[order])
    return parts
