"""`python -m bench.engines`: what SRTM costs in front of an engine, and what it is good for.

For nsqd and JetStream (one server each, writing to files), in turns within one run: directly, and through brokers with
`--engine` whose topics are in memory or on disk before the engine. First CPU a message of engine and broker, and
latency from when a message was due to its acknowledgement, at a steady rate; then the p99 of a quiet topic alone,
beside a topic that floods, and beside the same flood where SRTM holds both to their buckets. Engine and brokers share
one core: what SRTM takes, it takes from the engine. The load has another, where the flood (a process of its own) stands
behind; how late the load itself was is printed, too.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import host, peers
from bench.measure import show
from srtm.control.local.engine import Place, engines
from srtm.errors import ControlError
from srtm.net.alarm import Alarm
from srtm.protocol import client as nsq
from srtm.protocol import nats
from srtm.protocol.client import ClientProtocol, Error, Heartbeat, Response
from srtm.protocol.names import MAGIC_V2
from srtm.protocol.nats import Info, Msg, NatsProtocol, Ping, Pong

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
BODY = bytes(100)
PUBLISHERS = 20
RATES_MPS = (2_000, 10_000)
STEADY_S, QUIET_S, WARM_UP_S = 3.0, 4.0, 0.5
QUIET_MPS = 500
BUCKET = f"&r={QUIET_MPS}&b=1000"
FLOOD_WINDOW = 20_000  # messages without an answer that the flood allows itself
_PROCESS_CLOCK = 2


class Publishing(asyncio.Protocol):
    """One publisher's connection: messages out, latencies in."""

    def __init__(self) -> None:
        self.ready = asyncio.get_running_loop().create_future()
        self.latencies_ns: list[int] = []
        self.unanswered = 0
        self.transport: Any = None
        self.answered = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def done(self, due_ns: int) -> None:
        self.latencies_ns.append(time.monotonic_ns() - due_ns)
        self.unanswered -= 1
        self.answered.set()

    def publish(self, topic: str, due_ns: int) -> None:
        raise NotImplementedError


class ToNsq(Publishing):
    """To nsqd, or to a broker of ours."""

    def __init__(self) -> None:
        super().__init__()
        self._protocol = ClientProtocol()
        self._due: deque[int] = deque()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.write(MAGIC_V2)
        self.ready.set_result(None)

    def data_received(self, data: bytes) -> None:
        for event in self._protocol.feed(data):
            if isinstance(event, Heartbeat):
                self.transport.write(nsq.nop())
            elif isinstance(event, Response):
                self.done(self._due.popleft())
            elif isinstance(event, Error):
                raise event.problem

    def publish(self, topic: str, due_ns: int) -> None:
        self._due.append(due_ns)
        self.unanswered += 1
        self.transport.write(nsq.pub(topic, BODY))


class ToNats(Publishing):
    """To JetStream, as its own clients publish: with an id, answered one by one."""

    def __init__(self) -> None:
        super().__init__()
        self._protocol = NatsProtocol()
        self._due: dict[bytes, int] = {}
        self._inbox = b"_INBOX.%d." % id(self)
        self._number = 0

    def data_received(self, data: bytes) -> None:
        for event in self._protocol.feed(data):
            if isinstance(event, Info):
                greeting = nats.connect(verbose=False, headers=True, no_responders=True)
                self.transport.write(greeting + nats.subscribe(self._inbox + b"*", 1) + nats.PING)
            elif isinstance(event, Pong):
                self.ready.set_result(None)
            elif isinstance(event, Ping):
                self.transport.write(nats.PONG)
            elif isinstance(event, Msg):
                assert not event.status, event
                assert b'"error"' not in event.body, event.body
                self.done(self._due.pop(event.subject))

    def publish(self, topic: str, due_ns: int) -> None:
        self._number += 1
        reply = self._inbox + b"%d" % self._number
        self._due[reply] = due_ns
        self.unanswered += 1
        self.transport.write(nats.publish_once(topic.encode(), reply, reply, BODY))


