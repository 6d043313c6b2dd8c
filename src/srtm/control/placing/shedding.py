"""Overload at run time: which broker is too slow for a topic, and which publishers should leave it.

A broker sheds only for being busy: where messages wait for tokens instead, a smaller share would make it worse, and the
TB Adaptor is at work. It has to be too slow for several seconds in a row, a topic rests after each time, and a broker
that is itself too slow for any topic takes nobody. So load does not run back and forth between brokers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.model.latency import Sketch
from srtm.model.placement import Roster, pick
from srtm.units import exact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from srtm.control.members import Member, Seen
    from srtm.control.topic import Topic
    from srtm.model.placement import Broker

PATIENCE_S = 5  # seconds in a row that a broker has to be too slow
_PART = 5  # one of so many publishers leaves at a time


def overloaded(topic: Topic, members: Mapping[str, Member]) -> list[str]:
    """Brokers that have been too busy for this topic for a while; counts the newest second."""
    found = []
    for name, seen in topic.seen.items():
        if members[name].status != "alive" or not seen.seconds:
            continue
        topic.busy_s[name] = topic.busy_s[name] + 1 if _too_slow(topic, seen) else 0
        if topic.busy_s[name] >= PATIENCE_S:
            found.append(name)
    return found


def _too_slow(topic: Topic, seen: Seen) -> bool:
    second, contract = seen.seconds[-1], topic.contract
    allowed = 1 - exact(contract.quantile, "quantile")
    if not second.sent or second.over <= allowed * second.sent:
        return False
    return Sketch.read(second.access).quantile_ns(contract.quantile) < contract.slo_ns // 2


def shed(topic: Topic, broker: str, brokers: Sequence[Broker], topics: Iterable[Topic]) -> dict[str, str]:
    """New places for some publishers of a broker: where there is room, and nobody is too slow."""
    slow = {name for other in topics for name, seconds in other.busy_s.items() if seconds}
    here = [topic.publishers[name] for name, where in topic.place.items() if where == broker]
    if len(here) < 2:
        return {}
    in_use = set(topic.place.values())
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
