"""Relief at run time: when a topic suffers at a broker, the one that grew or came last there leaves.

In: seconds as brokers report them, once a second; rounds of fittings that broke a neighbour. Out: new places for the
publishers of who is to blame. The rules are `shedding`. What it remembers is lost with the controller, which costs a
neighbour one more trial at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.control.placing.fitted import unmet
from srtm.control.placing.shedding import (
    BARRED_S,
    PATIENCE_S,
    TRIAL_PATIENCE_S,
    count_slow,
    culprit,
    follow_load,
    on_trial,
    shed,
    slow,
)
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.control.placing.load_distributor import LiveFitting
    from srtm.control.placing.placing import Placing
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic


class Relief:
    """Keeps the promises of topics that share a broker."""

    def __init__(self, state: ControllerState, placing: Placing) -> None:
        self._state = state
        self._placing = placing
        self._begun = False

    def watch(self, now_ns: int) -> None:
        """Take in what brokers reported in the last second, and relieve those that are too busy."""
        topics = [topic for topic in self._state.topics.values() if topic.opened]
        for topic in topics:
            count_slow(topic, self._state.members)
            follow_load(topic, self._placing.neighbours, now_ns)
            if not self._begun:  # nobody knows who came last: the youngest, then
                for level in topic.overload.levels.values():
                    level.before, level.rose_ns = level.load, 0
        self._begun = True
        for topic in topics:
            if topic.fitting.running is None and not topic.layout.migration.publishers:
                for broker, seconds in topic.overload.busy_s.items():
                    if seconds >= TRIAL_PATIENCE_S:
                        self._relieve(topic, broker, seconds, now_ns)

    def stop(self, fitting: LiveFitting, now_ns: int) -> bool:
        """End a fitting whose last round broke a neighbour; False if it broke none."""
        topic = next((each for each in self._state.topics.values() if each.fitting.running is fitting), None)
        if topic is None or not fitting.broken:
            return False
        for broker, name in fitting.broken.items():
            if name in self._state.topics:
                self._step_back(topic, broker, self._state.topics[name], now_ns)
        return True

    def _relieve(self, topic: ManagedTopic, broker: str, seconds: int, now_ns: int) -> None:
        """A broker has been too slow for a topic for some seconds."""
        reason = culprit(broker, self._state.topics.values())
        if reason is None or not self._placing.neighbours.can_hold(topic, broker):
            reason = topic  # nobody else can break what it cannot keep
        if reason is not topic and on_trial(reason, broker, now_ns):
            self._step_back(reason, broker, topic, now_ns)
        elif seconds >= PATIENCE_S and _may_shed(reason, now_ns):
            self._shed(reason, broker, topic, now_ns)

    def _step_back(self, topic: ManagedTopic, broker: str, neighbour: ManagedTopic, now_ns: int) -> None:
        """A topic on trial broke a neighbour: what came leaves again, and a fitting that runs starts over."""
        level, place = topic.overload.levels.pop(broker, None), topic.layout.place
        running, topic.fitting.running = topic.fitting.running, None
        neighbour.overload.busy_s[broker] = 0
        admitted = topic.fitting.last is not None and topic.fitting.last.met
        settled = topic.fitting.settled if admitted else frozenset()
        was_here = admitted and level is not None and level.before > 0
        came = [name for name in place.at(broker) if not (was_here and name in settled)]
        if not came:  # it sends more than before
            self._shed(topic, broker, neighbour, now_ns)
            return
        topic.overload.barred[broker] = (neighbour.name, now_ns + BARRED_S * NS_PER_S)
        moved, refused = self._placing.leave(topic, broker, came, now_ns, set(came) - settled)
        topic.journal.note(now_ns, "trial", f"{moved} publishers away from {broker}: {neighbour.name!r} missed its SLO")
        neighbour.journal.note(now_ns, "trial", f"missed the SLO on {broker}: {topic.name!r} leaves it")
        if refused:
            topic.journal.note(now_ns, "refused", topic.fitting.refusal)
        if not place:
            rounds = running.rounds if running else ()
            topic.fitting.last = unmet(topic.contract.policy, topic.layout, topic.fitting.refusal, rounds)
            self._state.store.save_topic(topic)
        elif running is not None:
            self._placing.refit(topic, now_ns)

    def _shed(self, topic: ManagedTopic, broker: str, victim: ManagedTopic, now_ns: int) -> None:
        """Send a part of a topic's publishers away from a broker."""
        topics = self._state.topics.values()
        here = [topic.layout.publishers[name] for name in topic.layout.place.at(broker)]
        places = shed(topic, broker, self._placing.brokers_for(topic, here), slow(topics))
        if places:
            topic.overload.calm_after_ns = now_ns + round(self._state.options.calm_s * NS_PER_S)
            victim.overload.busy_s[broker] = 0
            why = "too slow" if victim is topic else f"too slow for {victim.name!r}"
            topic.journal.note(now_ns, "shed", f"{len(places)} publishers away from {broker}: {why}")
            self._placing.relocate(topic, places, "shed", now_ns)
        elif victim is not topic:
            topic.overload.calm_after_ns = now_ns + round(self._state.options.calm_s * NS_PER_S)
            topic.journal.note(now_ns, "crowded", f"{broker} is too slow for {victim.name!r}, and no other has room")


def _may_shed(topic: ManagedTopic, now_ns: int) -> bool:
    resting = now_ns < topic.overload.calm_after_ns
    moving = topic.fitting.running is not None or topic.layout.migration.publishers
    return topic.contract.adapt and not resting and not moving
