"""How bursty arrivals are: the envelope, batches, and the burst that a broker's share of b must let pass.

The envelope says for each length Δ how many messages the fullest window of that length holds: messages whose first and
last are less than Δ apart. Divided by Δ, it is the peak rate at that time scale. A token bucket (r, b) drawn beside it
is the line b + r·Δ. A batch is what one publisher sends at one instant.

A broker's *burst* is the backlog, in tokens, that its messages find at the broker's share of r, at a quantile of the
messages. b is split in proportion to bursts, whether they are computed from known arrivals (`needed_b`), expected from
declarations (`expected_b`) or measured (`tb_adaptor.History`): docs/adr/0018-b-follows-bursts.md.
"""

from __future__ import annotations

from math import expm1, log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtm.errors import InputError
from srtm.model import scan
from srtm.model._compiled import compiled
from srtm.model.bucket import TokenBucket
from srtm.units import NANO_PER_TOKEN, NS_PER_US, Number, exact, histogram_percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]

# 1 µs to 10 s, which is the TB Adaptor's history window; three to a decade, so that a line through them looks smooth.
WINDOWS_NS = (*(step * 10**power * NS_PER_US for power in range(7) for step in (1, 2, 5)), 10**7 * NS_PER_US)
_BUSIEST = 0.99  # load at which a backlog is expected at most: from 1 on it grows without limit
_BLOCK = 256  # messages that are compared at once; a few hundred fit into the nearest cache


def _widen(times: Ints, begin: int, windows: Ints, most: Ints) -> None:
    """Raise `most` to the fullest windows that end at message `begin` or later.

    A window that ends with message i holds more than m messages if and only if i and i − m are less than Δ apart, and
    the next message can raise the maximum by one at most. So it takes one comparison per message and Δ; fewer, because
    the times are sorted: if the first of a block and the message m before its last are Δ apart, so are all pairs.
    """
    reached = 0
    for d in range(len(windows)):
        window = windows[d]
        reached = max(reached, most[d])
        i = min(max(begin, reached), len(times))  # an earlier message has too few before it
        while i < len(times):
            end = min(len(times), i + max(_BLOCK, reached >> 4))
            if end - 1 - reached < i and times[i] - times[end - 1 - reached] >= window:
                i = end
                continue
            end = min(len(times), i + _BLOCK)
            early, late = times[i - reached : end - reached], times[i:end]
            hits = 0
            for j in range(len(late)):  # without a branch, so that it becomes vector instructions
                hits += late[j] - early[j] < window
            if hits:
                for j in range(i, end):
                    if j >= reached and times[j] - times[j - reached] < window:
                        reached += 1
            i = max(end, reached)
        most[d] = reached


def _count_batches(times: Ints, senders: Indices, seen: Ints, sizes: Ints, present: NDArray[np.bool_]) -> int:
    """Count messages of a sender at an instant; `seen`, one place a sender, is zero before and after.

    Marks senders as present, and returns the largest size.
    """
    begin = largest = 0
    while begin < len(times):
        end, alone = begin + 1, True
        while end < len(times) and times[end] == times[begin]:
            alone &= senders[end] == senders[begin]
            end += 1
        if alone:
            present[senders[begin]] = True
            sizes[end - begin] += 1
            largest = max(largest, end - begin)
        else:
            for i in range(begin, end):
                seen[senders[i]] += 1
            for i in range(begin, end):
                size = seen[senders[i]]
                seen[senders[i]] = 0
                if size > 0:
                    present[senders[i]] = True
                    sizes[size] += 1
                    largest = max(largest, size)
        begin = end
    return largest


widen = compiled(_widen)
count_batches = compiled(_count_batches)


