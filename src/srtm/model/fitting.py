"""Online-fitting: the Load Distributor of the paper's section 4.2 as a loop without IO.

The loop says what to try and which brokers to measure; its driver tries that, measures, and reports the latencies:

    fitting = Fitting(roster, brokers, "srtm", slo_ns)
    while isinstance(order := fitting.order, Measure):
        fitting.tell(measure(order), duration_s)
    # order is now Placed or NoCapacity

By default the number of brokers grows fast (`growth`): a fit takes rounds in the order of the logarithm of the number
of brokers. The paper's loop (`one_by_one`) adds about one broker an iteration. It is tried if brokers are so different
that no even split holds. docs/adr/0006-fitting.md compares the two.

With `predict`, the model comes first: the same loop runs against predictions, which costs no round, and one round
confirms the outcome. If the measurement disagrees, the loop runs again with predictions corrected by the ratio of the
two. If that fails twice, the loop measures, from the largest predicted k on.

Invariants: it ends; it is Placed only if every broker of the assignment was measured within the SLO under exactly that
assignment (in the paper's loop, with exactly those publishers on it). A fitting depends on its arguments and on what it
is told, nothing else. To resume one, create it again and tell it the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.model.growth import grow
from srtm.model.one_by_one import even_splits, one_by_one
from srtm.model.placement import Roster, check_fits, policy_named
from srtm.model.trials import Iteration, Measure, NoCapacity, Order, Placed, Trials, limited, resume

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from srtm.model.placement import Broker
    from srtm.model.trials import Trial

__all__ = ["MAX_ROUNDS", "STOP_WITHIN", "Fitting", "Iteration", "Measure", "NoCapacity", "Order", "Placed", "drive"]

STOP_WITHIN = 0.2
MAX_ROUNDS = 1_000
_CORRECTIONS = 2
_PATIENCE = 30  # rounds of the paper's loop after growing has failed; the paper's own searches took up to 17


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
        as_paper: bool = False,
    ) -> None:
        """With `as_paper`, brokers fill one after the other, and searches stop within that part below the SLO."""
        check_fits(roster, brokers)
        if not 0 < slo_ns < math.inf:
            raise InputError(f"the SLO must be a positive time, not {slo_ns} ns", value=slo_ns)
        if not 0 <= stop_within < 1:
            raise InputError(f"stop_within must lie in [0, 1), not {stop_within}", value=stop_within)
        self.rounds = 0
        self.elapsed_s = 0.0
        self.iterations: list[Iteration] = []
        self._trials = Trials(roster, brokers, policy_named(policy), slo_ns, seed, max_brokers, as_paper)
        self._stop_within = stop_within
        self._as_paper = as_paper
        self._max_rounds = max_rounds
        self._max_elapsed_s = max_elapsed_s
        self._trial = self._search(self._trials, self.iterations) if predict is None else self._model_first(predict)
        self.order: Order = resume(self._trial, None)

    def tell(self, latencies_ns: Mapping[int, int], duration_s: float) -> None:
        """Take in what the brokers of the current order measured, and how long that round took."""
        if not isinstance(self.order, Measure):
            raise InputError(f"the fitting is over ({type(self.order).__name__}) and takes no more measurements")
        if not 0 <= duration_s < math.inf:
            raise InputError(f"a round must last a finite time, not {duration_s} s", value=duration_s)
        heard = self._trials.checked(self.order, latencies_ns)
        self.rounds += 1
        self.elapsed_s += duration_s
        if self.iterations:
            self.iterations[-1].rounds += 1
        self.order = resume(self._trial, heard)
        if isinstance(self.order, Measure) and (
            self.rounds >= self._max_rounds or self.elapsed_s >= self._max_elapsed_s
        ):
            self.order = self._trials.settle(f"no fit after {self.rounds} rounds in {self.elapsed_s:g} s")

    def _search(self, trials: Trials, iterations: list[Iteration], first: int = 1) -> Trial:
        """Search by measuring."""
        if not trials.policy.concentrates:
            return (yield from _on_all(trials, iterations))
        filling = one_by_one(trials, iterations, self._stop_within)
        if self._as_paper:
            return (yield from filling)
        outcome = yield from grow(trials, iterations, first)
        if isinstance(outcome, Placed) or not trials.uneven:
            return outcome
        # Brokers differ: perhaps each can keep a part of its own.
        return (yield from limited(filling, _PATIENCE, trials))

    def _model_first(self, predict: Callable[[Measure], Mapping[int, int]]) -> Trial:
        trials = self._trials
        scale = dict.fromkeys(range(len(trials.brokers)), 1.0)
        confirmed: Placed | None = None
        k = 1
        for _ in range(1 + _CORRECTIONS):
            outcome = self._predicted(lambda order: _scaled(predict(order), scale))
            expected = outcome if isinstance(outcome, Placed) else outcome.best
            if expected is None or (confirmed and expected.k >= confirmed.k):
                break
            k = max(k, expected.k)
            self.iterations.append(Iteration(expected.k))
            measured = yield from trials.confirm(expected.broker_of)
            if isinstance(measured, Placed):
                confirmed = measured
            seen = trials.seen(expected.broker_of)
            for broker, latency_ns in seen.items():
                scale[broker] *= latency_ns / max(1, expected.latency_ns[broker])
            if confirmed and confirmed.k == 1:
                break
            # Assume that a broker that was not measured is like those that were.
            for broker in scale.keys() - seen.keys():
                scale[broker] = sum(scale[other] for other in seen) / len(seen)
        if confirmed:
            return confirmed
        if self._as_paper:  # even splits before any search: the model is off, but seldom by much
            outcome = yield from even_splits(trials, self.iterations, max(2, k))
            if isinstance(outcome, Placed):
                return outcome
        return (yield from self._search(trials, self.iterations, k))

    def _predicted(self, predict: Callable[[Measure], Mapping[int, float]]) -> Placed | NoCapacity:
        """Run the whole search against predictions, without remembering them."""
        trials = self._trials.anew()
        trial = self._search(trials, [])
        order = resume(trial, None)
        for _ in range(MAX_ROUNDS):
            if not isinstance(order, Measure):
                return order
            order = resume(trial, trials.checked(order, predict(order)))
        return NoCapacity(f"no predicted fit after {MAX_ROUNDS} rounds", trials.best)


def drive(fitting: Fitting, measure: Callable[[Measure], Mapping[int, int]], round_s: float) -> Placed | NoCapacity:
    """Run a fitting to its end against a function that measures."""
    while isinstance(order := fitting.order, Measure):
        fitting.tell(measure(order), round_s)
    return order


def _on_all(trials: Trials, iterations: list[Iteration]) -> Trial:
    """Measure a topic on every broker."""
    quotas = trials.policy.choose(trials.roster.rate, trials.rcaps, trials.loads)
    if quotas is None:
        return NoCapacity("out of brokers: together they cannot carry the topic", trials.best)
    k = sum(quota > 0 for quota in quotas)
    if trials.max_brokers is not None and k > trials.max_brokers:
        return NoCapacity(
            f"the topic would need {k} brokers, more than the {trials.max_brokers} that are allowed", trials.best
        )
    iterations.append(Iteration(k))
    outcome = yield from trials.confirm(trials.pick(quotas))
    if isinstance(outcome, Placed):
        return outcome
    return NoCapacity(f"policy {trials.policy.name} uses every broker and does not search", trials.best)


def _scaled(latencies_ns: Mapping[int, int], scale: Mapping[int, float]) -> dict[int, float]:
    return {broker: latency_ns * scale[broker] for broker, latency_ns in latencies_ns.items()}
