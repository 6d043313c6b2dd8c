"""Paced brokers: real ones whose service takes, by timers, as long as a model says.

In: the turns of a broker, with messages as they arrive and as buckets release them. Out: the same messages, handed to
channels when `model.service.Server` has served them: read on its cores from the kernel's arrival time on, with their
tokens, and through the serial stage. The host's processor hardly matters if the model is slow enough (`slower`), so
many such brokers fit on few cores. Statistics and traces of the broker include the service, as they do any other.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count, groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from srtm.broker.turn import Turn
from srtm.net.alarm import Alarm
from srtm.testing.serving import Processor
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from srtm.broker.message import Message
    from srtm.broker.topic import Topic
    from srtm.model.broker_models import ServiceModel
    from srtm.model.server import Background
    from srtm.testing.serving import Ints

_by_arrival, _read_event = attrgetter("arrival_ns"), attrgetter("arrival_ns", "publisher")


@dataclass(frozen=True, slots=True)
class Pace:
    """How a paced broker serves, and the load that its model carries besides its topics.

    With a `grain`, messages that the model sends within it leave together, at its end: a wake-up for each message of a
    batch costs processor time.
    """

    model: ServiceModel
    beside: Background | None = None
    seed: int = 0
    grain_ns: int = 0

    def reads_ns(self, first_ns: int, last_ns: int) -> Ints:
        """Read events of the load besides, from one instant to before another.

        Each second of the clock is drawn by itself, so whoever knows the pace knows these times.
        """
        drawn = [np.empty(0, np.int64)]
        for second in range(first_ns // NS_PER_S, -(-last_ns // NS_PER_S) if self.beside else 0):
            rng, begin_ns = np.random.default_rng([self.seed, second]), second * NS_PER_S
            drawn.append(self.beside.reads(begin_ns, begin_ns + NS_PER_S - 1, rng))  # type: ignore[union-attr]
        found = np.concatenate(drawn)
        return found[(found >= first_ns) & (found < last_ns)]


@dataclass(slots=True)
class _Line:
    """Messages of one topic that the model has not sent yet."""

    ready: list[tuple[int, int, Message]] = field(default_factory=list)  # a heap: when each can enter the serial stage
    sending: deque[Message] = field(default_factory=deque)  # in it: `sent_ns` says until when

    def next_ns(self, model: ServiceModel) -> int | None:
        """When a message may leave next: what is ready must still pass the serial stage."""
        times = [self.ready[0][0] + model.serial_ns + model.base_ns] if self.ready else []
        return min([*times, self.sending[0].sent_ns] if self.sending else times, default=None)


class PacedTurn(Turn):
    """A turn of a paced broker: what buckets release stays until the model has sent it."""

    __slots__ = ("_bell", "_carried_ns", "_lines", "_number", "_pace", "_processor")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        alarm: Callable[..., Alarm] = Alarm,
        *,
        pace: Pace,
    ) -> None:
        super().__init__(loop, now_ns, alarm)
        self._pace = pace
        self._processor = Processor(pace.model)
        self._lines: dict[Topic, _Line] = {}
        self._number = count()
        self._carried_ns = now_ns()  # until when the load besides is known
        self._bell = alarm(loop, self.end)

    def end(self, *, more: bool = False) -> None:
        """Hand over what the model has sent by now, and carry out what the turn has touched."""
        now_ns = self.now_ns()
        for topic, line in self._lines.items():
            if sent := list(self._sent(topic, line, now_ns)):
                super()._distribute(topic, sent, now_ns)
        super().end(more=more)
        model, lines = self._pace.model, self._lines.values()
        times = [at_ns for line in lines if (at_ns := line.next_ns(model)) is not None]
        if times:
            self._bell.set(min(times) + self._pace.grain_ns, self.now_ns())

    def _drain(self, topic: Topic, now_ns: int) -> None:
        if arrived := sorted(topic.gate.arrived, key=_by_arrival):
            if self._pace.beside is not None and self._carried_ns <= now_ns:
                until_ns = (now_ns // NS_PER_S + 1) * NS_PER_S
                self._processor.carry(self._pace.reads_ns(self._carried_ns, until_ns), self._pace.beside.batch)
                self._carried_ns = until_ns
            for (arrival_ns, _), together in groupby(arrived, _read_event):
                self._processor.read(list(together), arrival_ns)
        super()._drain(topic, now_ns)

    def _distribute(self, topic: Topic, released: list[Message], now_ns: int) -> None:
        line = self._lines.setdefault(topic, _Line())
        for message in released:
            if self._pace.model.cores == 1:  # where sending delays the next read
                self._processor.send(topic, message)
                line.sending.append(message)
            else:
                ready_ns = max(message.sent_ns, message.release_ns)
                heapq.heappush(line.ready, (ready_ns, next(self._number), message))
        if topic.unclaimed:
            super()._distribute(topic, [], now_ns)

    def _sent(self, topic: Topic, line: _Line, now_ns: int) -> Iterator[Message]:
        """Let the serial stage take what is ready by now; returns what has left it by now."""
        while line.ready and line.ready[0][0] <= now_ns:
            _, _, message = heapq.heappop(line.ready)
            self._processor.send(topic, message)
            line.sending.append(message)
        while line.sending and line.sending[0].sent_ns <= now_ns:
            message = line.sending.popleft()
            message.sent_ns = 0  # nobody has it yet
            yield message

    def forget(self, topic: Topic) -> None:
        """Drop a topic that was deleted."""
        self._lines.pop(topic, None)
        super().forget(topic)

    def close(self) -> None:
        """Ring no more."""
        self._bell.close()
        super().close()
