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
from srtm.model import md1, scan
from srtm.model._compiled import compiled
from srtm.units import NS_PER_S, Number, exact

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """A broker's costs in ns: `read_ns` (w) per read event, `message_ns` (s) per message, `base_ns` for all."""

    read_ns: int
    message_ns: int
    base_ns: int = 0

    def __post_init__(self) -> None:
        """Refuse costs that are not whole numbers, or negative."""
        costs = (self.read_ns, self.message_ns, self.base_ns)
        if not all(isinstance(cost, int) and cost >= 0 for cost in costs) or self.read_ns + self.message_ns == 0:
            raise InputError(f"the costs of a broker must be positive whole nanoseconds: {self}")

    def cost_ns(self, messages: int) -> int:
        """A read event's cost."""
        return self.read_ns + messages * self.message_ns

    def mcap_mps(self, slo_ns: int, quantile: Number = "0.99", batch: int = 1) -> float:
        """The highest rate of Poisson batches whose latency stays within the SLO at this quantile.

        Read events are an M/D/1 queue: one that finds U events' worth of work leaves U + 1 of them later.
        """
        cost_ns = self.cost_ns(batch)
        room = (slo_ns - self.base_ns) / cost_ns - 1
        if room < 0:
            return 0.0
        tail = 1 - float(exact(quantile, "quantile"))
        low, high = 0.0, 0.999
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if md1.exceeds(room, middle) <= tail else (low, middle)
        return low * batch * NS_PER_S / cost_ns


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


# The paper's 2-core broker, fitted to what its text says: 10 kmsg/s of single messages stay far inside 1 ms, 60 kmsg/s
# overload it, 80 kmsg/s in batches of 10 do not. docs/adr/0005-paper-testbed.md compares it with the paper's Table 1.
# And a broker of ours, as `srtm calibrate` measured it on one core of a small cloud machine: what a controller assumes
# without a calibration of its own.
PRESETS = {
    "paper-testbed": ServiceModel(read_ns=9_000, message_ns=8_000, base_ns=150_000),
    "srtm-broker": ServiceModel(read_ns=48_000, message_ns=23_000, base_ns=190_000),
}
PAPER_MCAP_MPS = 110_000  # the capacity that the paper's prototype assumed for every broker


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
