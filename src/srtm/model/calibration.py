"""The costs of a broker from three loads on it, and what they predict of other loads.

In: what a broker with one core used and how long messages took, for single messages while nothing queues, for batches,
and for single messages while it is busy. Out: a `ServiceModel`. A busy loop seldom has to wake up, so the busy load
tells that from the cost of a read, and batches tell reads from messages. Quartiles tell what comes before a message
leaves from what comes after, such as answers and the consumer's FIN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from srtm.model.broker_models import ServiceModel
from srtm.model.service import busy_share, processing_latencies
from srtm.units import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

QUANTILES = ("0.25", "0.5", "0.75", "0.99")
_P50, _P99 = 1, 3
_ROUNDS, _STEPS = 6, 16
_PARTS = 11  # ways to split the cost of waking up into what comes before messages leave, and after


@dataclass(frozen=True, slots=True)
class Observed:
    """One load: when messages arrived, the broker's processor time for each, and their latency."""

    times_ns: NDArray[np.int64]
    publisher_of: NDArray[np.int32]
    cpu_ns: float
    quantiles_ns: Sequence[int]  # at `QUANTILES`


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A fitted model, and how many times longer than its own the tails of the loads of the fit were.

    The model's costs are constant. Those of a broker vary, and the host takes its part.
    """

    service: ServiceModel
    tail: float

    def predicted_ns(self, times_ns: NDArray[np.int64], publisher_of: NDArray[np.int32]) -> tuple[int, int]:
        """p50 and p99 of messages that need not wait for tokens."""
        _, p50_ns, _, p99_ns = _quantiles(times_ns, publisher_of, self.service)
        return p50_ns, round(p99_ns * self.tail)


def calibrated(single: Observed, batches: Observed, busy: Observed) -> Calibrated:
    """The model that explains three loads: their processor time and latencies."""
    wake_ns = read_ns = message_ns = single.cpu_ns / 3
    for _ in range(_ROUNDS):
        both_ns = wake_ns + read_ns
        message_ns = _root(partial(_unused, batches, wake_ns, read_ns), batches.cpu_ns)
        # The more of both is for waking up, the less a busy broker uses.
        read_ns = _root(partial(_unused_of_both, busy, both_ns, message_ns), both_ns)
        wake_ns = _root(partial(_unused_awake, single, read_ns, message_ns), single.cpu_ns)
    costs = ServiceModel(round(read_ns), max(1, round(message_ns)), wake_ns=round(wake_ns))
    split = [
        _with_base(replace(costs, wake_ns=part, rest_ns=costs.wake_ns - part), single)
        for part in np.linspace(0, costs.wake_ns, _PARTS).round().astype(int).tolist()
    ]
    model = min(split, key=lambda each: _error(each, single) + _error(each, busy) + _error(each, batches))
    loads = (single, batches, busy)
    tails = [load.quantiles_ns[_P99] / _quantiles(load.times_ns, load.publisher_of, model)[_P99] for load in loads]
    return Calibrated(model, max(1.0, median(tails)))


def _with_base(model: ServiceModel, load: Observed) -> ServiceModel:
    """The model with the constant that explains a load's median."""
    without = _quantiles(load.times_ns, load.publisher_of, model)
    return replace(model, base_ns=max(0, load.quantiles_ns[_P50] - without[_P50]))


def _error(model: ServiceModel, load: Observed) -> float:
    """By which factors the quartiles of a load are missed, as logarithms."""
    found = _quantiles(load.times_ns, load.publisher_of, model)[:_P99]
    return sum(abs(math.log(max(1, ours) / max(1, seen))) for ours, seen in zip(found, load.quantiles_ns, strict=False))


def _unused(load: Observed, wake_ns: float, read_ns: float, message_ns: float) -> float:
    """By how much these costs fall short of the processor time that a message took."""
    model = ServiceModel(round(read_ns), max(1, round(message_ns)), wake_ns=round(wake_ns))
    span_ns = int(load.times_ns[-1] - load.times_ns[0])
    return load.cpu_ns - busy_share(load.times_ns, load.publisher_of, model) * span_ns / len(load.times_ns)


def _unused_of_both(load: Observed, both_ns: float, message_ns: float, read_ns: float) -> float:
    return _unused(load, both_ns - read_ns, read_ns, message_ns)


def _unused_awake(load: Observed, read_ns: float, message_ns: float, wake_ns: float) -> float:
    return _unused(load, wake_ns, read_ns, message_ns)


def _root(left: Callable[[float], float], most: float) -> float:
    """Where a falling function crosses zero between 0 and `most`, or the nearer end."""
    low, high = 0.0, most
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) > 0 else (low, middle)
    return (low + high) / 2


def quantiles_of(took_ns: NDArray[np.int64]) -> list[int]:
    """Latencies at `QUANTILES`."""
    return [percentile(took_ns, quantile) for quantile in QUANTILES]


def _quantiles(times_ns: NDArray[np.int64], publisher_of: NDArray[np.int32], model: ServiceModel) -> list[int]:
    return quantiles_of(processing_latencies(times_ns, times_ns, publisher_of, model))