class Way:
    """A way to an engine: directly, or through a broker."""

    def __init__(self, name: str, port: int, kind: type[Publishing], pids: list[int]) -> None:
        self.name, self.port, self.kind, self.pids = name, port, kind, pids

    def cpu_ns(self) -> list[int]:
        return [time.clock_gettime_ns((~pid << 3) | _PROCESS_CLOCK) for pid in self.pids]

    async def connected(self, count: int) -> list[Publishing]:
        loop = asyncio.get_running_loop()
        made = [(await loop.create_connection(self.kind, HOST, self.port))[1] for _ in range(count)]
        await asyncio.gather(*(each.ready for each in made))
        return made


async def steadily(publishers: list[Publishing], topic: str, rate_mps: float, seconds: float, seed: int) -> list[int]:
    """Publish as a Poisson process that waits for nobody; gives how late each message was sent."""
    random, due_ns, late_ns = Random(seed), time.monotonic_ns(), list[int]()
    rung = asyncio.Event()
    alarm = Alarm(asyncio.get_running_loop(), rung.set)  # the loop's own timers count in milliseconds
    end_ns = due_ns + round(seconds * 1e9)
    while due_ns < end_ns:
        now_ns = time.monotonic_ns()
        while due_ns <= min(now_ns, end_ns):
            random.choice(publishers).publish(topic, due_ns)
            late_ns.append(time.monotonic_ns() - due_ns)
            due_ns += round(random.expovariate(rate_mps) * 1e9)
        rung.clear()
        alarm.set(due_ns, time.monotonic_ns())
        await rung.wait()
    alarm.close()
    await asyncio.gather(*(_answered(each, 0) for each in publishers))
    return late_ns


async def _answered(publisher: Publishing, most: int) -> None:
    while publisher.unanswered > most:
        publisher.answered.clear()
        await asyncio.wait_for(publisher.answered.wait(), 30)


async def flood(kind: str, port: int) -> None:
    """Publish as fast as answers come, and faster than anybody should; says how many were answered until when."""
    reader, writer = await asyncio.open_connection(HOST, port)
    if kind == "nats":
        token = b"_INBOX.flood"
        writer.write(nats.connect(verbose=False, headers=True) + nats.subscribe(token, 1))
        commands = nats.publish(b"flood", token, BODY) * 250
    else:
        token = b"OK"
        writer.write(MAGIC_V2)
        commands = nsq.pub("flood", BODY) * 250
    sent = answered = said_ns = 0
    data = b""
    while True:
        while sent - answered < FLOOD_WINDOW:
            writer.write(commands)
            sent += 250
        data = data[1 - len(token) :] + await reader.read(1 << 20)
        answered += data.count(token)
        if time.monotonic_ns() - said_ns > 50_000_000:
            said_ns = time.monotonic_ns()
            print(said_ns, answered, flush=True)


async def steady(way: Way, rate_mps: float, seed: int) -> tuple[list[float], list[int], list[int]]:
    """CPU µs a message of each process, latencies, and how late messages were sent."""
    publishers = await way.connected(PUBLISHERS)
    await steadily(publishers, "steady", rate_mps, WARM_UP_S, seed)
    for each in publishers:
        each.latencies_ns.clear()
    before = way.cpu_ns()
    late_ns = await steadily(publishers, "steady", rate_mps, STEADY_S, seed + 1)
    after = way.cpu_ns()
    found = [latency for each in publishers for latency in each.latencies_ns]
    for each in publishers:
        each.transport.close()
    return [(b - a) / 1_000 / len(found) for a, b in zip(before, after, strict=True)], found, late_ns


