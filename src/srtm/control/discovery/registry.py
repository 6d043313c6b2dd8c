"""The registry: producers with their topics and channels, as nsqlookupd keeps them; no IO, no clock.

In: what producers and operators say, and when. Out: what nsqlookupd 1.3.0 would answer, and changes, to `on_change`.

A producer is one connection of a broker. A name stays when its last producer is gone, so that the next broker with the
topic learns its channels; an ephemeral name goes when its last producer unregisters it. Answers omit a producer while
it is silent, and omit it from one topic while it is tombstoned there. A reader that asks for a topic's producers at
every `TopicChanged` is up to date, to the next `tick`. `on_change` may read the registry, not change it. The cost of an
operation depends on what it changes, not on the size of the registry, which is at most `max_entries`.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from srtm.errors import RegistryFull
from srtm.protocol.names import ephemeral
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from srtm.protocol.lookup import PeerInfo

INACTIVE_AFTER_S = 300.0
TOMBSTONE_S = 45.0
MAX_ENTRIES = 2_000_000  # a thousand brokers with a thousand topics and channels each; some hundred bytes an entry
ANY = "*"  # in place of a topic's name in questions and deletions


class Reason(StrEnum):
    """How a producer left."""

    EOF = "eof"  # it closed the connection, or its process ended
    RESET = "reset"  # its host does not know the connection
    SILENT = "silent"  # it sent nothing for a while; the connection may still be open
    REFUSED = "refused"  # it broke the protocol


class Producer:
    """One broker's connection: its identity, when it was last heard, and its registrations."""

    __slots__ = ("address", "channels", "peer", "seen_ns", "silent", "topics")

    def __init__(self, address: str, peer: PeerInfo, now_ns: int) -> None:
        self.address = address
        self.peer = peer
        self.seen_ns = now_ns
        self.silent = False
        self.topics: dict[str, None] = {}
        self.channels: dict[tuple[str, str], None] = {}

    @property
    def node(self) -> str:
        """Its HTTP address, as operators name it."""
        return f"{self.peer.broadcast_address}:{self.peer.http_port}"


class Came(NamedTuple):
    """A producer identified itself, or was heard again."""

    producer: Producer


class Left(NamedTuple):
    """A producer is gone; a silent one may be heard again, or leave for another reason later."""

    producer: Producer
    reason: Reason


class TopicChanged(NamedTuple):
    """The producers of a topic changed."""

    topic: str


class Entry(NamedTuple):
    """One registration; `topic` and `channel` may be empty."""

    category: str
    topic: str
    channel: str
    producer: Producer
    tombstoned_ns: int | None


Change = Came | Left | TopicChanged


