"""Packing: when topics left or shrank, those that are left move together, so that a broker is free again.

In: topics at rest, and the room at brokers. Out: one topic's publishers at one broker go to a busier one. A broker is
emptied only if all of its topics fit elsewhere, with more to spare than a newcomer needs, so what packing joins is not
soon apart again. Each move goes from the least busy broker to a busier one, so moves end. It remembers nothing but
since when the cluster is at rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.control.placing.shedding import BARRED_S, TRIAL_S
from srtm.model.placement import policy_named, rcap
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.control.placing.placing import Placing
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic

CALM_S = 60  # at rest for so long before each move: longer than a trial and the longest round
MARGIN = 0.6  # of an SLO: three quarters of what newcomers may use


class Packing:
    """Moves topics together."""

    def __init__(self, state: ControllerState, placing: Placing) -> None:
        self._state = state
        self._placing = placing
        self._rests_since_ns: int | None = None

    def watch(self, now_ns: int) -> None:
        """Move one topic if the cluster has been at rest for long enough. Call once a second."""
        if self._rests_since_ns is None or not all(_rests(topic, now_ns) for topic in self._state.topics.values()):
            self._rests_since_ns = now_ns
        elif now_ns - self._rests_since_ns >= CALM_S * NS_PER_S:
            self._rests_since_ns = now_ns
            self._pack(now_ns)

    def _pack(self, now_ns: int) -> None:
        neighbours, topics = self._placing.neighbours, self._state.topics.values()
        loads = {
            name: sum(neighbours.load(topic, name) for topic in topics)
            for name in set().union(*(topic.layout.place.brokers for topic in topics))
        }
        for source in sorted(loads, key=lambda name: (loads[name], name)):
            here = [topic for topic in topics if source in topic.layout.place.brokers]
            targets = [self._target(topic, source, loads, now_ns) for topic in here]
            if all(targets):
                topic, target = here[0], targets[0]
                assert target
                leaving = topic.layout.place.at(source)
                topic.journal.note(now_ns, "packed", f"{len(leaving)} publishers from {source} to {target}")
                self._placing.relocate(topic, dict.fromkeys(leaving, target), "packed", now_ns)
                return

    def _target(self, topic: ManagedTopic, source: str, loads: dict[str, float], now_ns: int) -> str | None:
        """A busier broker for a topic's part at another: one that others use, so k does not change."""
        contract, overload = topic.contract, topic.overload
        shed_lately = overload.calm_after_ns and now_ns < overload.calm_after_ns + BARRED_S * NS_PER_S
        if not contract.adapt or not policy_named(contract.policy).concentrates or shed_lately:
            return None
        layout, neighbours = topic.layout, self._placing.neighbours
        publishers = [layout.publishers[name] for name in layout.place.at(source)]
        rate_mps = sum(publisher.rate_mps for publisher in publishers)
        found = []
        for house in self._placing.houses_for(topic, publishers):
            name = house.broker.name
            busier = (loads.get(name, 0.0), name) > (loads[source], source)
            if busier and name not in layout.place.brokers and rcap(house.broker) >= 1000 * rate_mps:
                room = neighbours.room(topic, self._state.members[name], publishers, MARGIN)
                if room.good_mps >= rate_mps:
                    found.append((loads[name], name))
        return max(found)[1] if found else None


def _rests(topic: ManagedTopic, now_ns: int) -> bool:
    """Whether nothing happens to a topic: it is not opened, fitted, moved, on trial or late."""
    overload = topic.overload
    tried = any(now_ns - level.rose_ns < TRIAL_S * NS_PER_S for level in overload.levels.values())
    late = any(seconds > 0 for seconds in overload.busy_s.values())
    moving = topic.fitting.running is not None or topic.settling(now_ns)
    return topic.opened and not (moving or tried or late or topic.layout.refused)
