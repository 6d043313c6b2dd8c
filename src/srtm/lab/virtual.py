"""The shipped code as a world: the real controller and brokers' gates in virtual time, on the paper's testbed.

In: the same arrivals as the simulator's, sent over and over by publishers that register, are placed and follow orders.
Out: what the controller's fitting came to, and the latency of every message of one lap of those arrivals at each
broker. Control plane, migration, token buckets and TB Adaptor are the ones that ship; the network and the brokers'
processor (`testing/serving.py`) are models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.errors import PlacementError
from srtm.lab.result import SLO_MS
from srtm.lab.world import BROKERS, PAPERS_RULE, Simulated, brokers
from srtm.model.broker_models import broker_model
from srtm.model.bucket import TokenBucket
from srtm.model.fitting import Iteration
from srtm.model.latency import SLO, Latency
from srtm.model.placement import place
from srtm.protocol.exchange import Contract
from srtm.sim.simulate import SimulatedTopic, Simulation
from srtm.testing.serving import Sent
from srtm.testing.virtual import VirtualCluster
from srtm.units import NS_PER_MS, NS_PER_S, percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from srtm.broker.message import Message
    from srtm.control.topic import ManagedTopic
    from srtm.sim.simulate import SimulatedBroker
    from srtm.testing.serving import Ints
    from srtm.testing.traffic import Replay, VirtualPublisher
    from srtm.workload.publishers import Population

_MODEL = "paper-testbed"
_TOPIC = "lab"
_SLO = SLO(round(SLO_MS * NS_PER_MS))
_LOOSE_NS = NS_PER_S  # SLO of the load beside a topic, which does not keep the topic away
_PATIENCE_S = 3_600  # of virtual time, until a topic is placed, or an overloaded broker has sent everything


@dataclass(frozen=True, slots=True)
class DeclaredTopic(SimulatedTopic):
    """A topic with what its publishers declare."""

    population: Population
    lap_ns: int

    def declared(self) -> list[DeclaredPublisher]:
        """The publishers as they register."""
        kind = self.population
        return [
            DeclaredPublisher(
                each.id, each.rate_mps, each.group, process=kind.process, batch=kind.batch, jitter_ns=kind.spread_ns
            )
            for each in self.publishers
        ]


def loads(topic: SimulatedTopic, seed: int, loads_kmps: Sequence[int]) -> dict[str, tuple[Ints, int]]:
    """The read events of the load that brokers carry besides a topic, as the simulator draws them, and their batch."""
    first_ns, last_ns = int(topic.arrivals.times_ns[0]), int(topic.arrivals.times_ns[-1])
    return {
        broker.name: (load.reads(first_ns, last_ns, np.random.default_rng([seed, number])), load.batch)
        for number, broker in enumerate(brokers(loads_kmps))
        if (load := broker.background)
    }


@dataclass(frozen=True, slots=True)
class Virtual:
    """The shipped code on six brokers of the model `paper-testbed`, in virtual time; the seed is the only noise."""

    seconds: float = 60.0
    most_messages: int = 2_000_000
    adapt: bool = True  # whether shares follow the traffic, and not only what publishers declare

    @property
    def name(self) -> str:
        """Identifies kept rows."""
        return f"shipped code in virtual time, {self.seconds:g} s, at most {self.most_messages} messages"

    def topic(self, population: Population, seed: int, quantile: str = PAPERS_RULE) -> DeclaredTopic:
        """The topic, its bucket profiled from its own traffic."""
        topic = Simulated(self.seconds, self.most_messages, longest=1).topic(population, seed, quantile)
        lap_s = min(self.seconds, self.most_messages / population.total_mps)
        return DeclaredTopic(topic.publishers, topic.arrivals, topic.bucket, population, round(lap_s * NS_PER_S))

    def fit(self, topic: DeclaredTopic, policy: str, seed: int, *, loads_kmps: Sequence[int] = ()) -> Simulation:
        """Let the controller search by measuring; then watch the topic for a lap."""
        testbed = Testbed(topic, policy, seed, fit="measure", adapt=self.adapt, loads_kmps=loads_kmps)
        testbed.start()
        testbed.carry(loads(topic, seed, loads_kmps), again=True)
        testbed.wait_for_fit()
        testbed.finish_lap()
        return testbed.summed_up(testbed.last_lap())

    def spread(
        self, topic: DeclaredTopic, policy: str, k: int, seed: int, *, loads_kmps: Sequence[int] = ()
    ) -> Simulation:
        """Split the topic by rates over k brokers, and watch it from the first message on."""
        testbed = self.split(topic, policy, k, seed, loads_kmps=loads_kmps)
        return testbed.summed_up(testbed.last_lap())

    def split(self, topic: DeclaredTopic, policy: str, k: int, seed: int, *, loads_kmps: Sequence[int] = ()) -> Testbed:
        """Let an operator move publishers to where a policy places them on k brokers, before they send anything."""
        testbed = Testbed(topic, policy, seed, fit="none", adapt=self.adapt)
        seen = [each.seen_by(topic, _SLO) for each in brokers(loads_kmps)]
        testbed.move(place(topic.publishers, seen, policy, seed, k=k).broker_of.tolist())
        testbed.start()
        testbed.carry(loads(topic, seed, loads_kmps))
        return testbed


class Testbed(VirtualCluster):
    """A cluster with one topic, whose messages are not recorded but watched."""

    def __init__(
        self,
        topic: DeclaredTopic,
        policy: str,
        seed: int,
        *,
        fit: str,
        adapt: bool = True,
        loads_kmps: Sequence[int] = (),
    ) -> None:
        """`loads_kmps` are the loads that the controller knows of, as topics of their own."""
        model = broker_model(_MODEL)
        options = ControllerOptions(broker_model=_MODEL, mcap_mps=model.mcap_mps, seed=seed)
        super().__init__(seed, options, Store(), BROKERS, model.service)
        self.run(1)
        self.offered = topic
        bucket = topic.bucket
        contract = Contract(
            bucket.r_mtps, bucket.b_ntok, _SLO.limit_ns, str(_SLO.quantile), policy, fit=fit, adapt=adapt
        )
        assert self.controller is not None
        self._occupy(brokers(loads_kmps))
        self.topic: ManagedTopic = self.controller.create(_TOPIC, contract, self.now_ns)
        self.senders: list[VirtualPublisher] = self.connect(_TOPIC, topic.declared())
        self.laps: Replay | None = None
        self._settle()

    def arrived(self, topic: str, messages: int) -> None:
        """Keep no record."""

    def drained(self, topic: str, broker: str, released: list[Message], known: list[tuple[int, int | None]]) -> None:
        """Keep no record."""

    def _occupy(self, fleet: Sequence[SimulatedBroker]) -> None:
        """Tell the controller of other load, as of one publisher each; `carry` has the processor time that it takes."""
        assert self.controller is not None
        for broker in fleet:
            if load := broker.background:
                name, publisher = f"beside-{broker.name}", f"load-{broker.name}"
                bucket = TokenBucket.of(2 * load.rate_mps, load.rate_mps)
                contract = Contract(bucket.r_mtps, bucket.b_ntok, _LOOSE_NS, fit="none", adapt=False)
                self.controller.create(name, contract, self.now_ns)
                declared = DeclaredPublisher(publisher, load.rate_mps, batch=load.batch)
                self.controller.register(name, [declared], self.now_ns)
                self.controller.move(name, [publisher], broker.name, self.now_ns)

    def carry(self, loads: Mapping[str, tuple[Ints, int]], *, again: bool = False) -> None:
        """Put other load on brokers for the lap that begins now, and perhaps for all laps that follow."""
        for name, (reads_ns, batch) in loads.items():
            serving = self.brokers[name].serving
            assert serving is not None
            serving.carry(reads_ns + self.now_ns, batch)
        if loads and again:
            self.at(self.offered.lap_ns, lambda: self.carry(loads, again=True))

    def move(self, broker_of: Sequence[int]) -> None:
        """Move every publisher to the broker of this number, as an operator does."""
        assert self.controller is not None
        for number, name in enumerate(sorted(self.brokers)):
            there = [each.id for each, at in zip(self.offered.publishers, broker_of, strict=True) if at == number]
            self.controller.move(_TOPIC, there, name, self.now_ns)
        self._settle()

    def start(self) -> None:
        """Begin to send."""
        self.laps = self.replay(self.senders, self.offered.arrivals, self.offered.lap_ns)

    def wait_for_fit(self) -> None:
        """Let time pass until the controller's fitting is over."""
        for _ in range(_PATIENCE_S):
            self.run(1)
            if self.topic.fitting.last is not None and not self.topic.layout.migration.publishers:
                return
        raise PlacementError(f"no fit after {_PATIENCE_S} s of virtual time")

    def finish_lap(self) -> None:
        """Let time pass until the next lap begins."""
        assert self.laps is not None
        self.run((self.laps.began_ns + self.offered.lap_ns - self.now_ns) / NS_PER_S)

    def last_lap(self) -> dict[str, Sent]:
        """What became of every message of the lap that begins now, by broker; times count from its beginning."""
        assert self.laps is not None
        self.laps.last_lap = True
        begin_ns = self.now_ns
        found: dict[str, list[Sent]] = {name: [Sent.none()] for name in self.brokers}
        for name, broker in self.brokers.items():
            assert broker.serving is not None
            broker.serving.watch = lambda _, sent, name=name: found[name].append(sent)
        self.run(self.offered.lap_ns / NS_PER_S)
        for _ in range(_PATIENCE_S):
            self.run(1)
            parts = {name: _since(begin_ns, sent) for name, sent in found.items()}
            if sum(len(part.sent_ns) for part in parts.values()) == len(self.offered.arrivals.times_ns):
                return {name: part for name, part in parts.items() if len(part.sent_ns)}
        raise PlacementError(f"brokers have not sent all messages of a lap after {_PATIENCE_S} s of virtual time")

    def in_force(self) -> Mapping[str, TokenBucket]:
        """The share of each broker."""
        shares = {name: broker.topics.touch(_TOPIC).limiter for name, broker in sorted(self.brokers.items())}
        carried = self.topic.layout.place.brokers
        return {name: limiter.bucket for name, limiter in shares.items() if limiter is not None and name in carried}

    def summed_up(self, parts: Mapping[str, Sent]) -> Simulation:
        """The facts of a run, as the simulator gives them."""
        names, place, last = tuple(sorted(self.brokers)), self.topic.layout.place, self.topic.fitting.last
        rounds = last.rounds if last else ()
        latencies = {name: (sent.access_ns, sent.processing_ns) for name, sent in sorted(parts.items())}
        worst_ns = max(percentile(sent.access_ns + sent.processing_ns, _SLO.quantile) for sent in parts.values())
        return Simulation(
            policy=self.topic.contract.policy,
            meets_slo=worst_ns <= _SLO.limit_ns,
            brokers=names,
            broker_of=np.array([names.index(place[each.id]) for each in self.offered.publishers], np.int32),
            shares=self.in_force(),
            latency=Latency.of(*(np.concatenate(column) for column in zip(*latencies.values(), strict=True))),
            by_broker={name: Latency.of(*each) for name, each in latencies.items()},
            rounds=len(rounds),
            elapsed_s=last.elapsed_s if last else 0.0,
            iterations=tuple(Iteration(each.k, 1) for each in rounds),
        )

    def _settle(self) -> None:
        """Let time pass until publishers are in place, and shares in force."""
        for _ in range(_PATIENCE_S):
            self.run(1)
            layout, transfer = self.topic.layout, self.topic.transfer
            placed = all(
                each.broker and each.broker.name == layout.place.get(each.declared.id) for each in self.senders
            )
            if placed and not self.topic.settling(self.now_ns) and transfer.done and transfer.wanted:
                return
        raise PlacementError(f"publishers or shares are not in place after {_PATIENCE_S} s of virtual time")


def _since(begin_ns: int, sent: Sequence[Sent]) -> Sent:
    """Messages that arrived from an instant on, with times that count from it."""
    whole = Sent(*(np.concatenate(times) for times in zip(*sent, strict=True)))
    return Sent(*(times - begin_ns for times in whole.where(whole.arrival_ns >= begin_ns)))
