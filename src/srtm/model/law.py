"""The one law, as plain Python that the broker interprets and `model.scan` compiles.

A message that arrives at a_i finds U(a_i^-) unfinished work and leaves `backlog` = U(a_i^-) + 1 behind it
(paper, appendix A). The bucket (r, b) lets it go once that backlog has drained to b: after
max(0, backlog − b) / r, its access delay. U itself does not depend on b.

`backlog`, `token` and `burst` count in one unit and `rate` is that unit per nanosecond, so everything is an
integer. Interpreted, integers have no bounds. Compiled, they have 64 bits. Two rules keep them exact:
- a gap is cut at `horizon`, the time that empties any backlog up to LIMIT;
- a scan reports its `peak`, and its caller refuses the result if the peak passed LIMIT. A backlog grows by one token at
  a time, which is far less than 2**63 − LIMIT, so a scan sees it above LIMIT before it can overflow.

Everything the compiled scans need is in this file, because numba's cache watches one file per function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]

LIMIT = 2**62


def step(backlog: int, gap_ns: int, rate: int, token: int) -> int:
    """The backlog behind a message that comes `gap_ns` after the one that left `backlog`."""
    left = backlog - rate * gap_ns
    return left + token if left > 0 else token


def delay_ns(backlog: int, burst: int, rate: int) -> int:
    """How long that message waits for its token, rounded up to a whole nanosecond."""
    excess = backlog - burst
    return -(-excess // rate) if excess > 0 else 0


def rising(times: Ints) -> bool:
    """Whether times never decrease."""
    sign = 0
    for i in range(1, len(times)):
        sign |= times[i] - times[i - 1]
    return sign >= 0


def scan_backlogs(
    arrivals: Ints, rate: int, token: int, horizon: int, backlog: int, last: int, out: Ints
) -> tuple[int, int, int]:
    """Backlog behind every arrival, into `out` unless it is empty.

    Returns (backlog at the end, peak, sign); a negative sign means unsorted arrivals.
    """
    peak = backlog
    sign = 0
    keep = len(out) > 0
    for i in range(len(arrivals)):
        gap = arrivals[i] - last
        last = arrivals[i]
        sign |= gap
        backlog = step(backlog, min(gap, horizon), rate, token)
        peak = max(peak, backlog)
        if keep:
            out[i] = backlog
    return backlog, peak, sign


def scan_histogram(
    arrivals: Ints, start: int, rate: int, token: int, horizon: int, backlog: int, last: int, counts: Ints
) -> tuple[int, int, int, int, int]:
    """Count backlogs in whole tokens, rounded up, from arrival `start` on.

    Stops at the first backlog that `counts` is too short for. Returns (next arrival, backlog, last, peak, sign):
    the caller makes `counts` longer and continues from there.
    """
    peak = backlog
    sign = 0
    inverse = 1.0 / token
    for i in range(start, len(arrivals)):
        gap = arrivals[i] - last
        sign |= gap
        after = step(backlog, min(gap, horizon), rate, token)
        peak = max(peak, after)
        # Rounded up by a guess in floats, which is off by less than 1e-5 tokens, and a correction in integers: twice as
        # fast as a division.
        tokens = int(after * inverse)
        if tokens * token < after:
            tokens += 1
        if not 0 <= tokens < len(counts):  # below zero only where unsorted times have overflowed
            return i, backlog, last, peak, sign
        counts[tokens] += 1
        backlog = after
        last = arrivals[i]
    return len(arrivals), backlog, last, peak, sign


def scan_delays(
    arrivals: Ints,
    bucket_of: Indices,
    rates: Ints,
    tokens: Ints,
    bursts: Ints,
    horizons: Ints,
    backlogs: Ints,
    lasts: Ints,
    peaks: Ints,
    out: Ints,
) -> int:
    """Access delays of messages spread over several buckets: message i goes through bucket `bucket_of[i]`.

    `backlogs`, `lasts` and `peaks` are the buckets' states, read and left behind. Returns the sign of the
    smallest gap between neighbouring arrivals (negative: unsorted).
    """
    sign = 0
    previous = arrivals[0] if len(arrivals) else 0
    for i in range(len(arrivals)):
        at = arrivals[i]
        sign |= at - previous
        previous = at
        bucket = bucket_of[i]
        backlog = step(backlogs[bucket], min(at - lasts[bucket], horizons[bucket]), rates[bucket], tokens[bucket])
        lasts[bucket] = at
        backlogs[bucket] = backlog
        if backlog > peaks[bucket]:
            peaks[bucket] = backlog
        out[i] = delay_ns(backlog, bursts[bucket], rates[bucket])
    return sign


def scan_drops(
    arrivals: Ints,
    rate: int,
    token: int,
    burst: int,
    horizon: int,
    backlog: int,
    last: int,
    out: NDArray[np.bool_],
) -> tuple[int, int]:
    """Which messages a dropping bucket lets pass: one that would wait is dropped and takes no token."""
    sign = 0
    for i in range(len(arrivals)):
        gap = arrivals[i] - last
        last = arrivals[i]
        sign |= gap
        after = step(backlog, min(gap, horizon), rate, token)
        passes = after <= burst
        out[i] = passes
        backlog = after if passes else after - token
    return backlog, sign


def drain_excess(
    work: int, last: int, until: int, interval: int, begins: Ints, rates: Ints, bursts: Ints, horizons: Ints
) -> tuple[int, int, int]:
    """`work` of `scan_excess` carried from `last` on to `until`, through the changes of (r, b) between them.

    Returns (work, interval in force, time of that work); nothing changes if `until` lies before `last`.
    """
    while interval + 1 < len(begins) and begins[interval + 1] <= until:
        change = begins[interval + 1]
        if change > last:
            work = max(0, work - rates[interval] * min(change - 1 - last, horizons[interval])) - rates[interval]
        work = max(0, work + bursts[interval + 1] - bursts[interval])
        interval += 1
        last = change
    if until >= last:
        work = max(0, work - rates[interval] * min(until - last, horizons[interval]))
        last = until
    return work, interval, last


def scan_excess(
    times: Ints,
    begins: Ints,
    rates: Ints,
    bursts: Ints,
    horizons: Ints,
    token: int,
    work: int,
    last: int,
    interval: int,
) -> tuple[int, int, int, int, int]:
    """The window (s, t] whose messages exceed b(s) + ∫r by most; interval q of (r, b) starts at `begins[q]`.

    `work` − b is the largest excess of all windows that end now: it falls by r, rises by a token at every message, and
    is at least −b(s) for a window that starts at s. Windows that matter start just before a message or around a change.
    Returns (largest excess, index of the message that ends its window, peak of `work`, `work` and interval at the end).
    """
    peak = work
    worst = -(2**63)
    where = 0
    for i in range(len(times)):
        before = times[i] - 1
        work, interval, last = drain_excess(work, last, before, interval, begins, rates, bursts, horizons)
        if last == before:
            work -= rates[interval]
        last = times[i]
        work += token
        peak = max(peak, work)
        if work - bursts[interval] > worst:
            worst = work - bursts[interval]
            where = i
    return worst, where, peak, work, interval
