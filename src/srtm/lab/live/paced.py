"""The paper's testbed live: paced brokers, real sockets and the real controller, by a slower clock.

A paced broker (`testing/pacing.py`) takes as long for a message as the model of the paper's broker says, times a
factor. Rates are divided by the factor and the SLO is multiplied by it, so that the paper's numbers of publishers and
brokers, its costs and its capacities appear on a host of two cores, whose gaps are short by this clock.
In: topics of the simulator, with the same arrivals. Out: what became of every message at each broker, in the paper's
time; by the brokers' own records, and by the law and the service model from the arrivals that they recorded.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from srtm import program
from srtm.client.cluster import Cluster
from srtm.client.load import Load, LoadOptions
from srtm.errors import ControlError
from srtm.lab.live.broker import pace_of
from srtm.lab.live.cluster import TOPIC, late_ms, limit, read, record, running, shares_of
from srtm.lab.live.priority import hurried, hurry
from srtm.lab.live.world import create, places, refuse_unless_positive
from srtm.lab.result import SLO_MS
from srtm.lab.virtual import DeclaredTopic, Virtual
from srtm.lab.world import BROKERS, brokers
from srtm.model.broker_models import broker_model
from srtm.model.bucket import TokenBucket
from srtm.model.fitting import Iteration
from srtm.model.latency import SLO, Latency
from srtm.model.service import processing_latencies
from srtm.sim.simulate import Simulation, assess, simulate
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Arrivals, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from srtm.control.local.cluster import LocalCluster
    from srtm.lab.live.cluster import Ints, Part
    from srtm.testing.pacing import Pace
    from srtm.workload.publishers import Population

MODEL = "paper-testbed"
FACTORS = (10, 20, 30, 50, 100)  # to choose from
ABOVE_GAPS = 5  # how many times the host's gaps the SLO must be
_SLO = SLO(round(SLO_MS * NS_PER_MS))
_POLL_S = 5.0
_CALM_S = 60.0
_EXCHANGE_S = 3  # exchanges take processor time; brokers close connections that are idle for 5 s
_PATIENCE_S = 120.0  # until publishers are connected


@dataclass(frozen=True)
class Laps(Workload):
    """Known arrivals, sent over and over."""

    lap: Arrivals = field(kw_only=True, repr=False)
    lap_ns: int = field(kw_only=True)

    def arrivals(self) -> Arrivals:
        """All laps."""
        laps = range(self.duration_ns // self.lap_ns)
        times = np.concatenate([self.lap.times_ns + lap * self.lap_ns for lap in laps])
        return Arrivals(times, np.tile(self.lap.publisher_of, len(laps)))


@dataclass(frozen=True, slots=True)
class Seen:
    """A run on live brokers in the paper's time, and what the model says about it."""

    found: Simulation
    simulated: Mapping[str, Latency]  # from the recorded arrivals, at the recorded places and shares
    scheduled: Simulation  # by the simulator alone, from the schedule
    late_p99_ms: float  # of the load, by this host's clock
    lost: int = 0
    met: bool = False  # whether a search ended with the SLO met
    over: bool = True  # whether it ended in time