class Envelope:
    """The envelope of sorted arrivals that come array by array."""

    def __init__(self, windows_ns: Sequence[int] = WINDOWS_NS) -> None:
        if list(windows_ns) != sorted(set(windows_ns)) or not windows_ns or windows_ns[0] < 1:
            raise InputError(f"the lengths of windows must be positive and rise, not {list(windows_ns)}")
        self._windows = np.array(windows_ns, np.int64)
        self.most = np.zeros(len(windows_ns), np.int64)
        self._recent = np.empty(0, np.int64)  # its end holds the arrivals with which windows may still begin
        self._filled = 0

    def add(self, times: Ints) -> None:
        """Take the next arrivals."""
        if not len(times):
            return
        if self._filled and times[0] < self._recent[self._filled - 1]:
            raise InputError(f"arrivals at {times[0]} ns come after those at {self._recent[self._filled - 1]} ns")
        self._make_room(len(times), int(times[0]))
        begin, self._filled = self._filled, self._filled + len(times)
        self._recent[begin : self._filled] = times
        widen(self._recent[: self._filled], begin, self._windows, self.most)

    def _make_room(self, count: int, first_ns: int) -> None:
        if self._filled + count <= len(self._recent):
            return
        old = int(np.searchsorted(self._recent[: self._filled], first_ns - self._windows[-1], side="right"))
        recent = self._recent[old : self._filled]
        # Twice what is needed, so that moving costs less than one copy of each message.
        room = np.empty(2 * (len(recent) + count), np.int64)
        room[: len(recent)] = recent
        self._recent, self._filled = room, len(recent)


def envelope(arrivals: ArrayLike, windows_ns: Sequence[int] = WINDOWS_NS) -> Ints:
    """The largest number of messages in any window of each length."""
    times = scan.as_arrivals(arrivals)
    scan.check_sorted(times)
    whole = Envelope(windows_ns)
    whole.add(times)
    return whole.most


def batch_sizes(times: Ints, senders: Indices) -> Ints:
    """How many batches there are of each size; entry 0 is zero."""
    return batches(times, senders, int(senders.max(initial=-1)) + 1)[0]


def batches(times: Ints, senders: Indices, known: int) -> tuple[Ints, NDArray[np.bool_]]:
    """`batch_sizes`, and which of the known senders sent anything; senders are numbered from 0."""
    if len(times) != len(senders):
        raise InputError(f"{len(times)} arrivals but {len(senders)} senders: there must be one each")
    sizes, present = np.zeros(len(times) + 1, np.int64), np.zeros(known, np.bool_)
    largest = count_batches(times, senders, np.zeros(known, np.int64), sizes, present)
    return sizes[: largest + 1].copy(), present


def needed_b(arrivals: ArrayLike, r_mtps: int, quantile: Number) -> int:
    """The burst of known arrivals: the smallest whole b at which this part of the messages finds a token at once."""
    counts, _ = scan.backlog_histogram(arrivals, TokenBucket(r_mtps, NANO_PER_TOKEN))
    return histogram_percentile(counts, quantile)


class Source(NamedTuple):
    """Publishers of one broker that send together: their mean rate, and the messages that come at once."""

    rate_mps: float
    together: float


def expected_b(sources: Iterable[Source], r_mps: float, quantile: Number) -> float:
    """The burst to expect of independent sources, before anything is measured; 1 if they send nothing.

    The backlog of Poisson bursts exceeds x with a probability of about e^(−θx), where θ solves Lundberg's equation
    Σ λ (e^(θs) − 1) = r θ over sources of λ bursts a second and s messages a burst.
    """
    # Sources of one size count as one, so that a thousand groups cost no more than one.
    sizes: dict[float, float] = {}
    for rate_mps, together in sources:
        sizes[together] = sizes.get(together, 0.0) + rate_mps
    total_mps = sum(sizes.values())
    if not total_mps:
        return 1.0
    r_mps = max(r_mps, total_mps / _BUSIEST)

    def excess(theta: float) -> float:
        """Positive if θ is too large."""
        return sum(rate / size * expm1(min(theta * size, 500.0)) for size, rate in sizes.items()) - r_mps * theta

    low, high = 0.0, 1.0 / max(sizes)
    while excess(high) < 0:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    late = float(1 - exact(quantile, "quantile"))
    return max(1.0, -log(max(late, 1e-9)) / high)
