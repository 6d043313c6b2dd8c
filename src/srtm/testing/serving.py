"""Processor time of a broker in virtual time: the model's `Server`, which all topics share.

In: reads with their arrival time, and messages as the bucket releases them. Out: latencies in the statistics of their
topics. A message is sent once it has been read and has its token.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from srtm.model.service import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from srtm.broker.message import Message
    from srtm.broker.topic import Topic
    from srtm.model.broker_models import ServiceModel


class Serving:
    """The processor of one broker."""

    def __init__(self, model: ServiceModel) -> None:
        self._server = Server(model)
        self._sending: defaultdict[Topic, deque[Message]] = defaultdict(deque)  # released, in order of `sent_ns`

    def read(self, together: Sequence[Message], now_ns: int) -> None:
        """Read messages that came together; until its release, `sent_ns` of a message says when it is read."""
        read_ns = self._server.read(len(together), now_ns)
        for message in together:
            message.sent_ns = read_ns

    def release(self, topic: Topic, message: Message) -> None:
        """Send a message that has its token, as soon as it is read."""
        (message.sent_ns,) = self._server.release(topic, 1, max(message.sent_ns, message.release_ns))
        self._sending[topic].append(message)

    def account(self, now_ns: int) -> None:
        """Count the latencies of all messages that have been sent by now."""
        for topic, sending in self._sending.items():
            recent = topic.recent
            while sending and sending[0].sent_ns <= now_ns:
                message = sending.popleft()
                recent.sent += 1
                recent.total.append(message.sent_ns - message.arrival_ns)
                recent.processing.append(message.sent_ns - message.release_ns)
