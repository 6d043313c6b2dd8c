"""The paper's loop (section 4.2): brokers fill one after the other.

An iteration places the topic on the fewest brokers (steps 1 and 2) and measures them (step 3). Brokers that violate the
SLO search, all at once and by halving, for the number of publishers that they can keep. A search ends early once the
latency is within 20 % below the SLO. The broker is then full: the rate that it kept replaces its rcap. What it shed is
`ua_rate`, and the next iteration shares the topic out again, on the fewest brokers and by max-min.

A broker that was not tried counts with its whole rcap, so every iteration adds about one broker. Because searches stop
early, a fit is then tried on one broker less, unless a measurement rules that out; the paper does not. If shedding
never helps, even splits are tried before the fitting ends in failure.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from srtm.model.halving import Halving
from srtm.model.placement import UNPLACED
from srtm.model.trials import Iteration, Measure, NoCapacity, Placed

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from srtm.model.trials import BrokerOf, Latencies, Trial, Trials


def one_by_one(trials: Trials, iterations: list[Iteration], stop_within: float) -> Trial:
    """Fill brokers one after the other until the topic is placed, or no capacity is left."""
    caps = list(trials.rcaps)
    too_much = [cap + 1 for cap in caps]  # the least rate that each broker could not carry
    in_use: set[int] = set()
    broker_of: BrokerOf | None = None
    while True:
        quotas = trials.policy.choose(trials.roster.rate, caps, trials.loads, in_use)
        if quotas is None:
            return (yield from even_splits(trials, iterations, 2))
        in_use = {broker for broker, quota in enumerate(quotas) if quota}
        k = len(in_use)
        if trials.max_brokers is not None and k > trials.max_brokers:
            return NoCapacity(
                f"the topic would need {k} brokers, more than the {trials.max_brokers} that are allowed", trials.best
            )
        broker_of = trials.pick(quotas, broker_of)
        iterations.append(Iteration(k))
        outcome = yield from trials.confirm(broker_of)
        if isinstance(outcome, Placed):
            if trials.as_paper:
                return outcome
            return (yield from _on_fewer(trials, outcome, too_much, iterations))
        searches = {
            broker: Halving(np.flatnonzero(broker_of == broker), int((broker_of == broker).sum()), latency_ns)
            for broker, latency_ns in trials.seen(broker_of).items()
            if latency_ns > trials.slo_ns
        }
        broker_of = yield from _narrow(trials, broker_of, searches, (1 - stop_within) * trials.slo_ns)
        for broker, search in searches.items():
            rates = trials.roster.rates[search.members]
            kept = int((rates * (broker_of[search.members] == broker)).sum())
            too_much[broker] = min(too_much[broker], int(rates.sum()) * search.high // len(rates))
            # At least one publisher and 2 % less than before, even if rounding had overfilled the broker: so the
            # loop ends, and soon.
            caps[broker] = max(0, min(kept, caps[broker] - max(int(rates.min()), caps[broker] // 50)))


def even_splits(trials: Trials, iterations: list[Iteration], fewest: int) -> Trial:
    """Try the topic on so many brokers, one more, … up to all, without any search."""
    caps = trials.rcaps
    largest = sorted(range(len(caps)), key=lambda i: (-caps[i], i))
    for k in range(fewest, min(len(caps), trials.max_brokers or len(caps)) + 1):
        used = [caps[i] if i in largest[:k] else 0 for i in range(len(caps))]
        if sum(used) < trials.roster.rate:
            continue
        iterations.append(Iteration(k))
        quotas = trials.policy.quotas(trials.roster.rate, used, trials.loads)
        outcome = yield from trials.confirm(trials.pick(quotas))
        if isinstance(outcome, Placed):
            return outcome
    return NoCapacity("out of brokers: those that are left cannot carry ua_rate", trials.best)


def _on_fewer(trials: Trials, placed: Placed, too_much: Sequence[int], iterations: list[Iteration]) -> Trial:
    """Searches stop early, so brokers may carry more than was found: try one broker less while none objects."""
    caps = trials.rcaps
    # A broker that was never too busy is believed to be like the ones that were.
    known = [Fraction(too_much[i] - 1, caps[i]) for i in range(len(caps)) if 0 < too_much[i] <= caps[i]]
    limit = max(known, default=Fraction(1))
    while placed.k > 1:
        room = [min(too_much[i] - 1, int(caps[i] * limit)) if i in placed.latency_ns else 0 for i in range(len(caps))]
        room[min(placed.latency_ns, key=lambda i: (room[i], -i))] = 0
        if sum(room) < trials.roster.rate:
            break
        iterations.append(Iteration(placed.k - 1))
        quotas = trials.policy.quotas(trials.roster.rate, room, trials.loads)
        outcome = yield from trials.confirm(trials.pick(quotas, placed.broker_of))
        if not isinstance(outcome, Placed):
            break
        placed = outcome
    return placed


def _narrow(
    trials: Trials, broker_of: BrokerOf, searches: dict[int, Halving], enough_ns: float
) -> Generator[Measure, Latencies, BrokerOf]:
    """Let brokers search for the number of publishers that each can keep; the others stay unplaced."""
    trial = broker_of.copy()
    while True:
        for search in searches.values():
            if not search.done:
                search.aim()
        for broker, search in searches.items():
            trial[search.members] = UNPLACED
            trial[search.kept(trials.roster, by_group=trials.policy.by_group, seed=trials.seed)] = broker
        active = tuple(broker for broker, search in searches.items() if not search.done)
        if not active:
            return trial
        heard = yield Measure(trial.copy(), active)
        trials.hear(trial, heard)
        for broker in active:
            searches[broker].hear(heard[broker], trials.slo_ns, enough_ns)
