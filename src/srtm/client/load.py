"""An open-loop load: publishers that send when the schedule says so, whatever the cluster makes of it.

In: a workload and where to publish. Out: a report. Each publisher has a connection of its own and is moved, throttled
and reconnected like any other (`Stream`); one pass over the merged schedule writes what is due, and one subscriber
connection per broker takes everything back.

Latency is counted from the scheduled time to the kernel's time of arrival at the subscriber's socket, so that a load
that falls behind cannot hide it, and what it takes to read and count is not part of it. At an engine that does not
speak NSQ's protocol, or speaks it through TLS, the time of arrival is that of reading. How late a message was written
is kept beside it: where that is a considerable part, the load was the bottleneck and not the cluster. Without a channel
it is counted to the answer instead, which brokers with a delivery engine give when that has the message, or, where the
topic is on disk, when that has.

A body is [run 8][publisher 4][number 8] and padding; `number` counts the messages of the whole schedule, so that it
gives the time that a message was due. All that is done per message is done by numpy on what one read brought.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

from srtm.broker.ioloop import SO_TIMESTAMPNS
from srtm.broker.timer import Alarm
from srtm.client.cluster import Assigned, Cluster, Fixed, PublisherSpec
from srtm.client.connection import Connection, ConnectionOptions, split_address
from srtm.client.links import Message, check_login, engine_at
from srtm.client.places import Places
from srtm.client.stream import Stream
from srtm.client.subscriber import Subscriber
from srtm.errors import ClientError, InputError, ProtocolError, SRTMError
from srtm.model.latency import Distribution
from srtm.protocol import client as say
from srtm.protocol import frames
from srtm.protocol.names import EPHEMERAL
from srtm.units import NS_PER_MS, NS_PER_S, percentile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.protocol.orders import Order
    from srtm.workload.publishers import Workload

    Ints = NDArray[np.int64]

SMALLEST = 20  # bytes of a body
_MOST = 100_000_000  # messages: each takes 8 bytes until the end
_AT_ONCE = 64  # writes between two looks at what else there is to do
_AHEAD = 128  # commands that are made at once
_OPENING = 200  # connections that are opened at the same time
_CONSIDERABLE = 0.2  # part of the latency that the load may cause itself before it has to say so
_NOTICED_NS = 100_000  # lateness that no one would call a bottleneck
_IN_FLIGHT = 2_500  # at an engine that is not read in bulk; as much as an nsqd allows
_MOMENT_S = 0.001  # that finished messages may wait for others
_OPTIONS = ConnectionOptions(heartbeat_ms=30_000, timeout_s=10.0)
_TIMESPEC = Struct("@ll")
_ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)
_FIN = np.dtype([("verb", "S4"), ("id", "V16"), ("end", "S1")])
_now_ns = time.time_ns  # the clock that the kernel stamps with


def own_channel() -> str:
    """A channel that no other load has: those that share one take each other's messages away."""
    return f"load-{secrets.token_hex(4)}{EPHEMERAL}"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to send, and where; without brokers, the controller says."""

    topic: str
    workload: Workload
    size: int = 64
    channel: str | None = field(default_factory=own_channel)  # none: nobody subscribes
    brokers: tuple[str, ...] = ()
    settle_s: float = 5.0  # how long the last messages may take after nothing came any more
    patience_s: float = 10.0  # how long a broker may take to be there at all
    engine: str | None = field(default=None, repr=False)  # a login and files for a delivery engine

    def __post_init__(self) -> None:
        """What cannot be is refused before anybody is asked."""
        say.sub(self.topic, self.channel or "none")
        for address in self.brokers:
            split_address(address)
        if self.size < SMALLEST:
            raise InputError(f"size = {self.size}: a message needs {SMALLEST} bytes to be told from others")
        if len(self.workload.populations) != 1:
            raise InputError("a load has one population of publishers")
        expected = self.workload.total_mps * self.workload.duration_ns / NS_PER_S
        if expected > _MOST:
            raise InputError(f"about {expected:,.0f} messages are more than {_MOST:,}: make it shorter, or slower")


@dataclass(frozen=True, slots=True)
class Second:
    """What happened in a second; percentiles in ns, None where nothing came."""

    second: int
    sent: int
    received: int
    waiting: int  # messages that could not be written yet, or have no answer
    p99_ns: int | None
    late_ns: int | None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, and what came of it."""

    topic: str
    publishers: int
    brokers: list[str]
    seconds: float
    sent: int
    acknowledged: int
    received: int
    lost: int  # acknowledged, and never delivered
    doubled: int
    refused: int
    foreign: int  # messages of others on the channel
    rate: float
    total: Distribution | None  # from the scheduled time to the subscriber's socket, or to the answer
    lateness: Distribution | None  # from the scheduled time to the write
    cpu_us: float  # of this process, for each message
    cpu_share: float
    migrations: int
    throttles: int
    reconnections: int
    stopped: bool = False  # before its time
    problem: str | None = None  # why the first that was refused was, or what the last without an answer met

    @property
    def unanswered(self) -> int:
        """Messages of which nobody knows what became of them."""
        return self.sent - self.acknowledged - self.refused

    @property
    def bottleneck(self) -> bool:
        """Whether the load itself took a considerable part of the latency that it measured."""
        if self.total is None or self.lateness is None:
            return False
        return self.lateness.p99 > max(_NOTICED_NS, _CONSIDERABLE * self.total.p99)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        for name in ("total", "lateness"):
            times = found.pop(name)
            found[f"{name}_ms"] = times and {key: value / NS_PER_MS for key, value in times.items()}
        return {**found, "unanswered": self.unanswered, "bottleneck": self.bottleneck}


