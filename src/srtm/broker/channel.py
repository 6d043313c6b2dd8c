"""A channel: a copy of its topic's messages, shared by competing consumers.

Messages are in the queue, deferred, or in flight to one consumer, which holds them: `FIN` ends one there, a time-out or
`REQ` brings it back.
Invariant: every message that was put is in exactly one of the three until it is finished, or was dropped and counted.
"""

from __future__ import annotations

import heapq
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Final

from srtm.broker.statistics import ChannelStatistics
from srtm.protocol.commands import failed
from srtm.protocol.frames import MAX_ATTEMPTS
from srtm.protocol.names import ephemeral
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from srtm.broker.disk.cursor import Cursor
    from srtm.broker.message import Message
    from srtm.broker.statistics import ClientStatistics
    from srtm.errors import ProtocolError

_AT_ONCE: Final = 32  # messages handed over between two looks at what a consumer has not read yet
_BYTES_AT_ONCE: Final = 64 * 1024  # about: messages of a topic are alike
_sample: Final = Random(0)


def _by_deadline(flight: tuple[bytes, Message]) -> int:
    return flight[1].deadline_ns


class Consumer:
    """What a channel asks of a subscribed connection."""

    __slots__ = ("flights", "sample_rate", "timeout_ns")

    timeout_ns: int
    sample_rate: int
    flights: dict[bytes, Message]  # that it has: all of one time-out, so they run out in the order they were taken

    def room(self) -> int:
        """How many messages it may be sent now."""
        raise NotImplementedError

    def deliver(self, messages: list[Message]) -> None:
        """Send it these, at the end of this turn."""
        raise NotImplementedError

    def attend(self) -> None:
        """Messages wait for it: hear now what it has finished."""
        raise NotImplementedError

    def fail(self, problem: ProtocolError) -> None:
        """Tell it what is wrong, and close it."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect it."""
        raise NotImplementedError

    def statistics(self) -> ClientStatistics:
        """A snapshot of the client."""
        raise NotImplementedError


class Tally:
    """Messages that did not go straight from the queue to FIN."""

    __slots__ = ("dropped", "lost", "requeued", "timed_out")

    def __init__(self) -> None:
        self.requeued = 0
        self.timed_out = 0
        self.dropped = 0  # by an ephemeral channel that is full
        self.lost = 0  # deleted from the log of a disk topic before it got them


