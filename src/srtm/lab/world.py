"""Worlds that results run in: a world generates traffic, profiles a bucket, places the topic and measures latency.

Results only see the protocol `World`. `Simulated` is the paper's testbed in virtual time
(docs/adr/0005-paper-testbed.md): six brokers of the model `paper-testbed` for the paper's 60 s, or less for a topic
whose rate makes a shorter run equally accurate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from srtm.lab.result import SLO_MS, VARIANT, Row
from srtm.model.latency import SLO
from srtm.model.profile import profile
from srtm.model.server import Background
from srtm.sim.simulate import SimulatedBroker, SimulatedTopic, Simulation, assess, simulate
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Arrivals, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from srtm.workload.publishers import Population

# b by the paper's rule, which leaves a p99 SLO no room, and with a margin (docs/adr/0005).
PAPERS_RULE = "0.99"
WITH_MARGIN = "0.995"
QUANTILES = {"99 %": PAPERS_RULE, "99.5 %": WITH_MARGIN}
BROKERS = 6
_KNOWN_MPS = 3_500.0  # from this rate on, b of single messages is known within 1 ms after a million of them
INITIAL_KMPS = (10, 40, 50, 60, 70, 80)  # Fig. 8: initial load of brokers 1 to 6, in batches of 10


class World(Protocol):
    """The interface of a world."""

    @property
    def name(self) -> str:
        """Part of the key of kept rows: worlds with different names give different numbers."""

    def topic(self, population: Population, seed: int, quantile: str = PAPERS_RULE) -> SimulatedTopic:
        """The publishers with their traffic, and b at this quantile of their backlog."""

    def topics(self, population: Population, seed: int, quantiles: Iterable[str]) -> list[SimulatedTopic]:
        """The same traffic with b at each of these quantiles."""

    def fit(
        self,
        topic: SimulatedTopic,
        policy: str,
        seed: int,
        *,
        loads_kmps: Sequence[int] = (),
        history: SimulatedTopic | None = None,
    ) -> Simulation:
        """Place the topic as the Load Distributor does; with a history, predict first."""

    def spread(
        self, topic: SimulatedTopic, policy: str, k: int, seed: int, *, loads_kmps: Sequence[int] = ()
    ) -> Simulation:
        """Split the topic by rates over k brokers, without a search."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """Virtual time: the token-bucket law and the service model; the seed is the only noise."""

    seconds: float = 60.0
    most_messages: int = 1_000_000
    longest: int = 5  # times as long, if a slow topic in batches needs it

    @property
    def name(self) -> str:
        """Identifies kept rows."""
        return (
            f"simulated, {self.seconds:g} s, at most {self.most_messages} messages, up to {self.longest} times that,"
            " b by bursts, of earlier traffic"
        )

    def length_s(self, population: Population) -> float:
        """How long a topic runs: slow topics in batches run longer, because their b is known least.

        An SLO of 1 ms forgives r/1000 tokens. A quantile of n messages in batches of s misses b by a multiple of
        s/√n, so n must grow with (s/r)². At 35,000 msg/s in batches of 10, a million messages suffice.
        """
        hard = (_KNOWN_MPS * population.batch / population.total_mps) ** 2
        most = self.most_messages * max(1.0, min(hard, self.longest))
        return min(self.seconds * max(1.0, min(hard, self.longest)), most / population.total_mps)

    def topic(self, population: Population, seed: int, quantile: str = PAPERS_RULE) -> SimulatedTopic:
        """The topic; `topics` says what its bucket is profiled on."""
        return self.topics(population, seed, [quantile])[0]

    def topics(self, population: Population, seed: int, quantiles: Iterable[str]) -> list[SimulatedTopic]:
        """Buckets are profiled on the time before, or on the same time if publishers are correlated.

        The authors profiled a run before the one that they measured. Backlogs of correlated Poisson publishers are so
        rare and so large that b of one minute says little about the next: `other_minute` has the numbers.
        """
        if population.group_size > 1:
            length_ns = round(min(self.seconds, self.most_messages / population.total_mps) * NS_PER_S)
            workload = Workload((population,), length_ns, seed)
            arrivals = workload.arrivals()
            profiled = arrivals.times_ns
        else:
            length_ns = round(self.length_s(population) * NS_PER_S)
            workload = Workload((population,), 2 * length_ns, seed)
            times, senders = workload.arrivals()
            cut = int(np.searchsorted(times, length_ns))
            profiled, arrivals = times[:cut], Arrivals(times[cut:] - length_ns, senders[cut:])
        publishers = workload.publishers()
        buckets = [profile(profiled, quantile=quantile).bucket for quantile in quantiles]
        return [SimulatedTopic(publishers, arrivals, bucket) for bucket in buckets]

    def fit(
        self,
        topic: SimulatedTopic,
        policy: str,
        seed: int,
        *,
        loads_kmps: Sequence[int] = (),
        history: SimulatedTopic | None = None,
    ) -> Simulation:
        """Search by measuring, or by the model first; the paper's loop, since its rounds are the paper's."""
        fit: Literal["model", "measure"] = "model" if history else "measure"
        fleet = brokers(loads_kmps)
        return simulate(topic, fleet, policy, _SLO, fit=fit, history=history, seed=seed, as_paper=True)

    def spread(
        self, topic: SimulatedTopic, policy: str, k: int, seed: int, *, loads_kmps: Sequence[int] = ()
    ) -> Simulation:
        """Split by rates alone."""
        return assess(topic, brokers(loads_kmps), policy, k, _SLO, seed=seed)


_SLO = SLO(round(SLO_MS * NS_PER_MS))


def brokers(loads_kmps: Sequence[int] = ()) -> list[SimulatedBroker]:
    """The paper's six brokers, idle or loaded."""
    loads = [Background(1_000.0 * load, 10) if load else None for load in loads_kmps or [0] * BROKERS]
    return [SimulatedBroker.like("paper-testbed", f"broker-{number}", load) for number, load in enumerate(loads, 1)]


