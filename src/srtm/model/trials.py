"""Trials of a fitting: assignments of publishers to brokers, what was measured of each, and the words for both.

Invariant: an assignment is `Placed` only if every broker of it was measured within the SLO under exactly this
assignment; in the paper's loop, with exactly these publishers on it, wherever the others were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.model.placement import Policy, Roster, allocated, pick, rcap

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from srtm.model.placement import Broker

    BrokerOf = NDArray[np.int32]
    Latencies = dict[int, int]
    Trial = Generator["Measure", Latencies, "Placed | NoCapacity"]


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

    @property
    def worst_ns(self) -> int:
        """The latency of the slowest broker."""
        return max(self.latency_ns.values())


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


@dataclass
class Trials:
    """The assignments of one topic that were tried, and the latencies that were measured of them."""

    roster: Roster
    brokers: Sequence[Broker]
    policy: Policy
    slo_ns: int
    seed: int
    max_brokers: int | None
    as_paper: bool = False
    best: Placed | None = None
    uneven: bool = False  # some brokers of an assignment held, and others did not
    _heard: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look up what each broker has left, and what it carries."""
        self.rcaps = [rcap(broker) for broker in self.brokers]
        self.loads = allocated(self.brokers)

    @property
    def most(self) -> int:
        """The most brokers that may be used."""
        return min(sum(cap > 0 for cap in self.rcaps), self.max_brokers or len(self.rcaps))

    def anew(self) -> Trials:
        """The same topic and brokers, nothing measured."""
        return Trials(self.roster, self.brokers, self.policy, self.slo_ns, self.seed, self.max_brokers, self.as_paper)

    def confirm(self, broker_of: BrokerOf) -> Trial:
        """Measure what is unknown of this assignment; Placed if all of it is within the SLO."""
        unknown = [broker for broker, latency in self._known(broker_of).items() if latency is None]
        if unknown:
            self.hear(broker_of, (yield Measure(broker_of, tuple(unknown))))
        placed = Placed(broker_of, self.seen(broker_of))
        if self.best is None or self._rank(placed) < self._rank(self.best):
            self.best = placed
        if placed.worst_ns <= self.slo_ns:
            return placed
        self.uneven = self.uneven or min(placed.latency_ns.values()) <= self.slo_ns
        return NoCapacity("measured above the SLO", self.best)

    def settle(self, reason: str) -> Placed | NoCapacity:
        """The best measured assignment, if it is good enough."""
        if self.best and self.best.worst_ns <= self.slo_ns:
            return self.best
        return NoCapacity(reason, self.best)

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

    def hear(self, broker_of: BrokerOf, latencies_ns: Latencies) -> None:
        """Remember what brokers measured with the publishers of this assignment."""
        for broker, latency_ns in latencies_ns.items():
            self._heard[self._key(broker_of, broker)] = latency_ns

    def seen(self, broker_of: BrokerOf) -> Latencies:
        """Latencies of the brokers of this assignment that were measured with exactly these publishers."""
        return {broker: latency for broker, latency in self._known(broker_of).items() if latency is not None}

    def pick(self, quotas: Sequence[int], current: BrokerOf | None = None) -> BrokerOf:
        """Choose publishers for these quotas; they stay on their current brokers if possible."""
        return pick(self.roster, quotas, by_group=self.policy.by_group, seed=self.seed, current=current)

    def _rank(self, placed: Placed) -> tuple[bool, int, int]:
        """Those that hold come first, by the number of brokers; the others by their latency."""
        holds = placed.worst_ns <= self.slo_ns
        return not holds, placed.k if holds else 0, placed.worst_ns

    def _known(self, broker_of: BrokerOf) -> dict[int, int | None]:
        return {
            int(broker): self._heard.get(self._key(broker_of, int(broker)))
            for broker in np.unique(broker_of[broker_of >= 0])
        }

    def _key(self, broker_of: BrokerOf, broker: int) -> tuple[int, bytes]:
        # Where the others are matters: a broker's part of b depends on the bursts elsewhere. The paper's does not.
        return broker, np.packbits(broker_of == broker).tobytes() if self.as_paper else broker_of.tobytes()


def resume(trial: Trial, heard: Latencies | None) -> Order:
    """Continue a trial with what was measured, or start it with None."""
    try:
        return trial.send(heard)  # type: ignore[arg-type]  # None starts it
    except StopIteration as end:
        outcome: Placed | NoCapacity = end.value
        return outcome


def limited(trial: Trial, rounds: int, trials: Trials) -> Trial:
    """A trial that ends after so many rounds."""
    order = resume(trial, None)
    for _ in range(rounds):
        if not isinstance(order, Measure):
            return order
        order = resume(trial, (yield order))
    return trials.settle(f"no fit after {rounds} more rounds") if isinstance(order, Measure) else order
