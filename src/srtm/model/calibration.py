"""The costs of a broker from three loads on it, and what they predict of other loads.

In: what a broker with one core used and how long messages took, for single messages and batches while nothing queues,
and for single messages while it is busy. Out: a `ServiceModel`. A turn of the loop takes all reads that are ready, so
the busy load tells the cost of a turn from the cost of a read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.model.broker_models import ServiceModel
from srtm.model.service import busy_share, processing_latencies
from srtm.units import percentile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_STEPS = 30


@dataclass(frozen=True, slots=True)
class Observed:
    """One load: its arrivals, the broker's processor time per message, and the latency of messages."""

    times_ns: NDArray[np.int64]
    publisher_of: NDArray[np.int32]
    cpu_ns: float
    p50_ns: int
    p99_ns: int


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A fitted model, and by how much the tail of an idle broker is longer than that of the model: the host's part."""

    service: ServiceModel
    host_ns: int

    def predicted_ns(self, times_ns: NDArray[np.int64], publisher_of: NDArray[np.int32]) -> tuple[int, int]:
        """p50 and p99 of messages that need not wait for tokens."""
        p50_ns, p99_ns = _quantiles(times_ns, publisher_of, self.service)
        return p50_ns, p99_ns + self.host_ns


def calibrated(single: Observed, batches: Observed, batch: int, busy: Observed) -> Calibrated:
    """The model that explains three loads: processor time of all, and the median and tail of single messages."""
    if batch < 2:
        raise InputError(f"a load of batches needs at least 2 messages in each, not {batch}")
    message_ns = max(1, round((batch * batches.cpu_ns - single.cpu_ns) / (batch - 1)))
    both_ns = max(2, round(single.cpu_ns) - message_ns)  # of a turn and a read
    low, high = 0, both_ns - 1
    while high - low > max(1, both_ns >> _STEPS):
        turn_ns = (low + high) // 2
        model = ServiceModel(both_ns - turn_ns, message_ns, turn_ns=turn_ns)
        span_ns = int(busy.times_ns[-1] - busy.times_ns[0])
        used_ns = busy_share(busy.times_ns, busy.publisher_of, model) * span_ns / len(busy.times_ns)
        low, high = (turn_ns, high) if used_ns > busy.cpu_ns else (low, turn_ns)
    model = ServiceModel(both_ns - low, message_ns, turn_ns=low)
    p50_ns, _ = _quantiles(single.times_ns, single.publisher_of, model)
    model = replace(model, base_ns=max(0, single.p50_ns - p50_ns))
    _, p99_ns = _quantiles(single.times_ns, single.publisher_of, model)
    return Calibrated(model, max(0, single.p99_ns - p99_ns))


def _quantiles(times_ns: NDArray[np.int64], publisher_of: NDArray[np.int32], model: ServiceModel) -> tuple[int, int]:
    took = processing_latencies(times_ns, times_ns, publisher_of, model)
    return percentile(took, "0.5"), percentile(took, "0.99")
