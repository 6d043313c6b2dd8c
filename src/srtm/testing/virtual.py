"""A cluster in virtual time: the real controller, real topics and control of brokers, over a network that may fail.

In: a seed, brokers, faults. Out: what was released when, for the invariant to be checked. Nothing sleeps, nothing
listens; a minute takes a fraction of a second, and the same seed gives the same run.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from srtm.broker.control import Control
from srtm.broker.message import Message
from srtm.broker.options import BrokerOptions
from srtm.broker.topic import Topic
from srtm.broker.topics import Topics
from srtm.control.controller import Controller
from srtm.control.members import DeclaredPublisher
from srtm.errors import ExchangeRefused
from srtm.protocol import exchange, identify, orders
from srtm.protocol.frames import FRAME_HEAD
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from srtm.control.options import ControllerOptions
    from srtm.control.store import Store
    from srtm.protocol.orders import Order

START_NS = 1_000 * NS_PER_S
_TICK_NS = 100 * NS_PER_MS
_DRAIN_NS = 20 * NS_PER_MS


@dataclass(eq=False)
class VirtualPublisher:
    """Somebody who sends, and goes where it is told to."""

    declared: DeclaredPublisher
    topic: str
    follow: Callable[[VirtualPublisher], None]  # is called when it was sent an order
    broker: VirtualBroker | None = None
    rng: random.Random = field(default_factory=random.Random)
    sent: int = 0
    gone: bool = False

    def __post_init__(self) -> None:
        """Declare it as IDENTIFY does."""
        self.identity = identify.Declared(self.declared.id, self.declared.group, self.topic)
        self.inbox: list[Order] = []

    def send(self, frame: bytes) -> None:
        """The broker says something to it."""
        found = orders.decode(frame[FRAME_HEAD.size :])
        if found is not None:
            self.inbox.append(found)
            self.follow(self)

    def next_gap_ns(self) -> int:
        """How long until it sends its next batch."""
        mean_ns = NS_PER_S * self.declared.batch / self.declared.rate_mps
        return max(1, round(self.rng.expovariate(1 / mean_ns)))


class _StillTurn:
    """A turn that `VirtualBroker.turn` takes by itself."""

    def __init__(self) -> None:
        self.to_drain: dict[Topic, None] = {}
        self.lag_ns = 0

    def wake(self) -> None:
        """The loop would turn."""


class VirtualBroker:
    """A broker's topics and control, without its sockets."""

    def __init__(self, name: str, number: int, world: VirtualCluster) -> None:
        self.options = BrokerOptions(name=name, tcp_port=4150 + 2 * number, controller="controller:4160")
        self.world = world
        self.started_ns = world.now_ns
        self.skew_ns = world.rng.randrange(10**15)  # its monotonic clock is nobody else's
        turn: Any = _StillTurn()
        self.topics = Topics(turn, None, 10**6, 10**9)
        self.control = self.topics.contracts = Control(self.options, self.topics, turn, {}, self.started_ns)
        self._learned: dict[str, list[tuple[int, int | None]]] = {}  # since when a topic is under which contract

    @property
    def name(self) -> str:
        """What it is called."""
        return self.options.name

    @property
    def mono_ns(self) -> int:
        """Its own clock."""
        return self.world.now_ns + self.skew_ns

    def turn(self) -> None:
        """A turn of its loop: what has tokens is released."""
        now_ns = self.world.now_ns
        self.control.check_lease(now_ns, self.mono_ns)
        for topic in self.topics.values():
            known, birth = self._learned.setdefault(topic.name, [(0, None)]), self.control.birth(topic.name)
            if known[-1][1] != birth:
                known.append((now_ns, birth))
            for message in topic.drain(now_ns):
                under = next(birth for since_ns, birth in reversed(known) if message.release_ns >= since_ns)
                self.world.released(topic.name, self.name, message, under)

    def second(self) -> None:
        """A second is over."""
        for topic in self.topics.values():
            peak_ntok = topic.limiter.take_peak_ntok() if topic.limiter else 0
            topic.recent.close(self.world.now_ns, len(topic.waiting), peak_ntok, topic.slo_ns)


