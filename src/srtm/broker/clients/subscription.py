"""A client's place in a channel: messages that it was sent and has not finished, and how many more it may get."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.broker.channel import Channel, Consumer
from srtm.protocol import frames
from srtm.protocol.commands import Fin
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from typing import Any

    from srtm.broker.clients.connection import Connection
    from srtm.broker.message import Message
    from srtm.broker.statistics import ClientStatistics
    from srtm.broker.topic import Topic
    from srtm.errors import ProtocolError


class Subscription(Consumer):
    """One consumer of a channel."""

    __slots__ = (
        "_connection",
        "_max_unsent",
        "_out",
        "_turn",
        "channel",
        "delivered",
        "finished",
        "messages",
        "ready",
        "requeued",
        "topic",
    )

    def __init__(self, connection: Connection, topic: Topic, channel: Channel, max_unsent: int) -> None:
        identity = connection.protocol.identity
        self.topic = topic
        self.channel = channel
        self.ready = 0
        self.flights: dict[bytes, Message] = {}
        self.timeout_ns = identity.msg_timeout_ms * NS_PER_MS
        self.sample_rate = identity.sample_rate
        self.delivered: list[Message] = []  # in `out`, and not written yet
        self.messages = self.finished = self.requeued = 0
        self._connection = connection
        self._out = connection.out
        self._turn = connection.keeper.turn
        self._max_unsent = max_unsent
        connection.sent = self._account

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Messages that it may have in flight, has, was sent, finished and gave back."""
        return self.ready, len(self.flights), self.messages, self.finished, self.requeued

    def statistics(self) -> ClientStatistics:
        """A snapshot of the client."""
        return self._connection.speaker.statistics()

    def room(self) -> int:
        """How many messages it may be sent now."""
        return self.ready - len(self.flights) if len(self._out) < self._max_unsent else 0

    def deliver(self, messages: list[Message]) -> None:
        """Send it messages, at the end of this turn."""
        if not self.delivered:
            self._turn.to_deliver.append(self._connection)
        self._out += frames.messages(messages)
        self.delivered += messages
        self.messages += len(messages)

    def _account(self) -> None:
        """The kernel has all messages of a write: their latency ends here."""
        if not self.delivered:
            return
        turn, recent = self._turn, self.topic.recent
        sent_ns = turn.now_ns()
        if turn.recorder is not None:
            turn.recorder.sent(self.delivered, sent_ns)
        recent.sent += len(self.delivered)
        if not recent.full:
            total, processing = recent.total.append, recent.processing.append
            for message in self.delivered:
                if not message.sent_ns:
                    message.sent_ns = sent_ns
                    total(sent_ns - message.arrival_ns)
                    processing(sent_ns - message.release_ns)
        self.delivered.clear()

    def finish(self, ids: list[bytes]) -> list[ProtocolError]:
        """The client is done with these messages; returns what is wrong with those that it does not have."""
        pop, refusal = self.flights.pop, self.channel.refusal
        found = [pop(each, None) for each in ids]
        messages = [message for message in found if message is not None]
        self.finished += len(messages)
        self.channel.finish(messages)
        if len(messages) == len(ids):
            return []
        return [refusal("FIN", each) for each, message in zip(ids, found, strict=True) if message is None]

    def attend(self) -> None:
        """Messages wait, and it can take none: read now what it has finished."""
        if self._connection.resting:
            self._connection.keeper.end_rest(self._connection)

    def may_rest(self, events: list[Any]) -> bool:
        """Whether nobody waits for what it says: it only finishes messages, and may have many more."""
        return 4 * len(self.flights) < self.ready and all(type(event) is Fin for event in events)

    @property
    def hungry(self) -> bool:
        """Whether it has nearly as many messages as it may have."""
        return 4 * len(self.flights) >= self.ready

    def fail(self, problem: ProtocolError) -> None:
        """Tell the client what is wrong, and close it."""
        self._connection.fail(problem)

    def close(self) -> None:
        """Disconnect the client."""
        self._connection.close()
