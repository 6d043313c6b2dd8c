"""Publishers that must wait: for a crowded topic to have room again, or, before they leave, for their last tokens.

A publisher of a crowded topic is not read any more, and TCP tells it so. A publisher that closes its connection keeps
it until all of its messages have their tokens; then it may go on at another broker without overtaking itself.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from srtm.protocol.orders import Throttle, encode
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from srtm.broker.topic import Sender, Topic

log = logging.getLogger(__name__)

_SILENCE_NS = 60 * NS_PER_S  # between two lines of the log about one topic
PARTING_S = 60.0  # how long a publisher that leaves waits, before its topic is looked at again
_RELEASES = 4  # publishers of a topic that are read again in one turn: all at once would crowd out other topics
_LONGEST_MS = 10_000  # that a publisher is told to wait before it may try again
_UNKNOWN_MS = 100  # if the topic has no rate to estimate the wait by


class Backpressure:
    """Crowded topics, and the publishers that wait for them."""

    __slots__ = ("_now_ns", "_silent", "_wake", "blocked")

    def __init__(self, wake: Callable[[], None], now_ns: Callable[[], int]) -> None:
        self._wake = wake
        self._now_ns = now_ns
        self._silent: dict[str, int] = {}  # topics that were in the log lately, and until when they are not again
        self.blocked: dict[Topic, dict[Sender, None]] = {}

    def block(self, topic: Topic) -> None:
        """Stop reading the publishers of this turn."""
        waiting = self.blocked.setdefault(topic, {})
        for sender in topic.senders:
            if sender not in waiting and sender.block(topic):
                waiting[sender] = None
        if waiting and self._now_ns() >= self._silent.get(topic.name, 0):
            self._silent[topic.name] = self._now_ns() + _SILENCE_NS
            log.warning("TOPIC(%s): publishers must wait: %s", topic.name, topic.why_crowded)

    def unblock(self) -> None:
        """Read some publishers of topics with room again, those that have waited longest first."""
        for topic in [topic for topic in self.blocked if topic.relieved]:
            waiting = self.blocked[topic]
            for sender in list(islice(waiting, _RELEASES)):
                del waiting[sender]
                sender.unblock(topic)
            if waiting:
                self._wake()
            else:
                del self.blocked[topic]

    def forget(self, topic: Topic) -> None:
        """Read all publishers of a topic that was deleted."""
        self._silent.pop(topic.name, None)
        for sender in self.blocked.pop(topic, {}):
            sender.unblock(topic)


def throttle(topic: Topic) -> bytes:
    """Return the order that tells a publisher about how long its topic will not be read."""
    limiter = topic.limiter
    half = len(topic.waiting) // 2
    wait_ms = round(half * 1_000_000 / limiter.bucket.r_mtps) if limiter and half else _UNKNOWN_MS
    return encode(Throttle(topic.name, max(1, min(wait_ms, _LONGEST_MS))))


def resume(topic: Topic) -> bytes:
    """Return the order that ends a throttle: tokens may have come sooner than estimated."""
    return encode(Throttle(topic.name, 0))


class Leaver(Protocol):
    """A publisher that wants to leave."""

    publisher: str

    def end(self) -> None:
        """Close the connection once everything is written."""


class Farewells:
    """Publishers that leave as soon as their last messages have their tokens."""

    __slots__ = ("_loop", "_touch", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, touch: Callable[[Topic], None]) -> None:
        self._loop = loop
        self._touch = touch
        self.waiting: dict[Topic, list[tuple[int, Leaver]]] = {}  # with the number of messages that must pass first

    def part(self, topic: Topic, leaver: Leaver) -> None:
        """Close a publisher's connection when all of its messages have their tokens."""
        self.waiting.setdefault(topic, []).append((topic.gate.sent_by(leaver.publisher), leaver))
        self._loop.call_later(PARTING_S, self._part_anyway, topic, leaver)
        self._touch(topic)

    def _part_anyway(self, topic: Topic, leaver: Leaver) -> None:
        """Do not keep a publisher for a topic without a share: another broker may be waiting for it."""
        waiting = self.waiting.get(topic, [])
        if not any(each is leaver for _, each in waiting):
            return
        if not topic.gate.closed:
            self._loop.call_later(PARTING_S, self._part_anyway, topic, leaver)
            return
        self._keep(topic, [entry for entry in waiting if entry[1] is not leaver])
        leaver.end()

    def let_go(self, topic: Topic) -> None:
        """Close the connections whose messages have all passed."""
        # Messages that wait in the log may wait for hours: nobody is kept for them, and order is not kept.
        behind = topic.leaves or topic.spooled > 0
        waiting, passed = self.waiting[topic], topic.passed
        self._keep(topic, [] if behind else [entry for entry in waiting if passed < entry[0]])
        for sent, leaver in waiting:
            if passed >= sent or behind:
                leaver.end()

    def forget(self, topic: Topic) -> None:
        """Let all go: the topic was deleted."""
        for _, leaver in self.waiting.pop(topic, []):
            leaver.end()

    def _keep(self, topic: Topic, waiting: list[tuple[int, Leaver]]) -> None:
        if waiting:
            self.waiting[topic] = waiting
        else:
            self.waiting.pop(topic, None)
