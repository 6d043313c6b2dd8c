"""Delivery by somebody else: what stands between released messages and the engine that stores and delivers them.

In: messages of topics, when their buckets have let them go. Out: bytes of one connection to the engine, written once a
turn; acknowledgements, by which publishers get their OK and latencies end. `nsqd` and `nats` say how each engine is
spoken to, `lane` what a topic has under way; everything else is here.

Always holds:
- a publisher's OK leaves only after the engine has acknowledged its messages, in the order of its commands; that of a
  topic on disk when the log has them (`spool`), and the acknowledgement finishes their offsets;
- what is not acknowledged is kept, and sent again after a broken connection, in order and with tokens of its own; it
  may then be there twice, unless the engine knows it by its id;
- at most WINDOW messages and WINDOW_BYTES are with the engine unacknowledged; topics take turns for that room, and what
  waits for it counts against the limits of its topic, whose publishers are then held;
- a topic whose lane is shut releases nothing: its messages get their tokens when the engine takes them, so that an
  engine that comes back is not flooded with what was released meanwhile;
- where an address asks for TLS, nothing but what leads to it is written in the clear, and nothing else is understood.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from srtm.broker.engines.lane import Lane, patience
from srtm.broker.receipts import settle
from srtm.broker.statistics import EngineStatistics
from srtm.errors import BrokerError, InputError, ProtocolError
from srtm.net.compression import BadStream
from srtm.net.credentials import Credentials
from srtm.net.explain import explained
from srtm.net.sockets import connect
from srtm.net.tls import Tls
from srtm.net.writer import Writer
from srtm.protocol import engine as addresses
from srtm.protocol.engine import is_local, seen_from_elsewhere

if TYPE_CHECKING:
    import socket

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
CONNECT_S = 1.0


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
        self._options = options
        self._turn = turn
        self._poller = poller
        self._view = memoryview(bytearray(options.read_size))
        self._servers = list(address.servers)
        self.place = self._servers[0]  # the one in use, or tried last
        self.credentials = Credentials.read(address)
        self._sock: socket.socket | None = None
        self._tls: Tls | None = None
        self._writer: Writer | None = None
        self._out = bytearray()  # for the engine, not encrypted yet
        self._heard_ns = 0
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # How an engine is spoken to.

    @abstractmethod
    def _greet(self) -> None:
        """A connection is there: begin it; `_ready` when it may be used."""

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Understand what the engine says."""

    @abstractmethod
    def _send(self, lane: Lane, messages: list[Message]) -> None:
        """Put messages of a topic into `_out`, and remember them."""

    @abstractmethod
    def _take_back(self) -> None:
        """The connection is gone: put what was not acknowledged back into its lanes."""

    @abstractmethod
    def new_probe(self, lane: Lane) -> Probe:
        """A probe of a topic."""

    @property
    def server_name(self) -> str:
        """What the certificate of the server in use must bear."""
        host, port = self.place
        return host if port else "localhost"

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
        self._task = self._turn.loop.create_task(self._keep())

    def stop(self) -> None:
        """Be gone; what is not acknowledged was never answered."""
        if self._task is not None:
            self._task.cancel()
        for lane in self.lanes.values():
            lane.watch(on=False)
        self._hang_up()

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
            topic.stall(self._turn.now_ns())
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
        self._write()

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
        if self._sock is None:
            return
        if now_ns - self._heard_ns > SILENCE_NS:
            self._lose("it is silent")
            return
        if self.connected:
            if now_ns - self._heard_ns > SILENCE_NS // 3:
                self._ask()
            self._look(now_ns)
        self._write()

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

    async def _keep(self) -> None:
        backoff, said = patience(), set[str]()
        while True:
            self.place = place = self._servers[0]
            self._servers.append(self._servers.pop(0))  # the next one, if it has to be
            was = self.acknowledged
            try:
                async with asyncio.timeout(CONNECT_S):
                    sock = await self._connect(*place)
            except (OSError, ValueError) as error:  # ValueError: unusable files, or an impossible host name
                self.problem = f"cannot connect to {_place(place)}: {explained(error)}"
                told = self.problem
            else:
                self._begin(sock)
                await self._ended.wait()
                told = f"lost {_place(place)}: {self.problem}"
            if self.acknowledged > was:
                backoff.reset()
                said.clear()
            if told not in said:
                log.warning("ENGINE(%s): %s", self.address, told)
            if self.acknowledged > was:
                continue  # the next server may take over at once
            said.add(told)
            await asyncio.sleep(backoff.next_s())

    async def _connect(self, host: str, port: int) -> socket.socket:
        sock = await connect(host, port)
        try:
            if self.address.tls or self.address.creds:  # the system's authorities alone take milliseconds to read
                self.credentials = await asyncio.to_thread(Credentials.read, self.address)
        except BaseException:
            sock.close()
            raise
        return sock

    def _begin(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = None
        self._out.clear()
        self._writer = Writer(self._turn.loop, sock, self._write, self._unwritable)
        self._heard_ns = self._turn.now_ns()
        self._ended.clear()
        self._poller.add(sock, self._readable)
        self._greet()
        self._write()

    def _ready(self) -> None:
        """The engine is there: topics go on."""
        log.info("ENGINE(%s): connected", self.address)
        self.connected = True
        for lane in list(self.lanes.values()):
            self._enter(lane)

    def _readable(self) -> None:
        """Read what is there; who calls it ends the turn."""
        assert self._sock is not None
        view = self._view
        try:
            size = self._sock.recv_into(view)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(explained(error))
            return
        if not size:
            self._lose("it closed the connection")
            return
        self._heard_ns = self._turn.now_ns()
        try:
            self._take(bytes(view[:size]) if self._tls is None else self._tls.decode(bytes(view[:size])))
        except (ProtocolError, InputError) as problem:
            self._lose(str(problem))
        except BadStream as problem:
            assert self._tls is not None
            with suppress(OSError):
                self._sock.send(self._tls.pending())  # an alert says why
            self._lose(explained(problem.__cause__ or problem))

    def _secure(self) -> None:
        """Begin TLS. What is said from now on waits for its handshake, and is encrypted."""
        assert self.credentials.tls is not None
        self._tls = Tls(self.credentials.tls, self.server_name)
        self._tls.decode(b"")

    def _write(self) -> None:
        writer, tls = self._writer, self._tls
        if writer is None or writer.waiting:
            return
        if tls is not None and not tls.ready:
            writer.write(tls.pending())
            return
        writer.write(self._out if tls is None else tls.encode(self._out))
        self._out.clear()

    def _unwritable(self, error: OSError) -> None:
        if self.connected:  # an engine that refuses the connection has said why, which is read next
            self._lose(explained(error))

    def _lose(self, problem: str) -> None:
        """The connection is of no use any more."""
        self.problem = problem
        self._hang_up()
        now_ns = self._turn.now_ns()
        self.resent += self.flying
        self._take_back()
        self.flying = self.flying_bytes = 0
        for lane in self.lanes.values():
            lane.shut(now_ns)
        self.reconnections += 1
        self._ended.set()

    def _hang_up(self) -> None:
        self.connected = False
        sock, self._sock = self._sock, None
        writer, self._writer = self._writer, None
        if sock is not None:
            self._poller.remove(sock)
            if writer is not None:
                writer.close()
            sock.close()

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


def _place(server: tuple[str, int]) -> str:
    host, port = server
    return f"{host}:{port}" if port else host
