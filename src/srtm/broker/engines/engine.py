"""Delivery by an engine: released messages go to the nsqd or NATS that stores and delivers them.

In: messages that topics released. Out: bytes of one connection to the engine, written once a turn; acknowledgements,
which answer publishers and end latencies. `nsqd` and `nats` implement the protocols of the two engines, `link` keeps
the connection, and `lane` holds a topic's unacknowledged messages.

Always holds:
- a publisher gets its OK only after the engine has acknowledged its messages, in the order of its commands; for a topic
  on disk it gets the OK when the log has them (`spool`), and the acknowledgement finishes their offsets;
- unacknowledged messages are kept, and sent again after a broken connection, in order and with new tokens; the engine
  may then have them twice, unless it recognises their ids;
- at most WINDOW messages and WINDOW_BYTES are unacknowledged at the engine; topics take turns for that room, and
  waiting messages count against the limits of their topic, which hold its publishers;
- a topic whose lane is shut releases nothing: its messages get their tokens when the engine accepts them, so an engine
  that returns is not flooded with messages released meanwhile.
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
SLICE, SLICE_BYTES = 256, 256 * 1024  # sent for one topic before the next gets its turn
SILENCE_NS = 2_500_000_000  # the broker asks engines for a sign of life every second


class Engine(ABC):
    """One engine, as a broker uses it."""

    kind: ClassVar[str]
    defers: ClassVar[bool] = False  # whether it supports delayed delivery

    def __init__(self, address: EngineAddress, options: BrokerOptions, turn: Turn, poller: Poller) -> None:
        self.address = address
        self.lanes: dict[str, Lane] = {}
        self.busy: dict[Lane, None] = {}  # lanes with messages to send, in order of their turns
        self.connected = False
        self.problem: str | None = None  # the most recent, even if it is over
        self.reconnections = self.resent = self.refused = self.acknowledged = 0
        self.flying = self.flying_bytes = 0
        self.link = Link(address, self, turn, poller, options.read_size)
        self._options = options
        self._turn = turn

    # The engine's protocol.

    @abstractmethod
    def greet(self) -> None:
        """Begin a connection; call `_ready` when it is usable."""

    @abstractmethod
    def take(self, data: bytes) -> None:
        """Handle bytes from the engine; ProtocolError or InputError ends the connection."""

    @abstractmethod
    def _send(self, lane: Lane, messages: list[Message]) -> None:
        """Put messages of a topic into `link.out`, and remember them until the engine answers."""

    @abstractmethod
    def _take_back(self) -> None:
        """Put unacknowledged messages back into their lanes."""

    @abstractmethod
    def new_probe(self, lane: Lane) -> Probe:
        """Create a probe of a topic."""

    def hint(self) -> str:
        """Return a likely reason why the engine says nothing, to be appended to an error."""
        return ""

    @property
    def delivery(self) -> str:
        """The engine's address for subscribers, without secrets."""
        options = self._options
        return str(self.address if is_local(options.host) else seen_from_elsewhere(self.address, options.address))

    def objection(self, publisher: str, body: bytes) -> str | None:  # noqa: ARG002 - not every engine knows
        """Return why the engine would refuse such a message; None if that is unknown before sending."""
        return None

    def _enter(self, lane: Lane) -> None:
        """Open a lane: its topic is new, or the engine is connected again."""
        lane.open(self._turn.now_ns())

    def _look(self, now_ns: int) -> None:  # noqa: B027 - not every engine needs it
        """Check lanes; called every tenth of a second while connected."""

    def _ask(self) -> None:  # noqa: B027 - not every engine needs it
        """Ask for a sign of life, if the engine does not send any unasked."""

    # For the broker.

    def start(self, port: int) -> None:
        """Connect, and reconnect as needed; BrokerError if the engine is this broker, which listens on `port`."""
        options = self._options
        here = {options.host, options.address, "localhost", "127.0.0.1", "::1"}
        if any(each == port and host in here for host, each in self.address.servers):
            raise BrokerError(
                f"the engine {self.address} is this broker itself: give the address of an nsqd, or choose another port"
            )
        self.link.start()

    def stop(self) -> None:
        """Disconnect; publishers of unacknowledged messages have had no OK."""
        for lane in self.lanes.values():
            lane.watch(on=False)
        self.link.stop()

    def check_topic(self, name: str) -> None:
        """Raise BrokerError if the engine cannot have a topic of this name."""
        if problem := addresses.refusal(self.kind, name):
            raise BrokerError(problem, topic=name)

    def no_channels(self, name: str) -> str:
        """Return why clients cannot subscribe to a topic at this broker."""
        return f"topic {name!r} is delivered by the engine {self.address}: subscribe to it there"

    def lane(self, topic: Topic) -> Lane:
        """Return the lane of a topic; create it if needed."""
        found = self.lanes.get(topic.name)
        if found is None or found.topic is not topic:
            found = self.lanes[topic.name] = Lane(self, topic)
            topic.gate.stall(self._turn.now_ns())
            if self.connected:
                self._enter(found)
        return found

    def forget(self, topic: Topic) -> None:
        """Drop the lane of a deleted topic; the engine keeps what it has."""
        lane = self.lanes.pop(topic.name, None)
        if lane is not None:
            lane.watch(on=False)
            self.busy.pop(lane, None)
            settle(lane.queue)
            lane.queue.clear()

    def touch(self, lane: Lane) -> None:
        """Schedule a lane that may send messages, and its topic, which may release some."""
        if lane.queue and lane.ready:
            self.busy[lane] = None
        if self.lanes.get(lane.topic.name) is lane:
            self._turn.touch(lane.topic)

    def flush(self) -> None:
        """Send as many messages as the window allows, topics in turns, in one write."""
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
        """Check the connection and the lanes; called every tenth of a second."""
        if not self.link.up:
            return
        if now_ns - self.link.heard_ns > SILENCE_NS:
            self.link.lose(f"the engine is silent{self.hint()}")
            return
        if self.connected:
            if now_ns - self.link.heard_ns > SILENCE_NS // 3:
                self._ask()
            self._look(now_ns)
        self.link.write()

    @property
    def trouble(self) -> str | None:
        """Why the engine accepts no messages of any topic, or of one; None if it accepts all."""
        shut = (lane.problem for lane in self.lanes.values() if not lane.ready and lane.problem)
        return self.absence or next(shut, None)

    @property
    def absence(self) -> str | None:
        """Why the engine is unavailable; None if it is connected."""
        return None if self.connected else f"the engine is unavailable: {self.problem or 'not connected yet'}"

    def statistics(self) -> EngineStatistics:
        """Return a snapshot."""
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
        """The connection is usable: open all lanes."""
        log.info("ENGINE(%s): connected", self.address)
        self.connected = True
        for lane in list(self.lanes.values()):
            self._enter(lane)

    def lost(self) -> None:
        """The connection ended: take back all unacknowledged messages."""
        now_ns = self._turn.now_ns()
        self.resent += self.flying
        self._take_back()
        self.flying = self.flying_bytes = 0
        for lane in self.lanes.values():
            lane.shut(now_ns)
        self.reconnections += 1

    # The engine's answers.

    def _acknowledge(self, lane: Lane, messages: list[Message], now_ns: int) -> None:
        """The engine stored messages: their latency ends, and their publishers get an OK."""
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
        """The engine refuses messages for good: tell their publishers, or log it if those already have their OK."""
        self.problem = f"refused a message of topic {lane.topic.name}: {problem}"
        self._landed(lane, messages)
        self.refused += len(messages)
        lane.topic.recent.dropped += len(messages)
        if lane.spool is not None:
            lane.spool.finish(messages)
            if lane.refused != problem:
                lane.refused = problem
                log.warning("TOPIC(%s): dropped a message because the engine refuses it: %s", lane.topic.name, problem)
        settle(messages, f"the engine {self.kind} refuses it: {problem}")

    def _landed(self, lane: Lane, messages: list[Message]) -> None:
        size = sum(len(message.body) for message in messages)
        lane.flying -= len(messages)
        lane.bytes -= size
        self.flying -= len(messages)
        self.flying_bytes -= size
