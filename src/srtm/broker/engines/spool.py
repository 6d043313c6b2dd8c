"""Store and forward: a topic on disk whose messages an engine delivers.

In: messages that the log has made durable, and the engine's acknowledgements. Out: the same messages to the topic's
gate, in order of offsets, from memory, or from the log if memory had no room.

Always holds:
- an offset is finished once the engine has acknowledged it, or it will never be sent: it was refused or emptied.
  Unfinished messages are sent again after a restart, with the same ids;
- messages that are only in the log go before those published later;
- while the topic may release nothing, it keeps messages in memory up to half its limit and leaves the rest to the log,
  so its publishers continue. Otherwise its publishers are held as those of other topics: by what they published since,
  beyond a burst and a second.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from typing import TYPE_CHECKING

from srtm.broker.message import Message
from srtm.errors import LogError, OffsetTrimmed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from srtm.broker.disk.batch import Record
    from srtm.broker.disk.cursor import Cursor
    from srtm.broker.disk.log import Log
    from srtm.broker.topic import Topic
    from srtm.broker.turn import Turn

logger = logging.getLogger(__name__)

_ENGINE = "engine:"  # names of channels have no colon
_BATCH = 1_000  # messages read from the log at once
_PAUSE_S = 0.02  # before another look at a topic without room
_AGAIN_S = 1.0  # before another try to read a log


class Spool:
    """A topic's stored messages that its engine has not acknowledged, and which of them are only in the log."""

    def __init__(self, topic: Topic, log: Log) -> None:
        self.topic = topic
        self._log = log
        own = next((cursor for cursor in log.cursors(topic.name) if is_engines(cursor)), None)
        self.cursor = own or log.cursor(topic.name, _ENGINE + secrets.token_hex(6), log.begin(topic.name))
        self.lost = 0  # deleted by retention before they were sent
        # The prefix of message ids: stored with the log, so ids are the same after a restart.
        self.prefix = self.cursor.channel.removeprefix(_ENGINE).encode()
        self._left = deque(self.cursor.unfinished(log.end(topic.name)))  # ranges of offsets that are only in the log
        self.messages = self.cursor.missing(log.end(topic.name))
        self._mark = self.messages  # publishers are not held for this many of them
        self._more = asyncio.Event()

    @property
    def grown(self) -> int:
        """Messages that are only in the log, beyond those left there while the topic could release nothing."""
        return self.messages - self._mark

    def keeps(self, first: int, count: int) -> bool:
        """Leave messages that were just stored to the log, if memory has no room; return whether it does so."""
        topic = self.topic
        if not (self._left or (topic.leaves and topic.room < count)):
            return False
        if self._left and self._left[-1][1] == first:
            self._left[-1] = self._left[-1][0], first + count
        else:
            self._left.append((first, first + count))
        self.messages += count
        if topic.leaves:
            self._mark = self.messages
        topic.gate.messages += count
        topic.recent.messages += count
        self._more.set()
        return True

    def finish(self, messages: Iterable[Message]) -> None:
        """Finish the offsets of messages: they need not be sent again."""
        for message in messages:
            self.cursor.finish(message.offset)

    async def empty(self) -> None:
        """Finish all messages that are only in the log."""
        left, self._left = self._left, deque()
        self._taken(self.messages)
        for begin, end in left:
            for at in range(begin, end, _BATCH):  # there may be millions after an outage
                for offset in range(at, min(at + _BATCH, end)):
                    self.cursor.finish(offset)
                await asyncio.sleep(0)

    def skip_to(self, begin: int) -> int:
        """Skip messages below an offset, which the log no longer holds; return how many will never be sent."""
        self.cursor.skip_to(begin)
        before = self.messages
        while self._left and self._left[0][0] < begin:
            first, end = self._left.popleft()
            if end > begin:
                self._left.appendleft((begin, end))
            self._taken(min(begin, end) - first)
        return before - self.messages

    def _taken(self, count: int) -> None:
        self.messages -= count
        self._mark = min(self._mark, self.messages)

    def close(self) -> None:
        """The topic was deleted."""
        self._more.set()

    async def follow(self, turn: Turn, alive: Callable[[Topic], bool]) -> None:
        """Read messages that are only in the log back as room permits, while the topic exists."""
        topic = self.topic
        while alive(topic):
            if not self._left:
                self._more.clear()
                await self._more.wait()
                continue
            begin, end = self._left[0]
            size = min(_BATCH, end - begin)
            if topic.room < size:  # read many at once, not one by one as others leave
                await asyncio.sleep(_PAUSE_S)
            if not topic.room:
                continue
            size = min(size, topic.room)
            try:
                records = await turn.loop.run_in_executor(None, self._log.read, topic.name, begin, size)
            except OffsetTrimmed:
                self.lost += self.skip_to(max(self._log.begin(topic.name), begin + 1))
                continue
            except LogError as problem:
                logger.warning("TOPIC(%s): %s", topic.name, problem)
                await asyncio.sleep(_AGAIN_S)
                continue
            if not alive(topic):  # a new topic of the name may have another log
                return
            if not self._left or self._left[0][0] != begin:  # emptied or trimmed meanwhile
                continue
            after, end = begin + len(records), self._left[0][1]  # it may have grown
            if after < end:
                self._left[0] = after, end
            else:
                self._left.popleft()
            self._taken(len(records))
            topic.gate.recall([_message(record, offset) for offset, record in enumerate(records, begin)], turn.now_ns())
            turn.touch(topic)


def is_engines(cursor: Cursor) -> bool:
    """Whether a cursor is that of an engine, not of a channel."""
    return cursor.channel.startswith(_ENGINE)


def _message(record: Record, offset: int) -> Message:
    delay_ns = record.due_ns - record.arrival_ns if record.due_ns else 0
    message = Message(record.id, record.arrival_ns, record.body, record.publisher, delay_ns)
    message.offset = offset
    return message
