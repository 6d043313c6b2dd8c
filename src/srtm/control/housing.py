"""Places for publishers that have none: those of a new topic, those that come later, those whose broker is lost.

In: a topic as it is placed, the homeless, brokers with room. Out: a broker for each of them. A new topic is placed as
the Load Distributor's first two steps would (`model.placement.place`); who comes later goes where the topic is already
and there is room, away from its group, and to another broker only where there is none.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.model.placement import place, policy_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from srtm.control.members import Declared
    from srtm.control.topic import Topic
    from srtm.model.placement import Broker


def housed(topic: Topic, homeless: Sequence[Declared], brokers: Sequence[Broker], seed: int) -> dict[str, str]:
    """The broker of each publisher; everybody gets one, also where all of them together are too small."""
    if not topic.place:
        try:
            chosen = place([each.publisher for each in homeless], brokers, topic.contract.policy, seed)
        except InputError:
            pass
        else:
            numbers = chosen.broker_of.tolist()
            return {each.id: brokers[number].name for each, number in zip(homeless, numbers, strict=True)}
    return _one_by_one(topic, homeless, brokers)


def _one_by_one(topic: Topic, homeless: Sequence[Declared], brokers: Sequence[Broker]) -> dict[str, str]:
    room = {broker.name: broker.mcap_mps - broker.allocated_mps for broker in brokers}
    together = Counter((broker, topic.publishers[each].group) for each, broker in topic.place.items())
    in_use = set(topic.place.values()) & room.keys()
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
