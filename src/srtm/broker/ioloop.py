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
import logging
import secrets
import socket
import time
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from srtm.broker.connection import PARTING_S, REST_S, TICK_NS, TICK_S, Connection
from srtm.broker.control import Control, resumed, throttled
from srtm.broker.engines.engine import check_topic, engine_of, no_channels
from srtm.broker.message import ids
from srtm.broker.options import settled, tls_of
from srtm.broker.poller import Poller
from srtm.broker.statistics import BrokerStatistics
from srtm.broker.topic import Topic
from srtm.errors import BrokerError, LogError
from srtm.net.alarm import Alarm
from srtm.net.stamps import SO_TIMESTAMPNS
from srtm.protocol import frames
from srtm.protocol.names import ephemeral
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from srtm.broker.auth import Authority, Guard
    from srtm.broker.channel import Channel
    from srtm.broker.disk.durable import Durable
    from srtm.broker.engines.engine import Engine
    from srtm.broker.options import BrokerOptions
    from srtm.broker.recorder import Recorder

log = logging.getLogger(__name__)

# What is due for many at one time is done for a few, then the loop turns: heartbeats, sums of a second.
_BEATS, _SUMS, _BREAK_S = 8, 4, 0.001
_LATE_NS = 2_000_000  # after that, a message was not read in time
_STOPPED_NS = 5_000_000  # longer than a turn reads
_RELEASES = 4
_SILENCE_NS = 60 * NS_PER_S  # after a warning that would be repeated ten times a second
_LITTLE = 4096  # about thirty messages: less than a tenth of a millisecond's work
_now_ns = time.time_ns  # the clock that the kernel stamps with


