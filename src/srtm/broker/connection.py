"""One client of a broker: what it sends is read, stamped and carried out; what it is sent goes out once a turn.

In: bytes of a socket, with the kernel's time. Out: messages before their topics, answers and deliveries in `out`.
Commands are carried out in order; a client that has to wait, for a full topic, a disk or an authority, is held: not
read. So is one that does not read its answers, and one that is being closed.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, Any

from srtm.broker.engines.lane import Receipt, Tracked
from srtm.broker.message import Message
from srtm.broker.statistics import ClientStatistics
from srtm.broker.transport import Transport
from srtm.errors import BrokerError, LogError, ProtocolError
from srtm.protocol import frames
from srtm.protocol.frames import append_message
from srtm.protocol.identify import response as identify_response
from srtm.protocol.server import (
    CLOSING,
    INIT,
    SUBSCRIBED,
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
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from srtm.broker.channel import Channel
    from srtm.broker.engines.engine import Engine
    from srtm.broker.ioloop import Broker
    from srtm.broker.topic import Topic
    from srtm.protocol.identify import Identity

REST_S = 0.002  # how long a busy consumer may not be heard
LAST_WORDS_S = 5.0  # for a client that is being closed to read what it was sent
PARTING_S = 60.0  # and for an engine to acknowledge what it published last
TICK_S = 0.1  # how often time-outs are looked for, as in nsqd
TICK_NS = int(TICK_S * NS_PER_S)
_REST_NS = int(REST_S * NS_PER_S)
_TIMESPEC = Struct("@ll")
_ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)
_timespec = _TIMESPEC.unpack
_OK = frames.OK
_STATES = {INIT: 0, SUBSCRIBED: 3, CLOSING: 4}  # nsqd's numbers
_now_ns = time.time_ns  # the clock that the kernel stamps with


class Connection:
    """One client: a publisher, a consumer, or both."""

    __slots__ = (
        "address",
        "beat",
        "broker",
        "channel",
        "choked",
        "closing",
        "connected_ns",
        "delivered",
        "finished",
        "flights",
        "guard",
        "heard_ns",
        "holds",
        "messages",
        "out",
        "parting",
        "pending",
        "protocol",
        "published",
        "publisher",
        "read_into",
        "ready",
        "requeued",
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
        self.read_into = broker.read_into  # for the next read: less where it floods its topic
        self.holds = 0  # reasons not to read from it
        self.beat = 0  # which of the heartbeats that were set up is its own
        self.out = bytearray()
        self.writing = False  # the kernel took less than there was; it says when it takes more
        self.choked = False  # held, because it does not read what it is sent
        self.closing = False
        self.pending: deque[Receipt] | None = None  # commands that an engine has yet to acknowledge
        self.parting = False  # it is closed when these are answered
        self.publisher = address
        self.topic: Topic | None = None
        self.channel: Channel | None = None
        self.ready = 0
        self.flights: dict[bytes, Message] = {}
        self.resting = False  # a busy consumer, read now and then
        self.sample_rate = 0
        self.timeout_ns = settings.msg_timeout_ms * NS_PER_MS
        self.delivered: list[Message] = []
        self.messages = self.finished = self.requeued = 0
        self.published: dict[str, int] = {}  # messages by topic
        self.connected_ns = self.heard_ns = _now_ns()

    @property
    def in_flight(self) -> int:
        """Messages that it has."""
        return len(self.flights)

    def statistics(self) -> ClientStatistics:
        """A snapshot."""
        identity, host = self.protocol.identity, self.address.rpartition(":")[0]
        tls = self.transport.tls.ssl if self.transport and self.transport.tls else None
        permit = self.guard.permit if self.guard else None
        return ClientStatistics(
            identity.client_id or host,
            identity.hostname or host,
            self.address,
            _STATES[self.protocol.state],
            self.ready,
            self.in_flight,
            self.messages,
            self.finished,
            self.requeued,
            tuple(self.published.items()),
            self.connected_ns,
            identity.msg_timeout_ms,
            identity.sample_rate,
            identity.deflate,
            identity.snappy,
            ((tls.cipher() or ("",))[0], tls.version() or "") if tls else None,
            identity.user_agent,
            (permit.identity, permit.identity_url) if permit else None,
        )

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
        """Read what is there, and carry out what it says; who calls it ends the turn."""
        broker = self.broker
        read_into, self.read_into = self.read_into, broker.read_into
        try:
            size, ancillary, _, _ = self.sock.recvmsg_into(read_into, _ANCILLARY)
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
        if self.writing and not self.choked and len(self.out) > self.broker.most_unsent:
            self.choked = True
            self.hold()
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
            self.broker.loop.call_later(TICK_S, self._take_more, arrival_ns)
            return
        self.broker.wake()
        self._take(self.transport.receive(b""), arrival_ns)
        self.release()

    def hold(self) -> None:
        """Read no more from it, until as many have released it as held it."""
        self.holds += 1
        if self.holds == 1:
            self.broker.poller.remove(self.sock)

    def release(self) -> None:
        """There is one reason less not to read from it."""
        self.holds -= 1
        if not self.holds and self.sock.fileno() >= 0 and not self.resting:
            self.heard_ns = _now_ns()  # it could not be heard
            self.broker.poller.add(self.sock, self.readable)

    def _ended(self) -> None:
        """It sends no more; what it had begun to say gets nsqd's error."""
        problem = self.protocol.end()
        if self.writing:  # what it does not read while it speaks, it will not read now
            self.broker.close(self)
            return
        self.hold()
        if problem and not self.closing:
            self.send(frames.error(problem))
        declared = self.protocol.identity.srtm
        topic = self.broker.topics.get(declared.topic) if declared and declared.topic else None
        if topic is not None and not problem:
            self.broker.part(topic, self)
            return
        self.end()

    def end(self) -> None:
        """Close it when it has read what there is for it, or after a while."""
        if self.pending:
            self.parting = True
            self.broker.loop.call_later(PARTING_S, self.broker.close, self)
            return
        self.closing = True
        self.broker.to_flush.append(self)
        self.broker.loop.call_later(LAST_WORDS_S, self.broker.close, self)
        self.broker.wake()

    def carry_out(self, events: list[Any], arrival_ns: int) -> None:
        """Do what it says, in order."""
        broker = self.broker
        try:
            for number, event in enumerate(events):
                kind = type(event)
                if kind is Pub:
                    name, body = event
                    topic = broker.touch(name)
                    if self.channel is not None and topic.full:
                        self._refuse("PUB")
                        break
                    if topic.later:
                        if topic.durable is None:
                            self._entrust(topic, [body], 0, arrival_ns)
                            continue
                        self._store(topic, events[number:], arrival_ns)
                        break
                    topic.arrived.append(Message(broker.next_id(), arrival_ns, body, self.publisher))
                    topic.bytes += len(body)
                    self.published[name] = self.published.get(name, 0) + 1
                    topic.senders[self] = None
                    if not self.out:
                        broker.to_flush.append(self)
                    self.out += _OK
                elif kind is Fin:
                    message = self.flights.pop(event[0], None)
                    if message is not None:
                        self.finished += 1
                        self.channel.finish(message)  # type: ignore[union-attr]
                    else:
                        self._refuse_fin(event[0])
                elif (kind is Mpub or kind is Dpub) and broker.touch(event.topic).later:
                    topic = broker.touch(event.topic)
                    if topic.durable is not None:
                        self._store(topic, events[number:], arrival_ns)
                        break
                    bodies, delay_ms = (event.bodies, 0) if kind is Mpub else ([event.body], event.delay_ms)
                    self._entrust(topic, bodies, delay_ms * NS_PER_MS, arrival_ns)
                    if self.closing:
                        break
                else:
                    self._carry_out(event, arrival_ns)
                    if self.closing:
                        break
        except BrokerError as problem:  # a topic that cannot be had here
            self.fail(ProtocolError("E_BAD_TOPIC", str(problem)))
        if self.channel is not None and self.channel.queue:
            broker.to_pump[self.channel] = None  # there may be room for more

    def _entrust(self, topic: Topic, bodies: list[bytes], delay_ns: int, arrival_ns: int) -> None:
        """Publish to a topic that an engine delivers: it is answered when the engine has it."""
        assert topic.lane is not None
        if delay_ns and not topic.lane.engine.defers:
            self.fail(_cannot_defer(topic.lane.engine))
            return
        next_id, publisher, receipt = self.broker.next_id, self.publisher, Receipt(self, len(bodies))
        if self.pending is None:
            self.pending = deque()
        self.pending.append(receipt)
        topic.arrived += [Tracked(next_id(), arrival_ns, body, publisher, delay_ns, receipt) for body in bodies]
        topic.recent.largest_batch = max(topic.recent.largest_batch, len(bodies))
        topic.bytes += sum(map(len, bodies))
        self._published(topic, len(bodies))

    def settle(self) -> None:
        """The engine has all messages of a command: answer, as far as commands before it are answered."""
        pending, answers = self.pending, 0
        while pending and not pending[0].left:
            pending.popleft()
            answers += 1
        if answers and self.sock.fileno() >= 0:
            self.send(_OK * answers)
        if self.parting and not pending:
            self.end()

    def refused(self, problem: str) -> None:
        """The engine will never take a message: there is no answer but an error, and the end."""
        if not self.closing and self.sock.fileno() >= 0:
            self.fail(ProtocolError("E_PUB_FAILED", f"PUB failed {problem}"))

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
            if topic.lane is not None and (problem := self._objection(topic.lane.engine, bodies, delay_ns)):
                if not answers:
                    self.fail(problem)
                    return
                break  # it is told when those before it are answered
            messages += [Message(broker.next_id(), arrival_ns, body, self.publisher, delay_ns) for body in bodies]
            answers += 1
        verb = type(events[0]).__name__.upper()

        def stored(problem: LogError | None) -> None:
            if self.sock.fileno() < 0:
                return
            if problem:
                self.fail(ProtocolError(f"E_{verb}_FAILED", f"{verb} failed {problem}"))
            else:
                self.send(frames.OK * answers)
                self._published(topic, len(messages))
                self.carry_out(events[answers:], arrival_ns)
            self.release()
            broker.wake()

        self.hold()
        assert topic.durable is not None
        topic.durable.publish(topic, messages, stored)

    def _objection(self, engine: Engine, bodies: list[bytes], delay_ns: int) -> ProtocolError | None:
        """What an engine has against messages, before they are stored."""
        if delay_ns and not engine.defers:
            return _cannot_defer(engine)
        for body in bodies:
            if problem := engine.objection(self.publisher, body):
                return ProtocolError("E_PUB_FAILED", f"PUB failed the engine {engine.kind} refuses it: {problem}")
        return None

    def _refuse_fin(self, message_id: bytes) -> None:
        assert self.channel is not None
        self.send(frames.error(self.channel.refusal("FIN", message_id)))

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
            topic.recent.largest_batch = max(topic.recent.largest_batch, len(event.bodies))
            topic.bytes += sum(map(len, event.bodies))
            self._published(topic, len(event.bodies))
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
            self._published(topic, 1)
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
                broker.control.came(self)
            engine = broker.engine.delivery if broker.engine is not None else None
            self.send(frames.response(identify_response(identity, broker.options.settings, engine)))
            broker.expect_heartbeat(self)
            if identity.upgrades:
                self._upgrade(identity, arrival_ns)
        elif kind is Sub:
            self._subscribe(event)
        elif kind is Cls:
            self.ready = 0
            self.send(frames.CLOSE_WAIT)
        elif isinstance(event, ProtocolError):
            self.fail(event)
        else:
            assert kind is Nop, event

    def _published(self, topic: Topic, count: int) -> None:
        self.published[topic.name] = self.published.get(topic.name, 0) + count
        topic.senders[self] = None

    def _refuse(self, verb: str) -> None:
        """A topic is full, and its publisher is a consumer: it cannot be made to wait, for its FINs would, too."""
        self.fail(ProtocolError(f"E_{verb}_FAILED", f"{verb} failed topic is full"))

    def fail(self, problem: ProtocolError) -> None:
        """Tell it what is wrong, and close it; what it had goes to others at once."""
        self.pending = None  # it gets no more answers
        self.send(frames.error(problem))
        self.protocol.closed = True
        self.hold()
        self.broker.leave(self)
        self.end()

    def _subscribe(self, event: Sub) -> None:
        broker, identity = self.broker, self.protocol.identity
        try:
            if identity.replay is None or broker.engine is not None:
                channel = broker.channel(broker.touch(event.topic), event.channel)
            else:
                channel = broker.replay(event.topic, event.channel, identity.replay, identity.replay_log)
        except (LogError, BrokerError) as problem:
            self.fail(ProtocolError("E_SUB_FAILED", f"SUB failed {problem}"))
            return
        self.topic = broker.touch(event.topic)
        self.channel = channel
        channel.consumers.append(self)
        broker.to_pump[channel] = None
        self.send(frames.OK)

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
                self.requeued += 1
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
        if self.delivered or self.closing:
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
        if self.choked and not self.writing:
            self.choked = False
            self.release()
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


def _cannot_defer(engine: Engine) -> ProtocolError:
    return ProtocolError("E_DPUB_FAILED", f"DPUB failed the engine {engine.kind} cannot defer messages: use PUB")
