"""A channel: a copy of its topic's messages, shared by competing consumers.

Messages are in the queue, deferred, or in flight to one consumer; `FIN` ends one, a time-out or `REQ` brings it back.
Invariant: every message that was put is in exactly one of the three until it is finished, or was dropped and counted.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from random import Random
from typing import TYPE_CHECKING, Protocol

from srtm.protocol.names import ephemeral
from srtm.protocol.server import failed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from srtm.broker.message import Message

NS_PER_MS = 1_000_000
_sample = Random(0)


class Consumer(Protocol):
    """What a channel asks of a subscribed connection."""

    timeout_ns: int
    sample_rate: int
    in_flight: int

    def can_take(self) -> bool:
        """Whether it may be sent a message now."""

    def deliver(self, message: Message) -> None:
        """Send it one, at the end of this turn."""

    def attend(self) -> None:
        """Messages wait for it: hear now what it has finished."""


class InFlight:
    """A message that a consumer has, until when."""

    __slots__ = ("consumer", "deadline_ns", "message", "sent_ns")

    def __init__(self, message: Message, consumer: Consumer, sent_ns: int, deadline_ns: int) -> None:
        self.message = message
        self.consumer = consumer
        self.sent_ns = sent_ns
        self.deadline_ns = deadline_ns


class Channel:
    """One channel of a topic."""

    def __init__(self, name: str, max_messages: int) -> None:
        self.name = name
        self.ephemeral = ephemeral(name)
        self.paused = False
        self.queue: deque[Message] = deque()
        self.deferred: list[tuple[int, bytes, Message]] = []
        # By time-out, because those of one time-out run out in the order in which they were sent.
        self.in_flight: dict[int, OrderedDict[bytes, InFlight]] = {}
        self.consumers: list[Consumer] = []
        self.messages = self.requeued = self.timed_out = self.finished = self.dropped = 0
        self._max = max_messages
        self._turn = 0

    @property
    def depth(self) -> int:
        """Messages that wait for a consumer."""
        return len(self.queue)

    @property
    def flying(self) -> int:
        """Messages that consumers have."""
        return sum(len(flights) for flights in self.in_flight.values())

    @property
    def held(self) -> int:
        """Messages that take memory here and are not with a consumer."""
        return len(self.queue) + len(self.deferred)

    def put(self, message: Message, now_ns: int) -> None:
        """Take a message from the topic; a channel that nobody will miss drops what it cannot hold."""
        self.messages += 1
        if self.ephemeral and self.held >= self._max:
            self.dropped += 1
        elif message.delay_ns:
            heapq.heappush(self.deferred, (now_ns + message.delay_ns, message.id, message))
        else:
            self.queue.append(message)

    def pump(self, now_ns: int) -> None:
        """Hand queued messages to consumers that can take them, in turns."""
        queue, consumers = self.queue, self.consumers
        if self.paused or not queue or not consumers:
            return
        idle = 0
        while queue and idle < len(consumers):
            self._turn = (self._turn + 1) % len(consumers)
            consumer = consumers[self._turn]
            if not consumer.can_take():
                idle += 1
                continue
            idle = 0
            message = queue.popleft()
            if consumer.sample_rate and _sample.randrange(100) >= consumer.sample_rate:
                self.finished += 1  # as nsqd does: what is not in the sample is gone
                continue
            message.attempts += 1
            self._flights(consumer.timeout_ns)[message.id] = InFlight(
                message, consumer, now_ns, now_ns + consumer.timeout_ns
            )
            consumer.in_flight += 1
            consumer.deliver(message)
        if queue:
            for consumer in consumers:
                consumer.attend()

    def _flights(self, timeout_ns: int) -> OrderedDict[bytes, InFlight]:
        flights = self.in_flight.get(timeout_ns)
        if flights is None:
            flights = self.in_flight[timeout_ns] = OrderedDict()
        return flights

    def _taken(self, verb: str, consumer: Consumer, message_id: bytes) -> InFlight:
        flight = self._flights(consumer.timeout_ns).pop(message_id, None)
        if flight is None:
            raise failed(verb, message_id, "ID not in flight")
        if flight.consumer is not consumer:
            self._flights(consumer.timeout_ns)[message_id] = flight
            raise failed(verb, message_id, "client does not own message")
        return flight

    def finish(self, consumer: Consumer, message_id: bytes) -> None:
        """A consumer is done with a message."""
        self._taken("FIN", consumer, message_id)
        consumer.in_flight -= 1
        self.finished += 1

    def requeue(self, consumer: Consumer, message_id: bytes, delay_ms: int, now_ns: int) -> None:
        """A consumer gives a message back, for later."""
        flight = self._taken("REQ", consumer, message_id)
        consumer.in_flight -= 1
        self.requeued += 1
        self._back(flight.message, delay_ms * NS_PER_MS, now_ns)

    def touch(self, consumer: Consumer, message_id: bytes, now_ns: int, longest_ns: int) -> None:
        """A consumer needs more time, but no more than `longest_ns` in all."""
        flight = self._taken("TOUCH", consumer, message_id)
        flight.deadline_ns = min(now_ns + consumer.timeout_ns, flight.sent_ns + longest_ns)
        self._flights(consumer.timeout_ns)[message_id] = flight

    def _back(self, message: Message, delay_ns: int, now_ns: int) -> None:
        if delay_ns:
            heapq.heappush(self.deferred, (now_ns + delay_ns, message.id, message))
        else:
            self.queue.append(message)

    def remind(self, now_ns: int) -> None:
        """Bring back what has timed out and what was deferred until now."""
        while self.deferred and self.deferred[0][0] <= now_ns:
            self.queue.append(heapq.heappop(self.deferred)[2])
        for flights in self.in_flight.values():
            while flights:
                message_id, flight = next(iter(flights.items()))
                if flight.deadline_ns > now_ns:
                    break
                del flights[message_id]
                flight.consumer.in_flight -= 1
                self.timed_out += 1
                self.queue.append(flight.message)

    def leave(self, consumer: Consumer) -> None:
        """A consumer is gone; what it had goes to others."""
        self.consumers.remove(consumer)
        flights = self._flights(consumer.timeout_ns)
        lost = [flight for flight in flights.values() if flight.consumer is consumer]
        for flight in lost:
            del flights[flight.message.id]
            self.queue.append(flight.message)
        self.requeued += len(lost)

    def empty(self) -> None:
        """Forget everything."""
        self.queue.clear()
        self.deferred.clear()
        for flights in self.in_flight.values():
            for flight in flights.values():
                flight.consumer.in_flight -= 1
            flights.clear()

    def everything(self) -> Iterable[Message]:
        """All messages that are not finished: to be saved when the broker stops."""
        for flights in self.in_flight.values():
            for flight in flights.values():
                yield flight.message
        yield from self.queue
        for _, _, message in self.deferred:
            yield message
