"""A broker behind its bucket: one server, one queue, a cost per read and per message.

A read event that carries m messages of one publisher costs w + m·s, and all of them leave when it is done (the
loop writes once per turn). `base_ns` is the latency of an idle broker: two hops through the network stack.
In: release times, sorted, with each message's publisher. Out: processing latencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.model import scan
from srtm.model._compiled import compiled
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.model.broker_models import ServiceModel

    Ints = NDArray[np.int64]


_MOST_READS = 100_000_000  # background read events of a broker: 8 bytes each


@dataclass(frozen=True, slots=True)
class Background:
    """Load that a broker already carries: `rate_mps` in Poisson batches of `batch`, each one read event."""

    rate_mps: float
    batch: int = 1

    def __post_init__(self) -> None:
        """Refuse a negative rate or an empty batch."""
        if not 0 <= self.rate_mps < math.inf or self.batch < 1:
            raise InputError(f"background load needs a rate of at least 0 and a batch of at least 1: {self}")

    def reads(self, first_ns: int, last_ns: int, rng: np.random.Generator) -> Ints:
        """Times of its read events between two instants."""
        mean = self.rate_mps / self.batch * (last_ns - first_ns) / NS_PER_S
        if mean > _MOST_READS:
            raise InputError(
                f"background load of {self.rate_mps:g} msg/s is {mean:.3g} read events over this traffic, which is more"
                f" than can be simulated ({_MOST_READS:,}): give a lower rate, or shorter traffic"
            )
        return np.sort(rng.integers(first_ns, last_ns + 1, rng.poisson(mean)))


def processing_latencies(
    releases: Ints,
    publisher_of: NDArray[np.int32],
    model: ServiceModel,
    reads: Ints | None = None,
    batch: int = 1,
) -> Ints:
    """Latency in ns of each released message; `reads` are background read events of `batch` messages each."""
    if len(publisher_of) != len(releases):
        raise InputError(f"{len(releases)} messages but {len(publisher_of)} publishers: there must be one each")
    for times in (releases, reads):
        if times is not None:
            scan.check_sorted(times)
    out = np.empty(len(releases), np.int64)
    background = np.empty(0, np.int64) if reads is None else reads
    _serve(releases, publisher_of, background, model.cost_ns(batch), model.read_ns, model.message_ns, out)
    return out + model.base_ns


@compiled
def _serve(
    releases: Ints,
    publisher_of: NDArray[np.int32],
    reads: Ints,
    read_cost: int,
    per_read: int,
    per_message: int,
    out: Ints,
) -> None:
    free_at = -(2**62)
    nearest = 0
    start = 0
    while start < len(releases):
        at = releases[start]
        end = start + 1
        while end < len(releases) and releases[end] == at and publisher_of[end] == publisher_of[start]:
            end += 1
        while nearest < len(reads) and reads[nearest] <= at:
            free_at = max(free_at, reads[nearest]) + read_cost
            nearest += 1
        free_at = max(free_at, at) + per_read + (end - start) * per_message
        for message in range(start, end):
            out[message] = free_at - at
        start = end