async def beside(way: Way, seed: int, *, flooded: bool) -> tuple[list[int], list[int], float]:
    """Latencies of a quiet topic, alone or beside a flood; how late it was sent; messages a second of the flood."""
    command = [sys.executable, "-m", "bench.engines", "--flood", "nats" if way.kind is ToNats else "nsqd"]
    with ExitStack() as stack:
        flooding = None
        if flooded:
            behind = functools.partial(_behind, peers.LOAD_CORE)
            child = [*command, "--port", str(way.port)]
            flooding = stack.enter_context(
                subprocess.Popen(child, stdout=subprocess.PIPE, text=True, preexec_fn=behind)
            )
            stack.callback(flooding.kill)
            await asyncio.sleep(1)
        publishers = await way.connected(PUBLISHERS)
        await asyncio.sleep(WARM_UP_S)
        began_ns = time.monotonic_ns()
        late_ns = await steadily(publishers, "quiet", QUIET_MPS, QUIET_S, seed)
        ended_ns = time.monotonic_ns()
        for each in publishers:
            each.transport.abort()
        rate_mps = 0.0
        if flooding is not None:
            flooding.kill()
            assert flooding.stdout is not None
            said = [[int(word) for word in line.split()] for line in flooding.stdout.read().splitlines()]
            within = [pair for pair in said if len(pair) == 2 and began_ns <= pair[0] <= ended_ns]
            if len(within) > 1:
                rate_mps = (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0]) * 1e9
    return [latency for each in publishers for latency in each.latencies_ns], late_ns, rate_mps


def _behind(core: int) -> None:
    """Run on the load's core whenever the load itself does not."""
    peers.settle(core, realtime=False)
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
    if priority > 1:
        os.sched_setscheduler(0, policy, os.sched_param(priority - 1))
    else:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def process(command: list[str], *, realtime: bool) -> Iterator[subprocess.Popen[str]]:
    """A process on the engine's core."""
    on_its_core = functools.partial(peers.settle, peers.BROKER_CORE, realtime=realtime)
    environment = {**os.environ, "GOMAXPROCS": "1", "PYTHONPATH": f"{peers.ROOT / 'src'}:{peers.ROOT}"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, preexec_fn=on_its_core
    ) as started:
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(10)
            except subprocess.TimeoutExpired:
                started.kill()


def post(http: int, path: str) -> None:
    request = urllib.request.Request(f"http://{HOST}:{http}{path}", data=b"", method="POST")
    urllib.request.urlopen(request, timeout=10).close()


async def make_streams(port: int) -> None:
    """The streams that a broker would make."""
    loop = asyncio.get_running_loop()
    _, publisher = await loop.create_connection(ToNats, HOST, port)
    await publisher.ready
    for name in (b"steady", b"quiet", b"flood"):
        wanted = b'{"name":"%b","subjects":["%b"],"storage":"file","max_bytes":100000000}' % (name, name)
        publisher.transport.write(b"PUB $JS.API.STREAM.CREATE.%b %d\r\n%b\r\n" % (name, len(wanted), wanted))
    await asyncio.sleep(0.5)
    publisher.transport.close()


