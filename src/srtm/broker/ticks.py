"""Ten times a second: time-outs, heartbeats, the lease, the engine; once a second, the sums of each topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from srtm.units import NS_PER_S

if TYPE_CHECKING:
    import asyncio

    from srtm.broker.clients.heartbeats import Heartbeats
    from srtm.broker.control import Control
    from srtm.broker.topic import Topic
    from srtm.broker.topics import Topics
    from srtm.broker.turn import Clock, Turn

TICK_S: Final = 0.1  # how often time-outs are looked for, as in nsqd
_TICK_NS: Final = int(TICK_S * NS_PER_S)
_SUMS: Final = 4  # topics that are summed up before the loop turns: each takes a while
_BREAK_S: Final = 0.001
_LONGEST_SECOND_NS: Final = 10 * NS_PER_S
_SMOOTH_S: Final = 5  # seconds over which `busy` is smoothed: placement should not follow every blip


class Ticks:
    """What a broker does by the clock."""

    __slots__ = (
        "_clock",
        "_control",
        "_cpu_ns",
        "_due_ns",
        "_heartbeats",
        "_late_ns",
        "_second_ns",
        "_summed",
        "_timer",
        "_topics",
        "_turn",
    )

    def __init__(self, turn: Turn, clock: Clock, topics: Topics, control: Control, heartbeats: Heartbeats) -> None:
        self._turn = turn
        self._clock = clock
        self._topics = topics
        self._control = control
        self._heartbeats = heartbeats
        self._due_ns = self._late_ns = self._second_ns = 0
        self._cpu_ns = clock.process_time_ns()
        self._summed: list[Topic] = []  # whose last second is yet to be summed up
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick now, and from now on."""
        now_ns, turn = self._clock.time_ns(), self._turn
        self._control.check_lease(now_ns, self._clock.monotonic_ns())
        self._late_ns = max(self._late_ns, now_ns - self._due_ns) if self._due_ns else 0
        self._due_ns = now_ns + _TICK_NS
        for topic in self._topics.values():
            for channel in topic.channels.values():
                channel.remind(now_ns)
                if channel.queue:
                    turn.to_pump[channel] = None
        if self._topics.engine is not None:
            self._topics.engine.tick(now_ns)
        self._heartbeats.tick()
        if now_ns - self._second_ns >= NS_PER_S and not self._summed:
            self._measure_work(now_ns - self._second_ns)
            self._second_ns = now_ns
            turn.lag_ns, self._late_ns = self._late_ns, 0
            self._summed = list(self._topics.values())
            self._sum_up()
        turn.wake()
        self._timer = turn.loop.call_later(TICK_S, self.start)

    def _measure_work(self, elapsed_ns: int) -> None:
        """Let the broker's `busy` follow the processor time of this second."""
        before_ns, self._cpu_ns = self._cpu_ns, self._clock.process_time_ns()
        if elapsed_ns < _LONGEST_SECOND_NS:  # not the first one, and the clock was not set
            lately = (self._cpu_ns - before_ns) / elapsed_ns
            self._control.busy += (lately - self._control.busy) / _SMOOTH_S

    def _sum_up(self) -> None:
        now_ns = self._clock.time_ns()
        for topic in self._summed[-_SUMS:]:
            topic.end_second(now_ns)
        del self._summed[-_SUMS:]
        if self._summed:
            self._turn.loop.call_later(_BREAK_S, self._sum_up)

    def stop(self) -> None:
        """Tick no more."""
        if self._timer:
            self._timer.cancel()
