"""Places for publishers that have none: those of a new topic, those that come later, those whose broker is lost.

In: a topic's layout, publishers without a place, brokers with room. Out: a broker for each of them. A new topic is
placed by the Load Distributor's first two steps (`model.placement.place`). A publisher that comes later goes to a
broker of the topic with room for it, away from its group, and to another broker only if there is none. A broker has
room if the promises of all topics there are kept (`neighbours`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from srtm.control.placing.neighbours import Room
from srtm.errors import InputError
from srtm.model.latency import SLO
from srtm.model.placement import Broker, place, policy_named, rcap
from srtm.model.room import Demand, broker_with_room, others_of, usual_batch
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from srtm.control.members import DeclaredPublisher, Member
    from srtm.control.placing.neighbours import Neighbours
    from srtm.control.topic import ManagedTopic


@dataclass(frozen=True, slots=True)
class House:
    """A usable broker, and the room that it has for certain publishers of a topic."""

    broker: Broker  # its mcap is what it can carry if the promises of all topics are kept
    room: Room
    in_use: bool  # a topic has publishers there

    @property
    def most_mps(self) -> float:
        """The highest rate that breaks no neighbour; infinite if the broker has none."""
        return self.room.most_mps


def housed(
    topic: ManagedTopic,
    homeless: Sequence[DeclaredPublisher],
    houses: Sequence[House],
    seed: int,
    refusable: Set[str] = frozenset(),
) -> dict[str, str]:
    """A broker for each publisher, even if the brokers together are too small.

    A `refusable` publisher gets none if it would break a neighbour's promise everywhere. A broker without a token of b
    cannot send anything, so no more brokers are used than b has tokens.
    """
    houses = _no_more(topic, houses)
    if not topic.layout.place and (found := _packed(topic, homeless, houses, seed)):
        return found
    return _one_by_one(topic, homeless, houses, refusable)


def houses(
    topic: ManagedTopic,
    publishers: Sequence[DeclaredPublisher],
    topics: Iterable[ManagedTopic],
    members: Iterable[Member],
    neighbours: Neighbours,
    limit_mps: float | None = None,
) -> list[House]:
    """Usable brokers, with the room that they have for these publishers of a topic, in messages of theirs."""
    movable = {publisher.id for publisher in publishers}
    fitting = (member for member in members if member.usable and member.can_have(topic.contract))
    usable = sorted(fitting, key=lambda member: member.name)
    beside = {member.name: defaultdict(float, {1: float(member.condition.free_mps)}) for member in usable}
    moving: dict[str, defaultdict[int, float]] = {member.name: defaultdict(float) for member in usable}
    for other in topics:
        conformant, declared = other.conformant, other.layout.publishers
        for name, broker in other.layout.place.items():
            if broker in beside:
                publisher = declared[name]
                rates = moving if other is topic and name in movable else beside
                rates[broker][publisher.batch] += publisher.rate_mps * conformant
    demand, found = _demand(topic, publishers), []
    for member in usable:
        others = others_of(neighbours.service, beside[member.name], moving[member.name], member.condition.busy)
        roomy = broker_with_room(member.name, neighbours.service, demand, others, limit_mps)
        room = _barred(topic, member.name, publishers) or neighbours.room(topic, member, publishers)
        roomy = replace(roomy, mcap_mps=min(roomy.mcap_mps, roomy.allocated_mps + room.good_mps))
        found.append(House(roomy, room, neighbours.crowded(member.name)))
    return found


def _demand(topic: ManagedTopic, publishers: Sequence[DeclaredPublisher]) -> Demand:
    """What these publishers of a topic ask of a broker; all of them if none is named."""
    chosen = publishers or list(topic.layout.publishers.values())
    batch = usual_batch((each.rate_mps, each.batch) for each in chosen)
    return Demand(SLO(topic.contract.slo_ns, topic.contract.quantile), batch)


def _barred(topic: ManagedTopic, broker: str, publishers: Sequence[DeclaredPublisher]) -> Room | None:
    """The room at a broker where a topic broke a neighbour: for those that are there."""
    if broker not in topic.overload.barred:
        return None
    held_mps = sum(each.rate_mps for each in publishers if topic.layout.place.get(each.id) == broker)
    return Room(held_mps, held_mps, topic.overload.barred[broker][0])


def refusal(
    refused: Mapping[str, float], houses: Sequence[House], slos_ns: Mapping[str, int], *, undivided: bool = False
) -> str:
    """Why publishers of these rates get no place: which neighbours are in the way, and what would fit.

    `undivided` says that one of them is too fast for every broker, and did not allow to be split.
    """
    limits = {
        house.broker.name: f"{house.room.limit!r} ({slos_ns.get(house.room.limit, 0) / NS_PER_MS:g} ms)"
        for house in houses
        if house.room.limit is not None
    }
    asked_mps = sum(refused.values())
    fits_mps = min(asked_mps, sum(house.most_mps for house in houses))
    who = f"{len(refused)} publisher{'s' * (len(refused) != 1)} with {asked_mps:,.0f} msg/s"
    broken = ", ".join(f"on {broker} of {limit}" for broker, limit in sorted(limits.items()))
    remedy = "; with split: true in its declaration, a publisher may use several brokers" if undivided else ""
    return f"no room for {who}: they would break the SLO {broken}; {fits_mps:,.0f} msg/s would fit{remedy}"


def on_fewest(topic: ManagedTopic, brokers: Sequence[Broker], seed: int) -> bool:
    """Whether a topic is on as few brokers as its rate takes, and on none but these."""
    layout, names = topic.layout, {broker.name for broker in brokers}
    if not layout.publishers.keys() <= layout.place.keys() or not layout.place.brokers <= names:
        return False
    try:
        publishers = [each.publisher for each in layout.publishers.values()]
        fewest = place(publishers, brokers, topic.contract.policy, seed).k
    except InputError:
        return True  # there is no better place, so measure this one
    return len(layout.place.brokers) == fewest


def _packed(
    topic: ManagedTopic, homeless: Sequence[DeclaredPublisher], houses: Sequence[House], seed: int
) -> dict[str, str]:
    """A new topic on the fewest brokers and, if that takes no more of them, on brokers that are in use."""
    publishers, policy = [each.publisher for each in homeless], topic.contract.policy
    best: dict[str, str] = {}
    fewest = len(houses) + 1
    concentrates = policy_named(policy).concentrates
    for among in ([house for house in houses if house.in_use] if concentrates else [], houses):
        brokers = [house.broker for house in among]
        try:
            chosen = place(publishers, brokers, policy, seed)
        except InputError:
            continue
        if chosen.k < fewest:
            fewest, numbers = chosen.k, chosen.broker_of.tolist()
            best = {each.id: brokers[number].name for each, number in zip(homeless, numbers, strict=True)}
    return best


def rooms_mps(topic: ManagedTopic, houses: Sequence[House]) -> list[float]:
    """The rates that a topic's brokers have room for, of no more brokers than b has tokens."""
    return [rcap(house.broker) / 1000 for house in _no_more(topic, houses)]


