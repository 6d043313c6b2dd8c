"""The loop of a broker: sockets in, sockets out, and between them one drain of every topic that was touched.

A turn begins with the reads that the loop found ready. Each read is stamped by the kernel (SO_TIMESTAMPNS) and parsed
whole; its messages are put before their topics with that stamp. When all reads are done, the turn ends: every touched
topic lets through what has tokens, channels hand messages to consumers, and each connection gets one write. One alarm
wakes the loop for the next token.

Linux keeps a stamp for TCP segments as it does for datagrams, without any patch; docs/adr/0011-arrival-times.md says
which one a read gets. Where there is none, the time of the read stands in, and `statistics` says so.
"""

from __future__ import annotations

import errno
import heapq
import socket
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

from srtm.broker import transport
from srtm.broker.control import Control, throttled
from srtm.broker.message import Message, ids
from srtm.broker.timer import Alarm
from srtm.broker.topic import Topic
from srtm.broker.transport import Transport
from srtm.errors import LogError, ProtocolError
from srtm.protocol import frames
from srtm.protocol.frames import append_message
from srtm.protocol.identify import response as identify_response
from srtm.protocol.server import (
    Cls,
    Dpub,
    Fin,
    Identify,
    Mpub,
    Nop,
    Pub,
    Rdy,
    Req,
    ServerProtocol,
    Sub,
    Touch,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from srtm.broker.auth import Authority, Guard
    from srtm.broker.channel import Channel
    from srtm.broker.durable import Durable
    from srtm.broker.options import BrokerOptions
    from srtm.broker.recorder import Recorder
    from srtm.protocol.identify import Identity

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
_TIMESPEC = Struct("@ll")
_ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)
_REST_S = 0.002  # how long a busy consumer may not be heard
_REST_NS = int(_REST_S * NS_PER_S)
# What is due for many at one time is done for a few, then the loop turns: heartbeats, sums of a second.
_BEATS, _SUMS, _BREAK_S = 8, 4, 0.001
_TICK_S = 0.1  # how often time-outs are looked for, as in nsqd
_timespec = _TIMESPEC.unpack
_OK = frames.OK
_now_ns = time.time_ns  # the clock that the kernel stamps with


