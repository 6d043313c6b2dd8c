"""Overload at run time: which broker is too slow for a topic, which topic is the reason, and which publishers leave.

A broker sheds publishers only if it is busy. If its messages wait for tokens instead, a smaller share would make that
worse, and the TB Adaptor handles it. The topic that grew or came last leaves, not the one that suffers. A broker sheds
after several slow seconds in a row, a topic rests after each time, and a broker that is too slow for any topic takes no
publishers. So load does not run back and forth between brokers.

A topic that came to a broker a moment ago, or grew there, is on trial: if a neighbour suffers, what came leaves, after
fewer seconds. A topic that was new to the broker leaves it as a whole, and does not come back for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.control.reports import too_slow
from srtm.control.topic import Level
from srtm.model.placement import Roster, pick
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from srtm.control.members import Member
    from srtm.control.placing.neighbours import Neighbours
    from srtm.control.topic import ManagedTopic
    from srtm.model.placement import Broker

PATIENCE_S = 5  # consecutive slow seconds before a broker sheds
TRIAL_PATIENCE_S = 3  # the same on trial: with a second to report and one to move, half of a window of 10 s
TRIAL_S = 20  # two windows, the first of which may be spent with moving
BARRED_S = 600  # one window of trouble in so long is little
_RISE = 1.25  # rates that are measured over a window vary by less
_NOTABLE = 0.01  # of a processor; less is not why others suffer
_PART = 5  # at least one fifth of the rate leaves at a time


def count_slow(topic: ManagedTopic, members: Mapping[str, Member]) -> None:
    """Count consecutive slow seconds of each broker of a topic, from what brokers reported since the last call."""
    overload = topic.overload
    for name, seen in topic.layout.seen.items():
        if name in members and members[name].status == "alive":
            after = overload.counted.get(name, 0)
            for second in seen.seconds:
                if second.number > after:
                    overload.counted[name] = second.number
                    overload.busy_s[name] = overload.busy_s[name] + 1 if too_slow(topic.contract, second) else 0
            if after > seen.last_number:  # its clock was set
                del overload.counted[name]


def follow_load(topic: ManagedTopic, neighbours: Neighbours, now_ns: int) -> None:
    """Note which brokers carry notably more of a topic than before, declared or reported. Call once a second."""
    levels, brokers = topic.overload.levels, topic.layout.place.brokers
    for broker in levels.keys() - brokers:
        del levels[broker]
    for broker in brokers:
        load, known = neighbours.load(topic, broker), levels.get(broker)
        before = known.load if known else 0.0
        if known is None or (load > _RISE * before and load - before > _NOTABLE):
            levels[broker] = Level(load, before, now_ns)
        elif load < known.load:
            known.load = load
    topic.overload.barred = {broker: bar for broker, bar in topic.overload.barred.items() if now_ns < bar[1]}


def culprit(broker: str, topics: Iterable[ManagedTopic]) -> ManagedTopic | None:
    """The topic that grew or came last at a broker."""
    here = [topic for topic in topics if broker in topic.overload.levels]
    return max(here, key=lambda topic: (topic.overload.levels[broker].rose_ns, topic.birth), default=None)


def on_trial(topic: ManagedTopic, broker: str, now_ns: int) -> bool:
    """Whether a topic came to a broker, or grew there, a moment ago."""
    return now_ns - topic.overload.levels[broker].rose_ns < TRIAL_S * NS_PER_S


def slow(topics: Iterable[ManagedTopic]) -> set[str]:
    """Brokers that are too slow for any topic."""
    return {name for topic in topics for name, seconds in topic.overload.busy_s.items() if seconds}


def shed(topic: ManagedTopic, broker: str, brokers: Sequence[Broker], slow: Set[str]) -> dict[str, str]:
    """New places for some publishers of a broker: at a broker with room that is not too slow itself."""
    layout = topic.layout
    here = [layout.publishers[name] for name in layout.place.at(broker)]
    if len(here) < 2:
        return {}
    in_use = layout.place.brokers
    roster = Roster(publisher.publisher for publisher in here)
    level = topic.overload.levels.get(broker)
    rise = 1 - level.before / level.load if level and level.before and level.load else 0.0
    leaving_mtps = max(roster.rate // _PART, int(roster.rate * rise))
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
