"""A fleet's plan: every topic of a trace on the same brokers, together; and what would be if something were different.

Tasks take a lot of topics each (`traces.gathering`) and simulate every topic alone, as `plan` does, with the traffic,
brokers, SLO and lending of each scenario. The driver then places the topics, the heaviest first, where their neighbours
leave room (`model.sharing`): on as few brokers as each needs and, if that takes no more of them, on brokers that others
use. A topic that finds no room is tried on more brokers, in a second run over such topics. The latency of a topic with
neighbours is that of the simulation, and what the model adds for them; without any, it is exactly that of `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtm.errors import InputError, SRTMError
from srtm.model.latency import SLO, Distribution
from srtm.model.placement import POLICIES, Publisher, Roster, policy_named, rcap
from srtm.model.profile import mean_rate, profile
from srtm.model.sharing import Host, Part, Shared, Work
from srtm.pipeline.plan import BrokerPlan, Cell, Plan, alike, assessed, best
from srtm.pipeline.traces.gathering import COLUMNS, over_topics
from srtm.pipeline.traces.reading import opened
from srtm.sim.simulate import SimulatedTopic
from srtm.workload.publishers import Arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import SparkSession

    from srtm.pipeline.traces.files import Files
    from srtm.pipeline.traces.frames import Frame
    from srtm.pipeline.traces.reading import Trace
    from srtm.pipeline.traces.topics import Topics
    from srtm.sim.simulate import Loans, SimulatedBroker
    from srtm.workload.gathered import TopicArrivals

_QUANTILES = ("0.50", "0.95", "0.99")
_MANY = 16  # brokers on which a topic is tried, if its rate does not take more
NO_ROOM = "no broker has room for it beside the others"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a fleet is planned for; `traffic` is how many times as fast the messages of the trace come."""

    name: str
    brokers: tuple[SimulatedBroker, ...]
    slo: SLO
    loans: Loans | None = None
    traffic: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        """Refuse traffic that is none, and SLOs that are not about p99."""
        if self.traffic <= 0:
            raise InputError(f"traffic = {float(self.traffic):g}: it must be more than 0")
        if self.slo.quantile != SLO().quantile:
            raise InputError(f"the quantile of a fleet's SLO must be {SLO().quantile}, not {self.slo.quantile}")


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """One topic's brokers and latency beside its neighbours; or the reason why it has none."""

    topic: str
    brokers: tuple[BrokerPlan, ...] = ()
    total: Distribution | None = None
    meets_slo: bool = False
    error: str | None = None

    @property
    def k(self) -> int:
        """How many brokers carry the topic."""
        return len(self.brokers)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """All topics of a scenario, in order of name."""

    scenario: Scenario
    topics: tuple[TopicPlan, ...]
    loads: Mapping[str, tuple[int, float, float]]  # by broker in use: parts of topics, msg/s, how much of it is busy
    needs: int | None  # brokers of the same kind that would have room for all topics, if that is known

    @property
    def brokers_used(self) -> int:
        """How many brokers carry topics."""
        return len(self.loads)

    @property
    def meets_slo(self) -> bool:
        """Whether every topic meets the SLO."""
        return all(topic.meets_slo for topic in self.topics)


class Search(NamedTuple):
    """How a topic alone is planned; see `plan`."""

    policies: Sequence[str] = tuple(POLICIES)
    fit: bool = True
    seed: int = 0


class _Offer(NamedTuple):
    """A plan for a topic alone, and what it brings to its brokers."""

    plan: Plan
    parts: tuple[Part, ...]

    @property
    def load(self) -> float:
        return sum(part.work.load for part in self.parts)


