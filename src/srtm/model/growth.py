"""Even splits of a topic over more and more brokers: the least number that holds, after few rounds.

Every round tries the whole topic on k brokers and measures all of them. `Ladder` chooses k by two latencies. If even
the fastest broker is too slow, brokers are too busy: k grows by the factor that it was too slow, from 2 to 4, and then
bisection finds the least k at which it holds. If the fastest broker holds and another does not, that one lacks tokens:
groups were not cut into equal parts. So from there on, numbers of brokers that divide groups come first.

More brokers do not always help: shares of the bucket shrink, and messages wait for tokens. If the fastest broker gets
slower before it has held, the search turns back and looks on both sides of the best k so far.

A broker may also be slower than its peers at the same load. If most brokers of a round hold and some do not, those get
less, others take over, and k is tried again. Brokers that were not tried are assumed to carry the same fraction of
their rcap as those that were. If that did not help, tokens were missing, and it is undone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np

from srtm.model.placement import Roster, fewest
from srtm.model.trials import Iteration, NoCapacity, Placed

if TYPE_CHECKING:
    from collections.abc import Callable

    from srtm.model.trials import BrokerOf, Trial, Trials

_STEEPEST = 4  # k grows by this factor at most
_SPARE = 2  # rounds in which a k is tried again


@dataclass
class Ladder:
    """Which number of brokers to try next. Latencies are in SLOs, so up to 1 holds."""

    first: int
    least: int
    most: int
    excess: Callable[[int], float] = lambda _: math.inf  # how unevenly groups are cut, see `excess_of`
    fastest: dict[int, float] = field(default_factory=dict)
    slowest: dict[int, float] = field(default_factory=dict)

    def tell(self, k: int, fastest: float, slowest: float) -> None:
        """Note the latency of the fastest and the slowest of k brokers."""
        self.fastest[k], self.slowest[k] = fastest, slowest

    def next(self) -> int | None:
        """The next number to try; None if there is none that could be better."""
        if not self.fastest:
            return self.first
        enough = min((k for k, latency in self.fastest.items() if latency <= 1), default=None)
        if enough is None:
            return self._more()
        busy = max((k for k in self.fastest if k < enough), default=self.least - 1)
        held = min((k for k, latency in self.slowest.items() if latency <= 1), default=None)
        if held is not None:
            return self._fewer(busy, held)
        return (busy + enough) // 2 if enough - busy > 1 else self._even(enough)

    def _more(self) -> int | None:
        """Grow as long as that helps; then look beside the best number so far."""
        last = max(self.fastest)
        best = min(self.fastest, key=lambda k: (self.fastest[k], -k))
        if best == last < self.most:
            return min(self.most, last * max(2, math.ceil(min(_STEEPEST, self.fastest[last]))))
        lower = max((k for k in self.fastest if k < best), default=self.least - 1)
        upper = min((k for k in self.fastest if k > best), default=self.most + 1)
        beside = [(best / max(1, lower), (lower + best) // 2), (upper / best, (best + upper) // 2)]
        for _, middle in sorted(beside, reverse=True):
            if middle not in self.fastest and self.least <= middle <= self.most:
                return middle
        return min(self._untried(self.least, self.most), key=lambda k: (abs(k - best), k), default=None)

    def _fewer(self, busy: int, held: int) -> int | None:
        """Bisect down to the last number that failed; below it, only numbers that divide all groups are worth a try."""
        failed = max((k for k in self.slowest if k < held), default=busy)
        if held - failed > 1:
            return (failed + held) // 2
        return min((k for k in self._untried(busy + 1, failed) if self.excess(k) == 1), default=None)

    def _even(self, enough: int) -> int | None:
        """Of the numbers above the least that is not too busy, the one that divides groups best."""
        untried = self._untried(enough + 1, self.most)
        for k in untried:
            if k <= 2 * enough and self.excess(k) == 1:
                return k
        last = max(self.slowest)
        if last < self.most and self.slowest[last] == min(self.slowest.values()):
            return min(self.most, 2 * last)
        return min(untried, key=lambda k: (self.excess(k), k), default=None)

    def _untried(self, first: int, last: int) -> list[int]:
        return [k for k in range(first, last + 1) if k not in self.fastest]


def grow(trials: Trials, iterations: list[Iteration], first: int = 1) -> Trial:
    """Place a topic on the least number of brokers whose even split holds; `first` is where to begin."""
    rate = trials.roster.rate
    chosen = fewest(rate, trials.rcaps)
    if chosen is None:
        return NoCapacity("out of brokers: together they cannot carry the topic", trials.best)
    if len(chosen) > trials.most:
        return NoCapacity(
            f"the topic would need {len(chosen)} brokers, more than the {trials.most} that are allowed", trials.best
        )
    least, most = len(chosen), trials.most
    ladder = Ladder(min(most, max(least, first)), least, most, excess_of(trials.roster))
    caps, tried = list(trials.rcaps), set[int]()
    placed: Placed | None = None
    broker_of: BrokerOf | None = None
    again: tuple[int, list[int]] | None = None  # which number, and the capacities before
    spare = _SPARE
    used: list[int] = []
    for _ in range(most_rounds(len(trials.brokers))):
        k = again[0] if again else ladder.next()
        if k is None:
            break
        if not again or sum(caps[i] for i in used) < rate:
            used = sorted(range(len(caps)), key=lambda i: (-caps[i], i))[:k]
        room = [cap if i in used else 0 for i, cap in enumerate(caps)]
        if sum(room) < rate:
            if again:
                caps, again = again[1], None
            else:
                ladder.tell(k, math.inf, math.inf)
            continue
        broker_of = _evenly(trials, trials.policy.quotas(rate, room, trials.loads), broker_of)
        iterations.append(Iteration(k))
        outcome = yield from trials.confirm(broker_of)
        seen = trials.seen(broker_of)
        tried |= seen.keys()
        slowest = max(seen.values()) / trials.slo_ns
        helped = not again or slowest < ladder.slowest[k]
        if isinstance(outcome, Placed):
            placed = outcome if placed is None or outcome.k < placed.k else placed
        if helped:
            ladder.tell(k, min(seen.values()) / trials.slo_ns, slowest)
        elif again:
            caps = again[1]
        # If the typical broker holds and some do not, those are exceptions: the number of brokers may still do.
        some = median_low(seen.values()) <= trials.slo_ns < max(seen.values())
        again = (k, list(caps)) if some and helped and spare else None
        if again:
            spare -= 1
            _relieve(trials, broker_of, caps, tried)
    return placed or NoCapacity("out of brokers: no even split holds", trials.best)


def most_rounds(brokers: int) -> int:
    """The most rounds that growing takes: steps of 4 up, halves down, and some to spare.

    A few brokers can be searched completely.
    """
    return max(8, 3 + int(1.5 * math.log2(brokers)))


def excess_of(roster: Roster) -> Callable[[int], float]:
    """How many times its part of a group the fullest of k brokers gets, on average: 1 if k divides all groups.

    Without groups, nothing is cut evenly by any k.
    """
    sizes, numbers = np.unique(np.bincount(roster.groups[roster.groups >= 0]), return_counts=True)
    grouped = sizes > 1
    sizes, numbers = sizes[grouped], numbers[grouped]
    publishers = int((sizes * numbers).sum())

    def excess(k: int) -> float:
        return float((-(-sizes // k) * k * numbers).sum() / publishers) if publishers else math.inf

    return excess


def _evenly(trials: Trials, quotas: list[int], current: BrokerOf | None) -> BrokerOf:
    """Publishers for these quotas: those that stay where they are, unless that would overfill a broker."""

    def overfilled(broker_of: BrokerOf) -> int:
        return int(max(trials.roster.rates_by_broker(broker_of, len(quotas)) - quotas))

    return min((trials.pick(quotas, current), trials.pick(quotas)), key=overfilled)


def _relieve(trials: Trials, broker_of: BrokerOf, caps: list[int], tried: set[int]) -> None:
    """Lower the capacity of brokers that were too slow; assume that untried ones are like the others."""
    carried = trials.roster.rates_by_broker(broker_of, len(caps)).tolist()
    held, kept = [], []  # fractions of rcap
    for broker, latency_ns in trials.seen(broker_of).items():
        rcap = max(1, trials.rcaps[broker])  # rounding may put a publisher on a broker without room
        if latency_ns > trials.slo_ns:
            caps[broker] = max(carried[broker] // 2, carried[broker] * trials.slo_ns // latency_ns)
            kept.append(Fraction(caps[broker], rcap))
        else:
            held.append(Fraction(carried[broker], rcap))
    alike = max(*held, median_low(kept))
    for broker, cap in enumerate(trials.rcaps):
        if broker not in tried:
            caps[broker] = min(caps[broker], int(cap * alike))
