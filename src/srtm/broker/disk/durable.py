"""Topics on disk, and queues over a stop: what stands between the loop and the log.

A message of a `disk` topic is handed to the log when it comes, answered with OK once it is durable, and only then put
before its topic, with the arrival time that the kernel gave it. A channel's FINs move its cursor. After a restart, what
a channel had not finished is read from the log again, as fast as there is room for it. It gets new tokens then,
because nobody knows who had theirs when a broker died. Where an engine delivers, it is one of a topic's readers, the
only one (`spool`).

Messages of memory topics are saved when the broker stops in order, and are there again at its next start, as in nsqd;
what was saved stays on disk until it has been delivered.
Which topics and channels there are, whether they are paused, and (r, b) set by hand are written down as they change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from srtm.broker.disk.batch import Record
from srtm.broker.disk.log import Known, Log, Retention
from srtm.broker.disk.replay import Replay
from srtm.broker.engines.spool import Spool, is_engines
from srtm.broker.message import Message
from srtm.broker.statistics import LogExtent
from srtm.errors import BrokerError, LogError, LogReplaced, OffsetTrimmed, ProtocolError
from srtm.model.bucket import Limiter, TokenBucket
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator
    from pathlib import Path

    from srtm.broker.channel import Channel
    from srtm.broker.ioloop import Broker
    from srtm.broker.topic import Topic

logger = logging.getLogger(__name__)

_BATCH = 1_000  # messages that are read from the log at once
_PAUSE_S = 0.02  # how long a channel that has enough is left alone
_SAVED_S = 0.1
_RETAINED_S = 1.0
_LOOKED_AT = 200  # saved queues at a time: thousands of them would stop the loop for long
_WAITING = ""  # no channel is called so: what waits for tokens, among saved queues


class Durable:
    """The log of one broker, and what of it is in memory."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self._broker = broker
        self._log = Log.open(folder, broker.loop)
        options = broker.options
        self._retention = Retention(
            options.retain_bytes, options.retain_age_ns, acknowledged=not options.retain_acknowledged
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._recovering = self._recovered = False
        self._noted: set[str] = set()  # topics of which something is yet to be written down
        self._writing = False
        self._readers: list[asyncio.Future[None]] = []  # who wait until it is
        # Pieces of queues that a stop has saved and that may be needed again, with the ids of their messages.
        self._saved: dict[tuple[str, str | None], deque[tuple[int, frozenset[bytes]]]] = {}
        self._unread: set[str] = set()  # topics that no channel has ever had, as far as is known
        self._ends: dict[str, int] = {}  # offsets behind the last message that topics were given

    def recover(self) -> None:
        """Bring back topics, channels and messages as they were."""
        broker = self._broker
        # What waited for tokens when a broker died must not pass without: all of it gets new ones.
        self._recovering = True
        known = self._log.known()
        self._check_readers(known)
        for name in self._log.topics:
            self.adopt(broker.touch(name))
        for name, rows in known.items():
            self._recall(broker.touch(name), rows)
        self._recovering = False
        for number, name, channel, records in self._log.load_queues():
            self._saved.setdefault((name, channel), deque()).append((number, frozenset(r.id for r in records)))
            topic, now_ns = broker.touch(name), broker.started_ns
            messages = [_message(record, now_ns) for record in records]
            if channel:
                broker.channel(topic, channel).put(messages, now_ns)
            elif channel == _WAITING or broker.options.controller is not None:
                topic.arrived.extend(messages)
            else:
                topic.unclaimed.extend(messages)
                topic.unclaimed_bytes += sum(len(message.body) for message in messages)
        self._recovered = True
        self._spawn(self._tend())
        broker.wake()

    def _check_readers(self, known: dict[str, list[Known]]) -> None:
        """BrokerError where messages are kept for somebody who is not there: an engine, or a channel beside one."""
        cursors = [cursor for topic in self._log.topics for cursor in self._log.cursors(topic)]
        if (engine := self._broker.engine) is None:
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

    def _recall(self, topic: Topic, rows: list[Known]) -> None:
        """Make a topic what it was. Its bucket begins empty: nobody knows what passed before the broker ended."""
        for row in rows:
            if row.channel:
                self._broker.channel(topic, row.channel).paused = row.paused
                continue
            topic.pause(self._broker.started_ns, on=row.paused)
            if row.r_mtps is not None and row.b_ntok is not None:
                topic.by_hand = TokenBucket(row.r_mtps, row.b_ntok)
                if self._broker.options.controller is None:  # or else that decides
                    topic.limiter = Limiter(topic.by_hand, self._broker.started_ns, 0)

    def note(self, name: str) -> None:
        """Something of a topic has changed: write it down, with what else changes until the disk is ready for it."""
        self._noted.add(name)
        if not self._writing:
            self._writing = True
            self._broker.loop.call_soon(self._write)

    async def noted(self, topic: Topic) -> None:
        """Write down what has changed of a topic, and wait until it is; LogError where it cannot be."""
        written: asyncio.Future[None] = self._broker.loop.create_future()
        self._readers.append(written)
        self.note(topic.name)
        await written

    def _write(self) -> None:
        names, self._noted = self._noted, set()
        readers, self._readers = self._readers, []

        def written(result: LogError | None) -> None:
            for reader in readers:
                _settle(reader, result)
            if result is not None:  # which the log has said
                self._noted |= names
                self._broker.loop.call_later(_RETAINED_S, self._write)
            elif self._noted:
                self._write()
            else:
                self._writing = False

        try:
            self._log.remember(self._changes(names), written)
        except LogError as closed:
            for reader in readers:
                _settle(reader, closed)

    def _changes(self, names: set[str]) -> dict[str, list[Known]]:
        return {name: _known(self._broker.topics.get(name)) for name in names}

    def adopt(self, topic: Topic) -> None:
        """Make a topic one on disk; its channels go on where they were."""
        topic.durable, topic.later, topic.drops = self, True, False  # what was answered is not dropped
        if topic.name not in self._log.topics:
            self._log.keep(topic.name, None)  # it is one on disk also before its first message
        self._ends[topic.name] = self._log.end(topic.name)
        if topic.lane is not None:
            topic.spool = Spool(topic, self._log)
            if self.retention(topic).limited:
                topic.spool.lost = topic.spool.cursor.lost
            self._spawn(topic.spool.follow(self._broker))
            return
        if not (cursors := self._log.cursors(topic.name)):
            self._unread.add(topic.name)
        for cursor in cursors:
            self._broker.channel(topic, cursor.channel)

    def attach(self, topic: Topic, channel: Channel) -> None:
        """Give a channel of such a topic its place in the log; the first one gets all that is there."""
        first = not any(other.cursor for other in topic.channels.values())
        begin, end = self._log.begin(topic.name), self._released(topic)  # later ones come through the bucket
        if channel.ephemeral:
            ranges = [(begin, end)] if topic.name in self._unread and begin < end else []
        else:
            channel.cursor = self._log.cursor(topic.name, channel.name, begin if first else end)
            if self.retention(topic).limited:
                channel.lost += channel.cursor.lost
            ranges = list(channel.cursor.unfinished(end))
        self._unread.discard(topic.name)
        if ranges:
            topic.unclaimed.clear()  # they are in the log, and come from there
            topic.unclaimed_bytes = 0
            self._spawn(self._reload(topic, channel, ranges, limited=self._recovering))

    def replay(self, topic: Topic, name: str, offset: int, log: str | None = None) -> Replay:
        """A channel that begins at an offset, of that log if one is named; LogError if the topic does not have it."""
        self._log.check_offset(topic.name, offset, log)
        end = topic.unclaimed[0].offset if topic.unclaimed else self._released(topic)
        channel = Replay(name, offset, end)
        self._spawn(self._follow(topic, channel))
        return channel

    async def _follow(self, topic: Topic, channel: Replay) -> None:
        """Give a replay what it is behind with, as long as it is there."""
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
                self._broker.wake()
                return
            if channel.at != at:  # it was emptied meanwhile
                continue
            now_ns = time.time_ns()
            messages = [_message(record, now_ns, offset) for offset, record in enumerate(records, at)]
            for message in messages:
                message.sent_ns = message.arrival_ns  # its latency is none of today's
            channel.take(messages, now_ns)
            self._broker.to_pump[channel] = None
            self._broker.wake()

    def _released(self, topic: Topic) -> int:
        """The offset of the first message that still waits for a token, or of the next one to come."""
        message = topic.oldest
        return self._ends[topic.name] if message is None else message.offset

    def publish(self, topic: Topic, messages: list[Message], done: Callable[[LogError | None], None]) -> None:
        """Store messages; `done` is called on the loop when they are durable and with their topic, or with why not."""

        def stored(result: int | LogError) -> None:
            if isinstance(result, LogError):
                done(result)
                return
            if self._broker.topics.get(topic.name) is topic:
                for offset, message in enumerate(messages, result):
                    message.offset = offset
                self._ends[topic.name] = result + len(messages)
                if topic.spool is None or not topic.spool.keeps(result, len(messages)):
                    topic.arrived += messages
                topic.bytes += sum(len(message.body) for message in messages)
                self._broker.touch(topic.name)
            # Otherwise the topic was deleted after these messages came, and they went with it: one of the same name
            # has a log of its own, which does not hold them.
            done(None)
            self._broker.wake()

        self._log.append_nowait(topic.name, [_record(message, self._broker.groups) for message in messages], stored)

    def extent(self, topic: Topic) -> LogExtent:
        """A snapshot of a topic's log."""
        name, log = topic.name, self._log
        return LogExtent(log.identity(name), log.begin(name), log.end(name), log.size(name))

    async def read(self, topic: Topic, begin: int, limit: int, log: str | None = None) -> list[Record]:
        """A range of the log, beside everything else; LogReplaced if it is not the one that was named."""
        return await self._broker.loop.run_in_executor(None, partial(self._log.read, topic.name, begin, limit, log=log))

    async def trim(self, topic: Topic, before: int, *, finished: bool = False, log: str | None = None) -> None:
        """Forget what is older, or of it only what all channels have `finished`; LogReplaced if it is not that log.

        Channels still get what of it is in memory.
        """
        if log is not None and log != self._log.identity(topic.name):
            raise LogReplaced(f"topic {topic.name!r} no longer has log {log!r}", topic=topic.name, log=log)
        if finished:
            before = min([before, *(cursor.low for cursor in self._log.cursors(topic.name))])
        self._skip(topic, await self._answer(partial(self._log.trim, topic.name, before)))

    async def empty(self, topic: Topic) -> None:
        """Let no channel get what none has yet: not from the log either, now or after a restart."""
        if topic.spool is not None:
            await topic.spool.empty()
        cursors = self._log.cursors(topic.name)
        for message in topic.early():
            for cursor in cursors:
                cursor.finish(message.offset)
        if not cursors:
            await self.trim(topic, self._ends[topic.name])

    def retention(self, topic: Topic) -> Retention:
        """What a topic keeps: what it was told to, or else the broker."""
        return self._log.retention(topic.name) or self._retention

    async def keep(self, topic: Topic, **told: Any) -> None:
        """Write down that a topic is on disk, and what it keeps: fields of `Retention`, the others as they were."""
        retention = replace(self.retention(topic), **told) if told else self._log.retention(topic.name)
        await self._answer(partial(self._log.keep, topic.name, retention))

    async def _answer(self, ask: Callable[[Callable[[Any], None]], None]) -> Any:
        answered: asyncio.Future[Any] = self._broker.loop.create_future()
        ask(lambda result: _settle(answered, result))
        return await answered

    def _expire(self, topic: Topic, begin: int | LogError) -> None:
        """Retention has taken what is below an offset: channels that are behind lose it."""
        if isinstance(begin, LogError):  # which the log has said
            return
        topic.forget(begin)
        for channel in topic.channels.values():
            if channel.cursor is not None and channel.cursor.low < begin:
                channel.forget(begin)
        if topic.spool is not None:
            topic.spool.lost += topic.spool.skip_to(begin)
        self._skip(topic, begin)
        self._broker.wake()  # there may be room for publishers

    def _skip(self, topic: Topic, begin: int) -> None:
        for channel in topic.channels.values():
            if channel.cursor is not None:
                channel.cursor.skip_to(begin)
        if topic.spool is not None:
            topic.spool.skip_to(begin)

    def forget_channel(self, topic: Topic, channel: Channel) -> None:
        """A channel is gone for good."""
        if channel.cursor is not None:
            self._log.delete_channel(topic.name, channel.name)
            channel.cursor = None

    def forget_topic(self, topic: Topic) -> None:
        """So is a topic."""
        if topic.spool is not None:
            topic.spool.close()
        self._unread.discard(topic.name)
        self._ends.pop(topic.name, None)
        self._log.delete_topic(topic.name)

    def drop_saved(self, topic: Topic, channel: Channel | None = None) -> None:
        """Bring back no messages that a stop had saved for a topic, or for a channel of it: it was deleted."""
        places = [
            place for place in self._saved if place[0] == topic.name and (channel is None or place[1] == channel.name)
        ]
        numbers = [number for place in places for number, _ in self._saved.pop(place)]
        if numbers:
            self._log.drop_queues(numbers)

    def close(self) -> None:
        """Save what is in memory alone, and close the log."""
        for task in self._tasks:
            task.cancel()
        if self._noted:
            self._log.remember(self._changes(self._noted), lambda _: None)
        self._log.save_cursors()
        try:
            if self._recovered:  # or else what was saved is there still
                self._log.save_queues(self._queues())
        except LogError as problem:
            lost = sum(len(records) for _, _, records in self._queues())
            raise LogError(f"{lost} messages of memory topics are lost: {problem}", lost=lost) from None
        finally:
            self._log.close()

    def _queues(self) -> Iterator[tuple[str, str | None, list[Record]]]:
        """What is in memory alone, by topic and channel."""
        groups = self._broker.groups
        for topic in self._broker.topics.values():
            if topic.ephemeral or topic.later:  # on disk, or not acknowledged to anybody
                continue
            yield topic.name, None, [_record(message, groups) for message in topic.unclaimed]
            yield topic.name, _WAITING, [_record(message, groups) for message in (*topic.waiting, *topic.arrived)]
            for channel in topic.channels.values():
                if not channel.ephemeral:
                    due_ns = {message.id: due for due, _, message in channel.deferred}
                    yield (
                        topic.name,
                        channel.name,
                        [
                            _record(message, groups)._replace(due_ns=due_ns.get(message.id, 0))
                            for message in channel.everything()
                        ],
                    )

    def _drop_saved(self) -> None:
        """Keep saved messages no longer than until they have been delivered; they were the first in their queues."""
        done: list[int] = []
        for place in list(islice(self._saved, _LOOKED_AT)):
            pieces = self._saved.pop(place)
            while pieces and not self._undelivered(*place, pieces[0][1]):
                done.append(pieces.popleft()[0])
            if pieces:
                self._saved[place] = pieces  # behind the others, which are looked at next
        if done:
            self._log.drop_queues(done)

    def _undelivered(self, name: str, channel_name: str | None, ids: frozenset[bytes]) -> bool:
        topic = self._broker.topics.get(name)
        if topic is None:
            return False
        if not channel_name:
            first = [*islice(topic.unclaimed, 1), topic.oldest]
            return any(message is not None and message.id in ids for message in first)
        channel = topic.channels.get(channel_name)
        return channel is not None and (
            any(message.id in ids for message in islice(channel.queue, 1))
            or any(not ids.isdisjoint(consumer.flights) for consumer in channel.consumers)
            or any(message_id in ids for _, message_id, _ in channel.deferred)
        )

    async def _reload(
        self, topic: Topic, channel: Channel, ranges: list[tuple[int, int]], *, limited: bool = False
    ) -> None:
        """Give a channel what it has not finished; `limited` where nobody knows whether that had its tokens."""
        most = self._broker.options.max_held_messages // 2
        for begin, end in ranges:
            at = begin
            while at < end and topic.channels.get(channel.name) is channel:
                if channel.held >= most:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                try:
                    size = min(_BATCH, end - at)
                    if limited:
                        size = await self._afford(topic, size)
                    records = await self.read(topic, at, size)
                except OffsetTrimmed:
                    kept = min(max(self._log.begin(topic.name), at + 1), end)
                    channel.lost += kept - at
                    at = kept
                    continue
                except LogError as problem:
                    logger.warning("CHANNEL(%s) of TOPIC(%s): %s", channel.name, topic.name, problem)
                    await asyncio.sleep(_RETAINED_S)
                    continue
                if topic.channels.get(channel.name) is not channel or not records:
                    return
                now_ns = time.time_ns()
                channel.put([_message(record, now_ns, offset) for offset, record in enumerate(records, at)], now_ns)
                at += len(records)
                self._broker.to_pump[channel] = None
                self._broker.wake()

    async def _afford(self, topic: Topic, most: int) -> int:
        """Wait for tokens for some messages: how many, a part of what a burst may be."""
        while topic.closed and self._broker.topics.get(topic.name) is topic:
            await asyncio.sleep(_PAUSE_S)
        limiter = topic.limiter
        if limiter is None:
            return most
        size = max(1, min(most, int(limiter.bucket.b) // 10))
        release_ns = limiter.admit(time.time_ns(), size)
        await asyncio.sleep(max(0, release_ns - time.time_ns()) / NS_PER_S)
        return size

    async def _tend(self) -> None:
        """Save the progress of channels, and forget what is not to be kept."""
        turns = 0
        while True:
            await asyncio.sleep(_SAVED_S)
            self._log.save_cursors()
            self._drop_saved()
            turns += 1
            if turns * _SAVED_S >= _RETAINED_S:
                turns = 0
                now_ns = time.time_ns()
                for topic in self._broker.topics.values():
                    if topic.durable is not None:
                        expire = partial(self._expire, topic)
                        self._log.retain(topic.name, self.retention(topic), now_ns, expire)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self._broker.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _some(names: Iterable[str]) -> str:
    """The first few of these."""
    found = list(names)
    return ", ".join([*found[:3], *(["…"] if len(found) > 3 else [])])


def _known(topic: Topic | None) -> list[Known]:
    """What is to be written down of a topic."""
    if topic is None or topic.ephemeral:
        return []
    limit = (topic.by_hand.r_mtps, topic.by_hand.b_ntok) if topic.by_hand else (None, None)
    rows = [Known("", topic.paused, *limit)]
    return rows + [Known(each.name, each.paused) for each in topic.channels.values() if not each.ephemeral]


def _record(message: Message, groups: dict[str, str | None]) -> Record:
    group = groups.get(message.publisher)
    due_ns = message.arrival_ns + message.delay_ns if message.delay_ns else 0
    return Record(message.id, message.arrival_ns, message.publisher, message.body, group, message.attempts, due_ns)


def _message(record: Record, now_ns: int, offset: int = -1) -> Message:
    delay_ns = max(0, record.due_ns - now_ns)
    message = Message(record.id, record.arrival_ns, record.body, record.publisher, delay_ns)
    message.attempts = record.attempts
    message.offset = offset
    return message


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.cancelled():
        return
    if isinstance(result, LogError):
        future.set_exception(result)
    else:
        future.set_result(result)
