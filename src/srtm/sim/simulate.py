"""Policy, fitting, bucket and service model over a topic's traffic, in virtual time.

The same placement and fitting that drive live brokers run here against `SimulatedCluster`, which answers a
`fitting.Measure` order from the law and the service model instead of the wire. Every round sees the same traffic,
so a simulation adds no noise and depends on its seeds alone. b is split by the bursts of that very traffic or, as a
controller splits it before brokers have measured anything, by declarations (`model.declared`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from srtm.errors import InputError, PlacementError, SplitError
from srtm.model import burst, fitting, scan
from srtm.model.broker_models import ServiceModel, broker_model
from srtm.model.bucket import TokenBucket
from srtm.model.declared import shares as shares_as_declared
from srtm.model.latency import SLO, Latency
from srtm.model.lending_scan import choose, lending_delays
from srtm.model.placement import UNPLACED, Broker, Roster, place
from srtm.model.profile import profile
from srtm.model.room import Demand, Others, broker_with_room
from srtm.model.server import Background
from srtm.model.service import processing_latencies
from srtm.model.split import least_b, split
from srtm.sim.dealing import count_reads, deal, find_batches
from srtm.units import NS_PER_S, percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from srtm.model.declared import Declares
    from srtm.model.lending import Rule, Term
    from srtm.model.lending_scan import Lent
    from srtm.model.placement import Publisher
    from srtm.workload.publishers import Arrivals, Workload

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]
    Dealt = dict[int, tuple[Ints, Indices]]  # times and senders of each broker's messages


_NOTHING = np.empty(0, np.int64)
_DEFAULT = broker_model()


@dataclass(frozen=True, slots=True)
class SimulatedBroker:
    """A broker of the simulation; without a model, as `srtm up` starts it.

    Without `mcap_mps`, its capacity follows from the model, by each topic's SLO and batches.
    """

    name: str
    mcap_mps: float | None = _DEFAULT.mcap_mps
    model: ServiceModel = _DEFAULT.service
    background: Background | None = None

    @classmethod
    def like(cls, model: str, name: str, background: Background | None = None) -> SimulatedBroker:
        """A broker of a named model, such as paper-testbed."""
        known = broker_model(model)
        return cls(name, known.mcap_mps, known.service, background)

    def seen_by(self, topic: SimulatedTopic, slo: SLO) -> Broker:
        """The broker as the Load Distributor knows it when it places a topic."""
        load = self.background
        if self.mcap_mps is not None:
            return Broker(self.name, self.mcap_mps, load.rate_mps if load else 0.0)
        others = Others({load.batch: load.rate_mps} if load else {})
        return broker_with_room(self.name, self.model, Demand(slo, topic.batch), others)


@dataclass(frozen=True, slots=True)
class SimulatedTopic:
    """A topic's publishers, its traffic, and its contract."""

    publishers: Sequence[Publisher]
    arrivals: Arrivals
    bucket: TokenBucket

    @property
    def batch(self) -> int:
        """How many messages a read event carries, on average."""
        return max(1, round(len(self.arrivals.times_ns) / count_reads(*self.arrivals)))

    @classmethod
    def of(cls, workload: Workload, bucket: TokenBucket | None = None) -> SimulatedTopic:
        """The topic of a workload; its bucket is profiled from its traffic unless given."""
        arrivals = workload.arrivals()
        return cls(workload.publishers(), arrivals, bucket or profile(arrivals.times_ns).bucket)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Where the publishers were placed, and their messages' latency. `broker_of` numbers `brokers` in order."""

    policy: str
    meets_slo: bool
    brokers: tuple[str, ...]
    broker_of: Indices
    shares: Mapping[str, TokenBucket]
    latency: Latency
    by_broker: Mapping[str, Latency]
    rounds: int
    elapsed_s: float
    iterations: tuple[fitting.Iteration, ...]
    rule: Rule = "off"  # by which brokers lend
    asks: float = 0.0  # per message

    @property
    def k(self) -> int:
        """How many brokers carry the topic."""
        return len(self.shares)


class Loans(NamedTuple):
    """How brokers of the simulation lend each other tokens (docs/adr/0021-lending.md)."""

    term: Term
    round_trip_ns: int


