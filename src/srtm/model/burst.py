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
from srtm.model._compiled import callable_from_compiled, compiled
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


def _widen_all(times: Ints, segments: Ints, windows: Ints, most: Ints) -> None:
    """`_widen` of many topics; rows of `segments` are (topic, begin, first new message, end)."""
    for number in range(len(segments)):
        topic, begin, new, end = segments[number]
        _widen(times[begin:end], new - begin, windows, most[topic])


def _count_batches(
    times: Ints, senders: Indices, seen: Ints, sizes: Ints, stamp: int, stamps: Ints, found: Indices
) -> tuple[int, int]:
    """Count messages of a sender at an instant; `seen`, one place a sender, is zero before and after.

    Puts every sender into `found` once and its stamp to `stamp`; returns the largest size and how many were found.
    """
    begin = largest = count = 0
    while begin < len(times):
        end, alone = begin + 1, True
        while end < len(times) and times[end] == times[begin]:
            alone &= senders[end] == senders[begin]
            end += 1
        if not alone:
            for i in range(begin, end):
                seen[senders[i]] += 1
        for i in range(begin, begin + 1 if alone else end):
            sender = senders[i]
            size = end - begin if alone else seen[sender]
            seen[sender] = 0
            if size > 0:
                if stamps[sender] != stamp:
                    stamps[sender] = stamp
                    found[count] = sender
                    count += 1
                sizes[size] += 1
                largest = max(largest, size)
        begin = end
    return largest, count


def _count_all_batches(
    times: Ints, senders: Indices, segments: Ints, seen: Ints, sizes: Ints, stamps: Ints, pairs: Indices, out: Ints
) -> tuple[int, int]:
    """`_count_batches` of many topics; rows of `segments` are (topic, begin, end).

    Rows of `pairs` are (topic, sender), and of `out` (topic, size, batches). Returns how many of each are filled.
    """
    paired = filled = 0
    for number in range(len(segments)):
        topic, begin, end = segments[number]
        largest, count = _count_batches(
            times[begin:end], senders[begin:end], seen, sizes, number, stamps, pairs[1, paired:]
        )
        pairs[0, paired : paired + count] = topic
        paired += count
        for size in range(1, largest + 1):
            if sizes[size]:
                out[filled, 0], out[filled, 1], out[filled, 2] = topic, size, sizes[size]
                sizes[size] = 0
                filled += 1
    return paired, filled


callable_from_compiled(_widen, _count_batches)
widen = compiled(_widen)
_widen_topics = compiled(_widen_all)
_count_topics_batches = compiled(_count_all_batches)


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
    one = np.array([[0, 0, len(times)]])
    found, pairs = topics_batches(times, senders, one, known)
    sizes, present = np.zeros(int(found[:, 1].max(initial=0)) + 1, np.int64), np.zeros(known, np.bool_)
    sizes[found[:, 1]] = found[:, 2]
    present[pairs[1]] = True
    return sizes, present


def topics_batches(times: Ints, senders: Indices, segments: Ints, known: int) -> tuple[Ints, Indices]:
    """The batches of many topics: rows (topic, size, batches), and a row of topics above one of their senders.

    Rows of `segments` are (topic, begin, end).
    """
    lengths = segments[:, 2] - segments[:, 1]
    rows = int(lengths.sum())
    out, pairs = np.empty((rows, 3), np.int64), np.empty((2, rows), np.int32)
    seen, stamps = np.zeros(known, np.int64), np.full(known, -1, np.int64)
    sizes = np.zeros(int(lengths.max(initial=0)) + 1, np.int64)
    paired, filled = _count_topics_batches(times, senders, segments, seen, sizes, stamps, pairs, out)
    return out[:filled], pairs[:, :paired]


def widen_topics(times: Ints, segments: Ints, most: Ints) -> None:
    """Raise each topic's envelope, a row of `most`; rows of `segments` are (topic, begin, first new message, end)."""
    _widen_topics(times, segments, np.array(WINDOWS_NS, np.int64), most)


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
