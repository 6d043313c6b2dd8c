"""Overload at run time: which broker is too slow for a topic, and which publishers should leave it.

A broker sheds publishers only if it is busy. If its messages wait for tokens instead, a smaller share would make that
worse, and the TB Adaptor handles it. A broker sheds after several slow seconds in a row, a topic rests after each time,
and a broker that is too slow for any topic takes no publishers. So load does not run back and forth between brokers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.model.latency import Sketch
from srtm.model.placement import Roster, pick
from srtm.units import exact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from srtm.control.members import Member
    from srtm.control.reports import Seen
    from srtm.control.topic import ManagedTopic
    from srtm.model.placement import Broker

PATIENCE_S = 5  # consecutive slow seconds before a broker sheds
_PART = 5  # one fifth of the rate leaves at a time


def overloaded(topic: ManagedTopic, members: Mapping[str, Member]) -> list[str]:
    """Brokers that have been too busy for this topic for a while. Call once a second: it counts the newest one."""
    busy_s, found = topic.overload.busy_s, []
    for name, seen in topic.layout.seen.items():
        if members[name].status != "alive" or not seen.seconds:
            continue
        busy_s[name] = busy_s[name] + 1 if _too_slow(topic, seen) else 0
        if busy_s[name] >= PATIENCE_S:
            found.append(name)
    return found


def _too_slow(topic: ManagedTopic, seen: Seen) -> bool:
    second, contract = seen.seconds[-1], topic.contract
    allowed = 1 - exact(contract.quantile, "quantile")
    if not second.sent or second.over <= allowed * second.sent:
        return False
    return Sketch.read(second.access).quantile_ns(contract.quantile) < contract.slo_ns // 2


def shed(topic: ManagedTopic, broker: str, brokers: Sequence[Broker], topics: Iterable[ManagedTopic]) -> dict[str, str]:
    """New places for some publishers of a broker: at a broker with room that is not too slow itself."""
    slow = {name for other in topics for name, seconds in other.overload.busy_s.items() if seconds}
    layout = topic.layout
    here = [layout.publishers[name] for name in layout.place.at(broker)]
    if len(here) < 2:
        return {}
    in_use = layout.place.brokers
    roster = Roster(publisher.publisher for publisher in here)
    leaving_mtps = roster.rate // _PART
    room = {
        each.name: each.mcap_mps - each.allocated_mps
        for each in brokers
        if each.name not in slow and each.name != broker and 1000 * (each.mcap_mps - each.allocated_mps) > leaving_mtps
    }
    if not room:
        return {}
    target = max(room, key=lambda name: (name in in_use, room[name], name))
    split = pick(roster, [roster.rate - leaving_mtps, leaving_mtps], by_group=topic.by_group, seed=0)
    return {roster.ids[number]: target for number in np.flatnonzero(split == 1).tolist()}