@dataclass(frozen=True, slots=True)
class Plan:
    """A static split, as the simulator makes it, and the rates that brokers carry besides."""

    scheduled: Simulation
    beside: Mapping[str, float]
    seed: int

    @classmethod
    def of(cls, topic: DeclaredTopic, policy: str, k: int, seed: int, loads_kmps: Sequence[int] = ()) -> Plan:
        """Split a topic over k brokers."""
        fleet = brokers(loads_kmps)
        loads = {broker.name: broker.background.rate_mps for broker in fleet if broker.background}
        return cls(assess(topic, fleet, policy, k, _SLO, seed=seed), loads, seed)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What brokers recorded of a static split."""

    parts: Mapping[str, Part]
    late_p99_ms: float
    lost: int


@dataclass(frozen=True, slots=True)
class Paced:
    """The scale of a paced run: how many times slower than the paper's, and how much traffic."""

    factor: int = 50
    seconds: float = 5.0  # of correlated traffic, by the paper's clock
    messages: int = 60_000  # of independent publishers, at most
    patience_s: float = 2_000.0  # for a fit, by this host's clock

    def __post_init__(self) -> None:
        """Refuse anything that is not positive."""
        refuse_unless_positive(self)

    @property
    def name(self) -> str:
        """Part of the key of kept rows, and a description of the scale."""
        return (
            f"paced, {self.factor} times slower than the paper's testbed, {self.seconds:g} s of correlated publishers,"
            f" {self.messages} messages of others, at most {self.patience_s:g} s for a fit"
        )

    def topic(self, population: Population, seed: int, quantile: str) -> DeclaredTopic:
        """A topic of the simulator, in the paper's time."""
        most = self.messages if population.group_size == 1 else round(self.seconds * population.total_mps)
        return Virtual(self.seconds, most).topic(population, seed, quantile)

    def split(self, topic: DeclaredTopic, policy: str, k: int, seed: int, *, loads_kmps: Sequence[int] = ()) -> Seen:
        """Split the topic by rates over k brokers, with the simulator's shares, and send one lap of its traffic."""
        plan = Plan.of(topic, policy, k, seed, loads_kmps)
        return self._seen(plan, program.run(self._send(plan, topic)))

    def fit(self, topic: DeclaredTopic, seed: int, *, force: bool) -> tuple[Seen, Seen | None]:
        """Let the controller search by measuring, and watch the topic for a lap where it is then.

        With `force`, Max-Min on as many brokers is run as well.
        """
        return program.run(self._fit(topic, seed, force=force))

    async def _send(self, plan: Plan, topic: DeclaredTopic, over: asyncio.Event | None = None) -> Recorded:
        """Send a lap; what was recorded is read when that disturbs nobody else, if `over` says when."""
        scheduled = plan.scheduled
        shares = {name: self._slowed(share) for name, share in scheduled.shares.items()}
        beside = [part for name, rate in plan.beside.items() for part in ("--beside", f"{name}={rate:g}")]
        started = 1 + max(scheduled.brokers.index(name) for name in shares)
        async with self._running(started, [*beside, "--seed", str(plan.seed)]) as (cluster, folder):
            await limit(cluster, shares)
            at = {child.name: f"127.0.0.1:{child.ports['TCP']}" for child in cluster.brokers}
            homes = tuple(at[scheduled.brokers[number]] for number in scheduled.broker_of.tolist())
            workload = self._laps(topic, plan.seed, 1)
            load = Load(LoadOptions(TOPIC, workload, brokers=homes, patience_s=_PATIENCE_S), None)
            await record(cluster, "start")
            with hurried():
                report = await load.go(lambda _: hurry())
            await record(cluster, "stop")
            if over is not None:
                await over.wait()
            parts = read(folder, shares, _numbers(topic))
        return Recorded(parts, late_ms(load), report.lost)

    def _seen(self, plan: Plan, recorded: Recorded) -> Seen:
        """What became of the messages of a static split."""
        scheduled, parts = plan.scheduled, recorded.parts
        pace = {name: pace_of(name, MODEL, self.factor, plan.beside, plan.seed) for name in parts}
        found = self._summed_up(parts, scheduled.broker_of, scheduled.policy)
        return Seen(found, self._simulated(parts, pace), scheduled, recorded.late_p99_ms, recorded.lost)

    async def _fit(self, topic: DeclaredTopic, seed: int, *, force: bool) -> tuple[Seen, Seen | None]:
        scheduled = simulate(topic, brokers(), "srtm", _SLO, seed=seed)
        workload = self._laps(topic, seed, 3 + int(self.patience_s / self._lap_s(topic)))
        wish = {"policy": "srtm", "fit": "measure", "adapt": False, "lending": "off", "slo_ms": self.factor * SLO_MS}
        plans = [Plan.of(topic, "max_min", k, seed) for k in range(1, BROKERS + 1)] if force else []
        over, forced = asyncio.Event(), None
        async with self._running(BROKERS, [], fits=True) as (cluster, folder), Cluster(cluster.url) as controller:
            await create(controller, workload, self._slowed(topic.bucket), wish)
            load = Load(LoadOptions(TOPIC, workload, patience_s=_PATIENCE_S), controller)
            with hurried():
                sending = asyncio.create_task(load.go(lambda _: None if over.is_set() else hurry()))
                try:
                    k = int((await self._placed(controller, sending))["k"])
                    watching = asyncio.create_task(self._watched(cluster, controller, topic, over))
                    if force:
                        forced = plans[k - 1], await self._send(plans[k - 1], topic, over)
                    state = await watching
                    homes = await places(controller)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
            parts = read(folder, shares_of(state), _numbers(topic))
        names = [broker.name for broker in brokers()]
        broker_of = np.array([names.index(homes[each.id]) for each in topic.publishers], np.int32)
        pace = {name: pace_of(name, MODEL, self.factor, {}, seed) for name in parts}
        found = self._summed_up(parts, broker_of, "srtm", state["fitted"])
        met, ended = bool(state["fitted"] and state["fitted"]["met"]), bool(state["fitted"])
        aware = Seen(found, self._simulated(parts, pace), scheduled, late_ms(load), met=met, over=ended)
        return aware, self._seen(*forced) if forced else None

    async def _placed(self, controller: Cluster, sending: asyncio.Task[Any]) -> dict[str, Any]:
        """The topic after its fitting, or at the end of patience."""
        until = time.monotonic() + self.patience_s
        while True:
            topic: dict[str, Any] = await controller.request("GET", f"/v1/topics/{TOPIC}")
            if topic["fitted"] or time.monotonic() > until:
                return topic
            if sending.done():
                sending.result()
                raise ControlError("the load ended before the topic was fitted")
            await asyncio.sleep(_POLL_S)

    async def _watched(
        self, cluster: LocalCluster, controller: Cluster, topic: DeclaredTopic, over: asyncio.Event
    ) -> dict[str, Any]:
        """Record a lap once publishers are in place and the backlog is gone; returns the topic by the controller."""
        until = time.monotonic() + _CALM_S
        while time.monotonic() < until:
            state: dict[str, Any] = await controller.request("GET", f"/v1/topics/{TOPIC}")
            if state["state"] != "moving" and not state["waiting"]:
                break
            await asyncio.sleep(_POLL_S / 25)
        await record(cluster, "start")
        await asyncio.sleep(self._lap_s(topic))
        await record(cluster, "stop")
        over.set()
        state = dict(await controller.request("GET", f"/v1/topics/{TOPIC}"))
        return state  # noqa: RET504

    def _running(
        self, number: int, flags: Sequence[str], *, fits: bool = False
    ) -> AbstractAsyncContextManager[tuple[LocalCluster, Path]]:
        """A cluster of paced brokers; its controller knows their model, and counts by the paper's seconds."""
        model = broker_model(MODEL).slower(self.factor)
        costs = ",".join(map(str, astuple(model.service)[:5]))
        # A round measures a lap, in blocks of a second of the paper; one more, since blocks begin at any time.
        times = ["--block-s", str(self.factor), "--round-s", f"{(self.seconds + 1) * self.factor:g}"]
        times += ["--exchange-s", str(_EXCHANGE_S)]
        controller = ["--broker-model", costs, "--mcap-mps", f"{model.mcap_mps:g}", *(times if fits else ())]
        return running(
            number,
            controller_flags=controller,
            broker_verb=("lab", "broker"),
            broker_flags=["--model", MODEL, "--factor", str(self.factor), *flags],
        )

    def _lap_s(self, topic: DeclaredTopic) -> float:
        return topic.lap_ns * self.factor / NS_PER_S

    def _laps(self, topic: DeclaredTopic, seed: int, laps: int) -> Laps:
        """The topic's traffic by this host's clock."""
        kind, (times, senders) = topic.population, topic.arrivals
        slow = replace(kind, rate_mps=kind.rate_mps / self.factor, spread_ns=kind.spread_ns * self.factor)
        lap_ns = topic.lap_ns * self.factor
        return Laps((slow,), laps * lap_ns, seed, lap=Arrivals(times * self.factor, senders), lap_ns=lap_ns)

    def _slowed(self, bucket: TokenBucket) -> TokenBucket:
        return TokenBucket(max(1, bucket.r_mtps // self.factor), bucket.b_ntok)

    def _summed_up(
        self,
        parts: Mapping[str, Part],
        broker_of: NDArray[np.int32],
        policy: str,
        fitted: Mapping[str, Any] | None = None,
    ) -> Simulation:
        """The facts of a run by the brokers' records, in the paper's time."""
        seen = {}
        for name, part in parts.items():
            sent = part.sent_ns > 0
            seen[name] = (part.access_ns[sent], (part.sent_ns - part.release_ns)[sent])
        by_broker = {name: self._latency(*each) for name, each in seen.items()}
        rounds = fitted["rounds"] if fitted else []
        return Simulation(
            policy=policy,
            meets_slo=all(each.total.p99 <= _SLO.limit_ns for each in by_broker.values()),
            brokers=tuple(broker.name for broker in brokers()),
            broker_of=broker_of,
            shares={name: part.share for name, part in parts.items()},
            latency=self._latency(*(np.concatenate(column) for column in zip(*seen.values(), strict=True))),
            by_broker=by_broker,
            rounds=len(rounds),
            elapsed_s=fitted["elapsed_s"] / self.factor if fitted else 0.0,
            iterations=tuple(Iteration(int(each["k"]), 1) for each in rounds),
        )

    def _simulated(self, parts: Mapping[str, Part], paces: Mapping[str, Pace]) -> dict[str, Latency]:
        """Latencies by the law and the service model, from the recorded arrivals, in the paper's time."""
        found = {}
        for name, part in parts.items():
            pace, access_ns = paces[name], part.simulated_ns()
            reads = pace.reads_ns(int(part.arrival_ns[0]) - NS_PER_S, int(part.arrival_ns[-1]))
            processing_ns = processing_latencies(
                part.arrival_ns,
                part.arrival_ns + access_ns,
                part.publisher_of,
                pace.model,
                reads,
                pace.beside.batch if pace.beside else 1,
            )
            found[name] = self._latency(access_ns, processing_ns)
        return found

    def _latency(self, access_ns: Ints, processing_ns: Ints) -> Latency:
        return Latency.of(access_ns // self.factor, processing_ns // self.factor)


def _numbers(topic: DeclaredTopic) -> dict[str, int]:
    return {publisher.id: number for number, publisher in enumerate(topic.publishers)}
