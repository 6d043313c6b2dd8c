"""Neighbours at a broker: how much of a topic it can carry without breaking a promise, predicted in closed form.

In: topics with their publishers and what brokers report of them, the cost of messages. Out: the room that a broker has
for publishers of a topic, and the topic that limits it.

Reads of all topics share a broker's processor, and wait for it (`model.capacity`). Publishers of one group read
together. A topic's latency at a quantile is that of this wait, and its own reads. What a broker has measured counts
with what the model adds to it, so a model that is too low does not hide a slow broker.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

from srtm.control.reports import KEPT_S
from srtm.model.capacity import Stream, Wait, wait
from srtm.model.room import MARGIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from srtm.control.members import DeclaredPublisher, Member
    from srtm.control.topic import ManagedTopic
    from srtm.model.broker_models import ServiceModel

    Work = Mapping[float, float]  # events per ns, by what each costs

_WHOLE = 0.9  # part of a window's messages, so that at most a tenth of it is from before
_HALVINGS = 10  # the room is known to 1 in 1,000 of what is asked for


class Room(NamedTuple):
    """What a broker can carry of a topic's publishers that are to be placed."""

    good_mps: float  # with the promises of all topics kept, its own included
    most_mps: float  # with those of its neighbours kept; infinite if there are none
    limit: str | None = None  # the neighbour that would break


class _Placed(NamedTuple):
    """What publishers of a topic declared who belong to a broker."""

    work: Work
    rate_mps: float


