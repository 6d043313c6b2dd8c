"""Delivery by an engine: between released messages and the nsqd or NATS that stores and delivers them.

In: messages of topics, when their buckets have let them go. Out: bytes of one connection to the engine, written once a
turn; acknowledgements, by which publishers get their OK and latencies end. `nsqd` and `nats` say how each engine is
spoken to, `link` keeps the connection, `lane` what a topic has under way; everything else is here.

Always holds:
- a publisher's OK leaves only after the engine has acknowledged its messages, in the order of its commands; that of a
  topic on disk when the log has them (`spool`), and the acknowledgement finishes their offsets;
- what is not acknowledged is kept, and sent again after a broken connection, in order and with tokens of its own; it
  may then be there twice, unless the engine knows it by its id;
- at most WINDOW messages and WINDOW_BYTES are with the engine unacknowledged; topics take turns for that room, and what
  waits for it counts against the limits of its topic, whose publishers are then held;
- a topic whose lane is shut releases nothing: its messages get their tokens when the engine takes them, so that an
  engine that comes back is not flooded with what was released meanwhile.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from srtm.broker.engines.lane import Lane
from srtm.broker.engines.link import Link
from srtm.broker.receipts import settle
from srtm.broker.statistics import EngineStatistics
from srtm.errors import BrokerError
from srtm.protocol import engine as addresses
from srtm.protocol.engine import is_local, seen_from_elsewhere

if TYPE_CHECKING:
    from srtm.broker.engines.probe import Probe
    from srtm.broker.message import Message
    from srtm.broker.options import BrokerOptions
    from srtm.broker.poller import Poller
    from srtm.broker.topic import Topic
    from srtm.broker.turn import Turn
    from srtm.protocol.engine import EngineAddress

log = logging.getLogger(__name__)

WINDOW, WINDOW_BYTES = 1_024, 4 * 1024 * 1024  # enough for 100,000 messages a second at a distance of 10 ms
SLICE, SLICE_BYTES = 256, 256 * 1024  # of one topic, before it is the turn of the next
SILENCE_NS = 2_500_000_000  # engines are asked for a sign of life every second


class Engine(ABC):
    """One engine, as a broker uses it."""

    kind: ClassVar[str]
    defers: ClassVar[bool] = False  # whether it can deliver a message after a while

    def __init__(self, address: EngineAddress, options: BrokerOptions, turn: Turn, poller: Poller) -> None:
        self.address = address
        self.lanes: dict[str, Lane] = {}
        self.busy: dict[Lane, None] = {}  # those that have something to send, in their turns
        self.connected = False
        self.problem: str | None = None  # the last one, also when it is over
        self.reconnections = self.resent = self.refused = self.acknowledged = 0
        self.flying = self.flying_bytes = 0
        self.link = Link(address, self, turn, poller, options.read_size)
        self._options = options
        self._turn = turn

    # How an engine is spoken to.

    @abstractmethod
    def greet(self) -> None:
        """Begin a connection; `_ready` when it may be used."""

    @abstractmethod
    def take(self, data: bytes) -> None:
        """Understand what the engine says; ProtocolError or InputError ends the connection."""

    @abstractmethod
    def _send(self, lane: Lane, messages: list[Message]) -> None:
        """Put messages of a topic into `link.out`, and remember them."""

    @abstractmethod
    def _take_back(self) -> None:
        """Put what was not acknowledged back into its lanes."""

    @abstractmethod
    def new_probe(self, lane: Lane) -> Probe:
        """A probe of a topic."""

    @property
    def delivery(self) -> str:
        """Where subscribers find it, without what is secret."""
        options = self._options
        return str(self.address if is_local(options.host) else seen_from_elsewhere(self.address, options.address))

    def objection(self, publisher: str, body: bytes) -> str | None:  # noqa: ARG002 - not every engine knows
        """Why it will never take such a message, as far as that is known before it is sent."""
        return None

    def _enter(self, lane: Lane) -> None:
        """A topic is new, or the engine is there again."""
        lane.open(self._turn.now_ns())

    def _look(self, now_ns: int) -> None:  # noqa: B027 - not every engine needs it
        """See to lanes, every tenth of a second while it is connected."""

    def _ask(self) -> None:  # noqa: B027 - not every engine needs it
        """Ask for a sign of life, where the engine does not give them by itself."""

    # What a broker calls.

    def start(self, port: int) -> None:
        """Connect, and stay connected; BrokerError if the engine is this broker, which listens on `port`."""
        options = self._options
        here = {options.host, options.address, "localhost", "127.0.0.1", "::1"}
        if any(each == port and host in here for host, each in self.address.servers):
            raise BrokerError(
                f"the engine {self.address} is this broker itself: give the one of an nsqd, or another port"
            )
        self.link.start()

    def stop(self) -> None:
        """Be gone; what is not acknowledged was never answered."""
        for lane in self.lanes.values():
            lane.watch(on=False)
        self.link.stop()

    def check_topic(self, name: str) -> None:
        """BrokerError if the engine cannot have such a topic."""
        if problem := addresses.refusal(self.kind, name):
            raise BrokerError(problem, topic=name)

    def no_channels(self, name: str) -> str:
        """Why a topic cannot be subscribed to at this broker."""
        return f"topic {name!r} is delivered by the engine {self.address}: subscribe to it there"

    def lane(self, topic: Topic) -> Lane:
        """The lane of a topic, made if need be."""
        found = self.lanes.get(topic.name)
        if found is None or found.topic is not topic:
            found = self.lanes[topic.name] = Lane(self, topic)
            topic.gate.stall(self._turn.now_ns())
            if self.connected:
                self._enter(found)
        return found

    def forget(self, topic: Topic) -> None:
        """A topic is gone; what the engine has, it keeps."""
        lane = self.lanes.pop(topic.name, None)
        if lane is not None:
            lane.watch(on=False)
            self.busy.pop(lane, None)
            settle(lane.queue)
            lane.queue.clear()

    def touch(self, lane: Lane) -> None:
        """A lane has something to send, or its topic something to release."""
        if lane.queue and lane.ready:
            self.busy[lane] = None
        if self.lanes.get(lane.topic.name) is lane:
            self._turn.touch(lane.topic)

    def flush(self) -> None:
        """Send what there is room for, topics in turns, in one write."""
        while self.busy and self.connected and self.flying < WINDOW and self.flying_bytes < WINDOW_BYTES:
            lane = next(iter(self.busy))
            del self.busy[lane]
            self._send_slice(lane)
            if lane.queue and lane.ready:
                self.busy[lane] = None
        self.link.write()

    def _send_slice(self, lane: Lane) -> None:
        room = min(SLICE, WINDOW - self.flying)
        if lane.singly:
            room, lane.singly = 1, lane.singly - 1
        messages: list[Message] = []
        queue, size = lane.queue, 0
        while queue and len(messages) < room and size < SLICE_BYTES:
            messages.append(queue.popleft())
            size += len(messages[-1].body)
        if lane.probe is not None:
            lane.probe.expect(messages)
        lane.flying += len(messages)
        self.flying += len(messages)
        self.flying_bytes += size
        self._send(lane, messages)

    def tick(self, now_ns: int) -> None:
        """A tenth of a second has passed."""
        if not self.link.up:
            return
        if now_ns - self.link.heard_ns > SILENCE_NS:
            self.link.lose("it is silent")
            return
        if self.connected:
            if now_ns - self.link.heard_ns > SILENCE_NS // 3:
                self._ask()
            self._look(now_ns)
        self.link.write()

    @property
    def trouble(self) -> str | None:
        """Why it takes nothing, of all topics or of one; None where it does."""
        shut = (lane.problem for lane in self.lanes.values() if not lane.ready and lane.problem)
        return self.absence or next(shut, None)

    @property
    def absence(self) -> str | None:
        """Why it takes nothing; None where it is there."""
        return None if self.connected else f"the engine is away: {self.problem or 'not connected yet'}"

    def statistics(self) -> EngineStatistics:
        """A snapshot."""
        return EngineStatistics(
            self.kind,
            str(self.address),
            self.delivery,
            self.connected,
            sum(lane.held for lane in self.lanes.values()),
            self.flying,
            self.acknowledged,
            self.resent,
            self.refused,
            self.reconnections,
            self.problem,
            self.trouble,
        )

    # The connection.

    def _ready(self) -> None:
        """Let topics go on: the engine is there."""
        log.info("ENGINE(%s): connected", self.address)
        self.connected = True
        for lane in list(self.lanes.values()):
            self._enter(lane)

    def lost(self) -> None:
        """Take back everything that was not acknowledged: the connection is gone."""
        now_ns = self._turn.now_ns()
        self.resent += self.flying
        self._take_back()
        self.flying = self.flying_bytes = 0
        for lane in self.lanes.values():
            lane.shut(now_ns)
        self.reconnections += 1

    # What becomes of messages.

    def _acknowledge(self, lane: Lane, messages: list[Message], now_ns: int) -> None:
        """The engine has them: their latency ends here, and their publishers are answered."""
        self._landed(lane, messages)
        self.acknowledged += len(messages)
        recorder, recent = self._turn.recorder, lane.topic.recent
        if recorder is not None:
            recorder.sent(messages, now_ns)
        recent.sent += len(messages)
        if not recent.full:
            total, processing = recent.total.append, recent.processing.append
            for message in messages:
                total(now_ns - message.arrival_ns)
                processing(now_ns - message.release_ns)
        settle(messages)
        if lane.spool is not None:
            lane.spool.finish(messages)

    def _refuse(self, lane: Lane, messages: list[Message], problem: str) -> None:
        """The engine will never take them: their publishers are told, or the log where they have their OK already."""
        self.problem = f"refuses a message of {lane.topic.name}: {problem}"
        self._landed(lane, messages)
        self.refused += len(messages)
        lane.topic.recent.dropped += len(messages)
        if lane.spool is not None:
            lane.spool.finish(messages)
            if lane.refused != problem:
                lane.refused = problem
                log.warning("TOPIC(%s): a message is dropped: the engine refuses it: %s", lane.topic.name, problem)
        settle(messages, f"the engine {self.kind} refuses it: {problem}")

    def _landed(self, lane: Lane, messages: list[Message]) -> None:
        size = sum(len(message.body) for message in messages)
        lane.flying -= len(messages)
        lane.bytes -= size
        self.flying -= len(messages)
        self.flying_bytes -= size
