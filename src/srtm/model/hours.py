"""What of an hour's arrivals is kept, so that the profile of a day or a month is a fold of its hours.

U depends on r, and which r a month needs is only known at its end. So an hour is scanned at every rate of a fixed grid
that lies near its own mean, as if nothing came before it. Each rate leaves how many messages need how many tokens (in
bins, `latency.bins_of`), and the state behind the hour (`scan.Summary`).

A state before an hour raises the needs of its first messages, and only of those: every token that the hour itself
leaves unused takes one off that state. `needs` counts the messages until 1, 2, 4, … tokens are unused, which bounds how
many a state can reach. See docs/adr/0025-store-of-profiles.md.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from srtm.model import fleet
from srtm.model._compiled import compiled
from srtm.model.latency import bins_of, tops_of
from srtm.units import MILLI_PER_TOKEN, NS_PER_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

HOUR_NS = 3_600 * NS_PER_S
NEAR = 4  # rates from a quarter of the hour's own up to four times it
LEVELS = 22  # of the clear table: 2**21 tokens are exact in 64 bits at every rate
_WHOLE_FROM = 100 * MILLI_PER_TOKEN  # from here on rates are whole tokens a second, for a range 1,000 times larger


def _grid() -> Ints:
    """Rates in milli-tokens a second, four to a doubling, from one message in 17 minutes to a billion a second."""
    roots = {isqrt(isqrt(1 << power)) for power in range(4 * 40 + 1)}  # whole numbers: the same on every machine
    return np.array(sorted({-(-r // MILLI_PER_TOKEN) * MILLI_PER_TOKEN if r >= _WHOLE_FROM else r for r in roots}))


GRID = _grid()


def observed_ns(seen: Ints, begins_ns: Ints, ends_ns: Ints) -> Ints:
    """How much of each time from begin to end some trace covers, and a second at least; rows of `seen` are (from, to).

    A second, because a single burst is not a rate.
    """
    seen = seen[np.argsort(seen[:, 0])]
    until = np.maximum.accumulate(seen[:, 1])
    apart = np.concatenate([[True], seen[1:, 0] > until[:-1]])
    opens, closes = seen[apart, 0], until[np.append(apart[1:], True)]
    total = np.concatenate([[0], np.cumsum(closes - opens)])

    def before(at_ns: Ints) -> Ints:
        place = np.searchsorted(opens, at_ns, side="right")
        open_still = np.maximum(closes[np.maximum(place - 1, 0)] - at_ns, 0)
        return np.where(place > 0, total[place] - open_still, 0)

    covered: Ints = np.maximum(before(ends_ns) - before(begins_ns), NS_PER_S)
    return covered


def rates_near(messages: Ints, lengths_ns: Ints) -> tuple[Ints, Ints]:
    """Places in GRID of the rates at which hours are scanned: the first of each hour, and how many.

    `lengths_ns` says how much of each hour its trace covers.
    """
    mean = messages.astype(np.float64) * (MILLI_PER_TOKEN * NS_PER_S) / lengths_ns
    first = np.minimum(np.searchsorted(GRID, mean / NEAR), len(GRID) - 1)
    last = np.minimum(np.searchsorted(GRID, mean * NEAR), len(GRID) - 1)
    return first, last - first + 1


def rate_for(needed_mtps: Ints) -> Ints:
    """The smallest rate of GRID that is not below each."""
    return GRID[np.minimum(np.searchsorted(GRID, needed_mtps), len(GRID) - 1)]


def needs(times: Ints, segments: Ints, r_mtps: Ints) -> tuple[Ints, Ints, Ints]:
    """Scan each segment at its rate: rows (segment, bin, messages); and by segment, backlog behind it and clear table.

    Rows of `segments` are (begin, end). Backlogs are in the units of `fleet.laws_of`. Level j of the clear table has
    the messages before 2**j tokens have been left unused.
    """
    laws, states = fleet.laws_of(r_mtps), fleet.no_states(len(r_mtps))
    numbered = np.column_stack([np.arange(len(r_mtps)), segments])
    rows = fleet.histograms(times, numbered, laws, states)
    rows[:, 1] = bins_of(rows[:, 1])
    clear = np.empty((len(r_mtps), LEVELS), np.int64)
    _clearing(times, segments, laws, clear)
    return rows, states[:, fleet.BACKLOG], clear


def _clear(times: Ints, segments: Ints, laws: Ints, out: Ints) -> None:
    for number in range(len(segments)):
        begin, end = segments[number]
        rate, token, horizon = laws[number]
        backlog, last, unused, level = 0, times[begin], 0, 0
        for i in range(begin, end):
            left = backlog - rate * min(times[i] - last, horizon)
            if left < 0:
                unused += min(-left, 2**62)  # together with what was unused before, it fits into 64 bits
                left = 0
            while level < LEVELS and unused >= token << level:
                out[number, level] = i - begin
                level += 1
            if level == LEVELS:
                break
            backlog, last = left + token, times[i]
        out[number, level:] = end - begin


_clearing = compiled(_clear)


def reached(entering: Ints, summaries: Ints, laws: Ints, clear: Ints) -> tuple[Ints, Ints]:
    """How many messages of each hour the state before it can reach at most, and by how many tokens it is too late.

    Rows: of `entering` (backlog, last) and of `summaries` (messages, first, last, backlog), by hour as `laws`.
    """
    gaps = np.minimum(summaries[:, 1] - np.where(entering[:, 1] == fleet.NEVER, 0, entering[:, 1]), laws[:, 2])
    left = np.where(entering[:, 1] == fleet.NEVER, 0, np.maximum(0, entering[:, 0] - laws[:, 0] * gaps))
    tokens = -(-left // laws[:, 1])
    levels = np.ceil(np.log2(np.maximum(tokens, 1))).astype(np.int64)
    beyond = levels >= LEVELS
    count = np.where(beyond, summaries[:, 0], clear[np.arange(len(clear)), np.minimum(levels, LEVELS - 1)])
    return np.where(tokens > 0, count, 0), tokens


def least_b(counted: Ints, ranks: Ints) -> Ints:
    """The least that the need of rank `ranks[t]`, from 1, of each topic t can be: the smallest value of its bin.

    `counted` has rows (topic, bin, messages), in order, of at least one for each topic.
    """
    bins = counted[_rows_at(counted, ranks), 1]
    return np.where(bins > 0, tops_of(np.maximum(bins - 1, 0)) + 1, 0)


def most_b(counted: Ints, ranks: Ints, raised: Ints, tokens: Ints) -> Ints:
    """The most that it can be, if up to `raised[t]` messages need up to `tokens[t]` more than was counted."""
    totals = np.bincount(counted[:, 0], weights=counted[:, 2], minlength=len(ranks)).astype(np.int64)
    each_later = tops_of(counted[_rows_at(counted, ranks), 1]) + tokens
    some_lost = tops_of(counted[_rows_at(counted, np.minimum(ranks + raised, totals)), 1])
    return np.where(ranks + raised > totals, each_later, np.minimum(each_later, some_lost))


def _rows_at(counted: Ints, ranks: Ints) -> Ints:
    below = np.cumsum(counted[:, 2])
    begins = np.searchsorted(counted[:, 0], np.arange(len(ranks)))
    return np.searchsorted(below, np.concatenate([[0], below])[begins] + ranks)
