"""The one way to publish, for every protocol and every kind of topic.

In: bodies for a topic, their arrival time, and the sender. Out: messages before the topic's bucket. The sender is
answered when its messages are as safe as the topic promises: at once if they are in memory, otherwise by a receipt,
when the log has stored them or the engine has acknowledged them. A topic on disk that an engine delivers promises the
disk.

Always holds:
- a command is accepted whole or refused whole, before anything of it is counted;
- a full topic refuses senders that cannot be made to wait; all others wait from the end of the turn on;
- messages of a disk topic reach their topic in the order of their offsets, when they are durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from srtm.broker.message import Ids, Message
from srtm.broker.receipts import Receipt, Tracked
from srtm.errors import PublishRefused

if TYPE_CHECKING:
    from srtm.broker.engines.engine import Engine
    from srtm.broker.topic import Sender, Topic
    from srtm.broker.topics import Topics
    from srtm.broker.turn import Turn


class Store(Protocol):
    """The disk, as publishing uses it."""

    def publish(self, topic: Topic, messages: list[Message], receipt: Receipt, sender: Sender) -> None:
        """Store messages together with all others of this turn; then count them, put them before their topic, and
        settle the receipt.
        """


class Intake:
    """Accepts messages."""

    __slots__ = ("_engine", "_ids", "_known", "_store", "_topics", "_turn")

    def __init__(self, topics: Topics, turn: Turn, ids: Ids, store: Store | None = None) -> None:
        self._topics = topics
        self._turn = turn
        self._known = topics.by_name  # looked up here: a call less per message
        self._ids = ids
        self._engine = topics.engine
        self._store = store

    def publish(
        self,
        sender: Sender,
        name: str,
        bodies: list[bytes],
        arrival_ns: int,
        delay_ns: int = 0,
        verb: str = "PUB",
    ) -> Receipt | None:
        """Accept the messages of one command; returns None if they are safe already, otherwise what to wait for.

        PublishRefused if the topic or its engine does not take them, BrokerError if the topic cannot be had here.
        """
        topic = self._known.get(name)
        if topic is None:
            topic = self._topics.touch(name)
        else:
            self._turn.to_drain[topic] = None
        if sender.too_full is not None and sender.too_full(topic):
            raise PublishRefused("topic is full", reason="full")
        if topic.later:
            return self._publish_later(topic, sender, bodies, arrival_ns, delay_ns, verb)
        if len(bodies) == 1:
            body = bodies[0]
            topic.gate.arrived.append(Message(self._ids.take(), arrival_ns, body, sender.publisher, delay_ns))
            topic.bytes += len(body)
        else:
            ids, publisher = self._ids, sender.publisher
            topic.gate.arrived += [Message(ids.take(), arrival_ns, body, publisher, delay_ns) for body in bodies]
            topic.bytes += sum(map(len, bodies))
            _record_batch(topic, len(bodies))
        topic.senders[sender] = None
        return None

    def _publish_later(
        self, topic: Topic, sender: Sender, bodies: list[bytes], arrival_ns: int, delay_ns: int, verb: str
    ) -> Receipt | None:
        if not bodies:
            return None
        ids, publisher, receipt = self._ids, sender.publisher, Receipt(sender, len(bodies), verb)
        engine = self._engine
        if engine is not None and delay_ns and not engine.defers:
            raise PublishRefused(f"the engine {engine.kind} cannot defer messages", reason="defer")
        if topic.durable is None:
            topic.gate.arrived += [
                Tracked(ids.take(), arrival_ns, body, publisher, delay_ns, receipt) for body in bodies
            ]
            topic.bytes += sum(map(len, bodies))
            topic.senders[sender] = None
        else:
            assert self._store is not None
            if engine is not None:  # which cannot refuse what is answered when the log has it
                self._check(engine, publisher, bodies)
            messages = [Message(ids.take(), arrival_ns, body, publisher, delay_ns) for body in bodies]
            self._store.publish(topic, messages, receipt, sender)
        _record_batch(topic, len(bodies))
        return receipt

    def _check(self, engine: Engine, publisher: str, bodies: list[bytes]) -> None:
        for body in bodies:
            if problem := engine.objection(publisher, body):
                raise PublishRefused(f"the engine {engine.kind} refuses it: {problem}", reason="size")


def _record_batch(topic: Topic, size: int) -> None:
    """Keep the largest batch of this second: the TB Adaptor never fits a burst below it."""
    if size > topic.recent.largest_batch:
        topic.recent.largest_batch = size