class Connection:
    """One client: a publisher, a consumer, or both."""

    __slots__ = (
        "address",
        "beat",
        "broker",
        "channel",
        "closing",
        "connected_ns",
        "delivered",
        "flights",
        "guard",
        "heard_ns",
        "holds",
        "messages",
        "out",
        "protocol",
        "publisher",
        "ready",
        "resting",
        "sample_rate",
        "sock",
        "timeout_ns",
        "topic",
        "transport",
        "writing",
    )

    def __init__(self, broker: Broker, sock: socket.socket, address: str) -> None:
        settings = broker.options.settings
        self.broker = broker
        self.sock = sock
        self.address = address
        self.protocol = ServerProtocol(settings)
        self.transport: Transport | None = None  # TLS and compression
        self.guard = broker.guard(self)
        self.holds = 0  # reasons not to read from it
        self.beat = 0  # which of the heartbeats that were set up is its own
        self.out = bytearray()
        self.writing = False  # the kernel took less than there was; it says when it takes more
        self.closing = False
        self.publisher = address
        self.topic: Topic | None = None
        self.channel: Channel | None = None
        self.ready = 0
        self.flights: dict[bytes, Message] = {}
        self.resting = False  # a busy consumer, read now and then
        self.sample_rate = 0
        self.timeout_ns = settings.msg_timeout_ms * NS_PER_MS
        self.delivered: list[Message] = []
        self.messages = 0
        self.connected_ns = self.heard_ns = _now_ns()

    @property
    def in_flight(self) -> int:
        """Messages that it has."""
        return len(self.flights)

    def room(self) -> int:
        """How many messages it may be sent now."""
        return self.ready - len(self.flights) if len(self.out) < self.broker.options.max_unsent_bytes else 0

    def deliver(self, messages: list[Message]) -> None:
        """Send it messages, at the end of this turn."""
        if not self.delivered:
            self.broker.to_deliver.append(self)
        out = self.out
        for message in messages:
            append_message(out, message.arrival_ns, message.attempts, message.id, message.body)
        self.delivered += messages
        self.messages += len(messages)

    def send(self, data: bytes) -> None:
        """Send it bytes, at the end of this turn."""
        if not self.out:
            self.broker.to_flush.append(self)
        self.out += data

    def readable(self) -> None:
        """Read what is there, and carry out what it says."""
        broker = self.broker
        try:
            size, ancillary, _, _ = self.sock.recvmsg_into(broker.read_into, _ANCILLARY)
        except BlockingIOError:
            return
        except OSError:
            broker.close(self)
            return
        if not size:
            self._ended()
            return
        if ancillary:
            seconds, nanoseconds = _timespec(ancillary[0][2])
            arrival_ns = seconds * NS_PER_S + nanoseconds
        else:
            arrival_ns = _now_ns()
            broker.unstamped += 1
        since_ns = arrival_ns - self.heard_ns
        self.heard_ns = arrival_ns
        broker.wake()
        if self.transport is None:
            self._take(broker.read_view[:size], arrival_ns, since_ns)
        else:
            self._take(self.transport.receive(broker.read_view[:size]), arrival_ns, since_ns)

    def _take(self, data: bytes | memoryview, arrival_ns: int, since_ns: int = _REST_NS) -> None:
        """Read commands, and carry them out as far as they may be."""
        events: list[Any] = self.protocol.feed(data)
        if self.channel and not self.resting and since_ns < _REST_NS and self._may_rest(events):
            self.broker.rest(self)
        if self.guard is not None:
            events = self.guard.admit(events, arrival_ns)
        self.carry_out(events, arrival_ns)
        if self.transport is not None and self.sock.fileno() >= 0:
            if self.transport.more:
                self.hold()
                self.broker.loop.call_soon(self._take_more, arrival_ns)
            elif self.transport.ended:
                self._ended()

    def _take_more(self, arrival_ns: int) -> None:
        """Go on with a read that was too much for one turn, once nothing else stands against it."""
        if self.sock.fileno() < 0 or self.transport is None:
            return
        if self.holds > 1:
            self.broker.loop.call_later(_TICK_S, self._take_more, arrival_ns)
            return
        self.broker.wake()
        self._take(self.transport.receive(b""), arrival_ns)
        self.release()

    def hold(self) -> None:
        """Read no more from it, until as many have released it as held it."""
        self.holds += 1
        if self.holds == 1:
            self.broker.loop.remove_reader(self.sock)

    def release(self) -> None:
        """There is one reason less not to read from it."""
        self.holds -= 1
        if not self.holds and self.sock.fileno() >= 0 and not self.resting:
            self.heard_ns = _now_ns()  # it could not be heard
            self.broker.loop.add_reader(self.sock, self.readable)

    def _ended(self) -> None:
        """It sends no more; what it had begun to say gets nsqd's error."""
        problem = self.protocol.end()
        if self.writing:  # what it does not read while it speaks, it will not read now
            self.broker.close(self)
            return
        self.hold()
        if problem and not self.closing:
            self.send(frames.error(problem))
        self.closing = True
        self.broker.to_flush.append(self)
        self.broker.wake()

    def carry_out(self, events: list[Any], arrival_ns: int) -> None:
        """Do what it says, in order."""
        broker = self.broker
        for number, event in enumerate(events):
            kind = type(event)
            if kind is Pub:
                name, body = event
                topic = broker.touch(name)
                if self.channel is not None and topic.full:
                    self._refuse("PUB")
                    break
                if topic.durable is not None:
                    self._store(topic, events[number:], arrival_ns)
                    break
                topic.arrived.append(Message(broker.next_id(), arrival_ns, body, self.publisher))
                topic.bytes += len(body)
                topic.senders[self] = None
                if not self.out:
                    broker.to_flush.append(self)
                self.out += _OK
            elif kind is Fin:
                self._finish(event[0])
            elif (kind is Mpub or kind is Dpub) and broker.touch(event.topic).durable is not None:
                self._store(broker.touch(event.topic), events[number:], arrival_ns)
                break
            else:
                self._carry_out(event, arrival_ns)
            if self.closing:
                break

    def _store(self, topic: Topic, events: list[Any], arrival_ns: int) -> None:
        """Publish to a topic on disk: all of one topic that comes now goes to the log together, and is then answered.

        Nothing else is done for this client meanwhile, so that answers keep the order of commands.
        """
        broker, messages, answers = self.broker, list[Message](), 0
        for event in events:
            kind = type(event)
            if kind not in (Pub, Mpub, Dpub) or event.topic != topic.name:
                break
            delay_ns = event.delay_ms * NS_PER_MS if kind is Dpub else 0
            bodies = event.bodies if kind is Mpub else [event.body]
            messages += [Message(broker.next_id(), arrival_ns, body, self.publisher, delay_ns) for body in bodies]
            answers += 1
        verb = type(events[0]).__name__.upper()

        def stored(problem: LogError | None) -> None:
            if self.sock.fileno() < 0:
                return
            if problem:
                self.send(frames.error(ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {problem}")))
                self.closing = self.protocol.closed = True
            else:
                self.send(frames.OK * answers)
                topic.senders[self] = None
                self.carry_out(events[answers:], arrival_ns)
            self.release()
            broker.wake()

        self.hold()
        assert topic.durable is not None
        topic.durable.publish(topic, messages, stored)

    def _finish(self, message_id: bytes) -> None:
        channel = self.channel
        assert channel is not None
        message = self.flights.pop(message_id, None)
        if message is not None:
            channel.finished += 1
            channel.bytes -= len(message.body)
            if channel.cursor is not None:
                channel.cursor.finish(message.offset)
        else:
            self.send(frames.error(channel.refusal("FIN", message_id)))
        if channel.queue:
            self.broker.to_pump[channel] = None

    def _may_rest(self, events: list[Any]) -> bool:
        """Whether nobody waits for what it says: it only finishes messages, and may have many more."""
        return 4 * len(self.flights) < self.ready and all([type(event) is Fin for event in events])  # noqa: C419 - faster

    def attend(self) -> None:
        """Messages wait, and it can take none: hear now what it has finished."""
        if self.resting:
            self.broker.end_rest(self)

    def _carry_out(self, event: Any, arrival_ns: int) -> None:
        broker = self.broker
        kind = type(event)
        if kind is Mpub:
            topic = broker.touch(event.topic)
            if self.channel is not None and topic.full:
                self._refuse("MPUB")
                return
            topic.arrived += [Message(broker.next_id(), arrival_ns, body, self.publisher) for body in event.bodies]
            topic.bytes += sum(map(len, event.bodies))
            topic.senders[self] = None
            self.send(frames.OK)
        elif kind is Rdy:
            self.ready = event.ready
            broker.to_pump[self.channel] = None  # type: ignore[index]
        elif kind is Dpub:
            topic = broker.touch(event.topic)
            if self.channel is not None and topic.full:
                self._refuse("DPUB")
                return
            delay_ns = event.delay_ms * NS_PER_MS
            topic.arrived.append(Message(broker.next_id(), arrival_ns, event.body, self.publisher, delay_ns))
            topic.bytes += len(event.body)
            topic.senders[self] = None
            self.send(frames.OK)
        elif kind is Req or kind is Touch:
            self._give_back(event)
        elif kind is Identify:
            identity = event.identity
            self.timeout_ns = identity.msg_timeout_ms * NS_PER_MS
            self.sample_rate = identity.sample_rate
            if identity.srtm:
                self.publisher = identity.srtm.publisher
                broker.groups[self.publisher] = identity.srtm.group
            self.send(frames.response(identify_response(identity, broker.options.settings)))
            broker.expect_heartbeat(self)
            if identity.upgrades:
                self._upgrade(identity, arrival_ns)
        elif kind is Sub:
            self.topic = broker.touch(event.topic)
            self.channel = broker.channel(self.topic, event.channel)
            self.channel.consumers.append(self)
            broker.to_pump[self.channel] = None
            self.send(frames.OK)
        elif kind is Cls:
            self.ready = 0
            self.send(frames.CLOSE_WAIT)
        elif isinstance(event, ProtocolError):
            self.send(frames.error(event))
            self.closing = self.protocol.closed = True
        else:
            assert kind is Nop, event

    def _refuse(self, verb: str) -> None:
        """A topic is full, and its publisher is a consumer: it cannot be made to wait, for its FINs would, too."""
        self.send(frames.error(ProtocolError(f"E_{verb}_FAILED", f"{verb} failed topic is full")))
        self.closing = self.protocol.closed = True

    def _upgrade(self, identity: Identity, arrival_ns: int) -> None:
        """Go on through the layers that IDENTIFY settled; it was the last command before them."""
        rest = self.protocol.take_unparsed()
        if self.transport is not None:
            self._carry_out(ProtocolError("E_IDENTIFY_FAILED", "IDENTIFY failed a second upgrade"), arrival_ns)
            return
        self.transport = Transport(self, identity, self.broker.tls)
        if rest:
            self._take(self.transport.receive(rest), arrival_ns)

    def _give_back(self, event: Any) -> None:
        channel, now_ns = self.channel, _now_ns()
        assert channel is not None
        try:
            if type(event) is Req:
                channel.requeue(self, event.id, event.delay_ms, now_ns)
            else:
                longest_ns = self.broker.options.settings.max_msg_timeout_ms * NS_PER_MS
                channel.touch(self, event.id, now_ns, longest_ns)
        except ProtocolError as problem:
            self.send(frames.error(problem))
        self.broker.to_pump[channel] = None

    def flush(self) -> None:
        """One write of all that there is."""
        if self.transport is not None:
            self.transport.flush()
            return
        out = self.out
        if not self.writing and out:
            try:
                sent = self.sock.send(out)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.broker.close(self)
                return
            if sent < len(out):
                del out[:sent]
                self.writing = True
                self.broker.loop.add_writer(self.sock, self._writable)
                return
            out.clear()
        self.flushed()

    def flushed(self) -> None:
        """The kernel has all of it, or is still busy."""
        if self.delivered and not self.writing:
            self._account()
        if self.closing and not self.writing:
            self.broker.close(self)

    def _writable(self) -> None:
        try:
            sent = self.sock.send(self.out)
        except BlockingIOError:
            return
        except OSError:
            self.broker.close(self)
            return
        del self.out[:sent]
        if not self.out:
            self.written()

    def written(self) -> None:
        """The kernel has taken what it had not taken at first."""
        self.writing = False
        if self.sock.fileno() < 0:
            return
        self.broker.loop.remove_writer(self.sock)
        self.flush()
        if self.channel:
            self.broker.to_pump[self.channel] = None
            self.broker.wake()

    def _account(self) -> None:
        """The messages of this write are with the kernel: their latency ends here."""
        sent_ns, topic = _now_ns(), self.topic
        assert topic is not None
        if self.broker.recorder is not None:
            self.broker.recorder.sent(self.delivered, sent_ns)
        recent = topic.recent
        recent.sent += len(self.delivered)
        if not recent.full:
            total, processing = recent.total.append, recent.processing.append
            for message in self.delivered:
                if not message.sent_ns:
                    message.sent_ns = sent_ns
                    total(sent_ns - message.arrival_ns)
                    processing(sent_ns - message.release_ns)
        self.delivered.clear()


class Broker:
    """A broker at work: listens, serves, and stops."""

    def __init__(self, options: BrokerOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.options = options = transport.settled(options)
        self.loop = loop
        self.tls = transport.tls_context(options)
        self.authority: Authority | None = None
        if options.auth_http_addresses:
            from srtm.broker.auth import Authority

            self.authority = Authority(options.auth_http_addresses, loop, options.tls_root_ca_file)
        self.on_change: Callable[[], None] | None = None  # topics or channels came or went
        self.on_topic: Callable[[Topic], None] | None = None  # one was made: it may have channels elsewhere
        self.groups: dict[str, str | None] = {}  # correlation groups of publishers
        self.recorder: Recorder | None = None
        self.durable: Durable | None = None
        if options.data_path:
            from srtm.broker.durable import Durable

            self.durable = Durable(self, Path(options.data_path))
        self.control = Control(self)
        self.topics: dict[str, Topic] = {}
        self.connections: dict[int, Connection] = {}
        self.started_ns = _now_ns()
        self.tcp_port = self.http_port = 0
        self.unstamped = 0
        self.read_into = [bytearray(options.read_size)]
        self.read_view = memoryview(self.read_into[0])
        self.next_id: Callable[[], bytes] = ids(self.started_ns).__next__
        self.to_drain: dict[Topic, None] = {}
        self.to_pump: dict[Channel, None] = {}
        self.to_deliver: list[Connection] = []  # before the answers: a message's latency ends with its own write
        self.to_flush: list[Connection] = []
        self._limited: dict[Topic, None] = {}  # topics in which messages wait for tokens
        self._blocked: dict[Topic, dict[Connection, None]] = {}  # full topics, and the publishers that wait for them
        self._resting: dict[Connection, None] = {}
        self._awake = False
        self._alarm = Alarm(loop, self.wake)
        self._heartbeats: list[tuple[int, int, Connection]] = []
        self._beating = False
        self._closing: list[Topic] = []  # whose last second is to be summed up
        self._order = count()
        self._listener: socket.socket | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._second_ns = 0

    def listen(self) -> int:
        """Accept clients from now on; returns the port."""
        listener = socket.create_server(
            (self.options.host, self.options.tcp_port), backlog=self.options.backlog, reuse_port=False
        )
        listener.setblocking(False)
        with suppress(OSError):  # inherited, so that the first bytes of a client are stamped, too
            listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._listener = listener
        self.tcp_port = int(listener.getsockname()[1])
        if self.durable:
            self.durable.recover()
        self.loop.add_reader(listener, self._accept)
        self._on_tick()
        return self.tcp_port

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(64):
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                    self.loop.remove_reader(self._listener)  # too many files: try again with the next tick
                    self.loop.call_later(_TICK_S, self.loop.add_reader, self._listener, self._accept)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self, sock, f"{address[0]}:{address[1]}")
            self.connections[sock.fileno()] = connection
            self.loop.add_reader(sock, connection.readable)
            self.expect_heartbeat(connection)

    def touch(self, name: str) -> Topic:
        """The topic of that name, made if need be, to be drained at the end of this turn."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = Topic(name, self.options.max_held_messages, self.options.max_held_bytes)
            if self.on_topic:
                self.on_topic(topic)
            self.changed()
        self.to_drain[topic] = None
        return topic

    def channel(self, topic: Topic, name: str) -> Channel:
        """The topic's channel of that name, made if need be."""
        known = name in topic.channels
        channel = topic.channel(name)
        if not known:
            if topic.durable is not None:
                topic.durable.attach(topic, channel)
            self.to_drain[topic] = None
            self.changed()
        return channel

    def changed(self) -> None:
        """Topics or channels came or went."""
        if self.on_change:
            self.on_change()

    def guard(self, connection: Connection) -> Guard | None:
        """Who has to be asked before this client may do anything."""
        if self.authority is None:
            return None
        from srtm.broker.auth import Guard

        return Guard(connection, self.authority)

    def wake(self) -> None:
        """End this turn when all that is ready has been read."""
        if not self._awake:
            self._awake = True
            self.loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._awake = False
        now_ns = _now_ns()
        to_drain, self.to_drain = self.to_drain, {}
        if self._limited:
            to_drain |= self._limited
        for topic in to_drain:
            released = topic.drain(now_ns)
            if released and self.recorder is not None:
                self.recorder.released(topic.name, released)
            if released or topic.unclaimed:
                topic.distribute(released, now_ns)
                for channel in topic.channels.values():
                    self.to_pump[channel] = None
            if topic.waiting:
                self._limited[topic] = None
            else:
                self._limited.pop(topic, None)
            if topic.senders:
                if topic.full:
                    self._block(topic)
                topic.senders.clear()
        to_pump, self.to_pump = self.to_pump, {}
        for channel in to_pump:
            channel.pump(now_ns)
        to_deliver, self.to_deliver = self.to_deliver, []
        for connection in to_deliver:
            connection.flush()
        to_flush, self.to_flush = self.to_flush, []
        for connection in to_flush:
            connection.flush()
        if self._blocked:
            self._unblock()
        if self._limited:
            self._alarm.set(min(topic.next_release_ns() for topic in self._limited), _now_ns())

    def rest(self, consumer: Connection) -> None:
        """Read a busy consumer now and then instead of waking for each FIN, as network drivers do with interrupts.

        While it finishes messages faster than every _REST_S, a wake-up and a read per message are saved. What it may
        still be sent lasts for longer; where it does not, the channel attends to it.
        """
        if not self._resting:
            self.loop.call_later(_REST_S, self._after_rest)
        self._resting[consumer] = None
        consumer.resting = True
        self.loop.remove_reader(consumer.sock)

    def end_rest(self, consumer: Connection) -> None:
        """Read a consumer again as soon as it says something."""
        consumer.resting = False
        self._resting.pop(consumer, None)
        if consumer.sock.fileno() >= 0 and not consumer.holds:
            self.loop.add_reader(consumer.sock, consumer.readable)

    def _after_rest(self) -> None:
        for consumer in list(self._resting):
            heard_ns = consumer.heard_ns
            if not consumer.holds:
                consumer.readable()
            if consumer.resting and (consumer.heard_ns == heard_ns or 4 * consumer.in_flight >= consumer.ready):
                self.end_rest(consumer)
        if self._resting:
            self.loop.call_later(_REST_S, self._after_rest)

    def _block(self, topic: Topic) -> None:
        """Read no more from those who publish to a full topic; TCP tells them."""
        waiting = self._blocked.setdefault(topic, {})
        for connection in topic.senders:
            if connection.sock.fileno() >= 0 and connection not in waiting and connection.channel is None:
                waiting[connection] = None
                throttled(connection, topic)
                connection.hold()

    def _unblock(self) -> None:
        for topic in [topic for topic in self._blocked if topic.relieved]:
            for connection in self._blocked.pop(topic):
                connection.release()

    def expect_heartbeat(self, connection: Connection) -> None:
        """Ask a client for a sign of life when its interval is over."""
        interval_ns = connection.protocol.identity.heartbeat_ms * NS_PER_MS
        connection.beat = next(self._order)
        if interval_ns:
            heapq.heappush(self._heartbeats, (_now_ns() + interval_ns, connection.beat, connection))

    def _on_tick(self) -> None:
        now_ns = _now_ns()
        for topic in self.topics.values():
            for channel in topic.channels.values():
                channel.remind(now_ns)
                if channel.queue:
                    self.to_pump[channel] = None
        if not self._beating:
            self._beat()
        if now_ns - self._second_ns >= NS_PER_S and not self._closing:
            self._second_ns = now_ns
            self._closing = list(self.topics.values())
            self._close_seconds()
        self.wake()
        self._tick = self.loop.call_later(_TICK_S, self._on_tick)

    def _beat(self) -> None:
        """Ask for signs of life, a few at a time: clients that came together must not stop the loop together."""
        now_ns = _now_ns()
        for _ in range(_BEATS):
            self._beating = bool(self._heartbeats) and self._heartbeats[0][0] <= now_ns
            if not self._beating:
                break
            due_ns, beat, connection = heapq.heappop(self._heartbeats)
            interval_ns = connection.protocol.identity.heartbeat_ms * NS_PER_MS
            if connection.sock.fileno() < 0 or beat != connection.beat:
                continue
            if now_ns - connection.heard_ns > 2 * interval_ns and not connection.holds:
                self.close(connection)
                continue
            connection.send(frames.HEARTBEAT)
            heapq.heappush(self._heartbeats, (due_ns + interval_ns, beat, connection))
        self.wake()
        if self._beating:
            self.loop.call_later(_BREAK_S, self._beat)

    def _close_seconds(self) -> None:
        """Sum up the last second of topics, a few at a time, because each takes a while."""
        now_ns = _now_ns()
        for topic in self._closing[-_SUMS:]:
            peak = topic.limiter.take_peak_ntok() / 1e9 if topic.limiter else 0.0
            topic.recent.close(now_ns, len(topic.waiting), peak)
        del self._closing[-_SUMS:]
        if self._closing:
            self.loop.call_later(_BREAK_S, self._close_seconds)

    def close(self, connection: Connection) -> None:
        """Forget a client; what it had in flight goes to others."""
        fd = connection.sock.fileno()
        if fd < 0:
            return
        self.loop.remove_reader(fd)
        self.loop.remove_writer(fd)
        self.connections.pop(fd, None)
        connection.sock.close()
        connection.out.clear()
        self._resting.pop(connection, None)
        if connection.transport:
            connection.transport.close()
        if connection.guard:
            connection.guard.close()
        if connection.channel and connection.topic:
            connection.channel.leave(connection)
            self.to_pump[connection.channel] = None
            self.wake()
            if connection.channel.ephemeral and not connection.channel.consumers:
                self.delete_channel(connection.topic, connection.channel)

    def delete_channel(self, topic: Topic, channel: Channel) -> None:
        """Forget a channel; its consumers are disconnected. With its last channel goes an ephemeral topic."""
        if topic.channels.pop(channel.name, None) is None:
            return
        for consumer in list(channel.consumers):
            self.close(consumer)  # type: ignore[arg-type]
        if topic.durable is not None:
            topic.durable.forget_channel(topic, channel)
        channel.empty()
        self.to_pump.pop(channel, None)
        self.changed()
        if topic.ephemeral and not topic.channels:
            self.delete_topic(topic)

    def delete_topic(self, topic: Topic) -> None:
        """Forget a topic with its channels."""
        if self.topics.pop(topic.name, None) is None:
            return
        for channel in list(topic.channels.values()):
            self.delete_channel(topic, channel)
        if topic.durable is not None:
            topic.durable.forget_topic(topic)
        topic.empty()
        self.to_drain.pop(topic, None)
        self._limited.pop(topic, None)
        for connection in self._blocked.pop(topic, {}):
            connection.release()
        self.changed()

    def stop(self) -> None:
        """Accept nobody any more, close every connection, and save what is not finished."""
        if self._tick:
            self._tick.cancel()
        if self._listener:
            self.loop.remove_reader(self._listener)
            self._listener.close()
        for connection in list(self.connections.values()):
            self.close(connection)
        self._alarm.close()
        if self.durable:
            self.durable.close()
