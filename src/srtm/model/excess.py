"""By how much an output exceeded (r, b), as plain Python that `model.timeline` compiles.

Numbers are integers in pico-tokens, as in `model.law`: a scan reports its peak, and its caller refuses the result if
the peak passed LIMIT. A timeline's intervals of constant (r, b) are rows of arrays: interval q starts at `begins[q]`.

Everything that a compiled loop calls is in this file, because numba's cache watches one file per function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.model.law import LIMIT
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

NEVER = -(2**63)
EARLIEST = 1 - LIMIT


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


def interval_at(begins: Ints, time: int) -> int:
    """The interval in force at a time; the first one before all of them."""
    interval = 0
    while interval + 1 < len(begins) and begins[interval + 1] <= time:
        interval += 1
    return interval


def drained(work: int, last: int, until: int, table: Ints) -> tuple[int, int, int]:
    """`drain_excess` of the state that a message at `last` left; without one (NEVER), windows begin after `until`."""
    if last == NEVER:
        return 0, interval_at(table[0], until), until
    interval = interval_at(table[0], max(last - 1, EARLIEST))
    return drain_excess(work, last, until, interval, table[0], table[1], table[2], table[3])


def scan_excesses(times: Ints, segments: Ints, table: Ints, places: Ints, states: Ints, worst: Ints) -> None:
    """`scan_excess` of many topics, one segment of `times` after another.

    Rows: of `segments` (topic, begin, end); of `table` begins, rates, bursts and horizons, in whose columns `places`
    (from, to) has each topic's; by topic of `states` (work, last, peak), carried on, and of `worst` (excess, end).
    """
    for number in range(len(segments)):
        topic, begin, end = segments[number]
        its = table[:, places[topic, 0] : places[topic, 1]]
        work, interval, last = drained(states[topic, 0], states[topic, 1], times[begin] - 1, its)
        most, where, peak, work, _ = scan_excess(
            times[begin:end], its[0], its[1], its[2], its[3], PICO_PER_TOKEN, work, last, interval
        )
        states[topic, 0], states[topic, 1], states[topic, 2] = work, times[end - 1], max(states[topic, 2], peak)
        if most > worst[topic, 0]:
            worst[topic, 0], worst[topic, 1] = most, times[begin + where]


def enter_excesses(topics: Ints, rows: Ints, table: Ints, places: Ints, out: Ints) -> None:
    """The state (work, last) before each stretch of a topic, and what is left of it when the stretch begins.

    `rows` are summaries (messages, first, last, work), by topic and time. Every step of `work` is x → max(x + c, d),
    and so are all of a stretch together: d is the stretch's own end. 64 bits hold c as long as it fits itself; in
    floats it shows whether it does. Far below zero it does not matter, and above LIMIT it only has to stay there.
    """
    work, last = 0, EARLIEST
    for i in range(len(rows)):
        if i == 0 or topics[i] != topics[i - 1]:
            work, last = 0, EARLIEST
        its = table[:, places[topics[i], 0] : places[topics[i], 1]]
        messages, first, end, alone = rows[i]
        left, _, _ = drained(work, last, first - 1, its)
        out[i, 0], out[i, 1], out[i, 2] = work, last, left
        carried, about = left + messages * PICO_PER_TOKEN, float(left) + float(messages) * PICO_PER_TOKEN
        for q in range(its.shape[1]):
            until = its[0, q + 1] if q + 1 < its.shape[1] else LIMIT
            lasted = max(0, min(end, until) - max(first - 1, its[0, q]))
            carried -= its[1, q] * lasted
            about -= float(its[1, q]) * float(lasted)
        carried += its[2, interval_at(its[0], end - 1)] - its[2, interval_at(its[0], first - 1)]
        work, last = alone, end
        if about > 1.5 * 2.0**62:
            work = LIMIT + 1
        elif about > -1.5 * 2.0**62:
            work = max(alone, carried)
