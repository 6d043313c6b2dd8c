"""Online-fitting: the Load Distributor of the paper's section 4.2 as a loop without IO.

The loop says what to try and which brokers to measure; its driver tries that, measures, and reports the latencies:

    fitting = Fitting(roster, brokers, "srtm", slo_ns)
    while isinstance(order := fitting.order, Measure):
        fitting.tell(measure(order), duration_s)
    # order is now Placed or NoCapacity

An iteration places the topic on the fewest brokers (steps 1 and 2) and measures them (step 3). Brokers that violate the
SLO search, all at once and by halving, for the number of publishers that they can keep. A search ends early once the
latency is within 20 % below the SLO. The broker is then full: the rate that it kept replaces its rcap. What it shed is
`ua_rate`, and the next iteration shares the topic out again, on the fewest brokers and by max-min.

Beyond the paper (docs/adr/0006-fitting.md): because searches stop early, a fit is then tried on one broker less, unless
a measurement rules that out; and if shedding never helps, even splits are tried before the fitting ends in failure.

With `predict`, the model comes first: the same loop runs against predictions, which costs no round, and one round
confirms the outcome. If the measurement disagrees, the loop runs again with predictions corrected by the ratio of the
two. If that fails twice, even splits are measured from the largest predicted k on, and only then are the brokers
searched by measuring.

Invariants: it ends; it is Placed only if every broker of the assignment was measured within the SLO with exactly those
publishers on it. A fitting depends on its arguments and on what it is told, nothing else. To resume one, create it
again and tell it the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.model.halving import Halving
from srtm.model.placement import UNPLACED, Policy, Roster, allocated, check_fits, pick, policy_named, rcap

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from srtm.model.placement import Broker

    BrokerOf = NDArray[np.int32]
    Latencies = dict[int, int]
    Trial = Generator["Measure", Latencies, "Placed | NoCapacity"]

STOP_WITHIN = 0.2
MAX_ROUNDS = 1_000
_CORRECTIONS = 2


@dataclass(frozen=True, slots=True)
class Measure:
    """Try this assignment (broker number of every publisher, or UNPLACED) and measure these brokers."""

    broker_of: BrokerOf
    brokers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """Done: every broker of this assignment was measured within the SLO with these publishers."""

    broker_of: BrokerOf
    latency_ns: Mapping[int, int]

    @property
    def k(self) -> int:
        """How many brokers carry the topic."""
        return len(self.latency_ns)


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """No assignment was found; `best` is the complete one with the smallest worst latency, if any was measured."""

    reason: str
    best: Placed | None

    @property
    def k(self) -> int:
        """How many brokers the best assignment uses."""
        return self.best.k if self.best else 0


Order = Measure | Placed | NoCapacity


@dataclass(slots=True)
class Iteration:
    """One entry of the paper's Table 1: brokers in use, and the rounds of this iteration."""

    k: int
    rounds: int = 0


class Fitting:
    """The fitting of one topic. Deterministic for a seed."""

    def __init__(
        self,
        roster: Roster,
        brokers: Sequence[Broker],
        policy: str,
        slo_ns: int,
        *,
        seed: int = 0,
        max_brokers: int | None = None,
        stop_within: float = STOP_WITHIN,
        max_rounds: int = MAX_ROUNDS,
        max_elapsed_s: float = math.inf,
        predict: Callable[[Measure], Mapping[int, int]] | None = None,
    ) -> None:
        check_fits(roster, brokers)
        if not 0 < slo_ns < math.inf:
            raise InputError(f"the SLO must be a positive time, not {slo_ns} ns", value=slo_ns)
        if not 0 <= stop_within < 1:
            raise InputError(f"stop_within must lie in [0, 1), not {stop_within}", value=stop_within)
        self.rounds = 0
        self.elapsed_s = 0.0
        self.iterations: list[Iteration] = []
        self._assignments = _Assignments(roster, brokers, policy_named(policy), slo_ns, seed, max_brokers, stop_within)
        self._max_rounds = max_rounds
        self._max_elapsed_s = max_elapsed_s
        self._trial = self._assignments.search(self.iterations) if predict is None else self._model_first(predict)
        self.order: Order = _resume(self._trial, None)

    def tell(self, latencies_ns: Mapping[int, int], duration_s: float) -> None:
        """Take in what the brokers of the current order measured, and how long that round took."""
        if not isinstance(self.order, Measure):
            raise InputError(f"the fitting is over ({type(self.order).__name__}) and takes no more measurements")
        if not 0 <= duration_s < math.inf:
            raise InputError(f"a round must last a finite time, not {duration_s} s", value=duration_s)
        heard = self._assignments.checked(self.order, latencies_ns)
        self.rounds += 1
        self.elapsed_s += duration_s
        if self.iterations:
            self.iterations[-1].rounds += 1
        self.order = _resume(self._trial, heard)
        if isinstance(self.order, Measure) and (
            self.rounds >= self._max_rounds or self.elapsed_s >= self._max_elapsed_s
        ):
            self.order = self._assignments.settle(f"no fit after {self.rounds} rounds in {self.elapsed_s:g} s")

    def _model_first(self, predict: Callable[[Measure], Mapping[int, int]]) -> Trial:
        tried = self._assignments
        scale = dict.fromkeys(range(len(tried.brokers)), 1.0)
        confirmed: Placed | None = None
        k = 2
        for _ in range(1 + _CORRECTIONS):
            outcome = tried.search_by(lambda order: _scaled(predict(order), scale))
            expected = outcome if isinstance(outcome, Placed) else outcome.best
            if expected is None or (confirmed and expected.k >= confirmed.k):
                break
            k = max(k, expected.k)
            self.iterations.append(Iteration(expected.k))
            measured = yield from tried.confirm(expected.broker_of)
            if isinstance(measured, Placed):
                confirmed = measured
            seen = tried.seen(expected.broker_of)
            for broker, latency_ns in seen.items():
                scale[broker] *= latency_ns / max(1, expected.latency_ns[broker])
            if confirmed and confirmed.k == 1:
                break
            # Assume that a broker that was not measured is like those that were.
            for broker in scale.keys() - seen.keys():
                scale[broker] = sum(scale[other] for other in seen) / len(seen)
        if confirmed:
            return confirmed
        even = yield from tried.even_splits(self.iterations, k)
        return even if isinstance(even, Placed) else (yield from tried.search(self.iterations))


