"""One run of a load: connects, writes each command when it is due, waits for the rest, and reports.

Each publisher has its own connection and is moved, throttled and reconnected like any other (`Stream`). One pass over
the merged schedule writes what is due.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from srtm.client.cluster import Assigned, Cluster, Fixed
from srtm.client.load.ears import Ears
from srtm.client.load.options import CONNECTION
from srtm.client.load.report import LoadReport, Progress
from srtm.client.load.schedule import Schedule, declared
from srtm.client.load.tally import Tally
from srtm.client.parts import Parts
from srtm.client.stream import Stream
from srtm.net.alarm import Alarm
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from srtm.client.load.options import LoadOptions

_AT_ONCE = 64  # writes before the loop may do something else
_OPENING = 200  # connections opened at the same time
_now_ns = time.time_ns  # the clock that the kernel stamps with


class Load:
    """One run."""

    def __init__(self, options: LoadOptions, cluster: Cluster | None) -> None:
        self.schedule = Schedule(options)
        self.tally = Tally(options, self.schedule)
        self._options = options
        self._cluster = cluster
        self._streams: Sequence[Stream | Parts] = ()
        self._ears = Ears(self.tally, options.topic, options.channel, options.engine) if options.channel else None
        self._brokers: set[str] = set()  # at the start
        self._alarm: Alarm | None = None
        self._sent_all = asyncio.Event()
        self._stopped = False

    async def go(self, progress: Callable[[Progress], None]) -> LoadReport:
        """Connect, send everything when it is due, wait for the rest, and report."""
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
        """Stop sending, and report what was sent; return False if nothing was."""
        self._stopped = True
        self._sent_all.set()
        return self.schedule.next > 0

    async def _connect(self) -> None:
        """Connect every publisher to its broker, and an ear to every broker."""
        options, cluster = self._options, self._cluster
        publishers = options.workload.publishers()
        to = CONNECTION, self._answered, self.tally.refuse
        homes: list[Assigned | Fixed] = []
        if cluster is None:
            homes = [Fixed([options.brokers[n % len(options.brokers)]]) for n in range(len(publishers))]
        elif not options.split:
            specs = declared(options.workload, silent=not options.declare)
            places = await asyncio.gather(*(cluster.where(options.topic, spec) for spec in specs))
            homes = [Assigned(cluster, options.topic, spec, place) for spec, place in zip(specs, places, strict=True)]
        if cluster is not None and options.split:
            self._streams = [
                Parts(cluster, options.topic, spec, *to)
                for spec in declared(options.workload, split=True, silent=not options.declare)
            ]
        else:
            self._streams = [
                Stream(options.topic, publisher.id, publisher.group if options.declare else None, home, *to)
                for publisher, home in zip(publishers, homes, strict=True)
            ]
        first = max(1, len(options.brokers))  # one at each broker tells an absent broker from a busy one
        await self._open(self._streams[:first], options.patience_s)
        await self._open(self._streams[first:], 10 * options.patience_s)
        known = cluster.brokers(options.topic).values() if cluster is not None else ()
        here = {address for stream in self._streams for address in stream.addresses}
        self._brokers = {*known, *here}
        if self._ears is not None:
            delivery = cluster.delivery(options.topic) if cluster is not None else set()
            await self._ears.open(delivery or self._brokers, cluster, options.patience_s)

    async def _open(self, streams: Sequence[Stream | Parts], patience_s: float) -> None:
        """Open streams, some at a time; the first failure ends it."""
        opening = asyncio.Semaphore(_OPENING)

        async def opened(stream: Stream | Parts) -> None:
            async with opening:
                await stream.open(patience_s)

        tasks = [asyncio.ensure_future(opened(stream)) for stream in streams]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, progress: Callable[[Progress], None]) -> tuple[int, float]:
        """Send everything when it is due and wait for the rest; return when that began, and the CPU time then."""
        loop, schedule, tally = asyncio.get_running_loop(), self.schedule, self.tally
        began_ns, cpu_s = _now_ns() + 100 * NS_PER_MS, time.process_time()
        schedule.due_ns += began_ns
        self._alarm = Alarm(loop, self._write_due)
        self._write_due()
        last = (0, 0)
        second, quiet = 0, 0.0
        while not self._sent_all.is_set() or (tally.outstanding and quiet < self._options.settle_s):
            with suppress(TimeoutError):
                wait_s = began_ns / NS_PER_S + second + 1 - time.time()
                async with asyncio.timeout(max(0.01, wait_s)):
                    await (self._sent_all.wait() if not self._sent_all.is_set() else asyncio.sleep(0.02))
            if self._sent_all.is_set():
                quiet = 0.0 if tally.deliveries != last[1] else quiet + 0.02
            if _now_ns() >= began_ns + (second + 1) * NS_PER_S:
                second += 1
                now = (schedule.sent, tally.deliveries)
                progress(tally.progress(second, *(a - b for a, b in zip(now, last, strict=True))))
                last = now
        return began_ns, cpu_s

    def _write_due(self) -> None:
        """Write a few commands that are due; then wait for the next."""
        if self._stopped:
            return
        schedule, streams = self.schedule, self._streams
        late, number, now_ns = schedule.late_ns, schedule.next, _now_ns()
        for _ in range(_AT_ONCE):
            at = number - schedule.made_from
            if at == len(schedule.made):
                if number == len(schedule):
                    schedule.next = number
                    self._sent_all.set()
                    return
                schedule.make(number)
                at = 0
                now_ns = _now_ns()
            due_ns = schedule.times[at]
            if due_ns > now_ns:
                schedule.next = number
                assert self._alarm is not None
                self._alarm.set(due_ns, now_ns)
                return
            late[number] = now_ns - due_ns
            streams[schedule.who[at]].put_now(schedule.made[at], number)
            number += 1
            now_ns = _now_ns()
        schedule.next = number
        asyncio.get_running_loop().call_soon(self._write_due)

    def _answered(self, number: int) -> None:
        self.tally.acknowledge(number)
        if self._options.channel is None:
            batch = self.schedule.batch
            self.tally.heard(np.arange(number * batch, (number + 1) * batch), _now_ns())

    def _report(self, seconds: float, cpu_s: float) -> LoadReport:
        schedule, tally, batch = self.schedule, self.tally, self.schedule.batch
        received = tally.received
        waiting = (stream.problem for stream in self._streams if stream.waiting)
        problem = tally.refusal or next(waiting, None)
        return LoadReport(
            topic=self._options.topic,
            publishers=len(self._streams),
            brokers=sorted((self._ears.brokers if self._ears is not None else []) or self._brokers),
            seconds=seconds,
            sent=schedule.sent,
            acknowledged=tally.answers * batch,
            received=received,
            lost=tally.lost,
            doubled=tally.deliveries - received,
            refused=tally.refusals * batch,
            foreign=tally.foreign,
            rate=received / min(self._options.workload.duration_ns / NS_PER_S, seconds),
            total=tally.latency,
            lateness=schedule.lateness,
            cpu_us=cpu_s * 1e6 / max(1, schedule.sent),
            cpu_share=cpu_s / seconds,
            migrations=sum(stream.moves.migrations for stream in self._streams),
            throttles=sum(stream.moves.throttles for stream in self._streams),
            reconnections=sum(stream.moves.reconnections for stream in self._streams),
            stopped=self._stopped,
            problem=str(problem) if problem is not None else None,
        )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Keep the garbage collector away: what a load holds lives until its end."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
