"""The law over arrays: whole traces, traces cut into stretches, traces spread over several buckets.

In: sorted int64 arrival times. Out: backlogs in the units of the bucket's `law`, or delays in nanoseconds, equal to the
last unit to those of `limiter.Limiter`, message by message. The effect of a stretch on all that follows is four
integers (`Summary`), and joining two of them is associative, so a trace may be cut anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtm.errors import ArrivalsError, BacklogOverflow, InputError
from srtm.model import law as plain
from srtm.model._compiled import callable_from_compiled, compiled
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from srtm.model.bucket import Law, TokenBucket

    Ints = NDArray[np.int64]

callable_from_compiled(plain.step, plain.delay_ns)
_rising = compiled(plain.rising)
_scan_backlogs = compiled(plain.scan_backlogs)
_scan_histogram = compiled(plain.scan_histogram)
_scan_delays = compiled(plain.scan_delays)
_scan_drops = compiled(plain.scan_drops)

_NOTHING = np.empty(0, np.int64)
HIGHEST = plain.LIMIT  # backlog up to which 64 bits are exact
EARLIEST_NS, LATEST_NS = 1 - plain.LIMIT, plain.LIMIT - 1  # any two of them differ by less than 2**63


class State(NamedTuple):
    """Where a scan stands: the backlog behind the last message, and when that message came."""

    backlog: int
    last_ns: int


class Summary(NamedTuple):
    """The effect of a stretch of arrivals on those after it; `backlog` is its last if nothing was left before it."""

    messages: int
    first_ns: int
    last_ns: int
    backlog: int

    def leave(self, entering: State | None, law: Law) -> State:
        """The state behind the stretch, given the state before it."""
        if entering is None:
            return State(self.backlog, self.last_ns)
        if self.first_ns < entering.last_ns:
            raise ArrivalsError(
                f"stretches overlap: one ends at {entering.last_ns} ns and the next starts at {self.first_ns} ns",
                last_ns=entering.last_ns,
                first_ns=self.first_ns,
            )
        found = max(0, entering.backlog - law.rate * (self.first_ns - entering.last_ns))
        carried = found + self.messages * law.token - law.rate * (self.last_ns - self.first_ns)
        return State(max(carried, self.backlog), self.last_ns)

    def then(self, later: Summary, law: Law) -> Summary:
        """The summary of this stretch and the next together."""
        backlog = later.leave(self.leave(None, law), law).backlog
        return Summary(self.messages + later.messages, self.first_ns, later.last_ns, backlog)


def as_arrivals(values: ArrayLike) -> Ints:
    """Arrival times as int64, or an error that names the problem; the scans check the order."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ArrivalsError(f"arrivals must be a one-dimensional array of times, not one of shape {array.shape}")
    if len(array) == 0:
        raise ArrivalsError("no arrivals: the trace is empty")
    if array.dtype.kind == "f":
        whole = np.isfinite(array) & (array == np.floor(array))
        if not whole.all():
            where = int(np.argmin(whole))
            raise ArrivalsError(f"arrival {where} is {array[where]!r}: times must be whole nanoseconds", index=where)
    elif array.dtype.kind not in "iu" and not _all_ints(array):
        raise ArrivalsError(f"arrivals have type {array.dtype}: times must be integers (nanoseconds)")
    check_range(int(array.min()), int(array.max()))
    return np.ascontiguousarray(array, dtype=np.int64)


def check_range(first_ns: int, last_ns: int) -> None:
    """Refuse times that are too far apart for 64 bits, and from no clock."""
    if first_ns < EARLIEST_NS or last_ns > LATEST_NS:
        worst = first_ns if first_ns < EARLIEST_NS else last_ns
        raise ArrivalsError(
            f"arrival time {worst} ns lies beyond ±2**62 ns (146 years): check the unit of the times",
            value=worst,
        )


def backlogs(arrivals: ArrayLike, bucket: TokenBucket, entering: State | None = None) -> Ints:
    """U(a_i^-) + 1 behind every arrival, in units of `bucket.law` (so many to the token)."""
    return run(as_arrivals(arrivals), bucket.law, entering)[0]


def run(times: Ints, law: Law, entering: State | None = None) -> tuple[Ints, State]:
    """`backlogs` in the units of any law, and the state behind them."""
    out = np.empty(len(times), np.int64)
    return out, _run(times, law, entering, out)


def access_delays(arrivals: ArrayLike, bucket: TokenBucket) -> Ints:
    """How long each message waits for a token, in ns."""
    times = as_arrivals(arrivals)
    return split_access_delays(times, np.zeros(len(times), np.int32), [bucket])


def split_access_delays(arrivals: ArrayLike, bucket_of: NDArray[np.int32], buckets: Sequence[TokenBucket]) -> Ints:
    """How long each message waits when message i goes through `buckets[bucket_of[i]]`."""
    times = as_arrivals(arrivals)
    if len(bucket_of) != len(times):
        raise InputError(f"{len(times)} arrivals but {len(bucket_of)} bucket numbers: pass one for each arrival")
    if len(bucket_of) and not 0 <= bucket_of.min() <= bucket_of.max() < len(buckets):
        raise InputError(
            f"bucket numbers run from {bucket_of.min()} to {bucket_of.max()}, but there are {len(buckets)}"
        )
    laws = [bucket.law for bucket in buckets]
    for law, bucket in zip(laws, buckets, strict=True):
        check_burst(law, bucket)
    rates, tokens, bursts, horizons = (
        np.array(column, np.int64)
        for column in zip(*((law.rate, law.token, law.burst, law.horizon) for law in laws), strict=True)
    )
    peaks = np.zeros(len(laws), np.int64)
    out = np.empty(len(times), np.int64)
    sign = _scan_delays(
        times,
        bucket_of.astype(np.int32, copy=False),
        rates,
        tokens,
        bursts,
        horizons,
        np.zeros(len(laws), np.int64),
        np.full(len(laws), times[0]),
        peaks,
        out,
    )
    _check_order(times, sign)
    for law, peak in zip(laws, peaks, strict=True):
        check_peak(law, int(peak))
    return out


