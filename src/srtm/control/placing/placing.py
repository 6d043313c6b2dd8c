"""Placing: which broker each publisher belongs to. The only part of the controller that changes it.

In: publishers without a place, brokers that lose theirs, wishes of operators, results of fittings. Out: places, orders
to publishers (`Moves`), and jobs of fittings to run in threads. Time is an argument; no IO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.control.placing.housing import housed, on_fewest, room
from srtm.control.placing.load_distributor import LiveFitting
from srtm.control.placing.moves import Moves
from srtm.control.placing.search import Search
from srtm.control.placing.shedding import overloaded, shed
from srtm.errors import InputError, SRTMError
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from srtm.control.members import DeclaredPublisher, Member
    from srtm.control.placing.layout import Reason
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic
    from srtm.model.broker_models import ServiceModel
    from srtm.model.placement import Broker
    from srtm.protocol.exchange import Move

_FLOWING, _STEADY_S = 0.7, 3  # part of the declared rate, and for how many seconds, before the first fitting
_GROWTH = 1.1  # a topic that outgrew its last fitting by this factor gets its new publishers fitted


class Placing:
    """Where publishers belong."""

    def __init__(self, state: ControllerState, service: ServiceModel) -> None:
        self.service = service
        self._state = state
        self._moves = Moves(state.members)

    def place(
        self, topic: ManagedTopic, homeless: Sequence[DeclaredPublisher], reason: Reason, unreachable: Set[str]
    ) -> None:
        """Find a place for publishers that have none, if there is a broker for them."""
        movable = {publisher.id for publisher in homeless}
        unusable = unreachable | topic.sharing.refused.keys()
        brokers = [broker for broker in self.brokers_for(topic, movable) if broker.name not in unusable]
        if homeless and brokers:
            topic.layout.place.assign(housed(topic, homeless, brokers, self._state.options.seed), reason)

    def accept(self, topic: ManagedTopic, publishers: Iterable[str], broker: str, reason: Reason) -> None:
        """Let publishers belong to the broker that they are connected to."""
        topic.layout.place.assign(dict.fromkeys(publishers, broker), reason)

    def remove(self, topic: ManagedTopic, publishers: Iterable[str], reason: Reason) -> None:
        """Take the places of publishers away."""
        topic.layout.place.assign(dict.fromkeys(publishers), reason)

    def evacuate(self, topic: ManagedTopic, broker: str, now_ns: int) -> None:
        """Find other places for all publishers of a broker."""
        layout, leaving = topic.layout, topic.layout.place.at(broker)
        if not leaving:
            return
        self.remove(topic, leaving, "evacuated")
        self.place(topic, [layout.publishers[publisher] for publisher in leaving], "evacuated", {broker})
        layout.migration.left[broker] += len(leaving)
        self._state.due |= self._moves.send(topic, dict.fromkeys(leaving, broker), now_ns)
        self._state.store.save_publishers(topic, leaving)
        topic.sharing.stale = True
        self._state.changed(topic)

    def move(self, topic: ManagedTopic, publishers: Sequence[str], member: Member, now_ns: int) -> None:
        """Send publishers to a broker, because an operator asked for it."""
        broker = member.name
        if not member.usable:
            state = "draining" if member.draining else member.status
            raise InputError(f"cannot move publishers to broker {broker!r}: it is {state}", broker=broker)
        unknown = [publisher for publisher in publishers if publisher not in topic.layout.publishers]
        if unknown:
            raise InputError(f"topic {topic.name!r} has no publisher {unknown[0]!r}", publisher=unknown[0])
        topic.journal.note(now_ns, "moved", f"{len(publishers)} publishers to {broker}")
        self._relocate(topic, dict.fromkeys(publishers, broker), "moved", now_ns)
        self._state.store.save_publishers(topic, publishers)
        self._state.changed(topic)

    def gather(self, topic: ManagedTopic, now_ns: int) -> None:
        """Order stray publishers home at once."""
        alive, layout = set(self._state.alive), topic.layout
        astray = {
            publisher: broker
            for broker, wrong in layout.misplaced().items()
            if broker in alive
            for publisher in wrong - layout.migration.publishers
        }
        if astray:
            self._state.due |= self._moves.send(topic, astray, now_ns)

    def relieve(self, topic: ManagedTopic, now_ns: int) -> None:
        """Send publishers away from a broker that is too busy."""
        for broker in overloaded(topic, self._state.members):
            if now_ns >= topic.overload.calm_after_ns:
                places = shed(topic, broker, self.brokers_for(topic, set()), self._state.topics.values())
                if places:
                    topic.overload.calm_after_ns = now_ns + round(self._state.options.calm_s * NS_PER_S)
                    topic.journal.note(now_ns, "shed", f"{len(places)} publishers away from {broker}: too slow")
                    self._relocate(topic, places, "shed", now_ns)
                    self._state.store.save_publishers(topic, places)
                    self._state.changed(topic)

    def take_orders(self, broker: str) -> list[Move]:
        """Orders that a broker must pass on to publishers."""
        return self._moves.take(broker)

    def advance(self, topic: ManagedTopic, alive: Set[str], now_ns: int) -> None:
        """Time has passed: check which publishers arrived, remind the others, and continue a fitting."""
        self._moves.settle(topic, now_ns, self._state.options.move_s)
        running = topic.fitting.running
        if running is not None:
            running.tick(now_ns, shares_done=topic.transfer.done)
            if not running.brokers <= alive:
                topic.journal.note(now_ns, "fit", "restarted: a broker was lost")
                self.refit(topic, now_ns)
        self._state.due |= self._moves.remind(topic, now_ns)

    def brokers_for(self, topic: ManagedTopic, movable: Set[str]) -> list[Broker]:
        """Usable brokers, with the room that they have for these publishers of the topic."""
        state = self._state
        members, limit_mps = state.members.values(), state.options.mcap_mps
        return room(topic, movable, state.topics.values(), members, self.service, limit_mps)

    def least_loaded(self) -> Member | None:
        """A broker for publishers of a topic without a contract."""
        usable = [member for member in self._state.members.values() if member.usable]
        return min(
            usable,
            key=lambda each: (each.condition.busy, each.condition.rate_mps / each.mcap_mps, each.name),
            default=None,
        )

    # Fittings.

    def fit(self, topic: ManagedTopic, now_ns: int, *, only: Sequence[DeclaredPublisher] | None = None) -> None:
        """Start a fitting of a topic's publishers, or of some of them; it replaces one that is running."""
        chosen = list(topic.layout.publishers.values()) if only is None else list(only)
        if not chosen:
            raise InputError(f"topic {topic.name!r} has no publishers to place; register them first", topic=topic.name)
        brokers = self.brokers_for(topic, {publisher.id for publisher in chosen})
        if not brokers:
            raise InputError("no broker is available for placement; start one with --controller", topic=topic.name)
        predicts, seed = topic.contract.fit == "model" and only is None, self._state.options.seed
        search = Search(topic.contract, chosen, brokers, self.service, predicts=predicts, seed=seed)
        confirms = predicts and on_fewest(topic, brokers, seed)
        topic.fitting.running = LiveFitting(search, topic.layout, now_ns, confirms=confirms)
        topic.journal.note(now_ns, "fit", f"started: {len(chosen)} publishers, {len(brokers)} candidate brokers")
        self._state.changed(topic)

    def refit(self, topic: ManagedTopic, now_ns: int) -> None:
        """Start the running fitting over, or abandon it if that is impossible."""
        topic.fitting.running = None
        try:
            self.fit(topic, now_ns)
        except SRTMError as problem:
            topic.journal.note(now_ns, "fit", f"abandoned: {problem}")

    def fit_when_steady(self, topic: ManagedTopic, now_ns: int) -> None:
        """Start a topic's first fitting once its publishers send about what they declared. Call once a second."""
        fitting, layout = topic.fitting, topic.layout
        begun = fitting.last is not None or fitting.running is not None
        if begun or topic.contract.fit == "none" or not layout.publishers:
            return
        flowing = sum(seen.rate_mps for seen in layout.seen.values()) >= _FLOWING * layout.rate_mps
        fitting.flowing_s = fitting.flowing_s + 1 if flowing else 0
        if fitting.flowing_s >= _STEADY_S and self._state.any_usable:
            self.fit(topic, now_ns)

    def fit_growth(self, topic: ManagedTopic, now_ns: int) -> None:
        """Fit the publishers that came since the last fitting, once they are many."""
        fitting, layout = topic.fitting, topic.layout
        if fitting.last is None or fitting.running is not None or layout.rate_mps <= _GROWTH * fitting.last.rate_mps:
            return
        new = [publisher for name, publisher in layout.publishers.items() if name not in fitting.settled]
        if new and self._state.any_usable:
            self.fit(topic, now_ns, only=new)

    def jobs(self) -> list[LiveFitting]:
        """Fittings that wait for their `job` to run; call `done` after it."""
        running = (topic.fitting.running for topic in self._state.topics.values())
        return [each for each in running if each and each.job]

    def done(self, fitting: LiveFitting, now_ns: int) -> None:
        """Continue a fitting after its job."""
        topic = next((each for each in self._state.topics.values() if each.fitting.running is fitting), None)
        if topic is None:  # replaced or abandoned meanwhile
            return
        since_ns = fitting.since_ns
        fitting.resume(now_ns)
        if fitting.places:  # reminders to stray publishers wait for the fitting, too
            topic.layout.migration.since_ns = since_ns
        self._relocate(topic, fitting.places, "fitted", now_ns)
        if fitting.given_up:
            topic.fitting.running = None
            topic.journal.note(now_ns, "fit", f"abandoned: {fitting.given_up}")
        if outcome := fitting.outcome:
            topic.fitting.running, topic.fitting.last = None, outcome
            topic.fitting.settled = frozenset(topic.layout.publishers)
            topic.sharing.stale = True
            verdict = "met" if outcome.met else f"not met: {outcome.reason}"
            topic.journal.note(now_ns, "fit", f"k = {outcome.k} after {len(outcome.rounds)} rounds: SLO {verdict}")
            self._state.store.save_topic(topic)
        self._state.store.save_publishers(topic, topic.layout.publishers)
        self._state.changed(topic)

    def _relocate(self, topic: ManagedTopic, places: Mapping[str, str], reason: Reason, now_ns: int) -> None:
        """Change places of publishers, and order those that are elsewhere to go there."""
        place = topic.layout.place
        before = {publisher: broker for publisher, broker in place.items() if publisher in places}
        place.assign(places, reason)
        self._state.due |= self._moves.send(topic, before, now_ns)
