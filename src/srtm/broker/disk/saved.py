"""Messages of memory topics over a stop, as in nsqd: saved when the broker stops, there again at its next start.

Saved messages stay on disk until they have been delivered.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from srtm.broker.disk.records import message_of, record_of
from srtm.errors import LogError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from srtm.broker.channel import Channel
    from srtm.broker.disk.batch import Record
    from srtm.broker.disk.log import Log
    from srtm.broker.topic import Topic
    from srtm.broker.topics import Topics

_LOOKED_AT = 200  # saved queues at a time: thousands of them would stop the loop for long
_WAITING = ""  # no channel has this name: messages that wait for tokens, among saved queues


class SavedQueues:
    """The queues that the last stop saved, as far as they may be needed again."""

    __slots__ = ("_groups", "_log", "_pieces", "_topics")

    def __init__(self, log: Log, topics: Topics, groups: Mapping[str, str | None]) -> None:
        self._log = log
        self._topics = topics
        self._groups = groups
        # Pieces of queues by topic and channel, with the ids of their messages.
        self._pieces: dict[tuple[str, str | None], deque[tuple[int, frozenset[bytes]]]] = {}

    def load(self, now_ns: int, *, managed: bool) -> None:
        """Bring back the messages; under a controller, those without a channel need tokens again."""
        for number, name, channel, records in self._log.load_queues():
            self._pieces.setdefault((name, channel), deque()).append((number, frozenset(r.id for r in records)))
            topic = self._topics.touch(name)
            messages = [message_of(record, now_ns) for record in records]
            if channel:
                self._topics.channel(topic, channel).put(messages, now_ns)
            elif channel == _WAITING or managed:
                topic.gate.arrived.extend(messages)
            else:
                topic.unclaimed.extend(messages)
                topic.unclaimed_bytes += sum(len(message.body) for message in messages)

    def drop(self, topic: Topic, channel: Channel | None = None) -> None:
        """Bring back no messages of a topic, or of a channel of it, that was deleted."""
        places = [
            place for place in self._pieces if place[0] == topic.name and (channel is None or place[1] == channel.name)
        ]
        numbers = [number for place in places for number, _ in self._pieces.pop(place)]
        if numbers:
            self._log.drop_queues(numbers)

    def drop_delivered(self) -> None:
        """Drop pieces whose messages have been delivered; they were the first in their queues."""
        done: list[int] = []
        for place in list(islice(self._pieces, _LOOKED_AT)):
            pieces = self._pieces.pop(place)
            while pieces and not self._undelivered(*place, pieces[0][1]):
                done.append(pieces.popleft()[0])
            if pieces:
                self._pieces[place] = pieces  # behind the others, which are looked at next
        if done:
            self._log.drop_queues(done)

    def _undelivered(self, name: str, channel_name: str | None, ids: frozenset[bytes]) -> bool:
        topic = self._topics.get(name)
        if topic is None:
            return False
        if not channel_name:
            first = [*islice(topic.unclaimed, 1), topic.gate.oldest]
            return any(message is not None and message.id in ids for message in first)
        channel = topic.channels.get(channel_name)
        return channel is not None and (
            any(message.id in ids for message in islice(channel.queue, 1))
            or any(not ids.isdisjoint(consumer.flights) for consumer in channel.consumers)
            or any(message_id in ids for _, message_id, _ in channel.deferred)
        )

    def save(self) -> None:
        """Save everything that is in memory alone; LogError, with the number of messages, if that fails."""
        try:
            self._log.save_queues(self._queues())
        except LogError as problem:
            lost = sum(len(records) for _, _, records in self._queues())
            raise LogError(f"{lost} messages of memory topics are lost: {problem}", lost=lost) from None

    def _queues(self) -> Iterator[tuple[str, str | None, list[Record]]]:
        groups = self._groups
        for topic in self._topics.values():
            if topic.ephemeral or topic.later:  # on disk, or not acknowledged to anybody
                continue
            yield topic.name, None, [record_of(message, groups) for message in topic.unclaimed]
            waiting = (*topic.waiting, *topic.gate.arrived)
            yield topic.name, _WAITING, [record_of(message, groups) for message in waiting]
            for channel in topic.channels.values():
                if not channel.ephemeral:
                    due_ns = {message.id: due for due, _, message in channel.deferred}
                    yield (
                        topic.name,
                        channel.name,
                        [
                            record_of(message, groups)._replace(due_ns=due_ns.get(message.id, 0))
                            for message in channel.everything()
                        ],
                    )