def plan_all(
    trace: Trace,
    spark: SparkSession,
    scenarios: Sequence[Scenario],
    search: Search | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[FleetPlan]:
    """The plan of all topics of a trace (a DataFrame, a path or a URI) for each scenario."""
    chosen = search or Search()
    for name in chosen.policies:
        policy_named(name)
    with opened(trace, spark, COLUMNS) as source:
        topics, faults = source.topics()
        say(f"simulating {len(topics):,} topics, {int(topics.messages.sum()):,} messages")
        alone = _alone(source, topics, scenarios, chosen)
        say(f"placing {len(topics):,} topics")
        fleets = [_Fleet(scenario, found) for scenario, found in zip(scenarios, alone, strict=True)]
        homeless = {name for fleet in fleets for name in fleet.homeless}
        if homeless:
            say(f"splitting {len(homeless):,} topics that found no room")
            split = _split(source, topics, fleets, homeless, chosen)
            for fleet, offers in zip(fleets, split, strict=True):
                fleet.place_on_more(offers)
    wrong = {name: error for name, (_, error) in faults.items()}
    return [fleet.planned(wrong) for fleet in fleets]


def resized(brokers: Sequence[SimulatedBroker], count: int) -> tuple[SimulatedBroker, ...]:
    """The first so many brokers, or more of the same kind."""
    if count < 1:
        raise InputError(f"a fleet needs at least 1 broker, not {count}")
    more = range(len(brokers), count)
    if more and not (alike(brokers) and all(each.name == f"broker-{n}" for n, each in enumerate(brokers, 1))):
        raise InputError(f"cannot add brokers to the {len(brokers)} that the file describes: describe {count} of them")
    return (*brokers[:count], *(replace(brokers[0], name=f"broker-{number + 1}") for number in more))


def _alone(
    source: Files | Frame, topics: Topics, scenarios: Sequence[Scenario], search: Search
) -> list[dict[str, _Offer | str]]:
    """By scenario and topic, what `plan` chooses, or an error."""
    many = len(topics) > 1
    # A topic that one broker carries alone is the same, however many there are, and whether they lend.
    same = [(each.traffic, each.slo, each.brokers[0] if alike(each.brokers) else each.brokers) for each in scenarios]

    def work(found: TopicArrivals) -> list[_Offer | str]:
        kept: dict[object, _Offer | str] = {}
        at_speed: dict[Fraction, SimulatedTopic | str] = {}
        offers: list[_Offer | str] = []
        for scenario, key in zip(scenarios, same, strict=True):
            if scenario.traffic not in at_speed:
                at_speed[scenario.traffic] = _faster(found, scenario.traffic)
            topic = at_speed[scenario.traffic]
            if isinstance(topic, str):
                offers.append(topic)
                continue
            offer = kept.get(key)
            if offer is None:
                brokers = _promising(topic, scenario) if many else scenario.brokers
                offer, alone = _chosen(topic, scenario, search, brokers)
                if alone:
                    kept[key] = offer
            offers.append(offer)
        return offers

    found = dict(over_topics(source, topics, work))
    return [{name: found[name][number] for name in sorted(found)} for number in range(len(scenarios))]


def _chosen(
    topic: SimulatedTopic, scenario: Scenario, search: Search, brokers: Sequence[SimulatedBroker]
) -> tuple[_Offer | str, bool]:
    """What `plan` chooses of these brokers, and whether one of them carries the topic within the SLO."""
    policies, fit, seed = search
    found = best(topic, brokers, scenario.slo, policies=policies, fit=fit, seed=seed, loans=scenario.loans)
    return _offer(found, topic, scenario), found.meets_slo and found.k == 1


def _promising(topic: SimulatedTopic, scenario: Scenario) -> Sequence[SimulatedBroker]:
    """The brokers that one topic of many is tried on: of those that are alike, as many as could be of use."""
    brokers, slo = scenario.brokers, scenario.slo
    if not alike(brokers):
        return brokers
    model = brokers[0].model
    if model.base_ns + model.reading_ns(max(1, topic.batch - 1)) > slo.limit_ns:
        return brokers[:1]  # which is too slow even if it is idle, so more of them do not help
    room = rcap(brokers[0].seen_by(topic, slo))
    return brokers[: max(_MANY, 2 * -(-Roster(topic.publishers).rate // max(1, room)))]


def _split(
    source: Files | Frame, topics: Topics, fleets: Sequence[_Fleet], homeless: set[str], search: Search
) -> list[dict[str, list[_Offer]]]:
    """By scenario and topic without room, plans on more brokers that meet the SLO alone, or on those of other kinds."""
    wanted = np.array([name in homeless for name in topics.names.to_pylist()])
    looking = [(fleet.scenario, dict(fleet.homeless)) for fleet in fleets]

    def work(found: TopicArrivals) -> list[list[_Offer]]:
        offers: list[list[_Offer]] = []
        for scenario, before in looking:
            topic = _faster(found, scenario.traffic) if found.topic in before else ""
            if isinstance(topic, str):
                offers.append([])
                continue
            kinds: dict[object, list[SimulatedBroker]] = {}
            for broker in scenario.brokers:
                kinds.setdefault(replace(broker, name=""), []).append(broker)
            k = before[found.topic]
            least = k + 1 if len(kinds) == 1 else 1
            plans = [
                assessed(topic, brokers, Cell(search.policies[-1], number), scenario.slo, search.seed, scenario.loans)
                for brokers in kinds.values()
                for number in range(least, min(len(brokers), 2 * k + 2) + 1)
            ]
            plans = sorted((plan for plan in plans if plan.meets_slo), key=lambda plan: plan.k)
            made = [_offer(plan, topic, scenario) for plan in plans]
            offers.append([offer for offer in made if isinstance(offer, _Offer)])
        return offers

    found = dict(over_topics(source, topics.only(wanted), work))
    return [{name: offers[number] for name, offers in found.items()} for number in range(len(fleets))]


def _faster(found: TopicArrivals, factor: Fraction) -> SimulatedTopic | str:
    """The topic with its messages so many times as fast, and the bucket that it needs then; or what is wrong."""
    times, senders = found.arrivals
    publishers = found.publishers
    if factor != 1:
        times = times[0] + ((times - times[0]) / float(factor)).astype(np.int64)
        counts = np.bincount(senders, minlength=len(publishers)).tolist()
        rates = {count: float(mean_rate(count, int(times[0]), int(times[-1]))) for count in set(counts)}
        publishers = tuple(
            Publisher(each.id, rates[count], each.group) for each, count in zip(publishers, counts, strict=True)
        )
    try:
        return SimulatedTopic(publishers, Arrivals(times, senders), profile(times).bucket)
    except SRTMError as error:
        return str(error)


def _offer(plan: Plan, topic: SimulatedTopic, scenario: Scenario) -> _Offer | str:
    if plan.latency is None or plan.broker_of is None:
        return plan.error or "no plan is possible"
    models = {broker.name: broker.model for broker in scenario.brokers}
    times, senders = topic.arrivals
    used = sorted(set(plan.broker_of.tolist()))
    rates = np.bincount(plan.broker_of, [each.rate_mps for each in topic.publishers])
    parts = []
    for number, broker in zip(used, plan.brokers, strict=True):
        here = plan.broker_of[senders] == number if len(used) > 1 else slice(None)
        work = Work.of(times[here], senders[here], models[broker.broker])
        parts.append(Part(broker.broker, float(rates[number]), work, broker.total.p99))
    return _Offer(replace(plan, broker_of=None), tuple(parts))


class _Fleet:
    """The topics of a scenario, placed one after the other."""

    def __init__(self, scenario: Scenario, alone: Mapping[str, _Offer | str]) -> None:
        self.scenario = scenario
        self._alone = alone
        self._shared = Shared([_host(broker) for broker in scenario.brokers], scenario.slo)
        self._placed: dict[str, tuple[_Offer, list[str]]] = {}
        offers = {name: offer for name, offer in alone.items() if isinstance(offer, _Offer)}
        self._heaviest_first = sorted(offers.items(), key=lambda pair: (-pair[1].load, pair[0]))
        for name, offer in self._heaviest_first:
            self._place(name, offer)

    @property
    def homeless(self) -> dict[str, int]:
        """The topics without room, and the number of brokers that each wants."""
        return {name: offer.plan.k for name, offer in self._heaviest_first if name not in self._placed}

    def place_on_more(self, offers: Mapping[str, Sequence[_Offer]]) -> None:
        """Place topics without room by other plans, the first that fits."""
        for name in self.homeless:
            for offer in offers.get(name, ()):
                if self._place(name, offer):
                    break

    def _place(self, name: str, offer: _Offer) -> bool:
        places = self._shared.place(offer.parts, holds=offer.plan.meets_slo)
        if places is not None:
            self._placed[name] = offer, places
        return places is not None

    def planned(self, wrong: Mapping[str, str]) -> FleetPlan:
        """The plan, with topics that could not be read."""
        lines = [self._line(name) for name in self._alone]
        lines += [TopicPlan(name, error=error) for name, error in wrong.items()]
        return FleetPlan(
            self.scenario, tuple(sorted(lines, key=lambda line: line.topic)), self._shared.loads(), self._needs()
        )

    def _line(self, name: str) -> TopicPlan:
        alone = self._alone[name]
        if isinstance(alone, str):
            return TopicPlan(name, error=alone)
        if name not in self._placed:
            return TopicPlan(name, error=NO_ROOM)
        offer, places = self._placed[name]
        added = [
            self._shared.added_ns(place, part, _QUANTILES) for place, part in zip(places, offer.parts, strict=True)
        ]
        brokers = tuple(
            replace(broker, broker=place, total=_later(broker.total, more))
            for broker, place, more in zip(offer.plan.brokers, places, added, strict=True)
        )
        assert offer.plan.latency is not None
        total = _later(offer.plan.latency.total, [max(column) for column in zip(*added, strict=True)])
        meets = offer.plan.meets_slo and all(each.total.p99 <= self.scenario.slo.limit_ns for each in brokers)
        return TopicPlan(name, brokers, total, meets)

    def _needs(self) -> int | None:
        """The brokers that would have room for all topics, if there were as many of the kind as it takes."""
        homeless = self.homeless
        if len(self._placed) == len(self._alone):
            return len(self._shared.loads())
        if len(self._heaviest_first) < len(self._alone) or not alike(self.scenario.brokers):
            return None
        first = _host(self.scenario.brokers[0])
        names = [broker.name for broker in self.scenario.brokers]
        more = [f"more-{number}" for number in range(sum(homeless.values()))]
        shared = Shared([replace(first, name=name) for name in (*names, *more)], self.scenario.slo)
        for _, offer in self._heaviest_first:
            shared.place(offer.parts, holds=offer.plan.meets_slo)
        return len(shared.loads())


def _later(total: Distribution, more_ns: Sequence[int]) -> Distribution:
    p50, p95, p99 = more_ns
    return Distribution(total.p50 + p50, total.p95 + p95, total.p99 + p99)


def _host(broker: SimulatedBroker) -> Host:
    return Host(broker.name, broker.model, broker.mcap_mps, broker.background)
