"""Places for publishers that have none: those of a new topic, those that come later, those whose broker is lost.

In: a topic's layout, publishers without a place, brokers with room. Out: a broker for each of them. A new topic is
placed by the Load Distributor's first two steps (`model.placement.place`). A publisher that comes later goes to a
broker of the topic with room for it, away from its group, and to another broker only if there is none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.model.latency import SLO
from srtm.model.placement import Broker, place, policy_named
from srtm.model.room import Demand, broker_with_room, others_of, usual_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from srtm.control.members import DeclaredPublisher, Member
    from srtm.control.topic import ManagedTopic
    from srtm.model.broker_models import ServiceModel


def housed(
    topic: ManagedTopic, homeless: Sequence[DeclaredPublisher], brokers: Sequence[Broker], seed: int
) -> dict[str, str]:
    """A broker for each publisher, even if the brokers together are too small.

    A broker without a token of b cannot send anything, so no more brokers are used than b has tokens.
    """
    brokers = _no_more(topic, brokers)
    if not topic.layout.place:
        try:
            chosen = place([each.publisher for each in homeless], brokers, topic.contract.policy, seed)
        except InputError:
            pass
        else:
            numbers = chosen.broker_of.tolist()
            return {each.id: brokers[number].name for each, number in zip(homeless, numbers, strict=True)}
    return _one_by_one(topic, homeless, brokers)


def room(
    topic: ManagedTopic,
    movable: Set[str],
    topics: Iterable[ManagedTopic],
    members: Iterable[Member],
    service: ServiceModel,
    limit_mps: float | None = None,
) -> list[Broker]:
    """Usable brokers, with the room that they have for these publishers of the topic, in messages of theirs."""
    fitting = (member for member in members if member.usable and member.can_have(topic.contract))
    usable = sorted(fitting, key=lambda member: member.name)
    beside = {member.name: defaultdict(float, {1: float(member.condition.free_mps)}) for member in usable}
    moving: dict[str, defaultdict[int, float]] = {member.name: defaultdict(float) for member in usable}
    for other in topics:
        conformant, publishers = other.conformant, other.layout.publishers
        for name, broker in other.layout.place.items():
            if broker in beside:
                publisher = publishers[name]
                rates = moving if other is topic and name in movable else beside
                rates[broker][publisher.batch] += publisher.rate_mps * conformant
    demand = demand_of(topic, movable)
    brokers = []
    for member in usable:
        others = others_of(service, beside[member.name], moving[member.name], member.condition.busy)
        brokers.append(broker_with_room(member.name, service, demand, others, limit_mps))
    return brokers


def demand_of(topic: ManagedTopic, publishers: Set[str]) -> Demand:
    """What these publishers of a topic ask of a broker; all of them if none is named."""
    known = topic.layout.publishers
    chosen = [known[name] for name in publishers if name in known] or list(known.values())
    batch = usual_batch((each.rate_mps, each.batch) for each in chosen)
    return Demand(SLO(topic.contract.slo_ns, topic.contract.quantile), batch)


def on_fewest(topic: ManagedTopic, brokers: Sequence[Broker], seed: int) -> bool:
    """Whether a topic is on as few brokers as its rate takes, and on none but these."""
    layout, names = topic.layout, {broker.name for broker in brokers}
    if not layout.publishers.keys() <= layout.place.keys() or not layout.place.brokers <= names:
        return False
    try:
        publishers = [each.publisher for each in layout.publishers.values()]
        fewest = place(publishers, brokers, topic.contract.policy, seed).k
    except InputError:
        return False
    return len(layout.place.brokers) == fewest


def _no_more(topic: ManagedTopic, brokers: Sequence[Broker]) -> list[Broker]:
    in_use = topic.layout.place.brokers
    most = max(1, int(topic.contract.bucket.b))
    best = sorted(brokers, key=lambda each: (each.name not in in_use, each.allocated_mps - each.mcap_mps, each.name))
    return sorted(best[:most], key=lambda each: each.name)


def _one_by_one(
    topic: ManagedTopic, homeless: Sequence[DeclaredPublisher], brokers: Sequence[Broker]
) -> dict[str, str]:
    layout = topic.layout
    room = {broker.name: broker.mcap_mps - broker.allocated_mps for broker in brokers}
    together = Counter((broker, layout.publishers[each].group) for each, broker in layout.place.items())
    in_use = layout.place.brokers & room.keys()
    spreads = not policy_named(topic.contract.policy).concentrates
    found = {}
    for publisher in homeless:
        group = publisher.group if topic.by_group else None
        fits = [name for name in in_use if room[name] >= publisher.rate_mps]
        crowds = {name: together[name, group] if group is not None else 0 for name in room}
        best = min(list(room) if spreads or not fits else fits, key=lambda name: (crowds[name], -room[name], name))
        found[publisher.id] = best
        room[best] -= publisher.rate_mps
        together[best, group] += 1
        in_use.add(best)
    return found
