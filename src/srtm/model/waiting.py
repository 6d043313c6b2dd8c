"""How long messages wait for one bucket whose (r, b) changes, as plain Python that `model.timeline` compiles.

`timeline.waits` and `timeline.left_by` for many topics at once. Numbers are integers in pico-tokens, and timelines are
tables of begins, rates, bursts and horizons, as in `model.excess`.

Everything that a compiled loop calls is in this file, because numba's cache watches one file per function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.model.excess import EARLIEST, NEVER
from srtm.model.law import LIMIT
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


def carried(backlog: int, last: int, until: int, interval: int, its: Ints) -> tuple[int, int, int]:
    """A backlog at `last` behind the changes of (r, b) after it, up to `until` and with it: tokens stay.

    `interval` is one that has begun by `last`. Returns (backlog, its time, interval in force at `until`).
    """
    since = last
    while interval + 1 < its.shape[1] and its[0, interval + 1] <= until:
        change = its[0, interval + 1]
        if change > since:
            left = max(0, backlog - its[1, interval] * min(change - last, its[3, interval]))
            backlog = max(0, left + (its[2, interval + 1] - its[2, interval]))
            last = change
        interval += 1
    return backlog, last, interval


def wait_ns(owed: int, at: int, interval: int, its: Ints) -> int:
    """How long a message that lacks `owed` at its arrival waits, rounded up to a whole nanosecond."""
    if owed <= 0:
        return 0
    since = at
    while interval + 1 < its.shape[1]:
        until = its[0, interval + 1]
        if since < until:
            release: int = since - (-owed // its[1, interval])
            if release <= until:
                return release - at
            owed -= its[1, interval] * (until - since)
            since = until
        interval += 1
    last: int = since - (-owed // its[1, interval])
    return last - at


def scan_waits(times: Ints, segments: Ints, table: Ints, places: Ints, states: Ints, out: Ints) -> None:
    """The wait of every message, one segment of `times` after another, into `out` unless it is empty.

    Rows: of `segments` (topic, begin, end); of `table` as above, in whose columns `places` (from, to) has each topic's;
    by topic of `states` (backlog, last, peak), carried on. Without a state (NEVER), nothing was left before.
    """
    for number in range(len(segments)):
        topic, begin, end = segments[number]
        its = table[:, places[topic, 0] : places[topic, 1]]
        backlog, last = states[topic, 0], states[topic, 1]
        if last == NEVER:
            backlog, last = 0, times[begin]
        interval = 0
        while interval + 1 < its.shape[1] and its[0, interval + 1] <= last:
            interval += 1
        peak = max(states[topic, 2], backlog)
        for i in range(begin, end):
            backlog, last, interval = carried(backlog, last, times[i], interval, its)
            backlog = max(0, backlog - its[1, interval] * min(times[i] - last, its[3, interval])) + PICO_PER_TOKEN
            last = times[i]
            peak = max(peak, backlog)
            if len(out):
                out[i] = wait_ns(backlog - its[2, interval], last, interval, its)
        states[topic, 0], states[topic, 1], states[topic, 2] = backlog, last, peak


def enter_waits(topics: Ints, rows: Ints, table: Ints, places: Ints, out: Ints) -> None:
    """The state (backlog, last) before each stretch of a topic, into `out`.

    `rows` are summaries (messages, first, last, backlog), by topic and time. As in `excess.enter_excesses`, a stretch
    is x → max(x + c, d), and c is checked in floats.
    """
    backlog, last = 0, EARLIEST
    for i in range(len(rows)):
        if i == 0 or topics[i] != topics[i - 1]:
            backlog, last = 0, EARLIEST
        out[i, 0], out[i, 1] = backlog, last
        its = table[:, places[topics[i], 0] : places[topics[i], 1]]
        messages, first, end, alone = rows[i]
        left, since, interval = carried(backlog, last, first, 0, its)
        left = max(0, left - its[1, interval] * min(first - since, its[3, interval]))
        final = interval
        while final + 1 < its.shape[1] and its[0, final + 1] <= end:
            final += 1
        after = left + messages * PICO_PER_TOKEN + its[2, final] - its[2, interval]
        about = float(left) + float(messages) * PICO_PER_TOKEN + float(its[2, final]) - float(its[2, interval])
        for q in range(its.shape[1]):
            until = its[0, q + 1] if q + 1 < its.shape[1] else LIMIT
            lasted = max(0, min(end, until) - max(first, its[0, q]))
            after -= its[1, q] * lasted
            about -= float(its[1, q]) * float(lasted)
        backlog, last = alone, end
        if about > 1.5 * 2.0**62:
            backlog = LIMIT + 1
        elif about > -1.5 * 2.0**62:
            backlog = max(alone, after)
