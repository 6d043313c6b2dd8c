"""Reading the log back into channels, in the background: after a restart, for a first channel, and for replays.

In: ranges of offsets. Out: messages in channels, as fast as there is room for them. What a channel had not finished
when a broker died gets new tokens: nobody knows which messages had theirs.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from srtm.broker.disk.records import message_of
from srtm.broker.disk.replay import Replay
from srtm.errors import LogError, OffsetTrimmed, ProtocolError
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from srtm.broker.channel import Channel
    from srtm.broker.disk.batch import Piece, Record
    from srtm.broker.disk.log import Log
    from srtm.broker.topic import Topic
    from srtm.broker.topics import Topics
    from srtm.broker.turn import Turn

logger = logging.getLogger(__name__)

_BATCH = 1_000  # messages that are read from the log at once
_PAUSE_S = 0.02  # how long a channel that has enough is left alone
_AGAIN_S = 1.0  # before a log that cannot be read is tried again


class Readers:
    """The tasks that read a broker's log."""

    __slots__ = ("_log", "_most", "_tasks", "_topics", "_turn")

    def __init__(self, log: Log, topics: Topics, turn: Turn, most: int) -> None:
        """`most` messages may wait in a channel before it gets more from the log."""
        self._log = log
        self._topics = topics
        self._turn = turn
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Do something in the background, until it ends or the broker does."""
        task = self._turn.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End all of it."""
        for task in self._tasks:
            task.cancel()

    async def read(self, topic: Topic, begin: int, limit: int, log: str | None = None) -> list[Record]:
        """Read a range of the log in a thread; LogReplaced if it is not the log that was named."""
        return await self._turn.loop.run_in_executor(None, partial(self._log.read, topic.name, begin, limit, log=log))

    async def pieces(self, topic: Topic, begin: int, limit: int, log: str | None = None) -> list[Piece]:
        """`read`, as columns."""
        return await self._turn.loop.run_in_executor(None, partial(self._log.pieces, topic.name, begin, limit, log=log))

    async def follow(self, topic: Topic, channel: Replay) -> None:
        """Give a replay what it is behind with, as long as it exists."""
        await asyncio.sleep(0)  # until its topic has it
        while topic.channels.get(channel.name) is channel:
            at = channel.at
            if at >= channel.end:
                channel.behind.clear()
                await channel.behind.wait()
                continue
            if channel.full:
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                records = await self.read(topic, at, min(_BATCH, channel.end - at))
            except LogError as problem:
                for consumer in list(channel.consumers):
                    consumer.fail(ProtocolError("E_SUB_FAILED", f"SUB failed {problem}"))
                self._turn.wake()
                return
            if channel.at != at:  # it was emptied meanwhile
                continue
            now_ns = self._turn.now_ns()
            messages = [message_of(record, now_ns, offset) for offset, record in enumerate(records, at)]
            for message in messages:
                message.sent_ns = message.arrival_ns  # its latency does not count today
            channel.take(messages, now_ns)
            self._turn.pump(channel)

    async def reload(
        self, topic: Topic, channel: Channel, ranges: list[tuple[int, int]], *, limited: bool = False
    ) -> None:
        """Give a channel what it has not finished; `limited` if nobody knows whether that had its tokens."""
        for begin, end in ranges:
            at = begin
            while at < end and topic.channels.get(channel.name) is channel:
                if channel.held >= self._most:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                try:
                    size = min(_BATCH, end - at, self._most - channel.held)
                    if limited:
                        size = await self._afford(topic, size)
                    records = await self.read(topic, at, size)
                except OffsetTrimmed:
                    kept = min(max(self._log.begin(topic.name), at + 1), end)
                    if channel.cursor is None:  # otherwise its cursor counts them
                        channel.tally.lost += kept - at
                    at = kept
                    continue
                except LogError as problem:
                    logger.warning("CHANNEL(%s) of TOPIC(%s): %s", channel.name, topic.name, problem)
                    await asyncio.sleep(_AGAIN_S)
                    continue
                if topic.channels.get(channel.name) is not channel or not records:
                    return
                now_ns = self._turn.now_ns()
                messages = [message_of(record, now_ns, offset) for offset, record in enumerate(records, at)]
                if channel.cursor is not None and channel.cursor.low > at:  # deleted while they were read, and counted
                    messages = [message for message in messages if message.offset >= channel.cursor.low]
                channel.put(messages, now_ns)
                at += len(records)
                self._turn.pump(channel)

    async def _afford(self, topic: Topic, most: int) -> int:
        """Wait for tokens for some messages; returns how many, a part of what a burst may be."""
        while topic.gate.closed and self._topics.alive(topic):
            await asyncio.sleep(_PAUSE_S)
        limiter, now_ns = topic.limiter, self._turn.now_ns
        if limiter is None:
            return most
        size = max(1, min(most, int(limiter.bucket.b) // 10))
        release_ns = limiter.admit(now_ns(), size)
        await asyncio.sleep(max(0, release_ns - now_ns()) / NS_PER_S)
        return size
