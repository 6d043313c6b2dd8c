"""A topic's way to its engine: what was released and has no acknowledgement, and who waits for one.

In: messages that a bucket has let go, and the engine's word that it takes them, or not. Out: messages in order, to be
sent; answers to publishers; the rest back to the topic when the engine is gone.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Protocol

from srtm.broker.receipts import settle
from srtm.broker.statistics import LaneStatistics
from srtm.net.backoff import Backoff

if TYPE_CHECKING:
    from srtm.broker.engines.probe import Probe
    from srtm.broker.engines.spool import Spool
    from srtm.broker.message import Message
    from srtm.broker.topic import Topic

log = logging.getLogger(__name__)


def patience() -> Backoff:
    """Waits before an engine, or a topic at it, is tried again."""
    return Backoff(0.02, 0.5)


class Carrier(Protocol):
    """The engine, as its lanes use it."""

    kind: ClassVar[str]
    lanes: dict[str, Lane]
    busy: dict[Lane, None]
    problem: str | None

    @property
    def absence(self) -> str | None:
        """Why the engine takes nothing; None if it is there."""

    def touch(self, lane: Lane) -> None:
        """Note that a lane has something to send, or its topic something to release."""

    def new_probe(self, lane: Lane) -> Probe:
        """Make a probe of a topic."""


class Lane:
    """A topic's way to its engine: what was released and has no acknowledgement."""

    __slots__ = (
        "backoff",
        "bytes",
        "engine",
        "flying",
        "owed",
        "probe",
        "problem",
        "queue",
        "ready",
        "refused",
        "retry_ns",
        "singly",
        "spool",
        "topic",
    )

    def __init__(self, engine: Carrier, topic: Topic) -> None:
        self.engine = engine
        self.topic = topic
        self.spool: Spool | None = None  # of a topic on disk: what the engine has not acknowledged
        self.queue: deque[Message] = deque()
        self.flying = 0  # messages that the engine has
        self.bytes = 0  # of these and those in the queue
        self.owed = 0  # tokens that messages in the queue had, and spend again
        self.ready = False  # it may be sent messages
        self.singly = 0  # messages to be sent one by one: the engine refused one of them
        self.probe: Probe | None = None  # who times its messages to a consumer, if somebody wants it
        self.problem: str | None = None  # why it is shut though the engine is there
        self.refused: str | None = None  # why a stored message was dropped, as it was said last
        self.retry_ns = 0
        self.backoff = patience()

    @property
    def overdue(self) -> bool:
        """Whether it has been tried for a second or more in vain."""
        return self.backoff.exhausted

    @property
    def held(self) -> int:
        """Messages without an acknowledgement."""
        return len(self.queue) + self.flying

    def statistics(self) -> LaneStatistics:
        """A snapshot."""
        return LaneStatistics(
            self.engine.kind,
            self.ready,
            None if self.ready else self.engine.absence or self.problem,
            self.held,
            self.bytes,
            self.topic.spooled,
            self.spool.lost if self.spool else 0,
            self.probe.statistics() if self.probe else None,
        )

    def watch(self, *, on: bool) -> None:
        """Time messages to a consumer of the engine's, or end that."""
        if not on and self.probe is not None:
            self.probe.stop()
            self.probe = None
        elif on and self.probe is None:
            self.probe = self.engine.new_probe(self)

    def put(self, messages: list[Message]) -> None:
        """Send these as soon as there is room."""
        self.queue.extend(messages)
        self.bytes += sum(len(message.body) for message in messages)
        if self.ready:
            self.engine.busy[self] = None

    def open(self, now_ns: int) -> None:
        """The engine takes its messages."""
        self.problem, self.retry_ns = None, 0
        self.backoff.reset()
        if not self.ready:
            self.ready = True
            self.release(now_ns)
            self.engine.touch(self)

    def release(self, now_ns: int) -> None:
        """Let its topic go on, where neither the engine nor a pause holds it."""
        if self.ready and self.topic.gate.stalled and not self.topic.paused:
            self.topic.gate.resume(now_ns, self.owed)
            self.owed = 0

    def shut(self, now_ns: int) -> None:
        """It does not, for now."""
        if self.ready:
            self.ready = False
            self.engine.busy.pop(self, None)
            self.topic.gate.stall(now_ns, self._unsent())
            self.engine.touch(self)  # who would leave may not have to wait now

    def fail(self, problem: str) -> None:
        """Say why it is shut, once."""
        if self.problem is None:
            log.warning("TOPIC(%s): the engine accepts no messages: %s", self.topic.name, problem)
        self.problem = self.engine.problem = problem

    def _unsent(self) -> list[Message]:
        """What it gives back to its topic, to get tokens again: all but the oldest, by which the engine is asked."""
        if self.topic.limiter is None:
            return []
        back = list(self.queue)[1:]
        for message in back:
            self.bytes -= len(message.body)
            self.queue.pop()
        self.owed = len(self.queue)
        return back

    def back(self, messages: list[Message]) -> None:
        """The engine does not have these after all; they go first."""
        self.flying -= len(messages)
        if self.engine.lanes.get(self.topic.name) is self:
            self.queue.extendleft(reversed(messages))
        else:
            settle(messages)  # with their topic, which somebody deleted

    def later(self, now_ns: int) -> None:
        """Try again after a while, which grows."""
        self.retry_ns = now_ns + round(self.backoff.next_s() * 1e9)