class Broker:
    """A broker at work: listens, serves, and stops."""

    def __init__(self, options: BrokerOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.options = options = settled(options)
        self.loop = loop
        self.tls = tls_of(options)
        self.authority: Authority | None = None
        if options.auth_http_addresses:
            from srtm.broker.auth import Authority

            self.authority = Authority(options.auth_http_addresses, loop, options.tls_root_ca_file)
        self.on_change: Callable[[], None] | None = None  # topics or channels came or went
        self.on_topic: Callable[[Topic], None] | None = None  # one was made: it may have channels elsewhere
        self.groups: dict[str, str | None] = {}  # correlation groups of publishers
        self.recorder: Recorder | None = None
        self.engine: Engine | None = engine_of(self)  # that delivers, instead of channels
        self.durable: Durable | None = None
        if options.data_path:
            from srtm.broker.disk.durable import Durable

            self.durable = Durable(self, Path(options.data_path))
        self.control = Control(self, managed=options.controller is not None)
        self.topics: dict[str, Topic] = {}
        self.connections: dict[int, Connection] = {}
        self.started_ns = _now_ns()
        self.tcp_port = self.http_port = self.https_port = 0
        self.unstamped = 0
        self.read_view = memoryview(bytearray(options.read_size))
        self.read_into = [self.read_view]
        self.read_little = [self.read_view[:_LITTLE]]  # from publishers whose messages have to wait for tokens
        # Answers that a client may leave unread before it is not read either; messages alone never come to so much.
        self.most_unsent = 2 * options.max_unsent_bytes + options.settings.max_msg_size
        self.next_id: Callable[[], bytes] = ids(secrets.randbits(62)).__next__
        self.to_drain: dict[Topic, None] = {}
        self.to_pump: dict[Channel, None] = {}
        self.to_deliver: list[Connection] = []  # before the answers: a message's latency ends with its own write
        self.to_flush: list[Connection] = []
        self._limited: dict[Topic, int] = {}  # topics in which messages wait for tokens: when the next one comes
        self._blocked: dict[Topic, dict[Connection, None]] = {}  # crowded topics, and publishers that wait for them
        self._resting: dict[Connection, None] = {}
        self._awake = False
        self.poller = Poller(loop, self._turn)
        self._alarm = Alarm(loop, self._end_turn)
        self._heartbeats: list[tuple[int, int, Connection]] = []
        self._beating = False
        self._closing: list[Topic] = []  # whose last second is to be summed up
        self._order = count()
        self._listener: socket.socket | None = None
        self._said_until_ns = 0  # that it cannot accept clients
        self._tick: asyncio.TimerHandle | None = None
        self._second_ns = self._tick_due_ns = self._late_ns = 0
        self.lag_ns = 0  # how late a tick was at most, in the last second

    def listen(self) -> int:
        """Accept clients from now on; returns the port."""
        listener = socket.create_server(
            (self.options.host, self.options.tcp_port), backlog=self.options.backlog, reuse_port=False
        )
        listener.setblocking(False)
        if self.options.kernel_time:
            with suppress(OSError):  # inherited, so that the first bytes of a client are stamped, too
                listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._listener = listener
        self.tcp_port = int(listener.getsockname()[1])
        if self.engine is not None:
            self.engine.start()
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
                    if _now_ns() >= self._said_until_ns:
                        self._said_until_ns = _now_ns() + _SILENCE_NS
                        log.warning("BROKER: clients have to wait, %s; allow it more with ulimit -n", error.strerror)
                    self.loop.remove_reader(self._listener)  # too many files: try again with the next tick
                    self.loop.call_later(TICK_S, self.loop.add_reader, self._listener, self._accept)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self, sock, f"{address[0]}:{address[1]}")
            self.connections[sock.fileno()] = connection
            self.poller.add(sock, connection.readable)
            self.expect_heartbeat(connection)

    def touch(self, name: str) -> Topic:
        """The topic of that name, made if need be, to be drained at the end of this turn.

        BrokerError where the engine cannot have it, or it was promised to be on disk and cannot be.
        """
        topic = self.topics.get(name)
        if topic is None:
            if self.engine is not None:
                check_topic(self.engine, name)
            if problem := self.control.refusal(name):
                raise BrokerError(problem, topic=name)
            topic = self.topics[name] = Topic(name, self.options.max_held_messages, self.options.max_held_bytes)
            if self.engine is not None:
                topic.lane, topic.later = self.engine.lane(topic), True
            topic.closed = self.control.closes(name)
            self.control.made(topic)
            if self.on_topic:
                self.on_topic(topic)
            self.changed(topic)
        self.to_drain[topic] = None
        return topic

    def channel(self, topic: Topic, name: str) -> Channel:
        """The topic's channel of that name, made if need be; BrokerError where an engine delivers."""
        if self.engine is not None:
            raise BrokerError(no_channels(self.engine, topic.name), topic=topic.name)
        known = name in topic.channels
        channel = topic.channel(name)
        if not known:
            if topic.durable is not None:
                topic.durable.attach(topic, channel)
            self.to_drain[topic] = None
            self.changed(topic)
        return channel

    def replay(self, name: str, channel: str, offset: int, log: str | None = None) -> Channel:
        """A new channel that begins at an offset of a disk topic; LogError where there can be none."""
        topic = self.topics.get(name)
        if topic is None or topic.durable is None:
            raise LogError(f"topic {name!r} is not on disk: only disk topics are replayed", topic=name)
        if not ephemeral(channel) or channel in topic.channels:
            raise LogError(
                f"channel {channel!r} cannot be replayed to: it needs a name of its own that ends with #ephemeral",
                channel=channel,
            )
        found = topic.channels[channel] = topic.durable.replay(topic, channel, offset, log)
        self.to_drain[topic] = None
        self.changed(topic)
        return found

    def changed(self, topic: Topic) -> None:
        """A topic, or a channel of it, came or went."""
        if self.durable:
            self.durable.note(topic.name)
        if self.on_change:
            self.on_change()

    def guard(self, connection: Connection) -> Guard | None:
        """Who has to be asked before this client may do anything."""
        if self.authority is None:
            return None
        from srtm.broker.auth import Guard

        return Guard(connection, self.authority)

    def wake(self) -> None:
        """Have a turn soon: there is something to do that no socket has brought."""
        if not self._awake:
            self._awake = True
            self.loop.call_soon(self._woken)

    def _woken(self) -> None:
        self._awake = False
        self._end_turn()

    def _turn(self, readers: Iterable[Callable[[], None]], *, more: bool = False) -> None:
        """Read from clients that have something to say, and do what follows from it."""
        self._read(readers)
        if more and self._stood_still():
            return
        if _now_ns() - self.poller.began_ns > _STOPPED_NS and any(topic.limiter for topic in self.to_drain):
            # Stopped while it read: who was read since may have spoken later than those who are ready now.
            self._read(self.poller.again())
        self._end_turn(more=more)

    def _read(self, readers: Iterable[Callable[[], None]]) -> None:
        for read in readers:
            try:
                read()
            except Exception as error:  # others are not to suffer from one
                self.loop.call_exception_handler({"message": "a client was not understood", "exception": error})

    def _stood_still(self) -> bool:
        """Whether messages waited to be read for a while: those not read yet may have come before them. Read all."""
        late_ns = self.poller.began_ns - _LATE_NS
        return any(
            topic.limiter is not None and any(message.arrival_ns < late_ns for message in topic.arrived)
            for topic in self.to_drain
        )

    def _end_turn(self, *, more: bool = False) -> None:
        now_ns = _now_ns()
        to_drain, self.to_drain = self.to_drain, {}
        for topic, release_ns in self._limited.items():
            if release_ns <= now_ns:
                to_drain[topic] = None
        for topic in to_drain:
            released = topic.drain(now_ns)
            if released and self.recorder is not None:
                self.recorder.released(topic.name, released)
            if released or topic.unclaimed:
                topic.distribute(released, now_ns)
                for channel in topic.channels.values():
                    self.to_pump[channel] = None
            if topic.waiting and topic.limiter is not None and not topic.stalled:
                self._limited[topic] = topic.next_release_ns()
                for connection in topic.senders:
                    connection.read_into = self.read_little
            else:
                self._limited.pop(topic, None)
            if topic.farewells:
                self._let_go(topic)
            if topic.senders:
                if topic.crowded:
                    self._block(topic)
                topic.senders.clear()
        to_pump, self.to_pump = self.to_pump, {}
        for channel in to_pump:
            channel.pump(now_ns)
        if self.engine is not None:
            self.engine.flush()
        to_deliver, self.to_deliver = self.to_deliver, []
        for connection in to_deliver:
            connection.flush()
        if self._blocked:
            self._unblock()
        if not more:  # answers can wait for messages that are there already
            to_flush, self.to_flush = self.to_flush, []
            for connection in to_flush:
                connection.flush()
        if self._limited:
            self._alarm.set(min(self._limited.values()), _now_ns())

    def part(self, topic: Topic, connection: Connection) -> None:
        """Close a publisher's connection when all of its messages have their tokens: then it may go on elsewhere."""
        topic.farewells.append((topic.sent_by(connection.publisher), connection))
        self.loop.call_later(PARTING_S, self._part_anyway, topic, connection)
        self.to_drain[topic] = None
        self.wake()

    def _part_anyway(self, topic: Topic, connection: Connection) -> None:
        """Keep nobody for a topic without a share: nobody knows when it will have one, and another broker waits."""
        if not any(each is connection for _, each in topic.farewells):
            return
        if not topic.closed:
            self.loop.call_later(PARTING_S, self._part_anyway, topic, connection)
            return
        topic.farewells = [(sent, each) for sent, each in topic.farewells if each is not connection]
        connection.end()

    def _let_go(self, topic: Topic) -> None:
        behind = topic.leaves or topic.spooled > 0  # perhaps for hours: then nobody waits, and order is not kept
        for sent, connection in topic.farewells:
            if topic.passed >= sent or behind:
                connection.end()
        topic.farewells = [
            (sent, connection) for sent, connection in topic.farewells if topic.passed < sent and not behind
        ]

    def rest(self, consumer: Connection) -> None:
        """Read a busy consumer now and then instead of waking for each FIN, as network drivers do with interrupts.

        While it finishes messages faster than every REST_S, a wake-up and a read per message are saved. What it may
        still be sent lasts for longer; where it does not, the channel attends to it.
        """
        if not self._resting:
            self.loop.call_later(REST_S, self._after_rest)
        self._resting[consumer] = None
        consumer.resting = True
        self.poller.remove(consumer.sock)

    def end_rest(self, consumer: Connection) -> None:
        """Read a consumer again as soon as it says something."""
        consumer.resting = False
        self._resting.pop(consumer, None)
        if consumer.sock.fileno() >= 0 and not consumer.holds:
            self.poller.add(consumer.sock, consumer.readable)

    def _after_rest(self) -> None:
        for consumer in list(self._resting):
            heard_ns = consumer.heard_ns
            if not consumer.holds:
                consumer.readable()
            if consumer.resting and (consumer.heard_ns == heard_ns or 4 * consumer.in_flight >= consumer.ready):
                self.end_rest(consumer)
        self._end_turn()
        if self._resting:
            self.loop.call_later(REST_S, self._after_rest)

    def _block(self, topic: Topic) -> None:
        """Read no more from those who publish to a crowded topic; TCP tells them."""
        waiting = self._blocked.setdefault(topic, {})
        for connection in topic.senders:
            if connection.sock.fileno() >= 0 and connection not in waiting and connection.channel is None:
                waiting[connection] = None
                throttled(connection, topic)
                connection.hold()

    def _unblock(self) -> None:
        """Read those again who have waited longest, a few in a turn: all at once would crowd out other topics."""
        for topic in [topic for topic in self._blocked if topic.relieved]:
            waiting = self._blocked[topic]
            for connection in list(islice(waiting, _RELEASES)):
                del waiting[connection]
                resumed(connection, topic)
                connection.release()
            if waiting:
                self.wake()
            else:
                del self._blocked[topic]

    def expect_heartbeat(self, connection: Connection) -> None:
        """Ask a client for a sign of life when its interval is over."""
        interval_ns = connection.protocol.identity.heartbeat_ms * NS_PER_MS
        connection.beat = next(self._order)
        if interval_ns:
            heapq.heappush(self._heartbeats, (_now_ns() + interval_ns, connection.beat, connection))

    def _on_tick(self) -> None:
        now_ns = _now_ns()
        self.control.check_lease(now_ns, time.monotonic_ns())
        self._late_ns = max(self._late_ns, now_ns - self._tick_due_ns) if self._tick_due_ns else 0
        self._tick_due_ns = now_ns + TICK_NS
        for topic in self.topics.values():
            for channel in topic.channels.values():
                channel.remind(now_ns)
                if channel.queue:
                    self.to_pump[channel] = None
        if self.engine is not None:
            self.engine.tick(now_ns)
        if not self._beating:
            self._beat()
        if now_ns - self._second_ns >= NS_PER_S and not self._closing:
            self._second_ns = now_ns
            self.lag_ns, self._late_ns = self._late_ns, 0
            self._closing = list(self.topics.values())
            self._close_seconds()
        self.wake()
        self._tick = self.loop.call_later(TICK_S, self._on_tick)

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
            if now_ns - connection.heard_ns > 2 * interval_ns and (connection.choked or not connection.holds):
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
            topic.end_second(now_ns)
        del self._closing[-_SUMS:]
        if self._closing:
            self.loop.call_later(_BREAK_S, self._close_seconds)

    def statistics(self, topic: str | None = None, *, clients: bool = False) -> BrokerStatistics:
        """A snapshot, of all topics or of one; with `clients`, it lists publishers, and channels list consumers."""
        now_ns = _now_ns()
        topics = [each for name, each in sorted(self.topics.items()) if topic in (None, name)]
        publishers = [each for each in self.connections.values() if each.published] if clients else []
        return BrokerStatistics(
            self.started_ns,
            len(self.connections),
            self.unstamped,
            self.lag_ns,
            self.engine.statistics() if self.engine else None,
            tuple(each.statistics(now_ns, clients=clients) for each in topics),
            tuple(each.statistics() for each in publishers) if clients else None,
        )

    def close(self, connection: Connection) -> None:
        """Forget a client; what it had in flight goes to others."""
        fd = connection.sock.fileno()
        if fd < 0:
            return
        self.poller.remove(connection.sock)
        self.loop.remove_writer(fd)
        self.connections.pop(fd, None)
        connection.sock.close()
        connection.out.clear()
        self._resting.pop(connection, None)
        self.control.went(connection)
        if connection.transport:
            connection.transport.close()
        if connection.guard:
            connection.guard.close()
        self.leave(connection)

    def leave(self, connection: Connection) -> None:
        """Take a consumer from its channel; what it had in flight goes to others."""
        topic, channel, connection.channel = connection.topic, connection.channel, None
        if topic is not None and channel is not None:
            channel.leave(connection)
            self.to_pump[channel] = None
            self.wake()
            if channel.ephemeral and not channel.consumers:
                self.delete_channel(topic, channel)

    def delete_channel(self, topic: Topic, channel: Channel) -> None:
        """Forget a channel; its consumers are disconnected. With its last channel goes an ephemeral topic."""
        if topic.channels.get(channel.name) is not channel:  # gone, and perhaps another one has its name
            return
        del topic.channels[channel.name]
        for consumer in list(channel.consumers):
            self.close(consumer)  # type: ignore[arg-type]
        if topic.durable is not None:
            topic.durable.forget_channel(topic, channel)
        if self.durable is not None:
            self.durable.drop_saved(topic, channel)
        channel.empty()
        self.to_pump.pop(channel, None)
        self.changed(topic)
        if topic.ephemeral and not topic.channels:
            self.delete_topic(topic)

    def delete_topic(self, topic: Topic) -> None:
        """Forget a topic with its channels."""
        if self.topics.get(topic.name) is not topic:
            return
        del self.topics[topic.name]
        farewells, topic.farewells = topic.farewells, []
        for _, connection in farewells:
            connection.end()
        for channel in list(topic.channels.values()):
            self.delete_channel(topic, channel)
        if topic.durable is not None:
            topic.durable.forget_topic(topic)
        if self.durable is not None:
            self.durable.drop_saved(topic)
        if self.engine is not None:
            self.engine.forget(topic)
        topic.abandon(time.time_ns())
        self.to_drain.pop(topic, None)
        self._limited.pop(topic, None)
        for connection in self._blocked.pop(topic, {}):
            resumed(connection, topic)
            connection.release()
        self.changed(topic)

    def stop(self) -> None:
        """Accept nobody any more, close every connection, and save what is not finished."""
        if self._tick:
            self._tick.cancel()
        if self._listener:
            self.loop.remove_reader(self._listener)
            self._listener.close()
        for connection in list(self.connections.values()):
            self.close(connection)
        if self.engine is not None:
            self.engine.stop()
        self._alarm.close()
        self.poller.close()
        if self.durable:
            self.durable.close()
