"""Advice to operators from live arrivals, which `srtm advise` analyses (docs/adr/0024-advice.md).

In: findings about topics under contract, batch by batch; times as arguments. Out: standing advice by topic, events,
and, if the findings ask for it, found groups that placement then uses. A batch of a query counts once. Findings belong
to a birth of a contract; advice that no batch renews ends, and so does all advice when the contract changes. What is
kept here is lost with the controller; the next batch brings it back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from srtm.control.placing.regrouping import largest_part, regrouped
from srtm.control.topic import Standing
from srtm.model.advice import judged
from srtm.model.drift import adjusted_rand_index
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.control.placing.placing import Placing
    from srtm.control.state import ControllerState
    from srtm.control.topic import AdviceState, ManagedTopic
    from srtm.model.advice import Findings, Kind

STEADY = 3  # consecutive findings with the same groups before these count
_AGREE = 0.9  # adjusted Rand index from which on groups are the same
_CALM_S = 60  # between two regroupings of a topic, and until changed groups are the usual ones
_FEWEST_MOVES = 0.05  # of the grouped publishers; fewer are not worth it
_QUERIES = 16  # whose last batches are remembered


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch of a query found, by topic and birth; with `auto`, found groups may change placement."""

    query: str
    number: int
    valid_ns: int
    topics: Mapping[tuple[str, int], Findings]
    auto_groups: bool = False


class Advising:
    """Takes findings, and keeps the advice that follows from them."""

    def __init__(self, state: ControllerState, placing: Placing) -> None:
        self._state = state
        self._placing = placing
        self._batches: dict[str, int] = {}  # the last one of each query

    def take(self, batch: Batch, now_ns: int) -> bool:
        """Take in a batch; False if it, or a later one of its query, was taken before."""
        if batch.number <= self._batches.get(batch.query, -1):
            return False
        self._batches.pop(batch.query, None)  # the latest query is the last one to be forgotten
        self._batches[batch.query] = batch.number
        while len(self._batches) > _QUERIES:
            del self._batches[next(iter(self._batches))]
        for (name, birth), found in batch.topics.items():
            topic = self._state.topics.get(name)
            if topic is not None and topic.birth == birth:
                self._renew(topic, found, now_ns, now_ns + batch.valid_ns)
                if batch.auto_groups:
                    self._use_groups(topic, now_ns)
        return True

    def watch(self, now_ns: int) -> None:
        """End advice that was not renewed in time. Call once a second."""
        for topic in self._state.topics.values():
            over = [kind for kind, each in topic.advice.standing.items() if each.until_ns < now_ns]
            self._end(topic, over, "it was not renewed", now_ns)

    def forget(self, topic: ManagedTopic, now_ns: int) -> None:
        """End all advice about a topic: its contract changed, and findings are judged anew."""
        self._end(topic, list(topic.advice.standing), "the contract changed", now_ns)

    def _end(self, topic: ManagedTopic, kinds: Iterable[Kind], why: str, now_ns: int) -> None:
        for kind in kinds:
            del topic.advice.standing[kind]
            topic.journal.note(now_ns, "advice", f"{kind} ended: {why}")
            self._state.changed(topic)

    def _renew(self, topic: ManagedTopic, found: Findings, now_ns: int, until_ns: int) -> None:
        advice, contract = topic.advice, topic.contract
        _follow_groups(advice, found.group_of)
        declared = {name: None if each.found else each.group for name, each in topic.layout.publishers.items()}
        for kind, text, evidence in judged(found, contract.bucket, contract.slo_ns, declared, advice.groups):
            known = advice.standing.get(kind)
            if known is None:
                topic.journal.note(now_ns, "advice", f"{kind}: {text}")
                self._state.changed(topic)
            since_ns = known.since_ns if known else now_ns
            advice.standing[kind] = Standing(text, evidence, since_ns, until_ns)
        changed = advice.standing.get("groups-changed")
        if advice.agreeing >= STEADY and (changed is None or now_ns - changed.since_ns >= _CALM_S * NS_PER_S):
            advice.groups = advice.seen

    def _use_groups(self, topic: ManagedTopic, now_ns: int) -> None:
        """Let placement know steady groups that nobody declared, and spread each over the topic's brokers."""
        advice, layout = topic.advice, topic.layout
        if advice.agreeing < STEADY or not topic.by_group or not self._at_rest(topic, now_ns):
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
            and (last_ns is None or now_ns - last_ns >= _CALM_S * NS_PER_S)
            and all(broker in members and members[broker].usable for broker in topic.layout.place.brokers)
        )


def _follow_groups(advice: AdviceState, found: dict[str, str]) -> None:
    same = bool(found) and bool(advice.seen) and _agreement(found, advice.seen) >= _AGREE
    advice.agreeing = advice.agreeing + 1 if same else int(bool(found))
    advice.seen = found


def _agreement(one: Mapping[str, str], other: Mapping[str, str]) -> float:
    """How well two groupings agree over all publishers that either has; one that is in no group is alone."""
    names = sorted(one.keys() | other.keys())
    return adjusted_rand_index(*([groups.get(name, (name,)) for name in names] for groups in (one, other)))
