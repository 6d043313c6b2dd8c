"""The topics and channels that exist: made on demand, deleted by operators; ephemeral ones go by themselves.

In: names. Out: topics and channels, and a notice to everything that must know: the disk, the engine, the controller's
contracts, and lookup services (`on_change`, `on_topic`). Nothing else makes or deletes a topic or a channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from srtm.broker.permissions import Permissions
from srtm.broker.topic import Topic
from srtm.errors import BrokerError, LogError
from srtm.protocol.names import ephemeral

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from srtm.broker.channel import Channel, Consumer
    from srtm.broker.engines.engine import Engine
    from srtm.broker.turn import Turn


class Disk(Protocol):
    """What the disk must know of topics and channels."""

    def note(self, name: str) -> None:
        """Write down that something of a topic has changed."""

    def attach(self, topic: Topic, channel: Channel) -> None:
        """Give a new channel of a disk topic its place in the log."""

    def replay(self, topic: Topic, name: str, offset: int, log: str | None = None) -> Channel:
        """Make a channel that begins at an offset."""

    def adopt(self, topic: Topic) -> None:
        """Make a topic one on disk."""

    def forget_channel(self, topic: Topic, channel: Channel) -> None:
        """Delete everything that is kept for a channel."""

    def forget_topic(self, topic: Topic) -> None:
        """Delete everything that is kept for a topic."""


class Contracts(Protocol):
    """What the controller's contracts say about a topic that comes up here."""

    def refusal(self, topic: str) -> str | None:
        """Why the topic cannot be kept as promised; None if it can."""

    def closes(self, topic: str) -> bool:
        """Whether the topic must wait for a share."""

    def made(self, topic: Topic) -> None:
        """Put its contract in force."""


class Topics(Mapping[str, Topic]):
    """Topics by name; a mapping that only its own methods change."""

    def __init__(
        self, turn: Turn, engine: Engine | None, max_messages: int, max_bytes: int, max_consumers: int = 0
    ) -> None:
        """`max_consumers` of a channel; 0 if there may be any number."""
        self.engine = engine
        self.disk: Disk | None = None
        self.contracts: Contracts | None = None
        self.permissions = Permissions()
        self.on_change: Callable[[], None] | None = None  # topics or channels came or went
        self.on_topic: Callable[[Topic], None] | None = None  # a topic was made: it may have channels elsewhere
        self.by_name: dict[str, Topic] = {}  # for the intake alone, which looks up a topic per message
        self._turn = turn
        self._limits = max_messages, max_bytes
        self._max_consumers = max_consumers

    def __getitem__(self, name: str) -> Topic:
        """Return the topic of that name."""
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over names."""
        return iter(self.by_name)

    def __len__(self) -> int:
        """Count topics."""
        return len(self.by_name)

    def touch(self, name: str) -> Topic:
        """Return the topic of that name, made if need be, to be drained at the end of this turn.

        BrokerError if the engine cannot have it, or if it was promised to be on disk and cannot be.
        """
        topic = self.by_name.get(name)
        if topic is None:
            topic = self._make(name)
        self._turn.to_drain[topic] = None
        return topic

    def _make(self, name: str) -> Topic:
        engine, contracts = self.engine, self.contracts
        if engine is not None:
            engine.check_topic(name)
        if contracts is not None and (problem := contracts.refusal(name)):
            raise BrokerError(problem, topic=name)
        topic = self.by_name[name] = Topic(name, *self._limits)
        if engine is not None:
            topic.lane, topic.later = engine.lane(topic), True
        if contracts is not None:
            topic.gate.closed = contracts.closes(name)
            contracts.made(topic)
        if self.on_topic:
            self.on_topic(topic)
        self.changed(topic)
        return topic

    def alive(self, topic: Topic) -> bool:
        """Whether a topic was not deleted; another one may have its name by now."""
        return self.by_name.get(topic.name) is topic

    def channel(self, topic: Topic, name: str) -> Channel:
        """Return the topic's channel of that name, made if need be; BrokerError if an engine delivers."""
        if self.engine is not None:
            raise BrokerError(self.engine.no_channels(topic.name), topic=topic.name)
        known = name in topic.channels
        channel = topic.channel(name)
        if not known:
            if topic.durable is not None:
                assert self.disk is not None
                self.disk.attach(topic, channel)
            self._turn.to_drain[topic] = None
            self.changed(topic)
        return channel

    def channel_for_consumer(self, name: str, channel: str) -> Channel:
        """Return a channel, made if need be, that takes one more consumer; BrokerError if it has all that it may."""
        found = self.channel(self.touch(name), channel)
        if self._max_consumers and len(found.consumers) >= self._max_consumers:
            raise BrokerError(f"consumers for {name}:{channel} exceeds limit of {self._max_consumers}", channel=channel)
        return found

    def replay(self, name: str, channel: str, offset: int, log: str | None = None) -> Channel:
        """Make a channel that begins at an offset of a disk topic; LogError if that is impossible."""
        topic = self.by_name.get(name)
        if topic is None or topic.durable is None or self.disk is None:
            raise LogError(f"topic {name!r} is not on disk: only disk topics can be replayed", topic=name)
        if not ephemeral(channel) or channel in topic.channels:
            raise LogError(
                f"cannot replay to channel {channel!r}: use a new name that ends with #ephemeral", channel=channel
            )
        found = topic.channels[channel] = self.disk.replay(topic, channel, offset, log)
        self._turn.to_drain[topic] = None
        self.changed(topic)
        return found

    def changed(self, topic: Topic) -> None:
        """Tell that a topic, or a channel of it, came or went."""
        if self.disk is not None:
            self.disk.note(topic.name)
        if self.on_change:
            self.on_change()

    def leave(self, topic: Topic, channel: Channel, consumer: Consumer) -> None:
        """Take a consumer from its channel; others get what it had in flight."""
        channel.leave(consumer)
        self._turn.pump(channel)
        if channel.ephemeral and not channel.consumers:
            self.delete_channel(topic, channel)

    def delete_channel(self, topic: Topic, channel: Channel) -> None:
        """Delete a channel and disconnect its consumers. An ephemeral topic goes with its last channel."""
        if topic.channels.get(channel.name) is not channel:  # deleted before; another one may have its name
            return
        del topic.channels[channel.name]
        for consumer in list(channel.consumers):
            consumer.close()
        if self.disk is not None:
            self.disk.forget_channel(topic, channel)
        channel.empty()
        self._turn.to_pump.pop(channel, None)
        self.changed(topic)
        if topic.ephemeral and not topic.channels:
            self.delete(topic)

    def delete(self, topic: Topic) -> None:
        """Delete a topic with its channels."""
        if not self.alive(topic):
            return
        del self.by_name[topic.name]
        self._turn.farewells.forget(topic)
        for channel in list(topic.channels.values()):
            self.delete_channel(topic, channel)
        if self.disk is not None:
            self.disk.forget_topic(topic)
        if self.engine is not None:
            self.engine.forget(topic)
        topic.abandon(self._turn.now_ns())
        self._turn.forget(topic)
        self.changed(topic)
