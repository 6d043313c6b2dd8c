"""Latency goals and summaries, counted the same way by brokers, the simulator and Spark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.units import NS_PER_MS, exact, percentiles

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SLO:
    """A tail latency: this share of the messages within this time, end to end."""

    limit_ns: int = NS_PER_MS
    quantile: str = "0.99"

    def __post_init__(self) -> None:
        """A limit is a time, a quantile a share."""
        if not 0 < self.limit_ns < math.inf:
            raise InputError(f"the SLO must be a positive time, not {self.limit_ns} ns", value=self.limit_ns)
        if not 0 < exact(self.quantile, "quantile") <= 1:
            raise InputError(f"the SLO's quantile must lie in (0, 1], not {self.quantile}", value=self.quantile)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Three points of a latency distribution, in ns."""

    p50: int
    p95: int
    p99: int

    @classmethod
    def of(cls, values_ns: NDArray[np.int64]) -> Distribution:
        """The distribution of these latencies."""
        return cls(*percentiles(values_ns, ("0.50", "0.95", "0.99")))


@dataclass(frozen=True, slots=True)
class Latency:
    """What messages waited for tokens, what their broker took, and both together."""

    messages: int
    access: Distribution
    processing: Distribution
    total: Distribution

    @classmethod
    def of(cls, access_ns: NDArray[np.int64], processing_ns: NDArray[np.int64]) -> Latency:
        """Summary of messages whose access and processing latencies stand at the same place."""
        return cls(
            len(access_ns),
            Distribution.of(access_ns),
            Distribution.of(processing_ns),
            Distribution.of(access_ns + processing_ns),
        )
