"""A channel: a copy of its topic's messages, shared by competing consumers.

Messages are in the queue, deferred, or in flight to one consumer; `FIN` ends one, a time-out or `REQ` brings it back.
Invariant: every message that was put is in exactly one of the three until it is finished, or was dropped and counted.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from random import Random
from typing import TYPE_CHECKING, Protocol

from srtm.protocol.frames import MAX_ATTEMPTS
from srtm.protocol.names import ephemeral
from srtm.protocol.server import failed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from srtm.broker.message import Message

NS_PER_MS = 1_000_000
_AT_THE_LIMIT = -1  # in place of a time-out: those that were touched to their last time, in no order
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
        self.bytes = 0  # of all messages that are not finished
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
            return
        self.bytes += len(message.body)
        if message.delay_ns:
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
                self.bytes -= len(message.body)
                continue
            if message.attempts < MAX_ATTEMPTS:  # which is all that a frame can say
                message.attempts += 1
            self._flights(consumer.timeout_ns)[message.id] = InFlight(
                message, consumer, now_ns, now_ns + consumer.timeout_ns
            )
            consumer.in_flight += 1
            consumer.deliver(message)

    def _flights(self, timeout_ns: int) -> OrderedDict[bytes, InFlight]:
        flights = self.in_flight.get(timeout_ns)
        if flights is None:
            flights = self.in_flight[timeout_ns] = OrderedDict()
        return flights

    def _taken(self, verb: str, consumer: Consumer, message_id: bytes) -> InFlight:
        for timeout_ns in (consumer.timeout_ns, _AT_THE_LIMIT):
            flights = self._flights(timeout_ns)
            flight = flights.get(message_id)
            if flight is not None and flight.consumer is consumer:
                del flights[message_id]
                return flight
        if any(message_id in flights for flights in self.in_flight.values()):
            raise failed(verb, message_id, "client does not own message")
        raise failed(verb, message_id, "ID not in flight")

    def finish(self, consumer: Consumer, message_id: bytes) -> None:
        """A consumer is done with a message."""
        flight = self._taken("FIN", consumer, message_id)
        consumer.in_flight -= 1
        self.finished += 1
        self.bytes -= len(flight.message.body)

    def requeue(self, consumer: Consumer, message_id: bytes, delay_ms: int, now_ns: int) -> None:
        """A consumer gives a message back, for later."""
        flight = self._taken("REQ", consumer, message_id)
        consumer.in_flight -= 1
        self.requeued += 1
        self._back(flight.message, delay_ms * NS_PER_MS, now_ns)

    def touch(self, consumer: Consumer, message_id: bytes, now_ns: int, longest_ns: int) -> None:
        """A consumer needs more time, but no more than `longest_ns` in all."""
        flight = self._taken("TOUCH", consumer, message_id)
        wanted_ns, last_ns = now_ns + consumer.timeout_ns, flight.sent_ns + longest_ns
        flight.deadline_ns = min(wanted_ns, last_ns)
        self._flights(consumer.timeout_ns if wanted_ns < last_ns else _AT_THE_LIMIT)[message_id] = flight

    def _back(self, message: Message, delay_ns: int, now_ns: int) -> None:
        if delay_ns:
            heapq.heappush(self.deferred, (now_ns + delay_ns, message.id, message))
        else:
            self.queue.append(message)

    def remind(self, now_ns: int) -> None:
        """Bring back what has timed out and what was deferred until now."""
        while self.deferred and self.deferred[0][0] <= now_ns:
            self.queue.append(heapq.heappop(self.deferred)[2])
        for timeout_ns, flights in self.in_flight.items():
            late = []
            for flight in flights.values():
                if flight.deadline_ns <= now_ns:
                    late.append(flight)
                elif timeout_ns != _AT_THE_LIMIT:
                    break
            for flight in late:
                del flights[flight.message.id]
                flight.consumer.in_flight -= 1
                self.timed_out += 1
                self.queue.append(flight.message)

    def leave(self, consumer: Consumer) -> None:
        """A consumer is gone; what it had goes to others."""
        self.consumers.remove(consumer)
        for timeout_ns in (consumer.timeout_ns, _AT_THE_LIMIT):
            flights = self._flights(timeout_ns)
            lost = [flight for flight in flights.values() if flight.consumer is consumer]
            for flight in lost:
                del flights[flight.message.id]
                self.queue.append(flight.message)
            self.requeued += len(lost)
        consumer.in_flight = 0

    def empty(self) -> None:
        """Forget everything."""
        self.bytes = 0
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
