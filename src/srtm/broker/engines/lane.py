"""A topic's way to its engine: messages that were released and are not acknowledged.

In: messages that a topic released; whether the engine accepts them. Out: messages in order, to be sent; answers to
publishers; unsent messages, given back to the topic when the engine is unavailable.
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
    """Return the back-off for retrying an engine, or one topic at it."""
    return Backoff(0.02, 0.5)


class Carrier(Protocol):
    """The engine, as its lanes use it."""

    kind: ClassVar[str]
    lanes: dict[str, Lane]
    busy: dict[Lane, None]
    problem: str | None

    @property
    def absence(self) -> str | None:
        """Why the engine is unavailable; None if it is connected."""

    def touch(self, lane: Lane) -> None:
        """Schedule a lane that may send messages, and its topic, which may release some."""

    def new_probe(self, lane: Lane) -> Probe:
        """Create a probe of a topic."""


class Lane:
    """One topic's unacknowledged messages, and whether the engine accepts more."""

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
        self.spool: Spool | None = None  # only of a topic on disk
        self.queue: deque[Message] = deque()
        self.flying = 0  # messages sent and not acknowledged
        self.bytes = 0  # of messages in flight and in the queue
        self.owed = 0  # tokens that messages in the queue must spend again
        self.ready = False  # the engine accepts its messages
        self.singly = 0  # messages to send one by one, because the engine refused one of them
        self.probe: Probe | None = None  # times messages to a consumer, if switched on
        self.problem: str | None = None  # why it is shut although the engine is connected
        self.refused: str | None = None  # the reason logged last for dropping a stored message
        self.retry_ns = 0
        self.backoff = patience()

    @property
    def overdue(self) -> bool:
        """Whether retries have failed for a second or more."""
        return self.backoff.exhausted

    @property
    def held(self) -> int:
        """Unacknowledged messages."""
        return len(self.queue) + self.flying

    def statistics(self) -> LaneStatistics:
        """Return a snapshot."""
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
        """Switch the probe on or off."""
        if not on and self.probe is not None:
            self.probe.stop()
            self.probe = None
        elif on and self.probe is None:
            self.probe = self.engine.new_probe(self)

    def put(self, messages: list[Message]) -> None:
        """Queue messages, to be sent as the window allows."""
        self.queue.extend(messages)
        self.bytes += sum(len(message.body) for message in messages)
        if self.ready:
            self.engine.busy[self] = None

    def open(self, now_ns: int) -> None:
        """The engine accepts messages of this topic."""
        self.problem, self.retry_ns = None, 0
        self.backoff.reset()
        if not self.ready:
            self.ready = True
            self.release(now_ns)
            self.engine.touch(self)

    def release(self, now_ns: int) -> None:
        """Resume the topic, unless the engine or a pause holds it."""
        if self.ready and self.topic.gate.stalled and not self.topic.paused:
            self.topic.gate.resume(now_ns, self.owed)
            self.owed = 0

    def shut(self, now_ns: int) -> None:
        """The engine accepts no messages of this topic for now."""
        if self.ready:
            self.ready = False
            self.engine.busy.pop(self, None)
            self.topic.gate.stall(now_ns, self._unsent())
            self.engine.touch(self)  # publishers may be released now

    def fail(self, problem: str) -> None:
        """Record why it is shut; log it once."""
        if self.problem is None:
            log.warning("TOPIC(%s): the engine accepts no messages: %s", self.topic.name, problem)
        self.problem = self.engine.problem = problem

    def _unsent(self) -> list[Message]:
        """Give messages back to the topic, to get tokens again; keep the oldest, which tests the engine."""
        if self.topic.limiter is None:
            return []
        back = list(self.queue)[1:]
        for message in back:
            self.bytes -= len(message.body)
            self.queue.pop()
        self.owed = len(self.queue)
        return back

    def back(self, messages: list[Message]) -> None:
        """Put messages that the engine did not store back, before all others."""
        self.flying -= len(messages)
        if self.engine.lanes.get(self.topic.name) is self:
            self.queue.extendleft(reversed(messages))
        else:
            settle(messages)  # their topic was deleted

    def later(self, now_ns: int) -> None:
        """Schedule the next retry, with back-off."""
        self.retry_ns = now_ns + round(self.backoff.next_s() * 1e9)