class Registry:
    """All registrations. It has one owner, which calls `tick`."""

    def __init__(
        self,
        inactive_after_s: float = INACTIVE_AFTER_S,
        tombstone_s: float = TOMBSTONE_S,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self.on_change: Callable[[Change], None] | None = None
        self.entries = 0
        self._inactive_after_ns = round(inactive_after_s * NS_PER_S)
        self._tombstone_ns = round(tombstone_s * NS_PER_S)
        self._max_entries = max_entries
        self._producers: dict[Producer, None] = {}
        self._heard: OrderedDict[Producer, None] = OrderedDict()  # not silent; the one heard longest ago first
        self._topics: dict[str, dict[Producer, int | None]] = {}  # the time of the tombstone, if any
        self._channels: dict[str, dict[str, dict[Producer, None]]] = {}
        self._tombstones: OrderedDict[tuple[str, Producer], int] = OrderedDict()  # in force, oldest first

    def identify(self, address: str, peer: PeerInfo, now_ns: int) -> Producer:
        """Add a producer without registrations."""
        self._take_room()
        producer = Producer(address, peer, now_ns)
        self._producers[producer] = self._heard[producer] = None
        self._tell(Came(producer))
        return producer

    def ping(self, producer: Producer, now_ns: int) -> None:
        """A producer was heard. As in nsqlookupd, registering does not count as a sign of life."""
        producer.seen_ns = now_ns
        self._heard[producer] = None
        self._heard.move_to_end(producer)
        if producer.silent:
            producer.silent = False
            self._tell(Came(producer))
            self._tell_topics(producer.topics)

    def register(self, producer: Producer, topic: str, channel: str | None = None) -> None:
        """Register a topic of a producer, or a channel and its topic."""
        self.create(topic, channel)
        if channel is not None and (topic, channel) not in producer.channels:
            self._take_room()
            self._channels[topic][channel][producer] = None
            producer.channels[topic, channel] = None
        if topic not in producer.topics:
            self._take_room()
            self._topics[topic][producer] = None
            producer.topics[topic] = None
            self._tell(TopicChanged(topic))

    def unregister(self, producer: Producer, topic: str, channel: str | None = None) -> None:
        """Unregister a channel of a producer, or a topic with all its channels."""
        if channel is not None:
            self._drop_channel(producer, topic, channel)
            if ephemeral(channel) and not self._channels.get(topic, {}).get(channel):
                self.delete_channel(topic, channel)
            return
        for name in self._channels.get(topic, ()):
            self._drop_channel(producer, topic, name)
        self._drop_topic(producer, topic)
        if ephemeral(topic) and topic in self._topics and not self._topics[topic]:
            del self._topics[topic]
            self.entries -= 1

    def leave(self, producer: Producer, reason: Reason) -> None:
        """Remove a producer whose connection is gone, with its registrations; names stay."""
        del self._producers[producer]
        self._heard.pop(producer, None)
        self.entries -= 1
        self._tell(Left(producer, reason))
        for topic, channel in list(producer.channels):
            self._drop_channel(producer, topic, channel)
        for topic in list(producer.topics):
            self._drop_topic(producer, topic)

    def create(self, topic: str, channel: str | None = None) -> None:
        """Make a topic, and a channel of it, known without a producer."""
        if channel is not None and channel not in self._channels.get(topic, ()):
            self._take_room()
            self._channels.setdefault(topic, {})[channel] = {}
        if topic not in self._topics:
            self._take_room()
            self._topics[topic] = {}

    def delete_topic(self, topic: str) -> None:
        """Forget a topic and its channels, with all their registrations."""
        for name in _matching(self._channels, topic):
            for channel in list(self._channels[name]):
                self.delete_channel(name, channel)
        for name in _matching(self._topics, topic):
            producers = self._topics.pop(name)
            self.entries -= 1 + len(producers)
            for producer in producers:
                del producer.topics[name]
            if producers:
                self._tell(TopicChanged(name))

    def delete_channel(self, topic: str, channel: str) -> bool:
        """Forget a channel with all its registrations; False if it is unknown."""
        channels = self._channels.get(topic, {})
        if channel not in channels:
            return False
        producers = channels.pop(channel)
        self.entries -= 1 + len(producers)
        for producer in producers:
            del producer.channels[topic, channel]
        if not channels:
            del self._channels[topic]
        return True

    def tombstone(self, topic: str, node: str, now_ns: int) -> None:
        """Omit the producer at this node from a topic for a while, so that consumers leave before it does."""
        for name in _matching(self._topics, topic):
            for producer in self._topics[name]:
                if producer.node == node:
                    self._topics[name][producer] = self._tombstones[name, producer] = now_ns
                    self._tombstones.move_to_end((name, producer))
                    self._tell(TopicChanged(name))

    def tick(self, now_ns: int) -> None:
        """Report producers that fell silent, and tombstones that ended."""
        while self._heard and not self._active(producer := next(iter(self._heard)), now_ns):
            del self._heard[producer]
            producer.silent = True
            self._tell(Left(producer, Reason.SILENT))
            self._tell_topics(producer.topics)
        while self._tombstones:
            (topic, producer), at_ns = next(iter(self._tombstones.items()))
            if now_ns - at_ns < self._tombstone_ns:
                break
            del self._tombstones[topic, producer]
            if topic in producer.topics:
                self._tell(TopicChanged(topic))

    def topics(self) -> list[str]:
        """All known topics."""
        return list(self._topics)

    def channels(self, topic: str) -> list[str]:
        """All known channels of a topic."""
        return [channel for name in _matching(self._channels, topic) for channel in self._channels[name]]

    def knows(self, topic: str) -> bool:
        """Whether a topic is known, with producers or without."""
        return bool(_matching(self._topics, topic))

    def producers(self, topic: str, now_ns: int) -> list[Producer]:
        """The producers of a topic that consumers should connect to."""
        found = {
            producer: None
            for name in _matching(self._topics, topic)
            for producer in self._topics[name]
            if self._active(producer, now_ns) and not self.tombstoned(producer, name, now_ns)
        }
        return list(found)

    def nodes(self, now_ns: int) -> list[Producer]:
        """All producers that are not silent."""
        return [producer for producer in self._producers if self._active(producer, now_ns)]

    def tombstoned(self, producer: Producer, topic: str, now_ns: int) -> bool:
        """Whether a producer is tombstoned for a topic now."""
        at_ns = self._topics[topic][producer]
        return at_ns is not None and now_ns - at_ns < self._tombstone_ns

    def registrations(self) -> Iterator[Entry]:
        """Everything, silent and tombstoned producers included."""
        for producer in self._producers:
            yield Entry("client", "", "", producer, None)
        for topic, producers in self._topics.items():
            for producer, tombstoned_ns in producers.items():
                yield Entry("topic", topic, "", producer, tombstoned_ns)
        for topic, channels in self._channels.items():
            for channel, members in channels.items():
                for producer in members:
                    yield Entry("channel", topic, channel, producer, None)

    def _active(self, producer: Producer, now_ns: int) -> bool:
        return now_ns - producer.seen_ns <= self._inactive_after_ns

    def _drop_topic(self, producer: Producer, topic: str) -> None:
        if topic in producer.topics:
            del producer.topics[topic], self._topics[topic][producer]
            self.entries -= 1
            self._tell(TopicChanged(topic))

    def _drop_channel(self, producer: Producer, topic: str, channel: str) -> None:
        if (topic, channel) in producer.channels:
            del producer.channels[topic, channel], self._channels[topic][channel][producer]
            self.entries -= 1

    def _take_room(self) -> None:
        if self.entries >= self._max_entries:
            raise RegistryFull(
                f"the registry holds its limit of {self._max_entries} names and registrations; delete unused topics",
                limit=self._max_entries,
            )
        self.entries += 1

    def _tell(self, change: Change) -> None:
        if self.on_change:
            self.on_change(change)

    def _tell_topics(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self._tell(TopicChanged(topic))


def _matching(names: Mapping[str, object], topic: str) -> list[str]:
    return list(names) if topic == ANY else [topic] if topic in names else []
