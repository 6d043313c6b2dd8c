"""The gate of a topic: its sub-token bucket, and the messages that wait before it.

In: messages with their arrival times, all of one turn of the loop together. Out: messages released in order of arrival
(FCFS across publishers). The bucket is `model.limiter.Limiter`; a gate without one lets everything pass, or, of a topic
that is closed, nothing.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from srtm.broker.receipts import settle
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from srtm.broker.lending.lender import Lender
    from srtm.broker.message import Message
    from srtm.broker.recent import Recent
    from srtm.model.books import Books

_by_arrival: Final = attrgetter("arrival_ns")
_LOOKED_AT: Final = 10_000  # messages that wait, when a publisher goes; it has to wait for those before them


class Gate:
    """What has come to a topic and may not leave yet."""

    __slots__ = (
        "_changed_ns",
        "_ready",
        "_recent",
        "_stale",
        "arrived",
        "books",
        "by_hand",
        "bytes",
        "closed",
        "drops",
        "lender",
        "limiter",
        "messages",
        "stalled",
        "waiting",
    )

    def __init__(self, recent: Recent) -> None:
        self.limiter: Limiter | None = None
        self.lender: Lender | None = None  # brokers lend each other tokens of this very share
        self.books: Books | None = None  # of the contract, if its tokens were ever lent here
        self.by_hand: TokenBucket | None = None  # the operator's (r, b), whatever a controller says
        self.closed = False  # the topic is under contract and has no share here: everything waits
        self.drops = False  # non-conformant messages are dropped instead of made to wait; none of a topic on disk is
        self.stalled = False  # the engine takes nothing: messages wait without a claim on tokens
        self.arrived: list[Message] = []  # in this turn
        self.waiting: deque[Message] = deque()  # for tokens
        self.bytes = 0  # of these
        self.messages = 0  # that ever came
        self._recent = recent
        self._changed_ns = 0  # when (r, b) changed last
        self._stale = 0  # messages at the head of the queue whose release times were computed before that
        self._ready: list[Message] = []  # had their token when (r, b) changed, and leave with the next drain

    def limit(self, bucket: TokenBucket | None, now_ns: int, gift_ntok: int = 0) -> int:
        """Set (r, b), or none; returns the nano-tokens that were given up."""
        if self.limiter is not None and not self.drops:
            self._ready += self._pass(self.limiter, now_ns)  # what came before the change, by the old law
        self.lender = None
        self._changed_ns, self._stale = now_ns, len(self.waiting)
        if bucket is None:
            surrendered = self.limiter.surrender(now_ns) if self.limiter else 0
            self.limiter = None
            return surrendered
        if self.limiter is None:
            self.limiter = Limiter(bucket, now_ns)
            return 0
        return self.limiter.reconfigure(now_ns, bucket, gift_ntok)

    def open(self, limiter: Limiter, now_ns: int) -> None:
        """Begin a share of the topic; what waits already is counted from now on."""
        self.limiter, self._changed_ns, self._stale, self.lender = limiter, now_ns, 0, None
        if not self.stalled:
            for message in self.waiting:
                message.release_ns = limiter.admit(now_ns)

    def stall(self, now_ns: int, unsent: Iterable[Message] = ()) -> None:
        """The engine takes nothing: what waits leaves its claims on tokens, until it does.

        What was released and is `unsent` waits again, first: its tokens are old by then, and others fill the bucket.
        """
        back = list(unsent)
        if self.limiter is not None and not self.stalled and (self.waiting or not self.drops):
            ready = [] if self.drops else self._pass(self.limiter, now_ns)
            self.limiter.retract(now_ns, len(self.waiting))
            back += [*self._ready, *ready]
            self._ready = []
        self.waiting.extendleft(reversed(back))
        self.bytes += sum(len(message.body) for message in back)
        self.stalled = True
        self._forget(now_ns)

    def resume(self, now_ns: int, owed: int = 0) -> None:
        """It takes messages again: what waits is counted from now on, behind what is `owed` tokens already."""
        if self.limiter is not None and (owed or self.waiting or not self.drops):
            if not self.drops:
                self._pass(self.limiter, now_ns)  # what came meanwhile, too
            self.limiter.retract(now_ns, 0)  # and what is read later, though it came before
            if owed:
                self.limiter.admit(now_ns, owed)
            for message in self.waiting:
                message.release_ns = self.limiter.admit(now_ns)
        self.stalled, self._stale = False, 0
        self._forget(now_ns)

    def recall(self, messages: list[Message], now_ns: int) -> None:
        """Take messages that were in the log alone: they wait behind all others, and are counted from now on."""
        limiter = self.limiter
        if limiter is None:
            self._changed_ns = now_ns  # when they are let go, where no bucket holds them
            messages = [*self._arrivals(), *messages]
        else:
            if not self.drops:
                self._ready += self._pass(limiter, now_ns)
            limiter.retract(now_ns, 0)
            if not self.stalled:
                for message in messages:
                    message.release_ns = limiter.admit(now_ns)
        self.waiting.extend(messages)
        self.bytes += sum(len(message.body) for message in messages)
        self._forget(now_ns)

    def let_go(self, now_ns: int) -> int:
        """Release what has its token by now, before tokens of others come or go; returns how many wait for one."""
        assert self.limiter is not None
        assert not self.drops
        self._ready += self._pass(self.limiter, now_ns)
        self._stale = len(self.waiting)
        return self.claims

    @property
    def claims(self) -> int:
        """How many messages wait for tokens."""
        return 0 if self.stalled else len(self.waiting)

    def _forget(self, now_ns: int) -> None:
        """Take no tokens that were asked for before claims on tokens changed."""
        if self.lender is not None:
            self.lender.forget(now_ns)

    def content(self) -> Iterator[Message]:
        """All messages that are here, in the order in which they leave."""
        return chain(self._ready, self.waiting, self.arrived)

    @property
    def oldest(self) -> Message | None:
        """The next message to be released to channels, if there is one."""
        return next(self.content(), None)

    def sent_by(self, publisher: str) -> int:
        """How many messages have to pass until the last one of this publisher has passed."""
        if any(message.publisher == publisher for message in self.arrived):
            return self.messages + len(self.arrived)
        for behind, message in enumerate(islice(reversed(self.waiting), _LOOKED_AT)):
            if message.publisher == publisher:
                return self.messages - behind
        return max(0, self.messages - _LOOKED_AT)

    def drain(self, now_ns: int) -> list[Message]:
        """Let this turn's arrivals through the bucket, with those that waited; returns what was released."""
        released, self._ready = self._ready, []
        limiter, waiting = self.limiter, self.waiting
        if limiter is not None and not self.drops:
            return self._released(released + self._pass(limiter, now_ns))
        arrived = self._arrivals()
        if limiter is not None:
            if waiting and not self.stalled:  # since before it dropped, or from the log
                released += self._due(limiter, now_ns)
            passed: list[Message] = []
            dropped: list[Message] = []
            for message in arrived:
                (passed if limiter.offer(message.arrival_ns) else dropped).append(message)
            if arrived:  # dropped messages are demand, too
                self._recent.backlogs.append(limiter.last_backlog + len(dropped) * PICO_PER_TOKEN)
                self._recent.arrivals.append(len(arrived))
            self.drop(dropped)
            released += passed
        elif self.closed and self.drops:
            self.drop(arrived)
        elif self.closed:
            waiting.extend(arrived)
            self.bytes += sum(len(message.body) for message in arrived)
        else:
            for message in waiting:
                message.release_ns = self._changed_ns  # there is no bucket any more
            released += [*waiting, *arrived]
            waiting.clear()
            self.bytes = 0
        return self._released(released)

    def drop(self, messages: list[Message]) -> None:
        """Count messages that are not delivered, and answer their publishers."""
        self._recent.dropped += len(messages)
        settle(messages)

    def _arrivals(self) -> list[Message]:
        """What came in this turn, in order of time."""
        arrived = self.arrived
        if arrived:
            self.arrived = []
            if len(arrived) > 1:
                arrived.sort(key=_by_arrival)
            self.messages += len(arrived)
            self._recent.messages += len(arrived)
        return arrived

    def _pass(self, limiter: Limiter, now_ns: int) -> list[Message]:
        """Let arrivals wait for their tokens; returns those, with others that waited, which have them by now."""
        released: list[Message] = []
        arrived = self._arrivals()
        if self.stalled:
            self.waiting.extend(arrived)
            self.bytes += sum(len(message.body) for message in arrived)
            return released
        if arrived:
            first, most = 0, len(arrived)
            while first < most:
                arrival_ns, after = arrived[first].arrival_ns, first + 1
                while after < most and arrived[after].arrival_ns == arrival_ns:
                    after += 1
                self._admit(limiter, arrived[first:after], released, now_ns)
                first = after
            recent = self._recent
            recent.backlogs.append(limiter.last_backlog)
            recent.arrivals.append(len(arrived))
        if self.waiting:
            released += self._due(limiter, now_ns)
        return released

    def _due(self, limiter: Limiter, now_ns: int) -> list[Message]:
        """Take those that have their token by now out of the queue, with the time at which they got it."""
        released, waiting = [], self.waiting
        for _ in range(limiter.due(now_ns, len(waiting))):
            message = waiting[0]
            if self._stale:
                message.release_ns = limiter.next_release_ns(len(waiting))
                self._stale -= 1
            waiting.popleft()
            self.bytes -= len(message.body)
            released.append(message)
        return released

    def _admit(self, limiter: Limiter, together: list[Message], released: list[Message], now_ns: int) -> None:
        """Put messages that came at the same time before the bucket: they are released, or have to wait."""
        waiting, arrival_ns = self.waiting, together[0].arrival_ns
        if self._stale:
            released += self._due(limiter, arrival_ns)
        if limiter.admit(arrival_ns, len(together)) == arrival_ns <= now_ns and not waiting:
            released += together
            return
        for behind, message in zip(range(len(together), 0, -1), together, strict=True):
            message.release_ns = limiter.next_release_ns(behind)
            if waiting or message.release_ns > now_ns:
                waiting.append(message)
                self.bytes += len(message.body)
            else:
                released.append(message)

    def _released(self, messages: list[Message]) -> list[Message]:
        recent = self._recent
        recent.released += len(messages)
        if self.books is not None and self.limiter is not None:
            self.books.spent += len(messages)
        if not recent.full:
            append = recent.access.append
            for message in messages:
                append(message.release_ns - message.arrival_ns)
        return messages

    def next_release_ns(self) -> int:
        """When the oldest waiting message gets its token; 0 where none waits for one."""
        if not self.waiting or self.limiter is None or self.stalled:
            return 0
        return self.limiter.next_release_ns(len(self.waiting))

    def empty(self, now_ns: int) -> None:
        """Drop what waits, with its claims on tokens."""
        settle(self.waiting)
        if self.limiter is not None and not self.stalled:
            self.limiter.retract(now_ns, len(self.waiting))
        self._stale = 0
        self.waiting.clear()
        self.bytes = 0
        self._forget(now_ns)

    def abandon(self, now_ns: int) -> None:
        """Drop what came in this turn, too: the topic was deleted."""
        settle([*self._ready, *self.arrived])
        self._ready, self.arrived = [], []
        self.empty(now_ns)
