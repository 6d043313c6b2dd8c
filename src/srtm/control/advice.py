"""Advice to operators from live arrivals, which `srtm advise` analyses (docs/adr/0024-advice.md).

In: findings about topics under contract, batch by batch; times as arguments. Out: standing advice by topic, events,
and, if the findings ask for it, found groups that placement then uses. A batch of a query counts once. Findings belong
to a birth of a contract; advice that no batch renews ends, and so does all advice when the contract changes. What is
kept here is lost with the controller; the next batch brings it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtm.control.found_groups import CALM_S, FoundGroups, follow, steady
from srtm.control.topic import Standing
from srtm.model.advice import judged
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.control.placing.placing import Placing
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic
    from srtm.model.advice import Findings, Kind

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
        self._groups = FoundGroups(state, placing)
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
                    self._groups.use(topic, now_ns)
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
        follow(advice, found.group_of)
        declared = {name: None if each.found else each.group for name, each in topic.layout.publishers.items()}
        for kind, text, evidence in judged(found, contract.bucket, contract.slo_ns, declared, advice.groups):
            known = advice.standing.get(kind)
            if known is None:
                topic.journal.note(now_ns, "advice", f"{kind}: {text}")
                self._state.changed(topic)
            since_ns = known.since_ns if known else now_ns
            advice.standing[kind] = Standing(text, evidence, since_ns, until_ns)
        changed = advice.standing.get("groups-changed")
        if steady(advice) and (changed is None or now_ns - changed.since_ns >= CALM_S * NS_PER_S):
            advice.groups = advice.seen
