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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from srtm.client.cluster import Assigned, Cluster, Fixed, PublisherSpec
from srtm.client.ears import OPTIONS, SMALLEST, Ears, frame_of
from srtm.client.stream import Stream
from srtm.errors import InputError, SRTMError
from srtm.model.latency import Distribution
from srtm.net.alarm import Alarm
from srtm.net.sockets import split_address
from srtm.protocol import client as say
from srtm.protocol.names import EPHEMERAL
from srtm.units import NS_PER_MS, NS_PER_S, percentile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.workload.publishers import Workload

    Ints = NDArray[np.int64]

_MOST = 100_000_000  # messages: each takes 8 bytes until the end
_AT_ONCE = 64  # writes between two looks at what else there is to do
_AHEAD = 128  # commands that are made at once
_OPENING = 200  # connections that are opened at the same time
_CONSIDERABLE = 0.2  # part of the latency that the load may cause itself before it has to say so
_NOTICED_NS = 100_000  # lateness that no one would call a bottleneck
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
        self.frame = frame_of(options.size)
        self._commands = _Commands(options, self._batch, self.run)
        self._streams: list[Stream] = []
        self._ears = Ears(self, options.topic, options.channel, options.engine) if options.channel else None
        self._brokers: set[str] = set()  # at its beginning
        self._alarm: Alarm | None = None
        self._sent_all: asyncio.Event = asyncio.Event()
        self._stopped = False

    async def go(self, progress: Callable[[Second], None]) -> LoadReport:
        """Connect, send everything when it is due, wait for the rest, and say how it went."""
        try:
            await self._connect()
            with _no_collector():
                began_ns, cpu_s = await self._send(progress)
            seconds = (_now_ns() - began_ns) / NS_PER_S
            return self._report(seconds, time.process_time() - cpu_s)
        finally:
            if self._alarm is not None:
                self._alarm.close()
            if self._ears is not None:
                await self._ears.close()
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
            Stream(options.topic, publisher.id, publisher.group, home, OPTIONS, self._answered, self._refused)
            for publisher, home in zip(publishers, homes, strict=True)
        ]
        first = max(1, len(options.brokers))  # one at each broker: who is not there is told from who has much to do
        await self._open(self._streams[:first], options.patience_s)
        await self._open(self._streams[first:], 10 * options.patience_s)
        known = cluster.brokers(options.topic).values() if cluster is not None else ()
        here = {stream.connection.address for stream in self._streams if stream.connection is not None}
        self._brokers = {*known, *here}
        if self._ears is not None:
            delivery = cluster.delivery(options.topic) if cluster is not None else set()
            await self._ears.open(delivery or self._brokers, cluster, options.patience_s)

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
            sorted((self._ears.brokers if self._ears is not None else []) or self._brokers),
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
