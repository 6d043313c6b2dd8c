"""Store and forward: a topic on disk whose messages an engine delivers.

In: messages that the log has made durable, and the engine's acknowledgements. Out: the same messages before the topic's
bucket, in order of offsets, from memory or, where that had no room for them, from the log again.

Always holds:
- an offset is finished when the engine has acknowledged it, or nobody will ever send it: too large for the engine,
  or emptied. What is not finished is sent again after a restart, by the same id;
- what is in the log alone comes before what is published after it;
- while nothing may leave the topic, it holds half of what it may, and leaves the rest to the log: its publishers go on.
  When something may, they are held as those of other topics: by what they published since, beyond a burst and a second.
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

_ENGINE = "engine:"  # no channel's name has a colon
_BATCH = 1_000  # messages that are read from the log at once
_PAUSE_S = 0.02  # before a topic that has enough is looked at again
_AGAIN_S = 1.0  # before a log that cannot be read is


class Spool:
    """What of a topic's log its engine has not acknowledged, and which of that is in the log alone."""

    def __init__(self, topic: Topic, log: Log) -> None:
        self.topic = topic
        self._log = log
        own = next((cursor for cursor in log.cursors(topic.name) if is_engines(cursor)), None)
        self.cursor = own or log.cursor(topic.name, _ENGINE + secrets.token_hex(6), log.begin(topic.name))
        self.lost = 0  # taken by retention before it was sent
        # Ids of messages begin with it: written once and with the log, so that they are the same after a restart.
        self.prefix = self.cursor.channel.removeprefix(_ENGINE).encode()
        self._left = deque(self.cursor.unfinished(log.end(topic.name)))  # ranges of offsets that are in the log alone
        self.messages = self.cursor.missing(log.end(topic.name))
        self._mark = self.messages  # so many of these are nobody's fault
        self._more = asyncio.Event()

    @property
    def grown(self) -> int:
        """How many messages more are in the log alone than when the topic was let go on."""
        return self.messages - self._mark

    def keeps(self, first: int, count: int) -> bool:
        """Whether these messages, just stored, are left to the log."""
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
        """These need not be sent any more."""
        for message in messages:
            self.cursor.finish(message.offset)

    async def empty(self) -> None:
        """Nor does what is in the log alone."""
        left, self._left = self._left, deque()
        self._taken(self.messages)
        for begin, end in left:
            for at in range(begin, end, _BATCH):  # an outage may have left millions
                for offset in range(at, min(at + _BATCH, end)):
                    self.cursor.finish(offset)
                await asyncio.sleep(0)

    def skip_to(self, begin: int) -> int:
        """The log no longer holds what is below an offset; how many messages will never be sent."""
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
        """Its topic is gone."""
        self._more.set()

    async def follow(self, turn: Turn, alive: Callable[[Topic], bool]) -> None:
        """Bring back what is in the log alone, as there is room for it, as long as the topic is there."""
        topic = self.topic
        while alive(topic):
            if not self._left:
                self._more.clear()
                await self._more.wait()
                continue
            begin, end = self._left[0]
            size = min(_BATCH, end - begin)
            if topic.room < size:  # not one by one, as they leave
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
            if not alive(topic):  # and these may be of another log by its name
                return
            if not self._left or self._left[0][0] != begin:  # it was emptied or trimmed meanwhile
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
    """Whether a cursor is an engine's, and no channel's."""
    return cursor.channel.startswith(_ENGINE)


def _message(record: Record, offset: int) -> Message:
    delay_ns = record.due_ns - record.arrival_ns if record.due_ns else 0
    message = Message(record.id, record.arrival_ns, record.body, record.publisher, delay_ns)
    message.offset = offset
    return message
