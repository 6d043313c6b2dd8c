"""Placing: which broker each publisher belongs to. The only part of the controller that changes it.

In: publishers without a place, brokers that lose theirs, wishes of operators, results of fittings. Out: places, orders
to publishers (`Moves`), and jobs of fittings to run in threads. Time is an argument; no IO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.control.lending import loans_of
from srtm.control.placing.housing import House, housed, houses, on_fewest, refusal, rooms_mps
from srtm.control.placing.load_distributor import LiveFitting
from srtm.control.placing.measurement import Neighbour, Rounds
from srtm.control.placing.moves import Moves
from srtm.control.placing.neighbours import Neighbours
from srtm.control.placing.search import Search
from srtm.control.placing.shedding import culprit
from srtm.errors import InputError, SRTMError
from srtm.model.room import fewest_parts

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
        self.neighbours = Neighbours(state.topics, service)
        self._state = state
        self._moves = Moves(state.members)

    def place(
        self,
        topic: ManagedTopic,
        homeless: Sequence[DeclaredPublisher],
        reason: Reason,
        unreachable: Set[str],
        refusable: Set[str] = frozenset(),
    ) -> list[DeclaredPublisher]:
        """Find a place for publishers that have none, if there is a broker for them.

        Returns the `refusable` ones that would break a neighbour's promise on every broker: they have no place.
        """
        usable = self._reachable(topic, homeless, unreachable)
        if not homeless or not usable:
            return []
        found = housed(topic, homeless, usable, self._state.options.seed, refusable)
        topic.layout.place.assign(found, reason)
        for publisher in found:
            topic.layout.refused.pop(publisher, None)
        refused = [publisher for publisher in homeless if publisher.id not in found]
        self.refuse(topic, refused)
        if found and topic.fitting.last is not None and not topic.fitting.last.k:
            topic.fitting.last = None  # all were refused before
        return refused

    def parts_for(self, topic: ManagedTopic, publisher: DeclaredPublisher, had: int, unreachable: Set[str]) -> int:
        """How many parts a publisher takes, so that as many brokers have room for one each; it `had` some before."""
        most = max(had, sum(member.usable for member in self._state.members.values()))
        usable = self._reachable(topic, publisher.in_parts(most), unreachable)
        return fewest_parts(publisher.rate_mps, rooms_mps(topic, usable))

    def _reachable(
        self, topic: ManagedTopic, publishers: Sequence[DeclaredPublisher], unreachable: Set[str]
    ) -> list[House]:
        unusable = unreachable | topic.sharing.refused.keys()
        return [house for house in self.houses_for(topic, publishers) if house.broker.name not in unusable]

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

    def relocate(self, topic: ManagedTopic, places: Mapping[str, str], reason: Reason, now_ns: int) -> None:
        """Change places of publishers, keep that, and order those that are elsewhere to go there."""
        self._relocate(topic, places, reason, now_ns)
        self._state.store.save_publishers(topic, places)
        self._state.changed(topic)

    def leave(
        self, topic: ManagedTopic, broker: str, leaving: Sequence[str], now_ns: int, refusable: Set[str]
    ) -> tuple[int, int]:
        """Move publishers of a broker to where they break no neighbour; returns how many moved, and were refused.

        Of those that find no such place, the `refusable` are sent away, and may ask again; of a split publisher, all
        parts are. The others stay.
        """
        layout = topic.layout
        declared = [layout.publishers[publisher] for publisher in leaving]
        elsewhere = [house for house in self.houses_for(topic, declared) if house.broker.name != broker]
        places = housed(topic, declared, elsewhere, self._state.options.seed, set(leaving))
        gone = [each for each in leaving if each not in places and each in refusable]
        gone += layout.rest_of(gone)
        places = {each: at for each, at in places.items() if each not in gone}
        left = {each: layout.place.get(each, broker) for each in gone}
        self.remove(topic, gone, "shed")
        self.refuse(topic, [layout.publishers[each] for each in gone])
        for publisher in gone:
            layout.forget(publisher)
            self._state.store.delete_publisher(topic, publisher)
        for at in set(left.values()):
            self._state.due |= self._moves.dismiss(topic, at, [each for each in gone if left[each] == at])
        topic.sharing.stale = True
        self.relocate(topic, places, "shed", now_ns)
        return len(places), len(gone)

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

    def houses_for(self, topic: ManagedTopic, publishers: Sequence[DeclaredPublisher]) -> list[House]:
        """Usable brokers, with their room for these publishers of a topic, wherever they are now."""
        state = self._state
        members, limit_mps = state.members.values(), state.options.mcap_mps
        return houses(topic, publishers, state.topics.values(), members, self.neighbours, limit_mps)

    def brokers_for(self, topic: ManagedTopic, publishers: Sequence[DeclaredPublisher]) -> list[Broker]:
        """Usable brokers, with the rate that they carry besides these publishers of a topic."""
        return [house.broker for house in self.houses_for(topic, publishers)]

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
        brokers = self.brokers_for(topic, chosen)
        if not brokers:
            raise InputError("no broker is available for placement; start one with --controller", topic=topic.name)
        predicts, seed = topic.contract.fit == "model" and only is None, self._state.options.seed
        service = self.neighbours.service
        search = Search(topic.contract, chosen, brokers, service, predicts=predicts, seed=seed, loans=loans_of(topic))
        confirms = predicts and on_fewest(topic, brokers, seed)
        options = self._state.options
        how = Rounds(options.round_s, options.block_s, lambda broker: self._victims(topic, broker))
        topic.fitting.running = LiveFitting(search, topic.layout, now_ns, confirms=confirms, how=how)
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

    def refuse(self, topic: ManagedTopic, publishers: Sequence[DeclaredPublisher]) -> None:
        """Remember that publishers got no place, and why."""
        if publishers:
            refused = {publisher.id: publisher.rate_mps for publisher in publishers}
            topic.layout.refused |= refused
            slos_ns = {name: other.contract.slo_ns for name, other in self._state.topics.items()}
            found = self.houses_for(topic, publishers)
            most_mps = max((house.most_mps for house in found), default=0.0)
            undivided = len(found) > 1 and any(not each.split and each.rate_mps > most_mps for each in publishers)
            topic.fitting.refusal = refusal(refused, found, slos_ns, undivided=undivided)

    def _victims(self, topic: ManagedTopic, broker: str) -> list[Neighbour]:
        """Topics at a broker that suffer because of this one, if they do: it came last, and they are at rest."""
        if culprit(broker, self._state.topics.values()) is not topic:
            return []
        return [
            Neighbour(other.name, other.contract, other.layout)
            for other in self.neighbours.beside(topic, broker)
            if other.fitting.running is None and not other.layout.migration.publishers
            if self.neighbours.can_hold(other, broker)
        ]

    def _relocate(self, topic: ManagedTopic, places: Mapping[str, str], reason: Reason, now_ns: int) -> None:
        """Change places of publishers, and order those that are elsewhere to go there."""
        place = topic.layout.place
        before = {publisher: broker for publisher, broker in place.items() if publisher in places}
        place.assign(places, reason)
        self._state.due |= self._moves.send(topic, before, now_ns)
