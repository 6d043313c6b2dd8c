"""A broker in virtual time: a real one's topics and control, without sockets, and a model of its processor.

In: batches of messages, and exchanges through `control`. Out: what its gates release and when, told to its cluster.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from srtm.broker.control import Control
from srtm.broker.message import Message
from srtm.broker.options import BrokerOptions
from srtm.broker.topics import Topics
from srtm.testing.serving import Serving

if TYPE_CHECKING:
    import random

    from srtm.broker.topic import Topic
    from srtm.model.broker_models import ServiceModel


class Surroundings(Protocol):
    """What a broker needs of its cluster."""

    rng: random.Random
    service: ServiceModel | None

    @property
    def now_ns(self) -> int:
        """The virtual time."""

    def drained(self, topic: str, broker: str, released: list[Message], known: list[tuple[int, int | None]]) -> None:
        """Take note of messages that a gate released; `known` says since when which contract is known there."""


class _StillTurn:
    """A turn that `VirtualBroker.turn` takes by itself."""

    def __init__(self) -> None:
        self.to_drain: dict[Topic, None] = {}
        self.lag_ns = 0

    def wake(self) -> None:
        """Do nothing: no loop waits."""


class VirtualBroker:
    """A broker's topics and control, without its sockets."""

    def __init__(self, name: str, number: int, world: Surroundings, set_back_ns: int = 0) -> None:
        """`set_back_ns` is how far its wall clock is behind."""
        self.options = BrokerOptions(name=name, tcp_port=4150 + 2 * number, controller="controller:4160")
        self.world = world
        self.started_ns = world.now_ns - set_back_ns
        self.skew_ns = world.rng.randrange(10**15)  # every broker has its own monotonic clock
        turn: Any = _StillTurn()
        self.topics = Topics(turn, None, 10**6, 10**9)
        self.control = self.topics.contracts = Control(self.options, self.topics, turn, {}, self.started_ns)
        self.serving = Serving(world.service) if world.service else None  # None: messages take no processor time
        self._ids = map(b"%016d".__mod__, count())
        self._learned: dict[str, list[tuple[int, int | None]]] = {}  # since when a topic is under which contract

    @property
    def name(self) -> str:
        """Its name."""
        return self.options.name

    @property
    def mono_ns(self) -> int:
        """Its own monotonic clock."""
        return self.world.now_ns + self.skew_ns

    def read(self, topic_name: str, publisher: str, bodies: list[bytes]) -> None:
        """Read messages that a publisher sent together, and end the turn."""
        topic, now_ns = self.topics.touch(topic_name), self.world.now_ns
        together = [Message(next(self._ids), now_ns, body, publisher) for body in bodies]
        topic.gate.arrived += together
        if self.serving is not None:
            self.serving.read(together, now_ns)
        topic.recent.largest_batch = max(topic.recent.largest_batch, len(bodies))
        self.control.check_lease(now_ns, self.mono_ns)
        self._drain(topic, now_ns)

    def turn(self) -> None:
        """One turn of the loop: release messages that have tokens."""
        now_ns = self.world.now_ns
        self.control.check_lease(now_ns, self.mono_ns)
        for topic in self.topics.values():
            self._drain(topic, now_ns)

    def second(self) -> None:
        """Close a second of statistics."""
        now_ns = self.world.now_ns
        if self.serving is not None:
            self.turn()  # so that all messages with tokens are known
            self.serving.account(now_ns)
        for topic in self.topics.values():
            topic.end_second(now_ns)

    def _drain(self, topic: Topic, now_ns: int) -> None:
        known, birth = self._learned.setdefault(topic.name, [(0, None)]), self.control.birth(topic.name)
        if known[-1][1] != birth:
            known.append((now_ns, birth))
        released = topic.gate.drain(now_ns)
        if released:
            self.world.drained(topic.name, self.name, released, known)
            if self.serving is not None:
                self.serving.release(topic, released)
        if topic.gate.lender is not None:
            topic.gate.lender.look(now_ns, topic.gate.claims)