class Load:
    """One run of a load."""

    def __init__(self, options: LoadOptions, cluster: Cluster | None) -> None:
        self._options = options
        self._cluster = cluster
        (population,) = options.workload.populations
        self._batch = population.batch
        arrivals = options.workload.arrivals()
        if not len(arrivals.times_ns):
            raise InputError("nobody sends anything in that time: make it longer, or faster")
        self._due_ns: Ints = arrivals.times_ns[:: self._batch].copy()
        self._senders = arrivals.publisher_of[:: self._batch].copy()
        self.messages = len(arrivals.times_ns)
        self.latency_ns: Ints = np.full(self.messages, -1, np.int64)
        self._late_ns: Ints = np.zeros(len(self._due_ns), np.int64)
        self._acknowledged = bytearray(len(self._due_ns))
        self._answers = self._refusals = 0
        self._refusal: SRTMError | None = None  # the first
        self._next = 0
        self._made: list[bytes] = []
        self._made_from = 0
        self._times: list[int] = []
        self._who: list[int] = []
        self.deliveries = self.foreign = 0
        self._recent_ns: Ints = np.empty(max(10_000, round(2 * options.workload.total_mps)), np.int64)
        self._recents = 0  # latencies of this second, as far as there is room for them
        self.run = secrets.randbits(64)
        self.frame = _frame(options.size)
        self._commands = _Commands(options, self._batch, self.run)
        self._streams: list[Stream] = []
        self.ears: dict[str, _Ear] = {}
        self._places = Places(options.topic, _OPTIONS, options.engine)
        self._listener: _Listener | None = None  # instead of ears
        self._brokers: set[str] = set()  # at its beginning
        self._alarm: Alarm | None = None
        self._sent_all: asyncio.Event = asyncio.Event()
        self._stopped = False

    async def go(self, progress: Callable[[Second], None]) -> LoadReport:
        """Connect, send everything when it is due, wait for the rest, and say how it went."""
        watching: asyncio.Task[None] | None = None
        try:
            await self._connect()
            if self._cluster is not None and self.ears:
                watching = asyncio.create_task(self._watch(self._cluster))
            with _no_collector():
                began_ns, cpu_s = await self._send(progress)
            seconds = (_now_ns() - began_ns) / NS_PER_S
            return self._report(seconds, time.process_time() - cpu_s)
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if self._alarm is not None:
                self._alarm.close()
            for ear in self.ears.values():
                ear.close()
            if self._listener is not None:
                await self._listener.close()
            await asyncio.gather(*(stream.abort() for stream in self._streams))

    def stop(self) -> bool:
        """Send no more, and report what was sent; gives False if nothing was."""
        self._stopped = True
        self._sent_all.set()
        return self._next > 0

    async def _connect(self) -> None:
        """Every publisher at its broker, and an ear at every broker."""
        options, cluster = self._options, self._cluster
        publishers = options.workload.publishers()
        homes: list[Assigned | Fixed]
        if cluster is None:
            homes = [Fixed([options.brokers[n % len(options.brokers)]]) for n in range(len(publishers))]
        else:
            specs = declared(options.workload)
            places = await asyncio.gather(*(cluster.where(options.topic, spec) for spec in specs))
            homes = [Assigned(cluster, options.topic, spec, place) for spec, place in zip(specs, places, strict=True)]
        self._streams = [
            Stream(options.topic, publisher.id, publisher.group, home, _OPTIONS, self._answered, self._refused)
            for publisher, home in zip(publishers, homes, strict=True)
        ]
        first = max(1, len(options.brokers))  # one at each broker: who is not there is told from who has much to do
        await self._open(self._streams[:first], options.patience_s)
        await self._open(self._streams[first:], 10 * options.patience_s)
        known = cluster.brokers(options.topic).values() if cluster is not None else ()
        here = {stream.connection.address for stream in self._streams if stream.connection is not None}
        self._brokers = {*known, *here}
        if options.channel is not None:
            delivery = cluster.delivery(options.topic) if cluster is not None else set()
            await self._listen(delivery or self._brokers, options.channel)

    async def _open(self, streams: list[Stream], patience_s: float) -> None:
        """All of these, some at a time; the first that cannot be is the end of it."""
        opening = asyncio.Semaphore(_OPENING)

        async def opened(stream: Stream) -> None:
            async with opening:
                await stream.open(patience_s)

        tasks = [asyncio.ensure_future(opened(stream)) for stream in streams]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, places: set[str], channel: str) -> None:
        """Hear at all of these places, or at none: who leaves an ephemeral channel takes its messages away."""
        wanted = self._places.keys(places)
        if all(self._places.plain(key, place) for key, place in wanted.items()):
            ears = [_Ear(self, key, self._places.options(key)) for key in wanted]
            try:
                if await self._all_hear(ears, channel):
                    self.ears = {ear.address: ear for ear in ears if not ear.closed}
                    return
            finally:
                for ear in ears if not self.ears else ():
                    ear.close()
        options = self._options
        where: dict[str, Any] = {"controller": self._cluster} if self._cluster else {"brokers": options.brokers}
        self._listener = _Listener(self, options.topic, channel, engine=options.engine, **where)
        await self._listener.heard(options.patience_s)

    async def _all_hear(self, ears: list[_Ear], channel: str) -> bool:
        """Subscribe everywhere, if nobody is against it; False where a broker delivers through an engine."""
        found = await asyncio.gather(*(ear.prepare() for ear in ears), return_exceptions=True)
        there = [ear for ear, problem in zip(ears, found, strict=True) if problem is None]
        for ear, problem in zip(ears, found, strict=True):
            if problem is not None and not (there and isinstance(problem, ClientError)):
                raise problem
            if problem is not None:  # an engine of a broker that is dead; should it come back, `_watch` hears it
                ear.close()
        if any(ear.engine for ear in there):
            return False
        await there[0].open(self._options.topic, channel)  # if one agrees, so will the others
        await asyncio.gather(*(ear.open(self._options.topic, channel) for ear in there[1:]))
        return True

    async def _hear(self, address: str, channel: str) -> None:
        ear = self.ears[address] = _Ear(self, address, self._places.options(address))
        try:
            await ear.prepare()
            if ear.engine is None:
                await ear.open(self._options.topic, channel)
        except (ClientError, ProtocolError):
            ear.close()
            del self.ears[address]
            raise

    async def _watch(self, cluster: Cluster) -> None:
        """Hear brokers that the topic gets, or that came back; a load that hears too little would call it lost."""
        places, channel = set[str](), self._options.channel
        assert channel is not None
        changes = cluster.watch(self._options.topic)
        waiting: asyncio.Future[dict[str, str]] = asyncio.ensure_future(anext(changes))
        try:
            while True:
                done, _ = await asyncio.wait([waiting], timeout=0.25)
                if done:
                    waiting.result()
                    places = set(self._places.keys(cluster.delivery(self._options.topic)))
                    waiting = asyncio.ensure_future(anext(changes))
                for address in [address for address, ear in self.ears.items() if ear.closed]:
                    del self.ears[address]
                for address in places - self.ears.keys():
                    with suppress(ClientError, ProtocolError):
                        await self._hear(address, channel)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _send(self, progress: Callable[[Second], None]) -> tuple[int, float]:
        """Everything, when it is due, and then the rest of what comes; gives when it began, and the CPU time then."""
        loop = asyncio.get_running_loop()
        began_ns, cpu_s = _now_ns() + 100 * NS_PER_MS, time.process_time()
        self._due_ns += began_ns
        self._alarm = Alarm(loop, self._write_due)
        self._write_due()
        last = (0, 0)
        second, quiet = 0, 0.0
        while not self._sent_all.is_set() or (self._outstanding and quiet < self._options.settle_s):
            with suppress(TimeoutError):
                wait_s = began_ns / NS_PER_S + second + 1 - time.time()
                async with asyncio.timeout(max(0.01, wait_s)):
                    await (self._sent_all.wait() if not self._sent_all.is_set() else asyncio.sleep(0.02))
            if self._sent_all.is_set():
                quiet = 0.0 if self.deliveries != last[1] else quiet + 0.02
            if _now_ns() >= began_ns + (second + 1) * NS_PER_S:
                second += 1
                now = (self._next * self._batch, self.deliveries)
                progress(self._second(second, *(a - b for a, b in zip(now, last, strict=True))))
                last = now
        return began_ns, cpu_s

    @property
    def written_ns(self) -> Ints:
        """When the messages that were sent were written, in order, by the clock that the kernel stamps with."""
        return np.repeat(self._due_ns[: self._next] + self._late_ns[: self._next], self._batch)

    @property
    def lateness(self) -> Distribution | None:
        """How long after the scheduled time it wrote."""
        return Distribution.of(self._late_ns[: self._next]) if self._next else None

    @property
    def _outstanding(self) -> bool:
        """Whether anything was sent that did not come back."""
        sent_ns = self.latency_ns[: self._next * self._batch]
        return bool(np.count_nonzero(sent_ns < 0) > self._refusals * self._batch)

    def _write_due(self) -> None:
        """Write what is due, a few at a time; then wait for the next."""
        if self._stopped:
            return
        streams, late = self._streams, self._late_ns
        number = self._next
        now_ns = _now_ns()
        for _ in range(_AT_ONCE):
            at = number - self._made_from
            if at == len(self._made):
                if number == len(self._due_ns):
                    self._next = number
                    self._sent_all.set()
                    return
                self._make(number)
                at = 0
                now_ns = _now_ns()
            due_ns = self._times[at]
            if due_ns > now_ns:
                self._next = number
                assert self._alarm is not None
                self._alarm.set(due_ns, now_ns)
                return
            late[number] = now_ns - due_ns
            streams[self._who[at]].put_now(self._made[at], number)
            number += 1
            now_ns = _now_ns()
        self._next = number
        asyncio.get_running_loop().call_soon(self._write_due)

    def _make(self, number: int) -> None:
        """The next commands, while there is nothing to write."""
        upto = min(number + _AHEAD, len(self._due_ns))
        self._made_from = number
        self._times = self._due_ns[number:upto].tolist()
        self._who = self._senders[number:upto].tolist()
        self._made = self._commands.make(number, self._senders[number:upto])

    def _answered(self, number: int) -> None:
        self._acknowledged[number] = 1
        self._answers += 1
        if self._options.channel is None:
            self.heard(np.arange(number * self._batch, (number + 1) * self._batch), _now_ns())

    def _refused(self, number: int, problem: SRTMError) -> None:
        del number
        self._refusals += 1
        self._refusal = self._refusal or problem

    def heard(self, numbers: Ints, stamp_ns: int) -> None:
        """Messages of this run, and when they came."""
        latency_ns = np.maximum(stamp_ns - self._due_ns[numbers // self._batch], 0)
        self.deliveries += len(numbers)
        fresh = self.latency_ns[numbers] < 0
        if not fresh.all():
            numbers, latency_ns = numbers[fresh], latency_ns[fresh]
        self.latency_ns[numbers] = latency_ns
        room = self._recent_ns[self._recents : self._recents + len(latency_ns)]
        room[:] = latency_ns[: len(room)]
        self._recents += len(room)

    def _second(self, second: int, sent: int, received: int) -> Second:
        recent, self._recents = self._recent_ns[: self._recents], 0
        events = sent // self._batch
        late = self._late_ns[self._next - events : self._next]
        return Second(
            second,
            sent,
            received,
            (self._next - self._answers - self._refusals) * self._batch,
            percentile(recent, "0.99") if len(recent) else None,
            percentile(late, "0.99") if len(late) else None,
        )

    def _report(self, seconds: float, cpu_s: float) -> LoadReport:
        came = self.latency_ns >= 0
        acknowledged = np.repeat(np.frombuffer(self._acknowledged, np.uint8), self._batch) > 0
        received = int(np.count_nonzero(came))
        waiting = (stream.problem for stream in self._streams if stream.unsent or stream.unanswered)
        problem = self._refusal or next(waiting, None)
        return LoadReport(
            self._options.topic,
            len(self._streams),
            sorted(self.ears or (self._listener.brokers if self._listener else self._brokers)),
            seconds,
            self._next * self._batch,
            self._answers * self._batch,
            received,
            int(np.count_nonzero(acknowledged & ~came)),
            self.deliveries - received,
            self._refusals * self._batch,
            self.foreign,
            received / min(self._options.workload.duration_ns / NS_PER_S, seconds),
            Distribution.of(self.latency_ns[came]) if received else None,
            self.lateness,
            cpu_s * 1e6 / max(1, self._next * self._batch),
            cpu_s / seconds,
            sum(stream.migrations for stream in self._streams),
            sum(stream.throttles for stream in self._streams),
            sum(stream.reconnections for stream in self._streams),
            self._stopped,
            str(problem) if problem is not None else None,
        )


def declared(workload: Workload) -> list[PublisherSpec]:
    """What the publishers of a load say of themselves, in order."""
    (population,) = workload.populations
    spread_ms = population.spread_ns / NS_PER_MS
    kind = (population.rate_mps, population.process, population.batch, spread_ms)
    return [PublisherSpec(publisher.id, publisher.group, *kind) for publisher in workload.publishers()]


class _Commands:
    """PUB or MPUB commands of the schedule, many at once: only numbers differ between them."""

    def __init__(self, options: LoadOptions, batch: int, run: int) -> None:
        body = run.to_bytes(8, "big") + bytes(options.size - 8)
        command = say.pub(options.topic, body) if batch == 1 else say.mpub(options.topic, [body] * batch)
        each = 4 + options.size
        message = np.dtype(
            {"names": ["publisher", "number"], "formats": [">u4", ">u8"], "offsets": [12, 16], "itemsize": each}
        )
        head = len(command) - batch * each
        self._dtype = np.dtype(
            {"names": ["messages"], "formats": [(message, (batch,))], "offsets": [head], "itemsize": len(command)}
        )
        self._command = command
        self._batch = batch

    def make(self, first: int, senders: NDArray[np.int32]) -> list[bytes]:
        """The commands of these senders, from this one of the schedule on."""
        count, batch, size = len(senders), self._batch, len(self._command)
        found = np.frombuffer(bytearray(self._command * count), self._dtype)
        found["messages"]["publisher"] = senders[:, None]
        found["messages"]["number"] = np.arange(first * batch, (first + count) * batch).reshape(count, batch)
        data = found.tobytes()
        return [data[at : at + size] for at in range(0, len(data), size)]


def _frame(size: int) -> np.dtype[Any]:
    """A message frame with a body of the load's."""
    return np.dtype(
        [
            ("size", ">i4"),
            ("kind", ">i4"),
            ("timestamp_ns", ">i8"),
            ("attempts", ">u2"),
            ("id", "V16"),
            ("run", ">u8"),
            ("publisher", ">u4"),
            ("number", ">u8"),
            ("rest", f"V{size - SMALLEST}"),
        ]
    )


class _Listener(Subscriber):
    """A subscription at places that are not read in bulk: messages are counted when they come."""

    def __init__(self, load: Load, topic: str, channel: str, **options: Any) -> None:
        super().__init__(topic, channel, max_in_flight=_IN_FLIGHT, close_s=1.0, **options)
        self._load = load

    def deliver(self, message: Message) -> None:
        """Count a message, and finish it."""
        stamp_ns, body = _now_ns(), message.body
        message.finish_nowait()
        if len(body) < SMALLEST or int.from_bytes(body[:8], "big") != self._load.run:
            self._load.foreign += 1
        else:
            self._load.heard(np.array([int.from_bytes(body[12:20], "big")], np.int64), stamp_ns)

    async def heard(self, patience_s: float) -> None:
        """Until it is subscribed wherever the topic is delivered."""
        await self.open()
        try:
            async with asyncio.timeout(patience_s):
                await self.wait_subscribed()
        except TimeoutError:
            raise ClientError(
                f"topic {self.topic!r} cannot be heard within {patience_s:g} s: {self.trouble or 'nobody answers'};"
                " measure to the answers with --channel none"
            ) from None


class _Ear:
    """The subscription at one broker: frames of one size, read and finished in bulk."""

    def __init__(self, load: Load, address: str, options: ConnectionOptions) -> None:
        self.address = address
        self.closed = False
        self.engine: str | None = None  # that delivers, instead of the broker
        self._options = options
        self._connection: Connection | None = None
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._subscribed: asyncio.Future[bytes] = self._loop.create_future()
        self._sock: socket.socket | None = None
        self._buffer = bytearray(1024 * 1024)
        self._view = memoryview(self._buffer)
        self._end = 0  # of what was read and not understood yet
        self._out = bytearray()
        self._protocol = say.ClientProtocol()

    async def prepare(self) -> None:
        """Connect, and see whether messages are delivered there."""
        self._connection = await Connection.open(self.address, self, self._options)
        self.engine = engine_at(self._connection)
        if self.engine is None:
            check_login(self._connection, self._options, nsqd=True)

    async def open(self, topic: str, channel: str) -> None:
        """Subscribe, and take over the socket."""
        connection = self._connection
        assert connection is not None
        connection.send(say.sub(topic, channel))
        async with asyncio.timeout(_OPTIONS.timeout_s):
            await self._subscribed
        limit = connection.settled.get("max_rdy_count", 2500)
        self._sock = connection.detach()
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._loop.add_reader(self._sock, self._readable)
        self._say(say.rdy(limit))

    def close(self) -> None:
        """Hear no more."""
        self.closed = True
        if self._connection is not None:
            self._connection.close()
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._sock = None

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            size, ancillary, _, _ = self._sock.recvmsg_into([self._view[self._end :]], _ANCILLARY)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.close()
            return
        if ancillary:
            seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
            stamp_ns = seconds * NS_PER_S + nanoseconds
        else:
            stamp_ns = _now_ns()
        end = self._end + size
        at = self._take(end, stamp_ns)
        self._view[: end - at] = self._view[at:end]
        self._end = end - at

    def _take(self, end: int, stamp_ns: int) -> int:
        """Understand what is there up to `end`; gives up to where."""
        frame, at = self._load.frame, 0
        while True:
            count = (end - at) // frame.itemsize
            if count:
                found = np.frombuffer(self._buffer, frame, count, at)
                fits = (found["size"] == frame.itemsize - 4) & (found["kind"] == frames.MESSAGE)
                if not fits.all():
                    found = found[: int(fits.argmin())]
                self._messages(found, stamp_ns)
                at += len(found) * frame.itemsize
            if end - at < 8:
                return at
            (size, _) = frames.FRAME_HEAD.unpack_from(self._buffer, at)
            stop = at + 4 + size
            if stop > end:
                return at
            self._other(bytes(self._view[at:stop]))
            at = stop

    def _messages(self, found: NDArray[Any], stamp_ns: int) -> None:
        if not len(found):
            return
        fins = np.empty(len(found), _FIN)
        fins["verb"], fins["id"], fins["end"] = b"FIN ", found["id"], b"\n"
        self._say(fins.tobytes())
        own = found["run"] == self._load.run
        if not own.all():
            self._load.foreign += len(found) - int(np.count_nonzero(own))
            found = found[own]
        self._load.heard(found["number"].astype(np.int64), stamp_ns)

    def _other(self, data: bytes) -> None:
        """A frame that is none of the load's messages."""
        for event in self._protocol.feed(data):
            if isinstance(event, say.Heartbeat):
                self._say(say.nop())
            elif isinstance(event, say.Message):
                self._load.foreign += 1
                self._say(say.fin(event.id))

    def _say(self, data: bytes) -> None:
        """Say it in a moment, with what comes until then: nobody waits for it."""
        if not self._out:
            self._loop.call_later(_MOMENT_S, self._push)
        self._out += data

    def _push(self) -> None:
        if self._sock is None:
            return
        try:
            del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # reading says what happened
        if self._out:
            self._loop.add_writer(self._sock, self._push)
        else:
            self._loop.remove_writer(self._sock)

    def answered(self, data: bytes) -> None:
        """To SUB."""
        self._subscribed.set_result(data)

    def refused(self, problem: ProtocolError) -> None:
        """SUB was."""
        if not self._subscribed.done():
            self._subscribed.set_exception(problem)

    def delivered(self, message: say.Message) -> None:
        """Nothing comes before RDY."""
        raise AssertionError(message)

    def ordered(self, connection: Connection, order: Order) -> None:
        """Orders are for publishers."""

    def writable(self) -> None:
        """The socket is written by hand."""

    def ended(self, connection: Connection, problem: Exception | None) -> None:
        """It ended before it could be taken over."""
        del connection
        if not self._subscribed.done():
            self._subscribed.set_exception(ClientError(f"{self.address} closed the connection: {problem}"))


@contextmanager
def _no_collector() -> Iterator[None]:
    """What lives as long as the load need not be looked at again and again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
