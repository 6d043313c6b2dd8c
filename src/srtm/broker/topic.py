"""A topic: its sub-token bucket, the messages that wait for tokens, and its channels.

In: messages with their arrival times, all of one turn of the loop together. Out: messages released in order of arrival
(FCFS across publishers), a copy to every channel, or all to the lane of a delivery engine. The bucket is
`model.bucket.Limiter`; a topic without one lets everything pass. Where no channel is there yet, released messages are
held for the first.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from srtm.broker.channel import Channel
from srtm.broker.receipts import Sink, settle
from srtm.broker.statistics import Recent, TopicStatistics
from srtm.model.bucket import Limiter, TokenBucket
from srtm.protocol.names import ephemeral
from srtm.units import MILLI_PER_TOKEN, NANO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from srtm.broker.message import Message
    from srtm.broker.statistics import LaneStatistics, LogExtent

# What would wait longer than a second for tokens may as well wait with its publisher; few messages cost nobody much.
_PATIENCE_S, _LEAST_WAITING = 1, 1_000
_by_arrival = attrgetter("arrival_ns")
_LOOKED_AT = 10_000  # messages that wait, when a publisher goes; it has to wait for those before them


class Sender(Sink, Protocol):
    """A publisher, over TCP or HTTP."""

    publisher: str
    too_full: Callable[[Topic], bool] | None  # when its messages are refused; None if it can be made to wait instead

    def hold(self) -> None:
        """Be read no more until the disk has its messages."""

    def release(self) -> None:
        """Be read again."""

    def slow(self) -> None:
        """Read little next time: its messages must wait for tokens anyway."""

    def block(self, topic: Topic) -> bool:
        """Be read no more until the topic has room; False if it cannot be made to wait."""

    def unblock(self, topic: Topic) -> None:
        """Be read again."""


class Outlet(Protocol):
    """The way to a delivery engine, instead of channels."""

    bytes: int

    @property
    def held(self) -> int:
        """Messages without an acknowledgement."""

    def put(self, messages: list[Message]) -> None:
        """Send these as soon as there is room."""

    def release(self, now_ns: int) -> None:
        """Let the topic go on, unless the engine or a pause holds it."""

    def statistics(self) -> LaneStatistics:
        """A snapshot."""


class Backlog(Protocol):
    """Messages of the topic that only the log has, for an engine that has not acknowledged them."""

    messages: int
    lost: int

    @property
    def grown(self) -> int:
        """How many more these are than when the topic could release messages last."""


class Storage(Protocol):
    """The disk that keeps the topic's messages."""

    def extent(self, topic: Topic) -> LogExtent:
        """A snapshot of the topic's log."""


