"""Groups that `srtm advise` found: when they count, and how placement uses them (docs/adr/0024-advice.md).

In: the groups of one batch after the other. Out: groups that have been the same for a while and, if asked for, moves
that spread each of them over its topic's brokers, at most once a minute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from srtm.control.placing.regrouping import largest_part, regrouped
from srtm.model.drift import adjusted_rand_index
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.control.placing.placing import Placing
    from srtm.control.state import ControllerState
    from srtm.control.topic import AdviceState, ManagedTopic

STEADY = 3  # consecutive findings with the same groups before these count
CALM_S = 60  # between two regroupings of a topic, and until changed groups are the usual ones
_AGREE = 0.9  # adjusted Rand index from which on groups are the same
_FEWEST_MOVES = 0.05  # of the grouped publishers; fewer are not worth it


def follow(advice: AdviceState, found: dict[str, str]) -> None:
    """Take in the groups that a batch found, by publisher."""
    same = bool(found) and bool(advice.seen) and _agreement(found, advice.seen) >= _AGREE
    advice.agreeing = advice.agreeing + 1 if same else int(bool(found))
    advice.seen = found


def steady(advice: AdviceState) -> bool:
    """Whether the groups have been the same for long enough to count."""
    return advice.agreeing >= STEADY


class FoundGroups:
    """Lets placement use found groups."""

    def __init__(self, state: ControllerState, placing: Placing) -> None:
        self._state = state
        self._placing = placing

    def use(self, topic: ManagedTopic, now_ns: int) -> None:
        """Let placement know steady groups that nobody declared, and spread each over the topic's brokers."""
        advice, layout = topic.advice, topic.layout
        if not steady(advice) or not topic.by_group or not self._at_rest(topic, now_ns):
            return
        open_to = {name for name, each in layout.publishers.items() if each.group is None or each.found}
        found = {name: group for name, group in advice.seen.items() if name in open_to}
        used = {name: each.group for name, each in layout.publishers.items() if each.found and each.group is not None}
        if not found or (used and _agreement(found, used) >= _AGREE):
            return
        advice.regrouped_ns, advice.groups = now_ns, advice.seen
        for name in open_to:
            group = found.get(name)
            layout.publishers[name] = replace(layout.publishers[name], group=group, found=group is not None)
        layout.roster += 1
        self._state.store.save_publishers(topic, open_to)
        group_of = {name: each.group for name, each in layout.publishers.items() if each.group is not None}
        moves, before = (
            regrouped(layout.place, group_of, self._state.options.seed),
            largest_part(layout.place, group_of),
        )
        if len(moves) < _FEWEST_MOVES * len(group_of):
            moves = {}
        after = largest_part({**layout.place, **moves}, group_of)
        text = f"{len(found)} publishers burst in {len(set(found.values()))} groups that nobody declared"
        why = f"one broker had {before:.0%} of a group, now at most {after:.0%}" if moves else "their places stay"
        topic.journal.note(now_ns, "regrouped", f"{len(moves)} publishers move: {text}; {why}")
        topic.sharing.stale = topic.sharing.stale or not topic.established
        self._placing.relocate(topic, moves, "regrouped", now_ns)

    def _at_rest(self, topic: ManagedTopic, now_ns: int) -> bool:
        """Whether nothing else moves the topic, and nothing has moved it by groups for a while."""
        last_ns, members = topic.advice.regrouped_ns, self._state.members
        return (
            topic.opened
            and topic.fitting.running is None
            and not topic.settling(now_ns)
            and (last_ns is None or now_ns - last_ns >= CALM_S * NS_PER_S)
            and all(broker in members and members[broker].usable for broker in topic.layout.place.brokers)
        )


def _agreement(one: Mapping[str, str], other: Mapping[str, str]) -> float:
    """How well two groupings agree over all publishers that either has; one that is in no group is alone."""
    names = sorted(one.keys() | other.keys())
    return adjusted_rand_index(*([groups.get(name, (name,)) for name in names] for groups in (one, other)))
