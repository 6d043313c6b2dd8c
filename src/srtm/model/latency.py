"""Latency goals and summaries, counted the same way by brokers, the simulator and Spark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.units import NS_PER_MS, Number, exact, percentiles, rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

_SUB_BITS = 5  # of a bin: 32 bins per doubling, so values are known to 1 in 32
RESOLUTION = 1 / (1 << _SUB_BITS)  # of a value in a sketch
_LAST_BIN = ((63 - _SUB_BITS) << _SUB_BITS) + (1 << _SUB_BITS) - 1  # holds the largest latency of 64 bits


@dataclass(frozen=True, slots=True)
class SLO:
    """A tail latency: this share of the messages within this time, end to end."""

    limit_ns: int = NS_PER_MS
    quantile: str = "0.99"

    def __post_init__(self) -> None:
        """Refuse a limit that is not a positive time, or a quantile outside (0, 1]."""
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
    def of(cls, values_ns: NDArray[np.int64], *, overwrite: bool = False) -> Distribution:
        """The distribution of these latencies, whose order may change with `overwrite`."""
        return cls(*percentiles(values_ns, ("0.50", "0.95", "0.99"), overwrite=overwrite))


@dataclass(frozen=True, slots=True)
class Latency:
    """Access latency (waiting for tokens), processing latency (at the broker), and their sum."""

    messages: int
    access: Distribution
    processing: Distribution
    total: Distribution

    @classmethod
    def of(cls, access_ns: NDArray[np.int64], processing_ns: NDArray[np.int64], *, overwrite: bool = False) -> Latency:
        """The summary of messages, given the access and processing latency of each; see `Distribution.of`."""
        total = Distribution.of(access_ns + processing_ns, overwrite=True)
        access, processing = (Distribution.of(each, overwrite=overwrite) for each in (access_ns, processing_ns))
        return cls(len(access_ns), access, processing, total)

    @classmethod
    def of_all(cls, parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Latency:
        """The summary of all messages, given the access and processing latencies of some after the other."""
        import numpy as np

        total = Distribution.of(np.concatenate([access + processing for access, processing in parts]), overwrite=True)
        access, processing = (
            Distribution.of(np.concatenate(each), overwrite=True) for each in zip(*parts, strict=True)
        )
        return cls(sum(len(access) for access, _ in parts), access, processing, total)


class Sketch:
    """How many latencies fell into which bin: small, and sketches add up: that of a whole is the sum of its shares.

    Bins are a nanosecond wide up to 64 ns, and 1/32 of their value or less from there on.
    """

    __slots__ = ("counts",)

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        self.counts = {} if counts is None else counts

    @classmethod
    def of(cls, values_ns: NDArray[np.int64]) -> Sketch:
        """The sketch of these latencies; negative ones count as zero."""
        import numpy as np  # here, because a broker that starts must not wait for it

        bins, counts = np.unique(bins_of(np.maximum(values_ns, 0)), return_counts=True)
        return cls(dict(zip(bins.tolist(), counts.tolist(), strict=True)))

    @classmethod
    def read(cls, flat: Iterable[int]) -> Sketch:
        """The sketch in `flat`: bin, count, bin, count, …; InputError if it is malformed."""
        numbers = list(flat)
        counts = dict(zip(numbers[::2], numbers[1::2], strict=False))
        if len(numbers) % 2 or not all(0 <= bin_ <= _LAST_BIN for bin_ in counts):
            raise InputError("a sketch must be an alternating list of bins and counts, of 64-bit latencies")
        return cls(counts)

    @property
    def flat(self) -> list[int]:
        """The sketch as one list, for the wire."""
        return [number for pair in self.counts.items() for number in pair]

    @property
    def total(self) -> int:
        """How many latencies it counts."""
        return sum(self.counts.values())

    def add(self, other: Sketch) -> None:
        """Add the counts of another sketch."""
        for bin_, count in other.counts.items():
            self.counts[bin_] = self.counts.get(bin_, 0) + count

    def remove(self, other: Sketch) -> None:
        """Subtract a sketch that was added."""
        for bin_, count in other.counts.items():
            left = self.counts.pop(bin_, 0) - count
            if left > 0:
                self.counts[bin_] = left

    def quantile_ns(self, quantile: Number, without: Sequence[Sketch] = ()) -> int:
        """The largest value of the bin that holds this quantile, without sketches that were added; 0 if none is left.

        Few bins hold the tail of a distribution, so it looks for a high quantile from above.
        """
        total = self.total - sum(each.total for each in without)
        if total <= 0:
            return 0
        above = total - rank(total, quantile)
        for bin_ in sorted(self.counts, reverse=True):
            above -= self.counts[bin_]
            for each in without:
                above += each.counts.get(bin_, 0)
            if above < 0:
                return _top(bin_)
        raise AssertionError("sketches were not all added")

    def quantiles_ns(self, quantiles: Sequence[Number]) -> list[int]:
        """`quantile_ns` for several quantiles, smallest first, in one pass."""
        total = self.total
        if not total:
            return [0] * len(quantiles)
        bins, below, at, found = sorted(self.counts), 0, -1, []
        for quantile in quantiles:
            wanted = rank(total, quantile)
            while below < wanted:
                at += 1
                below += self.counts[bins[at]]
            found.append(_top(bins[at]))
        return found


def bins_of(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bin of each value, none of which is negative."""
    import numpy as np

    shift = np.maximum(np.frexp(values.astype(np.float64))[1] - 1 - _SUB_BITS, 0)
    bins: NDArray[np.int64] = (shift << _SUB_BITS) + (values >> shift)
    return bins


def tops_of(bins: NDArray[np.int64]) -> NDArray[np.int64]:
    """The largest value of each bin."""
    import numpy as np

    shift = np.maximum((bins >> _SUB_BITS) - 1, 0)
    tops: NDArray[np.int64] = ((bins - (shift << _SUB_BITS) + 1) << shift) - 1
    return tops


def _top(bin_: int) -> int:
    """The largest value of a bin."""
    shift = max(0, (bin_ >> _SUB_BITS) - 1)
    return ((bin_ - (shift << _SUB_BITS) + 1) << shift) - 1
