"""The registry against a table that is searched from end to end, as nsqlookupd does it; and what listeners are told."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from srtm.control.discovery.registry import Came, Change, Left, Producer, Reason, Registry, TopicChanged
from srtm.errors import RegistryFull
from srtm.protocol.lookup import PeerInfo
from srtm.units import NS_PER_S

INACTIVE_S, TOMBSTONE_S = 300, 45
START_NS = 1_600_000_000 * NS_PER_S

Key = tuple[str, str, str]


def peer(number: int) -> PeerInfo:
    return PeerInfo(f"host-{number % 3}", "h", 4150, 4151, "1.3.0")


class Table:
    """Registrations in one table: (category, topic, channel) to producers with the times of their tombstones."""

    def __init__(self) -> None:
        self.rows: dict[Key, dict[str, int | None]] = {}
        self.seen: dict[str, int] = {}
        self.nodes: dict[str, str] = {}

    def keys(self, category: str, topic: str, channel: str = "*") -> list[Key]:
        wanted = zip((category, topic, channel), range(3), strict=True)
        matches = [(value, place) for value, place in wanted if value != "*"]
        return [key for key in self.rows if all(key[place] == value for value, place in matches)]

    def add(self, key: Key, who: str | None = None) -> None:
        row = self.rows.setdefault(key, {})
        if who is not None:
            row.setdefault(who, None)

    def remove(self, key: Key, who: str) -> int:
        row = self.rows.get(key, {})
        row.pop(who, None)
        return len(row)

    def active(self, topic: str, now_ns: int) -> set[str]:
        return {
            who
            for key in self.keys("topic", topic, "")
            for who, at in self.rows[key].items()
            if now_ns - self.seen[who] <= INACTIVE_S * NS_PER_S
            and not (at is not None and now_ns - at < TOMBSTONE_S * NS_PER_S)
        }


class Both(RuleBasedStateMachine):
    """The same said to both; a listener that only reads what it is told has changed."""

    producers = Bundle("producers")
    topics = st.sampled_from(["t", "u", "e#ephemeral"])
    channels = st.sampled_from(["c", "d", "x#ephemeral"])

    @initialize()
    def begin(self) -> None:
        self.now_ns = START_NS
        self.count = 0
        self.registry = Registry(INACTIVE_S, TOMBSTONE_S)
        self.registry.on_change = self.hear
        self.table = Table()
        self.known: dict[str, set[str]] = {}
        self.alive: set[str] = set()

    def hear(self, change: Change) -> None:
        match change:
            case Came(producer):
                assert producer.address not in self.alive
                self.alive.add(producer.address)
            case Left(producer):
                self.alive.discard(producer.address)
            case TopicChanged(topic):
                self.known[topic] = {each.address for each in self.registry.producers(topic, self.now_ns)}

    @rule(target=producers, number=st.integers(0, 2))
    def identify(self, number: int) -> Producer:
        self.count += 1
        who = f"10.0.0.1:{self.count}"
        producer = self.registry.identify(who, peer(number), self.now_ns)
        self.table.add(("client", "", ""), who)
        self.table.seen[who], self.table.nodes[who] = self.now_ns, f"host-{number}:4151"
        return producer

    @rule(producer=producers)
    def ping(self, producer: Producer) -> None:
        self.registry.ping(producer, self.now_ns)
        self.table.seen[producer.address] = self.now_ns

    @rule(producer=producers, topic=topics, channel=st.none() | channels)
    def register(self, producer: Producer, topic: str, channel: str | None) -> None:
        self.registry.register(producer, topic, channel)
        if channel:
            self.table.add(("channel", topic, channel), producer.address)
        self.table.add(("topic", topic, ""), producer.address)

    @rule(producer=producers, topic=topics, channel=channels)
    def unregister_channel(self, producer: Producer, topic: str, channel: str) -> None:
        self.registry.unregister(producer, topic, channel)
        key = ("channel", topic, channel)
        if not self.table.remove(key, producer.address) and channel.endswith("#ephemeral"):
            self.table.rows.pop(key, None)

    @rule(producer=producers, topic=topics)
    def unregister(self, producer: Producer, topic: str) -> None:
        self.registry.unregister(producer, topic)
        for key in self.table.keys("channel", topic):
            self.table.remove(key, producer.address)
        if not self.table.remove(("topic", topic, ""), producer.address) and topic.endswith("#ephemeral"):
            self.table.rows.pop(("topic", topic, ""), None)

    @rule(target=producers, producer=consumes(producers), reason=st.sampled_from(Reason))
    def leave(self, producer: Producer, reason: Reason) -> Any:
        self.registry.leave(producer, reason)
        for key in list(self.table.rows):
            self.table.remove(key, producer.address)
        return multiple()

    @rule(topic=topics, channel=st.none() | channels)
    def create(self, topic: str, channel: str | None) -> None:
        self.registry.create(topic, channel)
        if channel:
            self.table.add(("channel", topic, channel))
        self.table.add(("topic", topic, ""))

    @rule(topic=topics | st.just("*"))
    def delete_topic(self, topic: str) -> None:
        self.registry.delete_topic(topic)
        for key in [*self.table.keys("channel", topic), *self.table.keys("topic", topic)]:
            del self.table.rows[key]

    @rule(topic=topics, channel=channels)
    def delete_channel(self, topic: str, channel: str) -> None:
        there = self.table.rows.pop(("channel", topic, channel), None) is not None
        assert self.registry.delete_channel(topic, channel) == there

    @rule(topic=topics | st.just("*"), number=st.integers(0, 2))
    def tombstone(self, topic: str, number: int) -> None:
        self.registry.tombstone(topic, f"host-{number}:4151", self.now_ns)
        for key in self.table.keys("topic", topic, ""):
            for who in self.table.rows[key]:
                if self.table.nodes[who] == f"host-{number}:4151":
                    self.table.rows[key][who] = self.now_ns

    @rule(seconds=st.sampled_from([0, 1, 44, 45, 255, 299, 300]), more_ns=st.sampled_from([0, 1]))
    def pass_time(self, seconds: int, more_ns: int) -> None:
        self.now_ns += seconds * NS_PER_S + more_ns
        self.registry.tick(self.now_ns)

    @invariant()
    def the_same(self) -> None:
        now_ns, registry, table = self.now_ns, self.registry, self.table
        assert set(registry.topics()) == {key[1] for key in table.keys("topic", "*")}
        for topic in ("t", "u", "e#ephemeral", "*"):
            assert registry.knows(topic) == bool(table.keys("topic", topic))
            assert sorted(registry.channels(topic)) == sorted(key[2] for key in table.keys("channel", topic))
            found = [each.address for each in registry.producers(topic, now_ns)]
            assert len(found) == len(set(found))
            assert set(found) == table.active(topic, now_ns)
            if topic != "*":
                assert self.known.get(topic, set()) == set(found), "who listens knows"
        nodes = {each.address for each in registry.nodes(now_ns)}
        assert nodes == self.alive
        everything = {
            (entry.category, entry.topic, entry.channel, entry.producer.address, entry.tombstoned_ns)
            for entry in registry.registrations()
        }
        wanted = {(*key, who, at) for key, row in table.rows.items() for who, at in row.items()}
        assert everything == wanted
        names = [key for key in table.rows if key[0] != "client"]
        assert registry.entries == len(wanted) + len(names)


TestBoth = Both.TestCase


def test_who_is_silent_is_told_once_and_may_come_back_or_go() -> None:
    registry = Registry(INACTIVE_S, TOMBSTONE_S)
    heard: list[Change] = []
    registry.on_change = heard.append
    one, two = (registry.identify(f"10.0.0.1:{port}", peer(port), START_NS) for port in (1, 2))
    registry.register(one, "t")
    registry.register(two, "t")
    heard.clear()

    registry.ping(two, START_NS + 1)
    registry.tick(START_NS + INACTIVE_S * NS_PER_S)
    assert heard == []
    registry.tick(START_NS + INACTIVE_S * NS_PER_S + 1)
    registry.tick(START_NS + INACTIVE_S * NS_PER_S + 1)
    assert heard == [Left(one, Reason.SILENT), TopicChanged("t")]
    heard.clear()
    registry.ping(one, START_NS + 400 * NS_PER_S)
    assert heard == [Came(one), TopicChanged("t")]
    heard.clear()
    registry.tick(START_NS + 800 * NS_PER_S)
    registry.leave(one, Reason.EOF)
    silent = [(Left(each, Reason.SILENT), TopicChanged("t")) for each in (two, one)]
    assert heard == [*silent[0], *silent[1], Left(one, Reason.EOF), TopicChanged("t")]


def test_who_has_left_does_not_fall_silent() -> None:
    registry = Registry(INACTIVE_S, TOMBSTONE_S)
    producer = registry.identify("10.0.0.1:1", peer(1), START_NS)
    registry.leave(producer, Reason.RESET)
    heard: list[Change] = []
    registry.on_change = heard.append
    registry.tick(START_NS + 1_000 * NS_PER_S)
    assert heard == []


def test_tombstones_end_in_time_and_can_be_renewed() -> None:
    registry = Registry(INACTIVE_S, TOMBSTONE_S)
    one, two = (registry.identify(f"10.0.0.1:{port}", peer(port), START_NS) for port in (1, 2))
    for producer in (one, two):
        registry.register(producer, producer.node.removesuffix(":4151"))
    heard: list[Change] = []
    registry.on_change = heard.append

    def told(seconds: int, less_ns: int = 0) -> list[Change]:
        heard.clear()
        registry.tick(START_NS + seconds * NS_PER_S - less_ns)
        return list(heard)

    def there(topic: str, seconds: int, less_ns: int = 0) -> bool:
        return bool(registry.producers(topic, START_NS + seconds * NS_PER_S - less_ns))

    registry.tombstone("host-1", one.node, START_NS)
    registry.tombstone("host-2", two.node, START_NS + 10 * NS_PER_S)
    registry.tombstone("host-1", one.node, START_NS + 20 * NS_PER_S)
    assert told(55, 1) == []
    assert not there("host-2", 55, 1)
    assert told(55) == [TopicChanged("host-2")]
    assert there("host-2", 55)
    assert told(65, 1) == []
    assert not there("host-1", 65, 1)
    assert told(65) == [TopicChanged("host-1")]
    assert there("host-1", 65)


def test_there_is_room_for_so_many_and_for_more_when_some_have_gone() -> None:
    registry = Registry(max_entries=4)
    producer = registry.identify("10.0.0.1:1", peer(0), START_NS)
    registry.register(producer, "t")
    registry.create("u")
    for refused in (
        lambda: registry.create("v"),
        lambda: registry.register(producer, "u"),
        lambda: registry.register(producer, "t", "c"),
        lambda: registry.identify("10.0.0.1:2", peer(0), START_NS),
    ):
        with pytest.raises(RegistryFull, match="limit of 4"):
            refused()
    registry.register(producer, "t")
    registry.delete_topic("u")
    registry.create("v")
    assert registry.topics() == ["t", "v"]


def steps_of(size: int) -> int:
    """Bytecodes that it takes `size` brokers to come with a topic and a channel each, to be asked for, and to go."""
    registry = Registry(INACTIVE_S, TOMBSTONE_S)
    steps = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        producers = [registry.identify(f"10.0.0.1:{port}", peer(port), START_NS) for port in range(size)]
        for number, producer in enumerate(producers):
            registry.register(producer, "shared", "c")
            registry.register(producer, f"t{number}", "c")
            registry.ping(producer, START_NS)
            registry.tombstone(f"t{number}", producer.node, START_NS)
        for number, producer in enumerate(producers):
            registry.producers(f"t{number}", START_NS)
            registry.channels(f"t{number}")
            registry.unregister(producer, "shared", "c")
        registry.tick(START_NS + 46 * NS_PER_S)
        assert len(registry.nodes(START_NS)) == size
        for producer in producers:
            registry.leave(producer, Reason.EOF)
        registry.delete_topic("*")
    finally:
        sys.settrace(before)
    assert registry.entries == 0
    return steps


def test_work_grows_with_what_changes_and_not_with_what_is_there() -> None:
    assert steps_of(1_000) < 2.1 * steps_of(500)
