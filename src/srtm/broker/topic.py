"""A topic: its gate, where messages wait for tokens, and its channels.

In: messages that its gate has released. Out: a copy to every channel, or all to the lane of a delivery engine. Before
the first channel comes, released messages are held for it. A topic also knows how full it is, and so whether its
publishers must wait.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from srtm.broker.channel import Channel
from srtm.broker.gate import Gate
from srtm.broker.lending.lender import reported
from srtm.broker.receipts import Sink, settle
from srtm.broker.recent import Recent
from srtm.broker.statistics import TopicStatistics
from srtm.protocol.names import ephemeral
from srtm.units import MILLI_PER_TOKEN, NANO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from srtm.broker.message import Message
    from srtm.broker.statistics import LaneStatistics, LogExtent
    from srtm.model.limiter import Limiter

# What would wait longer than a second for tokens may as well wait with its publisher; few messages cost nobody much.
_PATIENCE_S, _LEAST_WAITING = 1, 1_000


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
        self.paused = False
        self.starting = False  # lookup services are being asked which channels it has elsewhere
        self.later = False  # publishers are answered when a disk or an engine has their messages, and not at once
        self.durable: Storage | None = None  # on disk, and not in memory alone
        self.lane: Outlet | None = None  # to an engine, instead of channels
        self.spool: Backlog | None = None  # on disk and to an engine: what that has not acknowledged
        self.recent = Recent()
        self.gate = Gate(self.recent)
        self.unclaimed: deque[Message] = deque()  # released, before there is a channel
        self.unclaimed_bytes = 0
        self.channels: dict[str, Channel] = {}
        self.senders: dict[Sender, None] = {}  # that published in this turn
        self.bytes = 0
        self._limits = max_messages, max_bytes

    @property
    def ephemeral(self) -> bool:
        """Whether it goes with its last channel."""
        return ephemeral(self.name)

    @property
    def limiter(self) -> Limiter | None:
        """The sub-token bucket; None if nothing limits it."""
        return self.gate.limiter

    @property
    def waiting(self) -> deque[Message]:
        """Messages that wait for tokens."""
        return self.gate.waiting

    @property
    def messages(self) -> int:
        """Messages that ever came."""
        return self.gate.messages

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
        return self.spool is not None and (self.gate.stalled or self.paused)

    @property
    def full(self) -> bool:
        """Whether it holds all that it may; its publishers then have to wait."""
        messages, size = self._held()
        return messages >= self._limits[0] or size >= self._limits[1]

    @property
    def crowded(self) -> bool:
        """Whether it is full, or more wait for tokens than a burst and a second of them.

        Who floods is better stopped early: each of its messages takes time from other topics, long before it may go.
        """
        waiting = self._unreleased
        return ((waiting > _LEAST_WAITING and waiting > self._most_waiting()) or self.full) and not self.leaves

    @property
    def why_crowded(self) -> str:
        """The limit that it has reached, for the log."""
        messages, size = self._held()
        most, most_bytes = self._limits
        if messages >= most:
            return f"it holds {messages} messages, and --max-held-messages is {most}"
        if size >= most_bytes:
            return f"it holds {size} bytes, and --max-held-bytes is {most_bytes}"
        return f"{self._unreleased} messages wait for tokens"

    @property
    def relieved(self) -> bool:
        """Whether there is room again: half of all."""
        messages, size = self._held()
        return self.leaves or (
            2 * self._unreleased <= self._most_waiting()
            and 2 * messages <= self._limits[0]
            and 2 * size <= self._limits[1]
        )

    @property
    def room(self) -> int:
        """How many messages more may come from the log, or be kept beside it: up to half of what makes it crowded."""
        messages, size = self._held()
        if 2 * size > self._limits[1]:
            return 0
        half = max(1, self._most_waiting() // 2), max(1, self._limits[0] // 2)  # one, even if it may hold only one
        left = min(half[0] - len(self.waiting), half[1] - messages)
        return max(0, left - len(self.gate.arrived))

    @property
    def _unreleased(self) -> int:
        """Messages that wait for tokens, without those that piled up in the log while nothing could leave."""
        return len(self.gate.waiting) + (self.spool.grown if self.spool is not None else 0)

    def _most_waiting(self) -> int:
        if self.limiter is None:
            return self._limits[0]
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
        if self.unclaimed and not self.ephemeral:
            behind += len(self.unclaimed)
            behind_bytes += self.unclaimed_bytes
        if self.lane is not None:
            behind += self.lane.held
            behind_bytes += self.lane.bytes
        return len(self.gate.waiting) + behind, self.gate.bytes + behind_bytes

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
            self.messages + len(self.gate.arrived),
            self.bytes,
            waiting,
            waiting + len(self.unclaimed),
            self.paused,
            self.gate.closed,
            limiter.bucket if limiter else None,
            float(limiter.tokens(now_ns)) if limiter else None,
            limiter.late if limiter else 0,
            self.durable.extent(self) if self.durable else None,
            self.lane.statistics() if self.lane else None,
            tuple(channel.statistics(clients=clients) for _, channel in sorted(self.channels.items())),
            tuple(self.recent.history),
            reported(self.gate.books) if self.gate.books else None,
        )

    def end_second(self, now_ns: int) -> None:
        """Sum up the second that ends now, and begin the next."""
        peak_ntok = self.limiter.take_peak_ntok() if self.limiter else 0
        self.recent.close(now_ns, len(self.waiting) + self.spooled, peak_ntok)

    def pause(self, now_ns: int, *, on: bool) -> None:
        """Let nothing go, to channels or to the engine; or end that.

        What an engine would get waits without claims on tokens: it is not to come to it at once afterwards.
        """
        self.paused = on
        if self.lane is not None and on:
            self.gate.stall(now_ns)
        elif self.lane is not None:
            self.lane.release(now_ns)

    @property
    def passed(self) -> int:
        """Messages that wait no longer, of all that ever came."""
        return self.messages - len(self.waiting) - self.spooled

    def channel(self, name: str) -> Channel:
        """The channel of that name, made if need be; the first one gets what was held for it."""
        found = self.channels.get(name)
        if found is None:
            found = self.channels[name] = Channel(name, self._limits[0], self._limits[1])
        return found

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
                self.gate.drop(messages[fitting:])
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
        room, left = self._limits[0] - len(self.unclaimed), self._limits[1] - self.unclaimed_bytes
        for number, message in enumerate(messages[: max(0, room)]):
            if left <= 0:
                return number
            left -= len(message.body)
        return min(len(messages), max(0, room))

    def _leave_to_the_log(self) -> None:
        """Hold no more than half of what may be held: a first channel reads the log, so publishers need not wait."""
        while 2 * len(self.unclaimed) > self._limits[0] or 2 * self.unclaimed_bytes > self._limits[1]:
            self.unclaimed_bytes -= len(self.unclaimed.popleft().body)

    def forget(self, before: int) -> int:
        """Lose what no channel has yet and lies below an offset of the log; how many messages that is."""
        had = len(self.unclaimed)
        while self.unclaimed and self.unclaimed[0].offset < before:
            self.unclaimed_bytes -= len(self.unclaimed.popleft().body)
        return had - len(self.unclaimed)

    def early(self) -> Iterator[Message]:
        """What no channel has yet."""
        return chain(self.unclaimed, self.waiting)

    def empty(self, now_ns: int) -> None:
        """Forget what no channel and no engine has yet, with its claims on tokens."""
        settle(self.unclaimed)
        self.unclaimed.clear()
        self.unclaimed_bytes = 0
        self.gate.empty(now_ns)

    def abandon(self, now_ns: int) -> None:
        """Forget what came in this turn, too: the topic was deleted."""
        self.gate.abandon(now_ns)
        self.empty(now_ns)
