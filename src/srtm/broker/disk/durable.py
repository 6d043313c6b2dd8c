"""Topics on disk: between the loop and the log.

The log stores a message of a disk topic when it arrives, with all others of that turn. Once it is durable its publisher
gets its OK, and the message enters its topic with its arrival time from the kernel. A channel's FINs move its cursor.
After a restart, channels read unfinished messages from the log again (`readers`). An engine is the only reader of its
topics (`spool`). Pauses and limits are saved as they change (`notes`), queues of memory topics when the broker stops
(`saved`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from srtm.broker.disk.log import Log
from srtm.broker.disk.notes import Notes
from srtm.broker.disk.readers import Readers
from srtm.broker.disk.records import record_of
from srtm.broker.disk.replay import Replay
from srtm.broker.disk.rows import Known, Retention
from srtm.broker.disk.saved import SavedQueues
from srtm.broker.engines.spool import Spool, is_engines
from srtm.broker.receipts import Receipt, settle_stored
from srtm.broker.statistics import LogExtent
from srtm.errors import BrokerError, LogError, LogReplaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from srtm.broker.channel import Channel
    from srtm.broker.disk.batch import Piece
    from srtm.broker.message import Message
    from srtm.broker.options import BrokerOptions
    from srtm.broker.topic import Sender, Topic
    from srtm.broker.topics import Topics
    from srtm.broker.turn import Turn

_SAVED_S = 0.1
_RETAINED_S = 1.0

Stored = tuple[list["Message"], Receipt, "Sender"]


class Durable:
    """The log of one broker, and the part of it that is in memory."""

    def __init__(
        self, folder: Path, options: BrokerOptions, topics: Topics, turn: Turn, groups: dict[str, str | None]
    ) -> None:
        self._log = Log.open(folder, turn.loop)
        self._topics = topics
        self._turn = turn
        self._groups = groups
        self._managed = options.controller is not None
        self._retention = Retention(
            options.retain_bytes, options.retain_age_ns, acknowledged=not options.retain_acknowledged
        )
        self._notes = Notes(self._log, topics, turn.loop)
        self._saved = SavedQueues(self._log, topics, groups)
        self._readers = Readers(self._log, topics, turn, max(1, options.max_held_messages // 2))
        self._recovering = self._recovered = False
        self._coming: dict[Topic, list[Stored]] = {}  # stored at the end of this turn
        self._unread: set[str] = set()  # topics that are not known to have had a channel
        self._ends: dict[str, int] = {}  # the next offset of each topic

    def recover(self, now_ns: int) -> None:
        """Restore topics, channels and messages."""
        # Messages may have been waiting for tokens when the broker died, so all of them need new ones.
        self._recovering = True
        known = self._log.known()
        self._check_readers(known)
        for name in self._log.topics:
            self.adopt(self._topics.touch(name))
        for name, rows in known.items():
            self._notes.recall(self._topics.touch(name), rows, now_ns, limited=not self._managed)
        self._recovering = False
        self._saved.load(now_ns, managed=self._managed)
        self._recovered = True
        self._readers.spawn(self._tend())
        self._turn.wake()

    def _check_readers(self, known: dict[str, list[Known]]) -> None:
        """Raise BrokerError if the log has readers that this broker cannot serve: an engine, or channels beside one."""
        cursors = [cursor for topic in self._log.topics for cursor in self._log.cursors(topic)]
        if (engine := self._topics.engine) is None:
            owed = {
                cursor.topic: cursor.missing(self._log.end(cursor.topic)) for cursor in cursors if is_engines(cursor)
            }
            if owed:
                raise BrokerError(
                    f"--data-path has topics on disk that an engine delivers"
                    f" ({_some(f'{name}: {count} messages not acknowledged' for name, count in owed.items())}):"
                    f" start with --engine, or with another --data-path"
                )
            return
        channels = {f"{cursor.topic}/{cursor.channel}" for cursor in cursors if not is_engines(cursor)}
        channels |= {f"{name}/{row.channel}" for name, rows in known.items() for row in rows if row.channel}
        if channels:
            raise BrokerError(
                f"--data-path has channels ({_some(sorted(channels))}), which the engine {engine.kind} cannot serve:"
                f" start without --engine and delete them, or with another --data-path"
            )

    def note(self, name: str) -> None:
        """Save a topic that has changed."""
        self._notes.note(name)

    async def noted(self, topic: Topic) -> None:
        """Save a topic, and wait until that is durable; LogError if it fails."""
        await self._notes.noted(topic.name)

    def adopt(self, topic: Topic) -> None:
        """Put a topic on disk; its channels continue where they were."""
        topic.durable, topic.later, topic.gate.drops = self, True, False  # a message with an OK must not be dropped
        if topic.name not in self._log.topics:
            self._log.keep(topic.name, None)  # exists on disk even before its first message
        self._ends[topic.name] = self._log.end(topic.name)
        engine = self._topics.engine
        if engine is not None:
            spool = topic.spool = engine.lane(topic).spool = Spool(topic, self._log)
            if self.retention(topic).limited:
                spool.lost = spool.cursor.lost
            self._readers.spawn(spool.follow(self._turn, self._topics.alive))
            return
        if not (cursors := self._log.cursors(topic.name)):
            self._unread.add(topic.name)
        for cursor in cursors:
            self._topics.channel(topic, cursor.channel)

    def _spool(self, topic: Topic) -> Spool | None:
        engine = self._topics.engine
        return engine.lane(topic).spool if engine is not None else None

    def attach(self, topic: Topic, channel: Channel) -> None:
        """Give a channel of a disk topic its place in the log; the first channel gets everything in it."""
        first = not any(other.cursor for other in topic.channels.values())
        begin, end = self._log.begin(topic.name), self._released(topic)  # later messages come through the gate
        if not first and topic.unclaimed:  # of a topic that is paused: it gets these, too
            end = min(message.offset for message in topic.unclaimed)
        if channel.ephemeral:
            ranges = [(begin, end)] if topic.name in self._unread and begin < end else []
        else:
            channel.cursor = self._log.cursor(topic.name, channel.name, begin if first else end)
            if self.retention(topic).limited:
                channel.tally.lost += channel.cursor.lost
            ranges = list(channel.cursor.unfinished(end))
        self._unread.discard(topic.name)
        if ranges:
            topic.unclaimed.clear()  # the channel reads them from the log
            topic.unclaimed_bytes = 0
            self._readers.spawn(self._readers.reload(topic, channel, ranges, limited=self._recovering))

    def replay(self, topic: Topic, name: str, offset: int, log: str | None = None) -> Replay:
        """Create a channel that begins at an offset; LogError if the log, or the one given, does not hold it."""
        self._log.check_offset(topic.name, offset, log)
        end = topic.unclaimed[0].offset if topic.unclaimed else self._released(topic)
        channel = Replay(name, offset, end)
        self._readers.spawn(self._readers.follow(topic, channel))
        return channel

    def _released(self, topic: Topic) -> int:
        """Return the offset of the first message that still waits for a token, or of the next one to come."""
        message = topic.gate.oldest
        return self._ends[topic.name] if message is None else message.offset

    def publish(self, topic: Topic, messages: list[Message], receipt: Receipt, sender: Sender) -> None:
        """Store messages with all others of this turn; then pass them to their topic, and settle the receipt.

        Until then the sender is held: only the messages of one read wait for the disk.
        """
        sender.hold()
        self._coming.setdefault(topic, []).append((messages, receipt, sender))

    def flush(self) -> None:
        """Hand the messages of this turn to the log."""
        if not self._coming:
            return
        coming, self._coming = self._coming, {}
        for topic, parts in coming.items():
            records = [record_of(message, self._groups) for messages, _, _ in parts for message in messages]
            try:
                self._log.append_nowait(topic.name, records, partial(self._stored, topic, parts))
            except LogError as closed:
                self._stored(topic, parts, closed)

    def _stored(self, topic: Topic, parts: list[Stored], result: int | LogError) -> None:
        problem = str(result) if isinstance(result, LogError) else None
        # If the topic was deleted meanwhile, so were these messages: a new one of its name has another log.
        if not isinstance(result, LogError) and self._topics.alive(topic):
            self._put(topic, [message for messages, _, _ in parts for message in messages], result)
            for _, _, sender in parts:
                topic.senders[sender] = None
        settle_stored([receipt for _, receipt, _ in parts], problem)
        for _, _, sender in parts:
            sender.release()
        self._turn.wake()

    def _put(self, topic: Topic, messages: list[Message], first: int) -> None:
        for offset, message in enumerate(messages, first):
            message.offset = offset
        self._ends[topic.name] = first + len(messages)
        spool = self._spool(topic)
        if spool is None or not spool.keeps(first, len(messages)):
            topic.gate.arrived += messages
        topic.bytes += sum(len(message.body) for message in messages)
        self._turn.to_drain[topic] = None

    def extent(self, topic: Topic) -> LogExtent:
        """Return a snapshot of a topic's log."""
        name, log = topic.name, self._log
        return LogExtent(log.identity(name), log.begin(name), log.end(name), log.size(name))

    async def read(self, topic: Topic, begin: int, limit: int, log: str | None = None) -> list[Piece]:
        """Read a range of the log, as columns, in a thread; LogReplaced if the topic no longer has the given log."""
        return await self._readers.pieces(topic, begin, limit, log)

    async def trim(self, topic: Topic, before: int, *, finished: bool = False, log: str | None = None) -> None:
        """Delete messages before an offset, or only those that all channels have `finished`.

        Channels still get those in memory, and lose others. Raise LogReplaced if the topic no longer has the given log.
        """
        if log is not None and log != self._log.identity(topic.name):
            raise LogReplaced(f"topic {topic.name!r} no longer has log {log!r}", topic=topic.name, log=log)
        if finished:
            before = min([before, *(cursor.low for cursor in self._log.cursors(topic.name))])
        self._skip(topic, await self._answer(partial(self._log.trim, topic.name, before)))

    async def empty(self, topic: Topic) -> None:
        """Drop messages that no channel has had, in memory and in the log."""
        spool = self._spool(topic)
        if spool is not None:
            await spool.empty()
        cursors = self._log.cursors(topic.name)
        for message in topic.early():
            for cursor in cursors:
                cursor.finish(message.offset)
        if not cursors:
            await self.trim(topic, self._ends[topic.name])

    def retention(self, topic: Topic) -> Retention:
        """Return the retention of a topic: its own, or the broker's."""
        return self._log.retention(topic.name) or self._retention

    async def keep(self, topic: Topic, **told: Any) -> None:
        """Save that a topic is on disk, and change the given fields of its `Retention`."""
        retention = replace(self.retention(topic), **told) if told else self._log.retention(topic.name)
        await self._answer(partial(self._log.keep, topic.name, retention))

    async def _answer(self, ask: Callable[[Callable[[Any], None]], None]) -> Any:
        answered: asyncio.Future[Any] = self._turn.loop.create_future()
        ask(lambda result: _settle(answered, result))
        return await answered

    def _expire(self, topic: Topic, begin: int | LogError) -> None:
        """Retention deleted everything below an offset: channels that are behind lose it."""
        if isinstance(begin, LogError):  # the log has logged it
            return
        gone = topic.forget(begin)
        for channel in topic.channels.values():
            if channel.cursor is not None:
                channel.forget(channel.cursor.low, begin)
            elif not isinstance(channel, Replay):  # which reads the log, and says itself what is missing
                channel.tally.lost += gone
        self._skip(topic, begin)
        self._turn.wake()  # publishers may have room now

    def _skip(self, topic: Topic, begin: int) -> None:
        """The log no longer holds anything below an offset: count what channels and the engine never get."""
        for channel in topic.channels.values():
            if channel.cursor is not None and channel.cursor.low < begin:
                held = chain(channel.everything(), topic.unclaimed, topic.gate.content())
                channel.tally.lost += channel.cursor.skip_to(begin, (message.offset for message in held))
        spool = self._spool(topic) if self._topics.alive(topic) else None
        if spool is not None:
            spool.lost += spool.skip_to(begin)

    def forget_channel(self, topic: Topic, channel: Channel) -> None:
        """Delete everything stored for a channel."""
        if channel.cursor is not None:
            self._log.delete_channel(topic.name, channel.name)
            channel.cursor = None
        self._saved.drop(topic, channel)

    def forget_topic(self, topic: Topic) -> None:
        """Delete everything stored for a topic."""
        self._saved.drop(topic)
        if topic.durable is None:
            return
        self.flush()  # messages of this turn are deleted, too
        spool = self._spool(topic)
        if spool is not None:
            spool.close()
        self._unread.discard(topic.name)
        self._ends.pop(topic.name, None)
        self._log.delete_topic(topic.name)

    @property
    def problem(self) -> str | None:
        """Why messages cannot be stored; None if they can."""
        return self._log.problem

    def wait(self) -> None:
        """Block until the log has finished all work."""
        self._log.call()

    def close(self) -> None:
        """Save queues of memory topics, and close the log."""
        self._readers.close()
        self._notes.close()
        self._log.save_cursors()
        try:
            if self._recovered:  # otherwise the saved queues are still unread
                self._saved.save()
        finally:
            self._log.close()

    async def _tend(self) -> None:
        """Save the progress of channels and apply retention, periodically."""
        turns = 0
        while True:
            await asyncio.sleep(_SAVED_S)
            self._log.save_cursors()
            self._saved.drop_delivered()
            turns += 1
            if turns * _SAVED_S >= _RETAINED_S:
                turns = 0
                self._log.look()
                now_ns = self._turn.now_ns()
                for topic in self._topics.values():
                    if topic.durable is not None:
                        expire = partial(self._expire, topic)
                        self._log.retain(topic.name, self.retention(topic), now_ns, expire)


def _some(names: Iterable[str]) -> str:
    """Return the first few names."""
    found = list(names)
    return ", ".join([*found[:3], *(["…"] if len(found) > 3 else [])])


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.cancelled():
        return
    if isinstance(result, LogError):
        future.set_exception(result)
    else:
        future.set_result(result)