def passing(arrivals: ArrayLike, bucket: TokenBucket) -> NDArray[np.bool_]:
    """Which messages pass a bucket that drops messages instead of delaying them."""
    times = as_arrivals(arrivals)
    law = bucket.law
    check_burst(law, bucket)
    out = np.empty(len(times), np.bool_)
    _, sign = _scan_drops(times, law.rate, law.token, law.burst, law.horizon, 0, int(times[0]), out)
    _check_order(times, sign)
    return out


def backlog_histogram(arrivals: ArrayLike, bucket: TokenBucket, entering: State | None = None) -> tuple[Ints, State]:
    """How many messages need a bucket of 0, 1, 2, … whole tokens not to wait, in one pass; and the end state.

    U does not depend on b, so this one histogram answers for every b at this r.
    """
    times = as_arrivals(arrivals)
    law = bucket.law
    counts = np.zeros(1024, np.int64)
    at, peak, sign = 0, 0, 0
    backlog, last = _start(times, law, entering)
    while at < len(times):
        at, backlog, last, top, turn = _scan_histogram(
            times, at, law.rate, law.token, law.horizon, backlog, last, counts
        )
        peak, sign = max(peak, top), sign | turn
        _check_order(times, sign)
        check_peak(law, peak)
        if at < len(times):
            longer = np.zeros(max(2 * len(counts), peak // law.token + 2), np.int64)
            longer[: len(counts)] = counts
            counts = longer
    return counts[: int(np.flatnonzero(counts)[-1]) + 1], State(int(backlog), int(last))


def summarise(arrivals: ArrayLike, bucket: TokenBucket) -> Summary:
    """The summary of these arrivals."""
    times = as_arrivals(arrivals)
    end = _run(times, bucket.law, None, _NOTHING)
    return Summary(len(times), int(times[0]), end.last_ns, end.backlog)


def work_at(arrivals: ArrayLike, bucket: TokenBucket, times: ArrayLike) -> Ints:
    """Unfinished work U(t) in pico-tokens at each of the times, arrivals at t itself included."""
    sources = as_arrivals(arrivals)
    at = as_arrivals(times)
    law = bucket.law
    behind = backlogs(sources, bucket)
    index = np.searchsorted(sources, at, side="right") - 1
    gap = np.minimum(at - sources[index], law.horizon)
    work = np.where(index >= 0, np.maximum(0, behind[index] - law.rate * gap), 0)
    scale = PICO_PER_TOKEN // law.token
    check_peak(law, int(work.max(initial=0)) * scale)
    return work * scale


def _run(times: Ints, law: Law, entering: State | None, out: Ints) -> State:
    state = _start(times, law, entering)
    backlog, peak, sign = _scan_backlogs(times, law.rate, law.token, law.horizon, state.backlog, state.last_ns, out)
    _check_order(times, sign)
    check_peak(law, peak)
    return State(int(backlog), int(times[-1]))


def _start(times: Ints, law: Law, entering: State | None) -> State:
    if entering is None:
        return State(0, int(times[0]))
    if times[0] < entering.last_ns:
        raise ArrivalsError(f"arrivals start at {times[0]} ns, before the state they follow ({entering.last_ns} ns)")
    check_peak(law, entering.backlog)
    return entering


def check_sorted(times: Ints) -> None:
    """Refuse arrivals that are not in order of time."""
    _check_order(times, 0 if is_sorted(times) else -1)


def is_sorted(times: Ints) -> bool:
    """Whether times are in order."""
    return bool(_rising(times))


def _check_order(times: Ints, sign: int) -> None:
    if sign >= 0:
        return
    where = int(np.argmax(np.diff(times) < 0)) + 1
    raise ArrivalsError(
        f"arrivals are not sorted: number {where} at {times[where]} ns comes after {times[where - 1]} ns; sort them",
        index=where,
    )


def check_peak(law: Law, peak: int) -> None:
    """Refuse a scan whose backlog left the range in which 64 bits are exact."""
    if peak > plain.LIMIT:
        raise overflow(law)


def overflow(law: Law) -> BacklogOverflow:
    """The error of such a scan."""
    return BacklogOverflow(
        f"the backlog passed {plain.LIMIT // law.token:,} messages: r = {law.rate * 10**9 / law.token:g}/s is far"
        " below the arrival rate; raise r, or round it to a whole number for a range 1,000 times larger",
        rate=law.rate,
    )


def check_burst(law: Law, bucket: TokenBucket) -> None:
    """Refuse a bucket too large for 64 bits in the units of `law`."""
    if law.burst > plain.LIMIT:
        raise BacklogOverflow(
            f"b = {bucket.b:g} is out of exact range at r = {bucket.r:g}/s (at most {plain.LIMIT // law.token:,});"
            " round r to a whole number for a range 1,000 times larger",
            b=bucket.b,
        )


def _all_ints(array: NDArray[np.generic]) -> bool:
    """Whether these are Python integers, which numpy keeps as objects if they exceed 64 bits."""
    return array.dtype.kind == "O" and all(isinstance(value, int) for value in array)