def best_split(
    world: World, topic: SimulatedTopic, policy: str, seed: int, *, loads_kmps: Sequence[int] = ()
) -> Simulation:
    """A baseline as the authors ran it: split without a search, on the fewest brokers that meet the SLO.

    If none does, the fastest of the splits over 1 to 6 brokers.
    """
    tried = []
    for k in range(1, BROKERS + 1):
        run = world.spread(topic, policy, k, seed, loads_kmps=loads_kmps)
        if run.meets_slo:
            return run
        tried.append(run)
        if run.k < k:  # equal loads leave the next broker nothing
            break
    return min(tried, key=worst_ns)


def worst_ns(run: Simulation) -> int:
    """p99 at the worst broker."""
    return max(seen.total.p99 for seen in run.by_broker.values())


def facts(run: Simulation) -> Row:
    """The facts of a run that figures show; `p99_ms` is at the worst broker, because the SLO must hold at each."""
    total = run.latency.total
    worst = max(run.by_broker.values(), key=lambda seen: seen.total.p99)
    return {
        "policy": run.policy,
        "k": run.k,
        "meets_slo": run.meets_slo,
        "p99_ms": worst.total.p99 / NS_PER_MS,
        "access_p99_ms": worst.access.p99 / NS_PER_MS,
        "processing_p99_ms": worst.processing.p99 / NS_PER_MS,
        "all_p50_ms": total.p50 / NS_PER_MS,
        "all_p95_ms": total.p95 / NS_PER_MS,
        "all_p99_ms": total.p99 / NS_PER_MS,
        "rounds": run.rounds,
        "elapsed_s": run.elapsed_s,
    }


def variants(world: World, population: Population, seed: int) -> list[tuple[Row, SimulatedTopic]]:
    """The topic with b by the paper's rule and with a margin; a column names the variant."""
    topics = world.topics(population, seed, QUANTILES.values())
    return [({VARIANT: name}, topic) for name, topic in zip(QUANTILES, topics, strict=True)]
