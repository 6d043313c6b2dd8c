"""A cluster in virtual time: the real controller, and topics and control of real brokers, over a network that may fail.

In: a seed, brokers, faults. Out: a record of what was released when, to check invariants with. Nothing sleeps and
nothing listens; a minute takes a fraction of a second, and the same seed gives the same run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from srtm.control.controller import Controller
from srtm.errors import ExchangeRefused
from srtm.protocol import exchange, orders
from srtm.testing.faulty_network import FaultyNetwork
from srtm.testing.lending import VirtualWire
from srtm.testing.schedule import Schedule
from srtm.testing.traffic import Bursts, Replay, VirtualPublisher
from srtm.testing.virtual_broker import VirtualBroker
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from srtm.broker.message import Message
    from srtm.control.members import DeclaredPublisher
    from srtm.control.options import ControllerOptions
    from srtm.control.store import Store
    from srtm.model.broker_models import ServiceModel
    from srtm.workload.publishers import Arrivals

START_NS = 1_000 * NS_PER_S
_TICK_NS = 100 * NS_PER_MS
_DRAIN_NS = 20 * NS_PER_MS
_WAKE_NS = NS_PER_MS  # from news until the controller acts on it
_SOON_NS = 5 * NS_PER_MS  # until it tries again what came too soon after the last exchange


@dataclass(slots=True)
class Record:
    """What happened to messages, by topic."""

    arrivals: dict[str, list[int]] = field(default_factory=dict)
    releases: dict[str, list[tuple[int, str, bytes]]] = field(default_factory=dict)  # when, at which broker, the body
    released_under: dict[int, list[int]] = field(default_factory=dict)  # release times by the contract's birth


class VirtualCluster:
    """Controller, brokers and publishers, and the network between them."""

    def __init__(
        self,
        seed: int,
        options: ControllerOptions,
        store: Store,
        brokers: int = 3,
        service: ServiceModel | None = None,
    ) -> None:
        """Without `service`, a broker is never busy, and latency is access delay alone."""
        self.rng = random.Random(seed)
        self.schedule = Schedule(START_NS)
        self.network = FaultyNetwork(self.rng)
        self.record = Record()
        self.options, self.store, self.service = options, store, service
        self.brokers: dict[str, VirtualBroker] = {}
        self.paused: set[str] = set()  # brokers that stand still
        self.publishers: dict[str, VirtualPublisher] = {}
        self.controller: Controller | None = None
        self._awake = False
        self._last_sent: dict[str, int] = {}
        self.start_controller()
        for number in range(1, brokers + 1):
            self.start_broker(f"broker-{number}", number)
        self.at(0, self._tick)
        self.at(_DRAIN_NS, self._turn)
        self.at(NS_PER_S, self._second)

    @property
    def now_ns(self) -> int:
        """The virtual time."""
        return self.schedule.now_ns

    def at(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Run an action after a delay."""
        self.schedule.at(delay_ns, action, *args)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.schedule.run(seconds)

    def start_broker(self, name: str, number: int = 0, *, set_back_ns: int = 0) -> None:
        """Start a broker, perhaps again and with its clock set back; it registers."""
        self.brokers[name] = VirtualBroker(name, number or int(name.rpartition("-")[2]), self, set_back_ns)
        self.brokers[name].control.lenders.wire = VirtualWire(name, self)
        self._register(name)

    def kill_broker(self, name: str, *, noticed: bool = True) -> None:
        """End a broker with all it holds; its publishers ask the controller for another.

        With `noticed`, its host refuses connections, so the controller knows at once.
        """
        broker = self.brokers.pop(name)
        orphans = [publisher for publisher in self.publishers.values() if publisher.broker is broker]
        for publisher in orphans:
            publisher.broker = None
        if noticed and self.controller and name not in self.network.cut:
            self.controller.died(name, self.now_ns, "its host refuses the connection")
        self.at(200 * NS_PER_MS, self._find_places, orphans, [name])

    def pause_broker(self, name: str, for_ns: int) -> None:
        """Let a broker stand still for a while, as a stopped process does."""
        self.paused.add(name)
        self.at(for_ns, self.resume_broker, name)

    def resume_broker(self, name: str) -> None:
        """Resume a paused broker."""
        self.paused.discard(name)
        if name in self.brokers:
            self.brokers[name].turn()

    def kill_controller(self) -> None:
        """End the controller; its store stays."""
        self.controller = None

    def start_controller(self, first_epoch: int = 1) -> None:
        """Start a controller; on another store than before, give it a later epoch than the last one had."""
        self.controller = Controller(self.options, self.store, self.now_ns, first_epoch)
        self.controller.watch(lambda _: self._wake())
        for name in self.brokers:
            self._register(name)

    def publish(self, topic: str, publishers: Iterable[DeclaredPublisher]) -> None:
        """Let publishers of a topic begin to send at their declared rates."""
        sources: dict[str, list[VirtualPublisher]] = {}
        for publisher in self.connect(topic, publishers):  # publishers of a group send together
            sources.setdefault(publisher.declared.group or f"\0{publisher.declared.id}", []).append(publisher)
        for members in sources.values():
            Bursts(members, self.schedule, self._send)

    def connect(self, topic: str, publishers: Iterable[DeclaredPublisher]) -> list[VirtualPublisher]:
        """Let publishers of a topic find their brokers; they send nothing yet."""
        new = [
            VirtualPublisher(each, topic, self._will_follow, rng=random.Random(self.rng.random()))
            for each in publishers
        ]
        self.publishers |= {each.declared.id: each for each in new}
        self._find_places(new, [])
        return new

    def replay(self, publishers: Sequence[VirtualPublisher], arrivals: Arrivals, lap_ns: int) -> Replay:
        """Let publishers send known arrivals from now on, over and over; their numbers are those of the arrivals."""
        return Replay(publishers, arrivals, lap_ns, self.schedule, self._send)

    def rename(self, publisher: VirtualPublisher, topic: str) -> None:
        """Let a publisher reconnect and continue with another topic."""
        self._connect(publisher, None)
        publisher.topic = topic
        publisher.__post_init__()
        self.at(NS_PER_MS, self._find_places, [publisher], [])

    def leave(self, publisher: str) -> None:
        """End a publisher for good."""
        self.publishers[publisher].gone = True
        self._connect(self.publishers[publisher], None)

    def arrived(self, topic: str, messages: int) -> None:
        """Record that messages came to a broker."""
        self.record.arrivals.setdefault(topic, []).extend([self.now_ns] * messages)

    def drained(self, topic: str, broker: str, released: list[Message], known: list[tuple[int, int | None]]) -> None:
        """Record messages that a gate released; `known` says since when which contract is known there."""
        for message in released:
            birth = next(birth for since_ns, birth in reversed(known) if message.release_ns >= since_ns)
            self.released(topic, broker, message, birth)

    def released(self, topic: str, broker: str, message: Message, birth: int | None) -> None:
        """Record the release of a message under the contract of that birth."""
        if birth is not None:
            self.record.released_under.setdefault(birth, []).append(message.release_ns)
        self.record.releases.setdefault(topic, []).append((message.release_ns, broker, message.body))

    def _register(self, name: str) -> None:
        if self.controller and name in self.brokers and name not in self.network.cut:
            options = self.brokers[name].options
            self.controller.joined(name, "127.0.0.1", options.tcp_port, options.http_port, self.now_ns)

    def _find_places(self, publishers: list[VirtualPublisher], lost: list[str], tries: int = 0) -> None:
        homeless = [publisher for publisher in publishers if publisher.broker is None and not publisher.gone]
        if not homeless:
            return
        for topic in sorted({publisher.topic for publisher in homeless}):
            declared = [publisher.declared for publisher in homeless if publisher.topic == topic]
            if self.controller and topic in self.controller.topics:
                places = self.controller.register(topic, declared, self.now_ns, lost)
            else:  # fall back to any broker
                places = {each.id: self.rng.choice(sorted(self.brokers)) for each in declared} if self.brokers else {}
            for each in declared:
                self._connect(self.publishers[each.id], places.get(each.id))
        self.at((NS_PER_S // 2) << min(tries, 3), self._find_places, homeless, lost, tries + 1)

    def _connect(self, publisher: VirtualPublisher, name: str | None) -> None:
        if publisher.broker is not None:
            publisher.broker.control.went(publisher.identity, publisher)
        publisher.broker = self.brokers.get(name or "")
        if publisher.broker is not None:
            publisher.broker.control.came(publisher.identity, publisher)

    def _will_follow(self, publisher: VirtualPublisher) -> None:
        self.at(self.rng.randrange(1, 20) * NS_PER_MS, self._follow, publisher)

    def _follow(self, publisher: VirtualPublisher) -> None:
        """Connect a publisher to the broker it was ordered to."""
        for order in publisher.inbox:
            if isinstance(order, orders.Migrate):
                publisher.moves += 1
                if not order.to:  # leave, and ask for a place again
                    self._connect(publisher, None)
                    self._find_places([publisher], [])
                    continue
                port = int(order.to[0].rpartition(":")[2])
                target = next((each for each in self.brokers.values() if each.options.tcp_port == port), None)
                if target is not None:
                    self._connect(publisher, target.name)
        publisher.inbox.clear()

    def _send(self, publisher: VirtualPublisher, messages: int) -> None:
        broker = publisher.broker
        if broker is not None and broker.name not in self.paused:
            self.arrived(publisher.topic, messages)
            broker.read(publisher.topic, publisher.declared.id, publisher.bodies(messages))

    def _turn(self) -> None:
        for broker in self.brokers.values():
            if broker.name not in self.paused:
                broker.turn()
        self.at(_DRAIN_NS, self._turn)

    def _second(self) -> None:
        for name in self.brokers:  # brokers look for a controller while they have none
            if self.controller and name not in self.controller.members:
                self._register(name)
        for broker in self.brokers.values():
            if broker.name not in self.paused:
                broker.second()
        if self.controller:
            self.controller.adapt(self.now_ns)
        self.at(NS_PER_S, self._second)

    def _tick(self) -> None:
        self.at(_TICK_NS, self._tick)
        controller = self.controller
        if controller is None:
            return
        controller.tick(self.now_ns)
        for fit in controller.jobs():
            assert fit.job
            fit.job()
            controller.done(fit, self.now_ns)
        self._speak(controller)

    def _wake(self, after_ns: int = _WAKE_NS) -> None:
        """There is news, as for `control.service`."""
        if not self._awake:
            self._awake = True
            self.at(after_ns, self._woken)

    def _woken(self) -> None:
        self._awake = False
        if self.controller:
            self.controller.tick(self.now_ns)
            self._speak(self.controller)
            if self.controller.urgent:
                self._wake(_SOON_NS)

    def _speak(self, controller: Controller) -> None:
        """Send all exchanges that are due."""
        for name in list(controller.members):
            if controller.due(name, self._last_sent.get(name, 0), self.now_ns):
                self._last_sent[name] = self.now_ns
                said = controller.compose(name)
                if not self.network.loses(name):
                    for _ in range(self.network.copies()):
                        self.at(self.network.delay_ns(), self._exchange, controller, name, exchange.write(said))

    def _exchange(self, controller: Controller, name: str, text: bytes) -> None:
        broker = self.brokers.get(name)
        if broker is None or name in self.network.cut:
            return
        if name in self.paused:  # the broker reads it when it resumes
            self.at(NS_PER_S // 10, self._exchange, controller, name, text)
            return
        said = exchange.read(text, exchange.Exchange)
        try:
            answer = broker.control.exchange(said, self.now_ns, broker.mono_ns)
        except ExchangeRefused:
            return
        broker.turn()
        if not self.network.loses(name):
            self.at(self.network.delay_ns(), self._answered, controller, name, said, exchange.write(answer))

    def _answered(self, controller: Controller, name: str, said: exchange.Exchange, text: bytes) -> None:
        if controller is self.controller and name not in self.network.cut:
            controller.heard(name, said, exchange.read(text, exchange.Answer), self.now_ns)
            if controller.urgent:
                self._wake()
