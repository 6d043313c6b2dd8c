"""Loops over burst onsets, as plain Python that `model.correlation` and `model.phases` compile.

An *onset* is a message of a publisher that comes after a silence of its own. The onsets of many publishers lie in one
array, sorted within each publisher: those of publisher p are `onsets[starts[p]:starts[p + 1]]`.

Everything that a compiled loop calls is in this file, because numba's cache watches one file per function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]
    Floats = NDArray[np.float64]
    Words = NDArray[np.uint32]

MOST = 2_000  # onsets per comparison: more would not improve it
_WORD = 0xFFFFFFFF


def mark_onsets(times: Ints, senders: Indices, silence: int, last: Ints, out: Ints) -> tuple[int, bool]:
    """Positions of the messages that start a burst, into `out`; `last` holds every sender's latest message.

    Returns how many there are, and whether those of every sender are in order.
    """
    found = 0
    is_sorted = True
    for i in range(len(times)):
        at = times[i]
        sender = senders[i]
        if at - silence > last[sender]:
            out[found] = i
            found += 1
        is_sorted &= at >= last[sender]
        last[sender] = at
    return found, is_sorted


def note_groups(times: Ints, senders: Indices, groups: Indices, ranks: Indices, held: Indices, held_ns: Ints) -> None:
    """The group that each sender names in its latest message, into `held`; of several at one time the largest by rank.

    Groups are numbered from 0, and 0 is none.
    """
    for i in range(len(times)):
        sender = senders[i]
        if times[i] > held_ns[sender] or (times[i] == held_ns[sender] and ranks[groups[i]] > ranks[held[sender]]):
            held[sender] = groups[i]
            held_ns[sender] = times[i]


def sign_publishers(
    below: Words, above: Words, rest: Words, starts: Ints, cuts: Words, masks: Words, factors: Words, out: Words
) -> None:
    """MinHash signatures: of each publisher, for each hash, the least value among its onsets' time bins.

    Every hash lays its own grid over time: an onset lies `rest` after the beginning of a bin of the common grid and
    counts into the bin `above` for the hashes whose grid begins no later than that, else into the one `below`.
    """
    for publisher in range(len(starts) - 1):
        for h in range(len(cuts)):
            least = _WORD
            for i in range(starts[publisher], starts[publisher + 1]):
                bin_ = above[i] if rest[i] >= cuts[h] else below[i]
                least = min(least, ((bin_ ^ masks[h]) * factors[h]) & _WORD)
            out[publisher, h] = least


def count_together(one: Ints, other: Ints, shift: int, begin: int, span: int, tolerance: int) -> int:
    """How many onsets of the two pair up within the tolerance, the other being shifted around [begin, begin + span)."""
    turned = len(other)
    while turned > 0 and other[turned - 1] - begin + shift >= span:
        turned -= 1
    count = i = j = 0
    while i < len(one) and j < len(other):
        k = turned + j
        at = other[k] + shift - span if k < len(other) else other[k - len(other)] + shift
        if one[i] < at - tolerance:
            i += 1
        elif at < one[i] - tolerance:
            j += 1
        else:
            count += 1
            i += 1
            j += 1
    return count


def compare_pairs(
    onsets: Ints, starts: Ints, ones: Ints, others: Ints, shares: Floats, tolerance: int, floor: float, out: Floats
) -> None:
    """Compare pairs of publishers over the time that both are there, or its middle; a row is (agreement, evidence).

    *Together* is how many onsets pair up; *by chance* is the mean of the same after shifts of 4 to 40 tolerances, or of
    40 to 1,000, whichever is more: at random (`shares`), and never by more than half the time. Agreement is (together −
    by chance) over (their mean number of onsets − by chance): 1 always together, 0 as by chance. Evidence is Chernoff's
    bound on the probability that a Poisson variable of mean *by chance* reaches *together*, as −ln. Pairs far below
    `floor` are not tried to the end.
    """
    for pair in range(len(ones)):
        out[pair, 0] = out[pair, 1] = 0.0
        one = onsets[starts[ones[pair]] : starts[ones[pair] + 1]]
        other = onsets[starts[others[pair]] : starts[others[pair] + 1]]
        begin = max(one[0], other[0]) - tolerance
        end = min(one[-1], other[-1]) + tolerance
        longer = one if len(one) >= len(other) else other
        middle = np.searchsorted(longer, begin + (end - begin) // 2)
        begin = max(begin, longer[max(0, middle - MOST // 2)])
        end = min(end, longer[min(len(longer) - 1, middle + MOST // 2)])
        span = end - begin + 1
        near, knee, far = 4 * tolerance, min(span // 2, 40 * tolerance), min(span // 2, 1_000 * tolerance)
        if knee <= near:
            continue
        one = one[np.searchsorted(one, begin) : np.searchsorted(one, end + 1)]
        other = other[np.searchsorted(other, begin) : np.searchsorted(other, end + 1)]
        mean = 0.5 * (len(one) + len(other))
        together = count_together(one, other, 0, begin, span, tolerance)
        if together < 4 or together < floor * mean:
            continue
        chance = 0.0
        half = len(shares) // 2
        for low, high in ((near, knee), (knee, far)):
            total = tried = 0
            while tried < half:
                shift = low + int(shares[half * (low > near) + tried] * (high - low))
                total += count_together(one, other, shift if tried % 2 else span - shift, begin, span, tolerance)
                tried += 1
                if tried == 4 and 2.0 * (together - total / tried) < floor * (mean - total / tried):
                    break  # far below: skip the other shifts
            chance = max(chance, (total + 0.5) / tried)
            if tried < half:
                break
        if together <= chance or mean <= chance:
            continue
        out[pair, 0] = (together - chance) / (mean - chance)
        out[pair, 1] = together * np.log(together / chance) - (together - chance)


def join_pairs(ones: Ints, others: Ints, root: Ints) -> None:
    """Union-find: `root[p]`, at first p itself, becomes the least publisher that p is connected to."""
    for pair in range(len(ones)):
        one, other = ones[pair], others[pair]
        while root[one] != one:
            root[one] = root[root[one]]
            one = root[one]
        while root[other] != other:
            root[other] = root[root[other]]
            other = root[other]
        if one < other:
            root[other] = one
        else:
            root[one] = other
    for publisher in range(len(root)):
        root[publisher] = root[root[publisher]]


def find_periods(onsets: Ints, starts: Ints, fewest: int, share: float, out: Floats) -> None:
    """Period of each publisher whose intervals are nearly all multiples of their median, within a quarter; else 0."""
    for publisher in range(len(starts) - 1):
        out[publisher] = 0.0
        its = onsets[starts[publisher] : starts[publisher + 1]]
        if len(its) < fewest:
            continue
        intervals = its[1:] - its[:-1]
        usual = np.median(intervals)
        regular = turns = 0
        for interval in intervals:
            multiple = max(1, int(interval / usual + 0.5))
            turns += multiple
            if abs(interval - multiple * usual) <= 0.25 * usual:
                regular += 1
        if regular >= share * len(intervals):
            out[publisher] = (its[-1] - its[0]) / turns


def fit_period(onsets: Ints, starts: Ints, members: Ints, period: float) -> tuple[float, float]:
    """Least squares of lateness on turns, each publisher around its own mean: (covariance, variance) in all."""
    covariance = variance = 0.0
    for publisher in members:
        its = onsets[starts[publisher] : starts[publisher + 1]]
        turn_sum = late_sum = 0.0
        for at in its:
            turn = np.floor((at - its[0]) / period + 0.5)
            turn_sum += turn
            late_sum += (at - its[0]) - turn * period
        turn_mean, late_mean = turn_sum / len(its), late_sum / len(its)
        for at in its:
            turn = np.floor((at - its[0]) / period + 0.5)
            covariance += (turn - turn_mean) * ((at - its[0]) - turn * period - late_mean)
            variance += (turn - turn_mean) ** 2
    return covariance, variance


def measure_lateness(onsets: Ints, starts: Ints, members: Ints, period: float, out: Floats) -> None:
    """(mean, least, largest) lateness against a clock from its first onset on: of all, of every other, of the rest."""
    for row in range(len(members)):
        its = onsets[starts[members[row]] : starts[members[row] + 1]]
        sums = np.zeros(2)
        least = np.full(2, np.inf)
        largest = np.full(2, -np.inf)
        for i in range(len(its)):
            turn = np.floor((its[i] - its[0]) / period + 0.5)
            late = (its[i] - its[0]) - turn * period
            sums[i % 2] += late
            least[i % 2] = min(least[i % 2], late)
            largest[i % 2] = max(largest[i % 2], late)
        evens = (len(its) + 1) // 2
        out[row, 0] = (sums[0] + sums[1]) / len(its)
        out[row, 1] = min(least[0], least[1])
        out[row, 2] = max(largest[0], largest[1])
        for half in range(2):
            out[row, 3 * half + 3] = sums[half] / (evens if half == 0 else len(its) - evens)
            out[row, 3 * half + 4] = least[half]
            out[row, 3 * half + 5] = largest[half]


def cut_phases(phases: Floats, sigma: float, price: float, cost: Floats, back: Ints) -> None:
    """Cut sorted phases into the runs of largest classification likelihood; `back[i]` is where the run before i begins.

    A run of m phases costs Σ(x − mean)² / 2σ² − m ln m + price, and is not longer than twelve σ.
    """
    cost[0] = 0.0
    for end in range(1, len(phases) + 1):
        cost[end] = np.inf
        mean = squares = 0.0
        for begin in range(end - 1, -1, -1):
            if phases[end - 1] - phases[begin] > 12.0 * sigma:
                break
            members = end - begin
            step = phases[begin] - mean
            mean += step / members
            squares += step * (phases[begin] - mean)
            total = cost[begin] + squares / (2.0 * sigma * sigma) - members * np.log(members) + price
            if total < cost[end]:
                cost[end] = total
                back[end] = begin