class Topic:
    """One topic at one broker."""

    def __init__(self, name: str, max_messages: int, max_bytes: int) -> None:
        self.name = name
        self.ephemeral = ephemeral(name)
        self.paused = False
        self.starting = False  # it is being asked elsewhere which channels it has
        self.closed = False  # it is under contract and has no share here: everything waits
        self.slo_ns: int | None = None  # the latency that it was promised
        self.drops = False  # non-conformant messages are dropped instead of made to wait; none of a topic on disk is
        self.durable: Storage | None = None  # on disk, and not in memory alone
        self.lane: Outlet | None = None  # to an engine, instead of channels
        self.spool: Backlog | None = None  # on disk and to an engine: what that has not acknowledged
        self.later = False  # publishers are answered when a disk or an engine has their messages
        self.stalled = False  # the engine takes nothing: messages wait without a claim on tokens
        self.limiter: Limiter | None = None
        self.by_hand: TokenBucket | None = None  # what the operator set, whatever a controller says
        self.arrived: list[Message] = []  # in this turn
        self.waiting: deque[Message] = deque()  # for tokens
        self.unclaimed: deque[Message] = deque()  # released, and no channel there
        self.channels: dict[str, Channel] = {}
        self.senders: dict[Sender, None] = {}  # who published in this turn
        self.messages = self.bytes = 0
        self.waiting_bytes = self.unclaimed_bytes = 0
        self.recent = Recent()
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._changed_ns = 0  # when (r, b) changed last
        self._stale = 0  # messages at the head of the queue whose release times were computed before that
        self._ready: list[Message] = []  # had their token when (r, b) changed, and leave with the next drain

    @property
    def depth(self) -> int:
        """Messages that no channel has yet."""
        return len(self.waiting) + len(self.unclaimed) + self.spooled

    @property
    def spooled(self) -> int:
        """Messages that came and are in the log alone."""
        return self.spool.messages if self.spool is not None else 0

    @property
    def leaves(self) -> bool:
        """Whether nothing leaves it, and it leaves to the log what it has no room for: no publisher has to wait."""
        return self.spool is not None and (self.stalled or self.paused)

    @property
    def full(self) -> bool:
        """Whether it holds all that it may; its publishers then have to wait."""
        messages, size = self._held()
        return messages >= self._max_messages or size >= self._max_bytes

    @property
    def crowded(self) -> bool:
        """Whether it is full, or more wait for tokens than a burst and a second of them.

        Who floods is better stopped early: each of its messages takes time from other topics, long before it may go.
        """
        waiting = self._unreleased
        return ((waiting > _LEAST_WAITING and waiting > self._most_waiting()) or self.full) and not self.leaves

    @property
    def relieved(self) -> bool:
        """Whether there is room again: half of all."""
        messages, size = self._held()
        return self.leaves or (
            2 * self._unreleased <= self._most_waiting()
            and 2 * messages <= self._max_messages
            and 2 * size <= self._max_bytes
        )

    @property
    def room(self) -> int:
        """How many messages more may come from the log, or be kept beside it: up to half of what makes it crowded."""
        messages, size = self._held()
        if 2 * size > self._max_bytes:
            return 0
        left = min(self._most_waiting() // 2 - len(self.waiting), self._max_messages // 2 - messages)
        return max(0, left - len(self.arrived))

    @property
    def _unreleased(self) -> int:
        """Messages that wait for tokens, without those that piled up in the log while nothing could leave."""
        return len(self.waiting) + (self.spool.grown if self.spool is not None else 0)

    def _most_waiting(self) -> int:
        if self.limiter is None:
            return self._max_messages
        bucket = self.limiter.bucket
        in_time = bucket.b_ntok // NANO_PER_TOKEN + _PATIENCE_S * bucket.r_mtps // MILLI_PER_TOKEN
        return max(_LEAST_WAITING, in_time)

    def _held(self) -> tuple[int, int]:
        """Messages and bytes of the channel that is furthest behind, and of those before it.

        Bytes count with consumers, too; channels share bodies.
        """
        behind = behind_bytes = 0
        for channel in self.channels.values():
            if not channel.ephemeral:
                held = len(channel.queue) + len(channel.deferred)
                if held > behind:
                    behind = held
                if channel.bytes > behind_bytes:
                    behind_bytes = channel.bytes
        if not self.ephemeral:
            behind += len(self.unclaimed)
            behind_bytes += self.unclaimed_bytes
        if self.lane is not None:
            behind += self.lane.held
            behind_bytes += self.lane.bytes
        return len(self.waiting) + behind, self.waiting_bytes + behind_bytes

    @property
    def rate_mps(self) -> int:
        """Messages of the last whole second."""
        return self.recent.last_messages

    def statistics(self, now_ns: int, *, clients: bool = False) -> TopicStatistics:
        """A snapshot; with `clients`, its channels list their consumers."""
        limiter = self.limiter
        waiting = len(self.waiting) + self.spooled
        return TopicStatistics(
            self.name,
            self.messages,
            self.messages + len(self.arrived),
            self.bytes,
            waiting,
            waiting + len(self.unclaimed),
            self.paused,
            self.closed,
            limiter.bucket if limiter else None,
            float(limiter.tokens(now_ns)) if limiter else None,
            limiter.late if limiter else 0,
            self.durable.extent(self) if self.durable else None,
            self.lane.statistics() if self.lane else None,
            tuple(channel.statistics(clients=clients) for _, channel in sorted(self.channels.items())),
            tuple(self.recent.history),
        )

    def end_second(self, now_ns: int) -> None:
        """Sum up the second that ends now, and begin the next."""
        peak_ntok = self.limiter.take_peak_ntok() if self.limiter else 0
        self.recent.close(now_ns, len(self.waiting) + self.spooled, peak_ntok, self.slo_ns)

    def limit(self, bucket: TokenBucket | None, now_ns: int, gift_ntok: int = 0) -> int:
        """Set (r, b), or none; returns the nano-tokens that were given up."""
        if self.limiter is not None and not self.drops:
            self._ready += self._pass(self.limiter, now_ns)  # what came before the change, by the old law
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
        self.limiter, self._changed_ns, self._stale = limiter, now_ns, 0
        if not self.stalled:
            for message in self.waiting:
                message.release_ns = limiter.admit(now_ns)

    def pause(self, now_ns: int, *, on: bool) -> None:
        """Let nothing go, to channels or to the engine; or end that.

        What an engine would get waits without claims on tokens: it is not to come to it at once afterwards.
        """
        self.paused = on
        if self.lane is not None and on:
            self.stall(now_ns)
        elif self.lane is not None:
            self.lane.release(now_ns)

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
        self.waiting_bytes += sum(len(message.body) for message in back)
        self.stalled = True

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
        self.waiting_bytes += sum(len(message.body) for message in messages)

    @property
    def oldest(self) -> Message | None:
        """The next message to be released to channels, if there is one."""
        return next(chain(self._ready, self.waiting, self.arrived), None)

    def sent_by(self, publisher: str) -> int:
        """How many messages have to pass until the last one of this publisher has passed."""
        if any(message.publisher == publisher for message in self.arrived):
            return self.messages + len(self.arrived)
        for behind, message in enumerate(islice(reversed(self.waiting), _LOOKED_AT)):
            if message.publisher == publisher:
                return self.messages - behind
        return max(0, self.messages - _LOOKED_AT)

    @property
    def passed(self) -> int:
        """Messages that wait no longer, of all that ever came."""
        return self.messages - len(self.waiting) - self.spooled

    def channel(self, name: str) -> Channel:
        """The channel of that name, made if need be; the first one gets what was held for it."""
        found = self.channels.get(name)
        if found is None:
            found = self.channels[name] = Channel(name, self._max_messages, self._max_bytes)
        return found

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
            self._drop(dropped)
            released += passed
        elif self.closed and self.drops:
            self._drop(arrived)
        elif self.closed:
            waiting.extend(arrived)
            self.waiting_bytes += sum(len(message.body) for message in arrived)
        else:
            for message in waiting:
                message.release_ns = self._changed_ns  # there is no bucket any more
            released += [*waiting, *arrived]
            waiting.clear()
            self.waiting_bytes = 0
        return self._released(released)

    def _drop(self, messages: list[Message]) -> None:
        self.recent.dropped += len(messages)
        if self.lane is not None:
            settle(messages)

    def _arrivals(self) -> list[Message]:
        """What came in this turn, in order of time."""
        arrived = self.arrived
        if arrived:
            self.arrived = []
            if len(arrived) > 1:
                arrived.sort(key=_by_arrival)
            self.messages += len(arrived)
            self.recent.messages += len(arrived)
        return arrived

    def _pass(self, limiter: Limiter, now_ns: int) -> list[Message]:
        """Let arrivals wait for their tokens; returns those, with others that waited, which have them by now."""
        released: list[Message] = []
        arrived = self._arrivals()
        if self.stalled:
            self.waiting.extend(arrived)
            self.waiting_bytes += sum(len(message.body) for message in arrived)
            return released
        if arrived:
            if arrived[0].arrival_ns == arrived[-1].arrival_ns:
                self._admit(limiter, arrived, released, now_ns)
            else:
                for _, together in groupby(arrived, _by_arrival):
                    self._admit(limiter, list(together), released, now_ns)
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
            self.waiting_bytes -= len(message.body)
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
                self.waiting_bytes += len(message.body)
            else:
                released.append(message)

    def _released(self, messages: list[Message]) -> list[Message]:
        recent = self.recent
        recent.released += len(messages)
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

    def distribute(self, messages: list[Message], now_ns: int) -> None:
        """Give each channel its copy of released messages, or the engine all of them."""
        if self.lane is not None and not self.paused:
            if self.unclaimed:
                messages = [*self.unclaimed, *messages]
                self.unclaimed.clear()
                self.unclaimed_bytes = 0
            self.lane.put(messages)
            return
        if not self.channels or self.paused or self.starting:
            if self.ephemeral:  # nobody will miss what it cannot hold
                fitting = self._fitting(messages)
                self._drop(messages[fitting:])
                messages = messages[:fitting]
            self.unclaimed.extend(messages)
            self.unclaimed_bytes += sum(len(message.body) for message in messages)
            if self.durable is not None and self.lane is None and not self.channels:
                self._leave_to_the_log()
            return
        if self.unclaimed:
            messages = [*self.unclaimed, *messages]
            self.unclaimed.clear()
            self.unclaimed_bytes = 0
        channels = iter(self.channels.values())
        first = next(channels)
        for channel in channels:
            self.recent.dropped += channel.put([message.copy() for message in messages], now_ns)
        self.recent.dropped += first.put(messages, now_ns)

    def _fitting(self, messages: list[Message]) -> int:
        """How many of these it may hold for a channel that comes."""
        room, left = self._max_messages - len(self.unclaimed), self._max_bytes - self.unclaimed_bytes
        for number, message in enumerate(messages[: max(0, room)]):
            if left <= 0:
                return number
            left -= len(message.body)
        return min(len(messages), max(0, room))

    def _leave_to_the_log(self) -> None:
        """Hold no more than half of what may be held: a first channel reads the log, so publishers need not wait."""
        while 2 * len(self.unclaimed) > self._max_messages or 2 * self.unclaimed_bytes > self._max_bytes:
            self.unclaimed_bytes -= len(self.unclaimed.popleft().body)

    def forget(self, before: int) -> None:
        """Lose what no channel has yet and lies below an offset of the log."""
        while self.unclaimed and self.unclaimed[0].offset < before:
            self.unclaimed_bytes -= len(self.unclaimed.popleft().body)

    def early(self) -> Iterator[Message]:
        """What no channel has yet."""
        return chain(self.unclaimed, self.waiting)

    def empty(self, now_ns: int) -> None:
        """Forget what no channel and no engine has yet, with its claims on tokens."""
        if self.lane is not None:
            settle(self.early())
        if self.limiter is not None and not self.stalled:
            self.limiter.retract(now_ns, len(self.waiting))
        self._stale = 0
        self.waiting.clear()
        self.unclaimed.clear()
        self.waiting_bytes = self.unclaimed_bytes = 0

    def abandon(self, now_ns: int) -> None:
        """Forget what came in this turn, too: the topic was deleted, and nobody will ask it again."""
        if self.lane is not None:
            settle([*self._ready, *self.arrived])
        self._ready, self.arrived = [], []
        self.empty(now_ns)