class SimulatedCluster:
    """Brokers in virtual time that carry one topic next to their background load."""

    def __init__(
        self,
        topic: SimulatedTopic,
        brokers: Sequence[SimulatedBroker],
        slo: SLO,
        seed: int,
        loans: Loans | None = None,
        declared: Sequence[Declares] | None = None,
    ) -> None:
        """With `declared`, by the topic's publishers in their order, b is split by that and not by the traffic."""
        self._topic = topic
        self._declared = declared
        if declared is not None and [each.id for each in declared] != [each.id for each in topic.publishers]:
            raise InputError("the declarations must be of the topic's publishers, in the same order")
        self._roster = Roster(topic.publishers)
        self._brokers = brokers
        self._slo = slo
        self._loans = loans
        # The last assignment, and what it dealt to each broker, with its share; what lending did to it.
        self._last: tuple[bytes, tuple[Dealt, dict[int, TokenBucket]]] | None = None
        self._lent: tuple[bytes, tuple[Rule, Lent]] | None = None
        scan.as_arrivals(topic.arrivals.times_ns)
        if len(topic.arrivals.publisher_of) != len(topic.arrivals.times_ns) or not (
            0 <= topic.arrivals.publisher_of.min() <= topic.arrivals.publisher_of.max() < len(topic.publishers)
        ):
            raise InputError(f"every arrival must come from one of the {len(topic.publishers)} publishers of the topic")
        self._sent = np.bincount(topic.arrivals.publisher_of, minlength=len(topic.publishers))
        self._batches = np.ones(len(topic.publishers), np.int64)
        find_batches(*topic.arrivals, self._batches)
        self._seed = seed
        self._reads: dict[int, Ints | None] = {}  # of background load, by broker

    @property
    def names(self) -> tuple[str, ...]:
        """The brokers' names, in the order of their numbers."""
        return tuple(broker.name for broker in self._brokers)

    def measure(self, order: fitting.Measure) -> dict[int, int]:
        """End-to-end latency at the SLO's quantile, of each broker that the order names."""
        seen = self.observe(order.broker_of, order.brokers)
        return {broker: self.latency_ns(*latencies) for broker, latencies in seen.items()}

    def latency_ns(self, access: Ints, processing: Ints) -> int:
        """End-to-end latency at the SLO's quantile; 0 if there were no messages."""
        return percentile(access + processing, self._slo.quantile) if len(access) else 0

    def observe(self, broker_of: Indices, brokers: Sequence[int]) -> dict[int, tuple[Ints, Ints]]:
        """Access and processing latencies of every message, broker by broker."""
        dealt, shares = self._split(broker_of)
        borrowing = self._with_loans(broker_of, shares)
        seen = {}
        for broker in brokers:
            times, senders = dealt[broker]
            if not len(times):  # its publishers were silent
                seen[broker] = (_NOTHING, _NOTHING)
                continue
            access = borrowing[broker] if borrowing else scan.access_delays(times, shares[broker])
            background = self._brokers[broker].background
            processing = processing_latencies(
                times,
                times + access,
                senders,
                self._brokers[broker].model,
                self._reads_at(broker),
                background.batch if background else 1,
            )
            seen[broker] = (access, processing)
        return seen

    def _reads_at(self, broker: int) -> Ints | None:
        """Read events of a broker's background load; drawn once it is used."""
        if broker not in self._reads:
            background, times = self._brokers[broker].background, self._topic.arrivals.times_ns
            rng = np.random.default_rng([self._seed, broker])
            self._reads[broker] = background.reads(int(times[0]), int(times[-1]), rng) if background else None
        return self._reads[broker]

    def lent(self, broker_of: Indices) -> tuple[Rule, float]:
        """The rule that brokers lend by under an assignment, and their asks per message."""
        shares = self.shares(broker_of)
        if self._loans is None or len(shares) < 2:
            return "off", 0.0
        rule, lent = self._lend(self._loans, broker_of, shares)
        return rule, lent.asks / max(1, len(lent.delays_ns))

    def _with_loans(self, broker_of: Indices, shares: Mapping[int, TokenBucket]) -> dict[int, Ints]:
        """Access delays by broker if brokers lend, which takes all of them at once; empty if they do not."""
        if self._loans is None or len(shares) < 2:
            return {}
        delays = self._lend(self._loans, broker_of, shares)[1].delays_ns
        at = broker_of[self._topic.arrivals.publisher_of]
        at = at[at != UNPLACED]
        return {broker: delays[at == broker] for broker in shares}

    def _lend(self, loans: Loans, broker_of: Indices, shares: Mapping[int, TokenBucket]) -> tuple[Rule, Lent]:
        if self._lent is None or self._lent[0] != broker_of.tobytes():
            self._lent = broker_of.tobytes(), self._lend_anew(loans, broker_of, shares)
        return self._lent[1]

    def _lend_anew(self, loans: Loans, broker_of: Indices, shares: Mapping[int, TokenBucket]) -> tuple[Rule, Lent]:
        term, round_trip_ns = loans
        times, senders = self._topic.arrivals
        at = broker_of[senders]
        placed = at != UNPLACED
        number = np.zeros(len(self._brokers), np.int32)
        number[list(shares)] = np.arange(len(shares), dtype=np.int32)
        traffic = times[placed], number[at[placed]], list(shares.values()), round_trip_ns
        if term == "auto":
            return choose(*traffic, self._slo.quantile, self._slo.limit_ns)
        return term, lending_delays(*traffic, term)

    def _dealt(self, broker_of: Indices) -> Dealt:
        """Each broker's messages in order, and those of unplaced publishers, in one pass over all of them."""
        place = broker_of - UNPLACED  # unplaced publishers come first
        counts = np.bincount(place, self._sent, len(self._brokers) + 1).astype(np.int64)
        ends = np.cumsum(counts)
        times, senders = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int32)
        deal(*self._topic.arrivals, place, ends - counts, times, senders)
        parts = zip(np.split(times, ends[:-1]), np.split(senders, ends[:-1]), strict=True)
        return dict(enumerate(parts, UNPLACED))

    def shares(self, broker_of: Indices) -> dict[int, TokenBucket]:
        """Sub-token buckets under an assignment; the part of unplaced publishers stays unused."""
        return self._split(broker_of)[1]

    def _split(self, broker_of: Indices) -> tuple[Dealt, dict[int, TokenBucket]]:
        key = broker_of.tobytes()
        if self._last is None or self._last[0] != key:
            dealt = self._dealt(broker_of)
            self._last = key, (dealt, self._shares(broker_of, dealt))
        return self._last[1]

    def _shares(self, broker_of: Indices, dealt: Dealt) -> dict[int, TokenBucket]:
        """Shares of r by rates, and of b by declarations or by the bursts of what was dealt to each broker."""
        if self._declared is not None:
            names = (*self.names, "")  # unplaced publishers are at the last one
            at = [names[number] for number in broker_of.tolist()]
            found = shares_as_declared(zip(self._declared, at, strict=True), self._topic.bucket, self._slo.quantile)
            if missing := sorted(set(at) - found.keys()):
                raise SplitError(f"b = {self._topic.bucket.b:g} tokens leave none for {missing}: use fewer brokers")
            return {number: found[name] for number, name in enumerate(self.names) if name in found}
        whole, roster = self._topic.bucket, self._roster
        carried = roster.rates_by_broker(broker_of, len(self._brokers)).tolist()
        rates = {broker: rate for broker, rate in enumerate(carried) if rate}
        left = roster.rate - sum(carried)
        r_parts = split(whole, list(rates.values()), unused=(left, left))
        parts = dict(zip(rates, r_parts, strict=True))
        if left:
            parts[UNPLACED] = TokenBucket(max(1, whole.r_mtps * left // roster.rate), whole.b_ntok)
        bursts = {
            broker: burst.needed_b(times, share.r_mtps, self._slo.quantile) if len(times := dealt[broker][0]) else 0
            for broker, share in parts.items()
        }
        unused = (left, bursts.pop(UNPLACED, 0))
        least = least_b(whole.b_ntok, [int(self._batches[broker_of == broker].max()) for broker in rates])
        shared = split(whole, list(rates.values()), list(bursts.values()), min_b=least, unused=unused)
        return dict(zip(rates, shared, strict=True))


def simulate(
    topic: SimulatedTopic,
    brokers: Sequence[SimulatedBroker],
    policy: str = "srtm",
    slo: SLO | None = None,
    *,
    fit: Literal["measure", "model"] = "measure",
    history: SimulatedTopic | None = None,
    seed: int = 0,
    as_paper: bool = False,
    loans: Loans | None = None,
    declared: Sequence[Declares] | None = None,
) -> Simulation:
    """Place a topic as the Load Distributor would, and measure its messages' latency.

    `fit="model"` predicts first, from `history`: the topic at another time. With `as_paper`, brokers fill one after the
    other. With `declared`, shares are as publishers declare, and do not know the traffic. If no assignment meets the
    SLO, the result is the best one measured, with `meets_slo` False.
    """
    if fit not in ("measure", "model"):
        raise InputError(f"fit = {fit!r}: it must be measure or model")
    if history and [p.id for p in history.publishers] != [p.id for p in topic.publishers]:
        raise InputError("the history must be of the same publishers, in the same order")
    if (fit == "model") != (history is not None):
        raise InputError("fit='model' predicts from a history of the topic: give both or neither")
    goal = slo or SLO()
    cluster = SimulatedCluster(topic, brokers, goal, seed, loans, declared)
    search = fitting.Fitting(
        Roster(topic.publishers),
        [broker.seen_by(topic, goal) for broker in brokers],
        policy,
        goal.limit_ns,
        seed=seed,
        max_brokers=int(topic.bucket.b),
        predict=SimulatedCluster(history, brokers, goal, seed + 1, loans, declared).measure if history else None,
        as_paper=as_paper,
    )
    times = topic.arrivals.times_ns
    outcome = fitting.drive(search, cluster.measure, (int(times[-1]) - int(times[0])) / NS_PER_S)
    placed = outcome if isinstance(outcome, fitting.Placed) else outcome.best
    if placed is None:
        raise PlacementError("no assignment is possible: the brokers' capacity, or b, is too small for this topic")
    return _summed_up(
        cluster,
        placed.broker_of,
        cluster.observe(placed.broker_of, sorted(placed.latency_ns)),
        policy,
        meets_slo=isinstance(outcome, fitting.Placed),
        rounds=search.rounds,
        elapsed_s=search.elapsed_s,
        iterations=tuple(search.iterations),
    )


def assess(
    topic: SimulatedTopic,
    brokers: Sequence[SimulatedBroker],
    policy: str,
    k: int,
    slo: SLO | None = None,
    *,
    seed: int = 0,
    loans: Loans | None = None,
    declared: Sequence[Declares] | None = None,
) -> Simulation:
    """The latency of a topic that a policy splits over k brokers by rate, without a search; `simulate` explains."""
    goal = slo or SLO()
    cluster = SimulatedCluster(topic, brokers, goal, seed, loans, declared)
    placed = place(topic.publishers, [broker.seen_by(topic, goal) for broker in brokers], policy, seed, k=k)
    seen = cluster.observe(placed.broker_of, sorted(set(placed.broker_of.tolist())))
    meets_slo = all(cluster.latency_ns(*latencies) <= goal.limit_ns for latencies in seen.values())
    return _summed_up(cluster, placed.broker_of, seen, policy, meets_slo=meets_slo)


def _summed_up(
    cluster: SimulatedCluster,
    broker_of: Indices,
    seen: Mapping[int, tuple[Ints, Ints]],
    policy: str,
    *,
    meets_slo: bool,
    rounds: int = 0,
    elapsed_s: float = 0.0,
    iterations: tuple[fitting.Iteration, ...] = (),
) -> Simulation:
    names = cluster.names
    rule, asks = cluster.lent(broker_of)
    whole = Latency.of_all(list(seen.values())) if len(seen) > 1 else None
    by_broker = {  # overwrites what was seen
        names[broker]: Latency.of(*latencies, overwrite=True) for broker, latencies in seen.items() if len(latencies[0])
    }
    return Simulation(
        policy=policy,
        meets_slo=meets_slo,
        brokers=names,
        broker_of=broker_of,
        shares={names[broker]: share for broker, share in cluster.shares(broker_of).items()},
        latency=whole or next(iter(by_broker.values())),
        by_broker=by_broker,
        rounds=rounds,
        elapsed_s=elapsed_s,
        iterations=iterations,
        rule=rule,
        asks=asks,
    )