def _no_more(topic: ManagedTopic, houses: Sequence[House]) -> list[House]:
    in_use = topic.layout.place.brokers
    most = max(1, int(topic.contract.bucket.b))
    best = sorted(houses, key=lambda each: (each.broker.name not in in_use, -rcap(each.broker), each.broker.name))
    return sorted(best[:most], key=lambda each: each.broker.name)


def _one_by_one(
    topic: ManagedTopic, homeless: Sequence[DeclaredPublisher], houses: Sequence[House], refusable: Set[str]
) -> dict[str, str]:
    layout = topic.layout
    room = {house.broker.name: rcap(house.broker) / 1000 for house in houses}
    harmless = {house.broker.name: house.most_mps for house in houses}
    together = Counter((broker, layout.publishers[each].group) for each, broker in layout.place.items())
    in_use = layout.place.brokers & room.keys()
    spreads = not policy_named(topic.contract.policy).concentrates
    found = {}
    for publisher in homeless:
        group, rate_mps = publisher.group if topic.by_group else None, publisher.rate_mps
        among = [name for name in room if harmless[name] >= rate_mps]
        if not among and publisher.id in refusable:
            continue
        among = among or list(room)
        fits = [name for name in among if name in in_use and room[name] >= rate_mps]
        crowds = {name: together[name, group] if group is not None else 0 for name in room}
        best = min(among if spreads or not fits else fits, key=lambda name: (crowds[name], -room[name], name))
        found[publisher.id] = best
        room[best] -= rate_mps
        harmless[best] -= rate_mps
        together[best, group] += 1
        in_use.add(best)
    return found
