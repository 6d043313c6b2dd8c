"""Processor time of a broker in virtual time: the model's `Server`, which all topics share.

In: reads with their arrival time, and messages as the bucket releases them. Out: latencies in the statistics of their
topics, and, to who `watch`es, the times of every message. A message is sent once it has been read and has its token.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtm.model.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from srtm.broker.message import Message
    from srtm.broker.topic import Topic
    from srtm.model.broker_models import ServiceModel

    Ints = NDArray[np.int64]


class Sent(NamedTuple):
    """Times of messages, in the order in which they were sent."""

    arrival_ns: Ints
    release_ns: Ints
    sent_ns: Ints

    @property
    def access_ns(self) -> Ints:
        """How long they waited for tokens."""
        return self.release_ns - self.arrival_ns

    @property
    def processing_ns(self) -> Ints:
        """How long the broker took after that."""
        return self.sent_ns - self.release_ns

    @classmethod
    def none(cls) -> Sent:
        """No messages."""
        return cls(*(np.empty(0, np.int64) for _ in cls._fields))

    def where(self, chosen: NDArray[np.bool_]) -> Sent:
        """Some of these messages."""
        return Sent(*(times[chosen] for times in self))

    def and_then(self, others: Sent) -> Sent:
        """These messages and others."""
        return Sent(*(np.concatenate(both) for both in zip(self, others, strict=True)))


class Processor:
    """The processor of one broker, told one event at a time."""

    def __init__(self, model: ServiceModel) -> None:
        self._server = Server(model)
        self._beside: deque[tuple[int, int]] = deque()  # reads of other load to come: when, and how many messages

    def carry(self, reads_ns: Ints, batch: int) -> None:
        """Other load to come, in batches: its reads take processor time; on several cores, others send its messages."""
        self._beside.extend((at_ns, batch) for at_ns in reads_ns.tolist())

    def read(self, together: Sequence[Message], now_ns: int) -> None:
        """Read messages that came together; until they are sent, `sent_ns` of a message says when it is read."""
        while self._beside and self._beside[0][0] <= now_ns:
            at_ns, batch = self._beside.popleft()
            self._server.read(batch, at_ns)
        read_ns = self._server.read(len(together), now_ns)
        for message in together:
            message.sent_ns = read_ns

    def send(self, topic: Topic, message: Message) -> None:
        """Send a message that has its token, as soon as it is read: `sent_ns` says when it is sent."""
        (message.sent_ns,) = self._server.release(topic, 1, max(message.sent_ns, message.release_ns))


class Serving(Processor):
    """A processor that counts the latencies of messages in the statistics of their topics."""

    def __init__(self, model: ServiceModel) -> None:
        super().__init__(model)
        self.watch: Callable[[Topic, Sent], None] | None = None  # is called with messages once they are sent
        self._released: defaultdict[Topic, list[Message]] = defaultdict(list)  # `sent_ns` says when they are read
        self._sending: defaultdict[Topic, Sent] = defaultdict(Sent.none)

    def release(self, topic: Topic, messages: list[Message]) -> None:
        """Send messages that have their tokens, as soon as they are read."""
        if self._server.model.cores == 1:  # where it delays the next read
            for message in messages:
                self.send(topic, message)
        self._released[topic] += messages

    def account(self, now_ns: int) -> None:
        """Count the latencies of all messages that have been sent by now, of which all are known."""
        for topic, released in self._released.items():
            self._send(topic, released, now_ns)
        for topic, sending in self._sending.items():
            over = sending.sent_ns <= now_ns
            sent, self._sending[topic] = sending.where(over), sending.where(~over)
            recent = topic.recent
            recent.sent += len(sent.sent_ns)
            recent.total.frombytes((sent.sent_ns - sent.arrival_ns).tobytes())
            recent.processing.frombytes(sent.processing_ns.tobytes())
            if self.watch is not None:
                self.watch(topic, sent)

    def _send(self, topic: Topic, released: list[Message], now_ns: int) -> None:
        """Let the topic's thread send what is ready by now, in that order: a small read may overtake a large one."""
        times = np.array([(each.arrival_ns, each.release_ns, each.sent_ns) for each in released], np.int64)
        found = Sent(*times.reshape(-1, 3).T)
        self._released[topic] = []
        if self._server.model.cores > 1:
            ready_ns = np.maximum(found.release_ns, found.sent_ns)
            order = np.argsort(ready_ns, kind="stable")
            order = order[: np.searchsorted(ready_ns[order], now_ns, side="right")]
            late = np.ones(len(released), np.bool_)
            late[order] = False
            self._released[topic] = [released[each] for each in np.flatnonzero(late)]
            sent_ns = self._server.send(topic, ready_ns[order])
            found = Sent(found.arrival_ns[order], found.release_ns[order], sent_ns)
        self._sending[topic] = self._sending[topic].and_then(found)