class Neighbours:
    """The topics of a cluster, as neighbours of each other."""

    def __init__(self, topics: Mapping[str, ManagedTopic], service: ServiceModel) -> None:
        self.service = service
        self._topics = topics
        self._known: dict[int, tuple[tuple[int, int], dict[str, _Placed]]] = {}  # by birth of the topic, and broker

    def beside(self, topic: ManagedTopic, broker: str) -> list[ManagedTopic]:
        """Other topics with publishers at a broker."""
        return [other for other in self._topics.values() if other is not topic and broker in self._placed(other)]

    def crowded(self, broker: str) -> bool:
        """Whether any topic has publishers at a broker."""
        return any(broker in self._placed(topic) for topic in self._topics.values())

    def load(self, topic: ManagedTopic, broker: str) -> float:
        """The part of a broker's processor that a topic takes, as declared or, if that is more, as reported."""
        return sum(cost_ns * per_ns for cost_ns, per_ns in self._work(topic, broker).items())

    def room(
        self, topic: ManagedTopic, member: Member, newcomers: Sequence[DeclaredPublisher], margin: float = MARGIN
    ) -> Room:
        """The room at a broker for publishers of a topic that are to be placed."""
        broker, beside = member.name, self.beside(topic, member.name)
        rate_mps = sum(each.rate_mps for each in newcomers) * topic.conformant
        if not beside or not newcomers:
            return Room(math.inf, math.inf)
        without = self.service.stream(member.condition.free_mps, 1)
        free = {without.cost_ns: without.per_ns}
        ids = {each.id for each in newcomers}
        staying = [topic.layout.publishers[name] for name in topic.layout.place.at(broker) if name not in ids]
        here = [each for each in newcomers if topic.layout.place.get(each.id) == broker]
        own = _work(staying, self.service, topic.conformant)
        works = [free, own, *(self._work(other, broker) for other in beside)]
        flowing = all(self._flowing(each, broker) for each in (topic, *beside))
        now = self._waiting([*works, _work(here, self.service, topic.conformant)]) if flowing else None
        promises = [(each, margin * _limit_ns(each, broker)) for each in beside if self.can_hold(each, broker)]

        def broken(part: float) -> tuple[str | None, bool]:
            """The first neighbour that breaks if this part of the newcomers comes; whether the topic itself breaks."""
            added = _work(newcomers, self.service, topic.conformant, part)
            then = self._waiting([*works, added])
            for other, limit_ns in promises:
                if self._expected_ns(other, broker, now, then) > limit_ns:
                    return other.name, True
            mine_ns = self.service.base_ns + _largest((own, added)) + then.quantile_ns(topic.contract.quantile)
            return None, mine_ns > margin * topic.contract.slo_ns

        neighbour, itself = broken(1.0)
        if neighbour is None and not itself:
            return Room(math.inf, math.inf)
        good, most = 0.0, 0.0 if neighbour else math.inf
        if len(newcomers) > 1:  # a part of them may do
            good = rate_mps * _largest_part(lambda part: not broken(part)[1])
            most = rate_mps * _largest_part(lambda part: broken(part)[0] is None) if neighbour else most
        held_mps = sum(each.rate_mps for each in here) * topic.conformant  # measuring says what these do
        return Room(max(good, held_mps), max(most, held_mps), neighbour)

    def can_hold(self, topic: ManagedTopic, broker: str) -> bool:
        """Whether a promise can be kept at a broker, so that others can break it: it was kept, or would be alone."""
        if topic.fitting.last is not None and topic.fitting.last.met:
            return True
        alone = self._waiting([self._work(topic, broker)])
        return self._expected_ns(topic, broker, None, alone) <= MARGIN * _limit_ns(topic, broker)

    def _waiting(self, works: Iterable[Work]) -> Wait:
        """How long events wait for a broker that does all this work."""
        streams = [Stream(per_ns, cost_ns) for work in works for cost_ns, per_ns in work.items()]
        return wait(streams, self.service.wake_ns + self.service.rest_ns)

    def _expected_ns(self, topic: ManagedTopic, broker: str, now: Wait | None, then: Wait) -> float:
        """A neighbour's processing latency when the broker is busier: what was measured, and what the model adds."""
        quantile, seen = topic.contract.quantile, topic.layout.seen.get(broker)
        then_ns = then.quantile_ns(quantile)
        if then_ns == math.inf:
            return math.inf
        if now is not None and seen is not None and seen.processing.counts:
            return seen.processing.quantile_ns(quantile) + then_ns - now.quantile_ns(quantile)
        return self.service.base_ns + _largest([self._work(topic, broker)]) + then_ns

    def _flowing(self, topic: ManagedTopic, broker: str) -> bool:
        """Whether a broker carried all that a topic declares there, for all of the window that it measured."""
        placed, seen = self._placed(topic).get(broker), topic.layout.seen.get(broker)
        if placed is None:
            return True
        messages = sum(second.messages for second in seen.seconds) if seen else 0
        return messages >= _WHOLE * KEPT_S * placed.rate_mps

    def _work(self, topic: ManagedTopic, broker: str) -> Work:
        """A topic's events at a broker, more of them than declared if the broker reports more."""
        placed, seen = self._placed(topic).get(broker), topic.layout.seen.get(broker)
        if placed is None:
            return {}
        growth = max(1.0, seen.mean_mps / placed.rate_mps) if seen and topic.layout.observed else 1.0
        return {cost_ns: growth * per_ns for cost_ns, per_ns in placed.work.items()}

    def _placed(self, topic: ManagedTopic) -> Mapping[str, _Placed]:
        """A topic's work by broker, as its publishers declared it."""
        layout = topic.layout
        now = layout.roster, layout.place.changes
        found = self._known.get(topic.birth)
        if found is None or found[0] != now:
            here: defaultdict[str, list[DeclaredPublisher]] = defaultdict(list)
            for name, broker in layout.place.items():
                here[broker].append(layout.publishers[name])
            scale = topic.conformant
            works = {
                broker: _Placed(_work(each, self.service, scale), scale * sum(one.rate_mps for one in each))
                for broker, each in here.items()
            }
            births = {each.birth for each in self._topics.values()}
            self._known = {birth: kept for birth, kept in self._known.items() if birth in births}
            found = self._known[topic.birth] = (now, works)
        return found[1]


def _work(publishers: Iterable[DeclaredPublisher], service: ServiceModel, scale: float, part: float = 1.0) -> Work:
    """The events of a part of these publishers; members of a group read together, as one event."""
    events: defaultdict[float, float] = defaultdict(float)
    groups: Counter[tuple[str, float, int]] = Counter()
    for each in publishers:
        if each.group is None or each.jitter_ns:
            stream = service.stream(part * scale * each.rate_mps, each.batch)
            events[stream.cost_ns] += stream.per_ns
        else:
            groups[each.group, each.rate_mps, each.batch] += 1
    for (_, rate_mps, batch), members in groups.items():
        present, stream = part * members, service.stream(scale * rate_mps, batch)
        events[max(1.0, present) * stream.cost_ns] += min(1.0, present) * stream.per_ns
    return events


def _largest(works: Iterable[Work]) -> float:
    return max((cost_ns for work in works for cost_ns in work), default=0.0)


def _limit_ns(topic: ManagedTopic, broker: str) -> float:
    """What is left of a topic's SLO for processing: all but its wait for tokens, and half of it in any case."""
    contract = topic.contract
    seen = topic.layout.seen.get(broker)
    access_ns = seen.access.quantile_ns(contract.quantile) if seen else 0
    return max(contract.slo_ns - access_ns, contract.slo_ns / 2)


def _largest_part(holds: Callable[[float], bool]) -> float:
    """The largest part for which this holds, from none to all."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