@dataclass
class _Assignments:
    """The assignments of one topic: which to try next, and what was measured of those tried."""

    roster: Roster
    brokers: Sequence[Broker]
    policy: Policy
    slo_ns: int
    seed: int
    max_brokers: int | None
    stop_within: float
    best: Placed | None = None
    _heard: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def search(self, iterations: list[Iteration]) -> Trial:
        """The paper's loop, from rcap alone."""
        caps = [rcap(broker) for broker in self.brokers]
        too_much = [cap + 1 for cap in caps]  # the least rate that each broker could not carry
        loads = allocated(self.brokers)
        in_use: set[int] = set()
        broker_of: BrokerOf | None = None
        while True:
            quotas = self.policy.choose(self.roster.rate, caps, loads, in_use)
            if quotas is None:
                return (yield from self.even_splits(iterations, 2))
            in_use = {broker for broker, quota in enumerate(quotas) if quota}
            k = len(in_use)
            if self.max_brokers is not None and k > self.max_brokers:
                return NoCapacity(
                    f"the topic would need {k} brokers, more than the {self.max_brokers} that are allowed", self.best
                )
            broker_of = self._pick(quotas, broker_of)
            iterations.append(Iteration(k))
            outcome = yield from self.confirm(broker_of)
            if isinstance(outcome, Placed):
                return (yield from self._on_fewer(outcome, too_much, iterations))
            if not self.policy.concentrates:
                return NoCapacity(f"policy {self.policy.name} uses every broker and does not search", self.best)
            searches = {
                broker: Halving(np.flatnonzero(broker_of == broker), int((broker_of == broker).sum()), latency_ns)
                for broker, latency_ns in self.seen(broker_of).items()
                if latency_ns > self.slo_ns
            }
            broker_of = yield from self._narrow(broker_of, searches)
            for broker, search in searches.items():
                rates = self.roster.rates[search.members]
                kept = int((rates * (broker_of[search.members] == broker)).sum())
                too_much[broker] = min(too_much[broker], int(rates.sum()) * search.high // len(rates))
                # At least one publisher and 2 % less than before, even if rounding had overfilled the broker: so the
                # loop ends, and soon.
                caps[broker] = max(0, min(kept, caps[broker] - max(int(rates.min()), caps[broker] // 50)))

    def _on_fewer(self, placed: Placed, too_much: Sequence[int], iterations: list[Iteration]) -> Trial:
        """Searches stop early, so brokers may carry more than was found: try one broker less while none objects."""
        caps = [rcap(broker) for broker in self.brokers]
        # A broker that was never too busy is believed to be like the ones that were.
        known = [Fraction(too_much[i] - 1, caps[i]) for i in range(len(caps)) if 0 < too_much[i] <= caps[i]]
        limit = max(known, default=Fraction(1))
        while self.policy.concentrates and placed.k > 1:
            room = [
                min(too_much[i] - 1, int(caps[i] * limit)) if i in placed.latency_ns else 0 for i in range(len(caps))
            ]
            room[min(placed.latency_ns, key=lambda i: (room[i], -i))] = 0
            if sum(room) < self.roster.rate:
                break
            iterations.append(Iteration(placed.k - 1))
            quotas = self.policy.quotas(self.roster.rate, room, allocated(self.brokers))
            broker_of = self._pick(quotas, placed.broker_of)
            outcome = yield from self.confirm(broker_of)
            if not isinstance(outcome, Placed):
                break
            placed = outcome
        return placed

    def even_splits(self, iterations: list[Iteration], fewest: int) -> Trial:
        """Try the topic on so many brokers, one more, … up to all, without any search."""
        caps = [rcap(broker) for broker in self.brokers]
        largest = sorted(range(len(caps)), key=lambda i: (-caps[i], i))
        for k in range(fewest, min(len(caps), self.max_brokers or len(caps)) + 1):
            used = [caps[i] if i in largest[:k] else 0 for i in range(len(caps))]
            if sum(used) < self.roster.rate:
                continue
            quotas = self.policy.quotas(self.roster.rate, used, allocated(self.brokers))
            iterations.append(Iteration(k))
            broker_of = self._pick(quotas)
            outcome = yield from self.confirm(broker_of)
            if isinstance(outcome, Placed):
                return outcome
        return NoCapacity("out of brokers: those that are left cannot carry ua_rate", self.best)

    def confirm(self, broker_of: BrokerOf) -> Trial:
        """Measure what is unknown of this assignment; Placed if all of it is within the SLO."""
        unknown = [broker for broker, latency in self._known(broker_of).items() if latency is None]
        if unknown:
            self._hear(broker_of, (yield Measure(broker_of, tuple(unknown))))
        placed = Placed(broker_of, self.seen(broker_of))
        if self.best is None or max(placed.latency_ns.values()) < max(self.best.latency_ns.values()):
            self.best = placed
        if max(placed.latency_ns.values()) <= self.slo_ns:
            return placed
        return NoCapacity("measured above the SLO", self.best)

    def settle(self, reason: str) -> Placed | NoCapacity:
        """The best measured assignment, if it is good enough."""
        if self.best and max(self.best.latency_ns.values()) <= self.slo_ns:
            return self.best
        return NoCapacity(reason, self.best)

    def search_by(self, predict: Callable[[Measure], Mapping[int, float]]) -> Placed | NoCapacity:
        """Run the whole loop against predictions, without remembering them."""
        shadow = _Assignments(
            self.roster, self.brokers, self.policy, self.slo_ns, self.seed, self.max_brokers, self.stop_within
        )
        trial = shadow.search([])
        order = _resume(trial, None)
        for _ in range(MAX_ROUNDS):
            if not isinstance(order, Measure):
                return order
            order = _resume(trial, self.checked(order, predict(order)))
        return NoCapacity(f"no predicted fit after {MAX_ROUNDS} rounds", shadow.best)

    def checked(self, order: Measure, latencies_ns: Mapping[int, float]) -> Latencies:
        """The requested latencies; InputError if one is missing or is not a time."""
        heard: Latencies = {}
        for broker in order.brokers:
            latency = latencies_ns.get(broker)
            if latency is None or not 0 <= latency < math.inf:
                raise InputError(
                    f"invalid latency {latency} of broker {self.brokers[broker].name!r}; measure it again,"
                    " or fit without it",
                    broker=broker,
                )
            heard[broker] = math.ceil(latency)
        return heard

    def seen(self, broker_of: BrokerOf) -> Latencies:
        """Latencies of the brokers of this assignment that were measured with exactly these publishers."""
        return {broker: latency for broker, latency in self._known(broker_of).items() if latency is not None}

    def _narrow(self, broker_of: BrokerOf, searches: dict[int, Halving]) -> Generator[Measure, Latencies, BrokerOf]:
        enough_ns = (1 - self.stop_within) * self.slo_ns
        trial = broker_of.copy()
        while True:
            for search in searches.values():
                if not search.done:
                    search.aim()
            for broker, search in searches.items():
                trial[search.members] = UNPLACED
                trial[search.kept(self.roster, by_group=self.policy.by_group, seed=self.seed)] = broker
            active = tuple(broker for broker, search in searches.items() if not search.done)
            if not active:
                return trial
            heard = yield Measure(trial.copy(), active)
            self._hear(trial, heard)
            for broker in active:
                searches[broker].hear(heard[broker], self.slo_ns, enough_ns)

    def _pick(self, quotas: Sequence[int], current: BrokerOf | None = None) -> BrokerOf:
        return pick(self.roster, quotas, by_group=self.policy.by_group, seed=self.seed, current=current)

    def _known(self, broker_of: BrokerOf) -> dict[int, int | None]:
        return {
            int(broker): self._heard.get(self._key(broker_of, int(broker)))
            for broker in np.unique(broker_of[broker_of >= 0])
        }

    def _hear(self, broker_of: BrokerOf, latencies_ns: Latencies) -> None:
        for broker, latency_ns in latencies_ns.items():
            self._heard[self._key(broker_of, broker)] = latency_ns

    def _key(self, broker_of: BrokerOf, broker: int) -> tuple[int, bytes]:
        return broker, np.packbits(broker_of == broker).tobytes()


def drive(fitting: Fitting, measure: Callable[[Measure], Mapping[int, int]], round_s: float) -> Placed | NoCapacity:
    """Run a fitting to its end against a function that measures."""
    while isinstance(order := fitting.order, Measure):
        fitting.tell(measure(order), round_s)
    return order


def _resume(trial: Trial, heard: Latencies | None) -> Order:
    try:
        return trial.send(heard)  # type: ignore[arg-type]  # None starts it
    except StopIteration as end:
        outcome: Placed | NoCapacity = end.value
        return outcome


def _scaled(latencies_ns: Mapping[int, int], scale: Mapping[int, float]) -> dict[int, float]:
    return {broker: latency_ns * scale[broker] for broker, latency_ns in latencies_ns.items()}