@contextmanager
def ways(kind: str, *, realtime: bool) -> Iterator[list[Way]]:
    """An engine, and brokers in front of it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (made,) = engines(kind, 1, Place(HOST, folder, 1, free=True))
        command = [word for word in made.command if "lookupd" not in word]
        engine = stack.enter_context(process(command, realtime=realtime))
        direct: type[Publishing] = ToNats if kind == "nats" else ToNsq
        if kind == "nats":
            time.sleep(1)
            asyncio.run(make_streams(made.port))
        found = [Way(kind, made.port, direct, [engine.pid])]
        for name, durability in ((f"srtm + {kind}", "memory"), (f"srtm + {kind}, disk", "disk")):
            flags = [
                "--tcp-port",
                "0",
                "--http-port",
                "0",
                "--engine",
                made.address,
                "--data-path",
                str(folder / durability),
            ]
            broker = stack.enter_context(process([sys.executable, "-m", "srtm", "broker", *flags], realtime=realtime))
            assert broker.stdout is not None
            tcp, http = (int(part.rpartition(":")[2]) for part in broker.stdout.readline().split(", "))
            for topic, bucket in (("steady", "&r=1000000&b=100000"), ("quiet", BUCKET), ("flood", BUCKET)):
                post(http, f"/topic/create?topic={topic}&durability={durability}")
                post(http, f"/topic/limit?topic={topic}{bucket}")
            found.append(Way(name, tcp, ToNsq, [engine.pid, broker.pid]))
        yield found


def us(latencies_ns: list[int], q: float) -> float:
    return float(np.percentile(latencies_ns, 100 * q)) / 1_000


def measure(kind: str, turns: int, seed: int, *, realtime: bool) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of both tables for one engine."""
    added, neighbours = [], []
    with ways(kind, realtime=realtime) as all_ways:
        for rate_mps in RATES_MPS:
            runs: dict[str, list[tuple[list[float], list[int], list[int]]]] = {way.name: [] for way in all_ways}
            for turn in range(turns):
                for way in all_ways:
                    runs[way.name].append(asyncio.run(steady(way, rate_mps, seed + turn)))
            for way in all_ways:
                cpu = np.median([run[0] for run in runs[way.name]], axis=0)
                tails = [[us(run[1], q) for run in runs[way.name]] for q in (0.5, 0.95, 0.99)]
                cells = [f"{cpu[0]:.1f}", f"{cpu[1]:.1f}" if len(cpu) > 1 else "–"]
                cells += [f"{min(each):,.0f} ({statistics.median(each):,.0f})" for each in tails]
                late = statistics.median(us(run[2], 0.99) for run in runs[way.name])
                added.append([f"{way.name}, {rate_mps:,}/s", *cells, f"{late:,.0f}"])
        for flooded in (False, True):
            found: dict[str, list[tuple[list[int], list[int], float]]] = {way.name: [] for way in all_ways}
            for turn in range(turns):
                for way in all_ways:
                    found[way.name].append(asyncio.run(beside(way, seed + turn, flooded=flooded)))
            for way in all_ways:
                tails = [[us(run[0], q) for run in found[way.name]] for q in (0.5, 0.99)]
                cells = [f"{min(each):,.0f} ({statistics.median(each):,.0f})" for each in tails]
                flow = statistics.median(run[2] for run in found[way.name])
                late = statistics.median(us(run[1], 0.99) for run in found[way.name])
                name = f"{way.name}, {'beside the flood' if flooded else 'alone'}"
                neighbours.append([name, *cells, f"{flow:,.0f}", f"{late:,.0f}"])
    return added, neighbours


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.engines", description=__doc__)
    parser.add_argument("--engines", default="nsqd,nats", help="which")
    parser.add_argument("--turns", type=int, default=3, help="runs of each way under each load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-realtime", action="store_true", help="do not put them ahead of other processes")
    parser.add_argument("--flood", choices=("nsqd", "nats"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        asyncio.run(flood(options.flood, options.port))
    realtime = not options.no_realtime and peers.can_be_realtime()
    print(host.describe(options.seed))
    print(f"{'SCHED_FIFO' if realtime else 'priority as given'}; load average {os.getloadavg()[0]:.1f}")
    added, neighbours = [], []
    peers.settle(peers.LOAD_CORE, realtime=realtime)
    for kind in options.engines.split(","):
        try:
            rows = measure(kind, options.turns, options.seed, realtime=realtime)
        except ControlError as missing:
            print(f"left out: {missing}")
            continue
        added += rows[0]
        neighbours += rows[1]
    least = "least (median) of turns"
    title = f"To the acknowledgement, {PUBLISHERS} publishers, one by one; latencies in µs, {least}"
    show(title, ["", "engine CPU µs/msg", "broker CPU µs/msg", "p50", "p95", "p99", "sent late"], added)
    title = f"A topic of {QUIET_MPS} msg/s; with SRTM, both topics have r = {QUIET_MPS}; latencies in µs, {least}"
    show(title, ["", "p50", "p99", "flood, msg/s", "sent late"], neighbours)
    longest, lost = host.jitter_us()
    print(f"host jitter afterwards: longest gap {longest:.0f} µs, {lost:.2f} % of a second lost in gaps over 50 µs")


if __name__ == "__main__":
    main()