class VirtualCluster:
    """Controller, brokers and publishers, and the network between them."""

    def __init__(self, seed: int, options: ControllerOptions, store: Store, brokers: int = 3) -> None:
        self.rng = random.Random(seed)
        self.now_ns = START_NS
        self.options, self.store = options, store
        self.brokers: dict[str, VirtualBroker] = {}
        self.publishers: dict[str, VirtualPublisher] = {}
        self.arrivals: dict[str, list[int]] = {}
        self.releases: dict[str, list[tuple[int, str, bytes]]] = {}
        self.released_under: dict[int, list[int]] = {}  # by the birth of the contract, when
        self.cut: set[str] = set()  # brokers that the controller cannot reach, nor they it
        self.loss, self.doubling, self.longest_delay_ns = 0.0, 0.0, 5 * NS_PER_MS
        self.paused: set[str] = set()  # brokers that stand still
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._bodies = count()
        self.controller: Controller | None = Controller(options, store, self.now_ns)
        self._last_sent: dict[str, int] = {}
        for number in range(1, brokers + 1):
            self.start_broker(f"broker-{number}", number)
        self.at(0, self._tick)
        self.at(_DRAIN_NS, self._turn)
        self.at(NS_PER_S, self._second)

    def at(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now_ns + delay_ns, next(self._order), action, args))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now_ns + round(seconds * NS_PER_S)
        while self._events and self._events[0][0] <= until:
            self.now_ns, _, action, args = heapq.heappop(self._events)
            action(*args)
        self.now_ns = until

    def start_broker(self, name: str, number: int = 0) -> None:
        """A broker starts, perhaps again, and registers."""
        self.brokers[name] = VirtualBroker(name, number or int(name.rpartition("-")[2]), self)
        self._register(name)

    def kill_broker(self, name: str, *, noticed: bool = True) -> None:
        """A broker is gone with all that it had; its publishers ask the controller where to go on."""
        broker = self.brokers.pop(name)
        orphans = [publisher for publisher in self.publishers.values() if publisher.broker is broker]
        for publisher in orphans:
            publisher.broker = None
        if noticed and self.controller and name not in self.cut:
            self.controller.died(name, self.now_ns, "its host refuses the connection")
        self.at(200 * NS_PER_MS, self._find_places, orphans, [name])

    def pause_broker(self, name: str, for_ns: int) -> None:
        """A broker stands still for a while, as a stopped process does."""
        self.paused.add(name)
        self.at(for_ns, self.resume_broker, name)

    def resume_broker(self, name: str) -> None:
        """It goes on."""
        self.paused.discard(name)
        if name in self.brokers:
            self.brokers[name].turn()

    def kill_controller(self) -> None:
        """The controller is gone; its store stays."""
        self.controller = None

    def start_controller(self, first_epoch: int = 1) -> None:
        """A controller starts on the same store; on another one, with an epoch that is later than the last."""
        self.controller = Controller(self.options, self.store, self.now_ns, first_epoch)
        for name in self.brokers:
            self._register(name)

    def publish(self, topic: str, publishers: Iterable[DeclaredPublisher]) -> None:
        """Publishers of a topic begin to send."""
        new = [
            VirtualPublisher(each, topic, self._will_follow, rng=random.Random(self.rng.random()))
            for each in publishers
        ]
        self.publishers |= {each.declared.id: each for each in new}
        self._find_places(new, [])
        sources: dict[str, list[VirtualPublisher]] = {}
        for publisher in new:  # those of a group send together
            sources.setdefault(publisher.declared.group or f"\0{publisher.declared.id}", []).append(publisher)
        for members in sources.values():
            self.at(members[0].next_gap_ns(), self._burst, members)

    def rename(self, publisher: VirtualPublisher, topic: str) -> None:
        """A publisher goes on under the name of another topic; it connects anew."""
        self._connect(publisher, None)
        publisher.topic = topic
        publisher.__post_init__()
        self.at(NS_PER_MS, self._find_places, [publisher], [])

    def leave(self, publisher: str) -> None:
        """A publisher is gone for good."""
        self.publishers[publisher].gone = True
        self._connect(self.publishers[publisher], None)

    def released(self, topic: str, broker: str, message: Message, birth: int | None) -> None:
        """A message has its token, under the contract of that birth."""
        if birth is not None:
            self.released_under.setdefault(birth, []).append(message.release_ns)
        self.releases.setdefault(topic, []).append((message.release_ns, broker, message.body))

    def _register(self, name: str) -> None:
        if self.controller and name in self.brokers and name not in self.cut:
            options = self.brokers[name].options
            self.controller.joined(name, "127.0.0.1", options.tcp_port, options.http_port, self.now_ns)

    def _find_places(self, publishers: list[VirtualPublisher], lost: list[str]) -> None:
        homeless = [publisher for publisher in publishers if publisher.broker is None and not publisher.gone]
        if not homeless:
            return
        for topic in sorted({publisher.topic for publisher in homeless}):
            declared = [publisher.declared for publisher in homeless if publisher.topic == topic]
            if self.controller and topic in self.controller.topics:
                places = self.controller.register(topic, declared, self.now_ns, lost)
            else:  # fall-backs
                places = {each.id: self.rng.choice(sorted(self.brokers)) for each in declared} if self.brokers else {}
            for each in declared:
                self._connect(self.publishers[each.id], places.get(each.id))
        self.at(NS_PER_S // 2, self._find_places, homeless, lost)

    def _connect(self, publisher: VirtualPublisher, name: str | None) -> None:
        if publisher.broker is not None:
            publisher.broker.control.went(publisher.identity, publisher)
        publisher.broker = self.brokers.get(name or "")
        if publisher.broker is not None:
            publisher.broker.control.came(publisher.identity, publisher)

    def _burst(self, members: list[VirtualPublisher]) -> None:
        for publisher in members:
            self._send(publisher)
        self.at(members[0].next_gap_ns(), self._burst, members)

    def _will_follow(self, publisher: VirtualPublisher) -> None:
        self.at(self.rng.randrange(1, 20) * NS_PER_MS, self._follow, publisher)

    def _follow(self, publisher: VirtualPublisher) -> None:
        """A publisher goes where it was told to go."""
        for order in publisher.inbox:
            if isinstance(order, orders.Migrate):
                port = int(order.to[0].rpartition(":")[2]) if order.to else 0
                target = next((each for each in self.brokers.values() if each.options.tcp_port == port), None)
                if target is not None:
                    self._connect(publisher, target.name)
        publisher.inbox.clear()

    def _send(self, publisher: VirtualPublisher) -> None:
        broker = publisher.broker
        if broker is not None and broker.name not in self.paused:
            topic = broker.topics.touch(publisher.topic)
            for _ in range(publisher.declared.batch):
                body = b"%b %d" % (publisher.declared.id.encode(), publisher.sent)
                topic.arrived.append(Message(b"%016d" % next(self._bodies), self.now_ns, body, publisher.declared.id))
                publisher.sent += 1
            self.arrivals.setdefault(publisher.topic, []).extend([self.now_ns] * publisher.declared.batch)
            topic.recent.largest_batch = max(topic.recent.largest_batch, publisher.declared.batch)
            broker.turn()

    def _turn(self) -> None:
        for broker in self.brokers.values():
            if broker.name not in self.paused:
                broker.turn()
        self.at(_DRAIN_NS, self._turn)

    def _second(self) -> None:
        for name in self.brokers:  # which look for a controller for as long as they have none
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

    def _speak(self, controller: Controller) -> None:
        """Send the exchanges that are due."""
        if controller is not self.controller:
            return
        for name in list(controller.members):
            if controller.due(name, self._last_sent.get(name, 0), self.now_ns):
                self._last_sent[name] = self.now_ns
                said = controller.compose(name)
                if not self._loses(name):
                    for _ in range(2 if self.rng.random() < self.doubling else 1):
                        self.at(self._delay_ns(), self._exchange, controller, name, exchange.write(said))

    def _exchange(self, controller: Controller, name: str, text: bytes) -> None:
        broker = self.brokers.get(name)
        if broker is None or name in self.cut:
            return
        if name in self.paused:  # it will be read when the broker goes on
            self.at(NS_PER_S // 10, self._exchange, controller, name, text)
            return
        said = exchange.read(text, exchange.Exchange)
        try:
            answer = broker.control.exchange(said, self.now_ns, broker.mono_ns)
        except ExchangeRefused:
            return
        broker.turn()
        if not self._loses(name):
            self.at(self._delay_ns(), self._answered, controller, name, said, exchange.write(answer))

    def _answered(self, controller: Controller, name: str, said: exchange.Exchange, text: bytes) -> None:
        if controller is self.controller and name not in self.cut:
            controller.heard(name, said, exchange.read(text, exchange.Answer), self.now_ns)
            if controller.urgent:
                self.at(NS_PER_MS, self._speak, controller)

    def _loses(self, name: str) -> bool:
        return name in self.cut or self.rng.random() < self.loss

    def _delay_ns(self) -> int:
        return self.rng.randrange(100_000, max(100_001, self.longest_delay_ns))