class Channel:
    """One channel of a topic."""

    def __init__(self, name: str, max_messages: int, max_bytes: int) -> None:
        self.name = name
        self.ephemeral = ephemeral(name)
        self.paused = False
        self.queue: deque[Message] = deque()
        self.deferred: list[tuple[int, bytes, Message]] = []
        self.consumers: list[Consumer] = []
        self.messages = self.finished = 0
        self.tally = Tally()
        self.cursor: Cursor | None = None  # its place in the log of a topic on disk
        self.bytes = 0  # of all messages that are not finished
        self._limits = max_messages, max_bytes
        self._turn = 0

    @property
    def depth(self) -> int:
        """Messages that wait for a consumer."""
        return len(self.queue)

    @property
    def flying(self) -> int:
        """Messages that consumers have."""
        return sum(len(consumer.flights) for consumer in self.consumers)

    @property
    def held(self) -> int:
        """Messages that take memory here and are not with a consumer."""
        return len(self.queue) + len(self.deferred)

    def statistics(self, *, clients: bool = False) -> ChannelStatistics:
        """A snapshot; with `clients`, it lists the consumers."""
        return ChannelStatistics(
            self.name,
            self.depth,
            self.flying,
            len(self.deferred),
            self.messages,
            self.tally.requeued,
            self.tally.timed_out,
            self.finished,
            self.tally.dropped,
            self.tally.lost,
            self.paused,
            len(self.consumers),
            tuple(consumer.statistics() for consumer in self.consumers) if clients else None,
        )

    def put(self, messages: list[Message], now_ns: int) -> int:
        """Take messages from the topic; a channel that nobody will miss drops what it cannot hold. How many."""
        self.messages += len(messages)
        queue, dropped, (most, most_bytes) = self.queue, self.tally.dropped, self._limits
        for message in messages:
            if self.ephemeral and (self.held >= most or self.bytes >= most_bytes):
                self.tally.dropped += 1
                continue
            self.bytes += len(message.body)
            if message.delay_ns:
                self._back(message, message.delay_ns, now_ns)
            else:
                queue.append(message)
        return self.tally.dropped - dropped

    def pump(self, now_ns: int) -> None:
        """Hand queued messages to consumers that can take them, in turns."""
        queue, consumers = self.queue, self.consumers
        if self.paused or not queue or not consumers:
            return
        idle = 0
        while queue and idle < len(consumers):
            self._turn = (self._turn + 1) % len(consumers)
            consumer = consumers[self._turn]
            share = -(-len(queue) // len(consumers))
            most = min(share, consumer.room(), _AT_ONCE, 1 + _BYTES_AT_ONCE // (len(queue[0].body) + 1))
            if most <= 0:
                idle += 1
                continue
            idle = 0
            if most == len(queue):
                batch = list(queue)
                queue.clear()
            else:
                batch = [queue.popleft() for _ in range(most)]
            if consumer.sample_rate:
                for message in batch:
                    self.bytes -= len(message.body)
                everything, batch = batch, [m for m in batch if _sample.randrange(100) < consumer.sample_rate]
                if self.cursor is not None:
                    for message in set(everything) - set(batch):
                        self.cursor.finish(message.offset)
                self.finished += most - len(batch)  # as nsqd does: what is not in the sample is gone
                for message in batch:
                    self.bytes += len(message.body)
            flights, deadline_ns = consumer.flights, now_ns + consumer.timeout_ns
            for message in batch:
                if message.attempts < MAX_ATTEMPTS:  # two bytes in its frame
                    message.attempts += 1
                message.taken_ns = now_ns
                message.deadline_ns = deadline_ns
                flights[message.id] = message
            consumer.deliver(batch)
        if queue:
            for consumer in consumers:
                consumer.attend()

    def finish(self, messages: list[Message]) -> None:
        """A consumer has done what there was to do with these messages."""
        self.finished += len(messages)
        self.bytes -= sum([len(message.body) for message in messages])
        if self.cursor is not None:
            for message in messages:
                self.cursor.finish(message.offset)

    def _taken(self, verb: str, consumer: Consumer, message_id: bytes) -> Message:
        message = consumer.flights.pop(message_id, None)
        if message is None:
            raise self.refusal(verb, message_id)
        return message

    def refusal(self, verb: str, message_id: bytes) -> ProtocolError:
        """Why a consumer cannot have meant this message, which it does not have."""
        elsewhere = any(message_id in consumer.flights for consumer in self.consumers)
        return failed(verb, message_id, "client does not own message" if elsewhere else "ID not in flight")

    def requeue(self, consumer: Consumer, message_id: bytes, delay_ms: int, now_ns: int) -> None:
        """A consumer gives a message back, for later."""
        message = self._taken("REQ", consumer, message_id)
        self.tally.requeued += 1
        self._back(message, delay_ms * NS_PER_MS, now_ns)

    def touch(self, consumer: Consumer, message_id: bytes, now_ns: int, longest_ns: int) -> None:
        """A consumer needs more time, but no more than `longest_ns` in all."""
        message = self._taken("TOUCH", consumer, message_id)
        wanted_ns, last_ns = now_ns + consumer.timeout_ns, message.taken_ns + longest_ns
        message.deadline_ns = min(wanted_ns, last_ns)
        consumer.flights[message_id] = message
        if last_ns < wanted_ns:  # it runs out before others that were taken or touched earlier
            in_order = sorted(consumer.flights.items(), key=_by_deadline)
            consumer.flights.clear()
            consumer.flights.update(in_order)

    def _back(self, message: Message, delay_ns: int, now_ns: int) -> None:
        if delay_ns:
            heapq.heappush(self.deferred, (now_ns + delay_ns, message.id, message))
        else:
            self.queue.append(message)

    def remind(self, now_ns: int) -> None:
        """Bring back what has timed out and what was deferred until now."""
        while self.deferred and self.deferred[0][0] <= now_ns:
            self.queue.append(heapq.heappop(self.deferred)[2])
        for consumer in self.consumers:
            late = []
            for message in consumer.flights.values():
                if message.deadline_ns > now_ns:
                    break
                late.append(message)
            for message in late:
                del consumer.flights[message.id]
            self.tally.timed_out += len(late)
            self.queue.extend(late)

    def leave(self, consumer: Consumer) -> None:
        """A consumer is gone; what it had goes to others."""
        self.consumers.remove(consumer)
        self.tally.timed_out += len(consumer.flights)  # as nsqd counts them, which waits until their time is over
        self.queue.extend(consumer.flights.values())
        consumer.flights.clear()

    def empty(self) -> None:
        """Forget everything."""
        if self.cursor is not None:
            for message in self.everything():
                self.cursor.finish(message.offset)
        self.bytes = 0
        self.queue.clear()
        self.deferred.clear()
        for consumer in self.consumers:
            consumer.flights.clear()

    def forget(self, begin: int, end: int) -> None:
        """Drop what waits here and lies in a range of offsets of the log; consumers keep what they have."""
        going = range(begin, end)
        if not going:
            return
        held = [*self.queue, *(message for _, _, message in self.deferred)]
        self.bytes -= sum(len(message.body) for message in held if message.offset in going)
        kept = [message for message in self.queue if message.offset not in going]
        self.queue.clear()
        self.queue.extend(kept)
        self.deferred = [entry for entry in self.deferred if entry[2].offset not in going]
        heapq.heapify(self.deferred)

    def everything(self) -> Iterable[Message]:
        """All messages that are not finished: to be saved when the broker stops."""
        for consumer in self.consumers:
            yield from consumer.flights.values()
        yield from self.queue
        for _, _, message in self.deferred:
            yield message
