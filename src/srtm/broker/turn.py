"""A turn of the loop: everything that its reads have touched, and the one place where that takes effect.

During a turn, reads put messages before topics and mark what they touched. At its end every touched topic releases the
messages that have tokens, channels hand them to consumers, and each connection gets one write. One alarm wakes the loop
for the next token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from srtm.broker.backpressure import Backpressure, Farewells
from srtm.native import mypyc_attr
from srtm.net.alarm import Alarm

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from srtm.broker.arrivals import Arrivals
    from srtm.broker.channel import Channel
    from srtm.broker.message import Message
    from srtm.broker.recorder import Recorder
    from srtm.broker.topic import Topic


class Clock(Protocol):
    """The clocks of a broker; the module `time` has them."""

    def time_ns(self) -> int:
        """Return the time of the clock that the kernel stamps with."""

    def monotonic_ns(self) -> int:
        """Return the time of the clock that leases run by."""

    def process_time_ns(self) -> int:
        """Return the processor time that this process has used."""


class Flushed(Protocol):
    """Something that is written once a turn."""

    def flush(self) -> None:
        """Write everything that this turn has for it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Turn:
    """What this turn has touched: topics to drain, channels to pump, connections to write to."""

    __slots__ = (
        "_alarm",
        "_awake",
        "_limited",
        "disk",
        "engine",
        "farewells",
        "lag_ns",
        "loop",
        "now_ns",
        "pressure",
        "recorder",
        "to_deliver",
        "to_drain",
        "to_flush",
        "to_pump",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, now_ns: Callable[[], int], alarm: Callable[..., Alarm] = Alarm
    ) -> None:
        self.loop = loop
        self.now_ns = now_ns
        self.to_drain: dict[Topic, None] = {}
        self.to_pump: dict[Channel, None] = {}
        self.to_deliver: list[Flushed] = []  # before answers: the latency of a message ends with its own write
        self.to_flush: list[Flushed] = []
        self.disk: Flushed | None = None
        self.engine: Flushed | None = None
        self.recorder: Recorder | Arrivals | None = None
        self.pressure = Backpressure(self.wake, now_ns)
        self.farewells = Farewells(loop, self.touch)
        self.lag_ns = 0  # the largest delay of a tick in the last second
        self._limited: dict[Topic, int] = {}  # topics to drain by themselves, and when: messages wait for tokens
        self._awake = False
        self._alarm = alarm(loop, self.end)

    def wake(self) -> None:
        """Have a turn soon: there is work that no socket has brought."""
        if not self._awake:
            self._awake = True
            self.loop.call_soon(self._woken)

    def _woken(self) -> None:
        self._awake = False
        self.end()

    def touch(self, topic: Topic) -> None:
        """Drain a topic soon."""
        self.to_drain[topic] = None
        self.wake()

    def pump(self, channel: Channel) -> None:
        """Pump a channel soon."""
        self.to_pump[channel] = None
        self.wake()

    def end(self, *, more: bool = False) -> None:
        """Carry out what the turn has touched; answers wait if `more` reads follow at once."""
        if self.disk is not None:
            self.disk.flush()
        now_ns = self.now_ns()
        to_drain, self.to_drain = self.to_drain, {}
        for topic, release_ns in self._limited.items():
            if release_ns <= now_ns:
                to_drain[topic] = None
        for topic in to_drain:
            self._drain(topic, now_ns)
        to_pump, self.to_pump = self.to_pump, {}
        for channel in to_pump:
            channel.pump(now_ns)
        if self.engine is not None:
            self.engine.flush()
        to_deliver, self.to_deliver = self.to_deliver, []
        for connection in to_deliver:
            connection.flush()
        if self.pressure.blocked:
            self.pressure.unblock()
        if not more:
            to_flush, self.to_flush = self.to_flush, []
            for connection in to_flush:
                connection.flush()
        if self._limited:
            self._alarm.set(min(self._limited.values()), self.now_ns())

    def _drain(self, topic: Topic, now_ns: int) -> None:
        gate = topic.gate
        arrived = gate.arrived if gate.drops else None
        released = gate.drain(now_ns)
        if self.recorder is not None:
            if released:
                self.recorder.released(topic.name, released)
            if arrived:
                passed = set(map(id, released))
                self.recorder.dropped(topic.name, [message for message in arrived if id(message) not in passed])
        if released or topic.unclaimed:
            self._distribute(topic, released, now_ns)
        if gate.waiting and gate.limiter is not None and not gate.stalled:
            self._limited[topic] = gate.next_release_ns()
            for sender in topic.senders:
                sender.slow()
        else:
            self._limited.pop(topic, None)
        if gate.lender is not None:
            wake_ns = gate.lender.look(now_ns, gate.claims)
            if wake_ns is not None:
                self._limited[topic] = min(wake_ns, self._limited.get(topic, wake_ns))
        if topic in self.farewells.waiting:
            self.farewells.let_go(topic)
        if topic.senders:
            if topic.crowded:
                self.pressure.block(topic)
            topic.senders.clear()

    def _distribute(self, topic: Topic, released: list[Message], now_ns: int) -> None:
        """Give channels or the engine what a topic released."""
        topic.distribute(released, now_ns)
        for channel in topic.channels.values():
            self.to_pump[channel] = None

    def forget(self, topic: Topic) -> None:
        """Drop a topic that was deleted, and let its publishers go on."""
        self.to_drain.pop(topic, None)
        self._limited.pop(topic, None)
        self.pressure.forget(topic)

    def close(self) -> None:
        """Ring no more."""
        self._alarm.close()
