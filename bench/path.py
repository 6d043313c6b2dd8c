"""A message's way through a broker, stage by stage, interpreted: parts of a real broker, without kernel and loop."""

from __future__ import annotations

import gc
import socket
import time
from itertools import count, pairwise
from struct import Struct
from typing import TYPE_CHECKING, Any

from bench.measure import show
from srtm.broker.options import BrokerOptions
from srtm.model.bucket import TokenBucket
from srtm.net.stamps import SO_TIMESTAMPNS
from srtm.protocol import client
from srtm.protocol.names import MAGIC_V2
from srtm.testing.memory import MemoryBroker
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

TOGETHER = (1, 10, 1_000)  # messages of one turn
MESSAGES = 30_000
_SECOND = 1_000  # turns
BODY = b"x" * 100
STAGES = (
    "PUB: bytes to topic",
    "token bucket",
    "topic to channel",
    "channel to consumer",
    "write to consumer, latencies",
    "write of OKs",
    "FIN: bytes to channel",
)


class _Said:
    """A socket that has something to say, and takes everything."""

    _numbers = count(1)
    _stamp = Struct("@ll").pack

    def __init__(self, now_ns: int) -> None:
        self._number = next(self._numbers)
        self._ancillary = [(socket.SOL_SOCKET, SO_TIMESTAMPNS, self._stamp(*divmod(now_ns, NS_PER_S)))]
        self.words = b""

    def fileno(self) -> int:
        return self._number

    def send(self, data: bytes | bytearray) -> int:
        return len(data)

    def recvmsg_into(self, buffers: list[memoryview], _ancillary: int, _flags: int = 0) -> Any:
        size = len(self.words)
        buffers[0][:size] = self.words
        return size, self._ancillary, 0, None

    def close(self) -> None:
        self._number = -1


def stages(seed: int) -> None:
    """Messages of 100 bytes to one consumer; `seed` changes nothing."""
    del seed
    taken = {many: _stages(many) for many in TOGETHER}
    rows = [[name, *(f"{taken[many][at]:,.0f}" for many in TOGETHER)] for at, name in enumerate(STAGES)]
    rows.append(["all", *(f"{sum(taken[many]):,.0f}" for many in TOGETHER)])
    show("ns per message, the least of all turns", ["messages of a turn", *map(str, TOGETHER)], rows)


def _stages(many: int) -> list[float]:
    with MemoryBroker(BrokerOptions(name="bench", read_size=1 << 20)) as memory:
        broker, turn, now_ns = memory.broker, memory.broker.turn, memory.now_ns
        publishing, consuming = _Said(now_ns), _Said(now_ns)
        publisher, subscriber = (broker.clients.add(each, "127.0.0.1:1") for each in (publishing, consuming))
        broker.poller.late_ns = 1 << 62  # everything is read in time
        publishing.words = MAGIC_V2
        consuming.words = MAGIC_V2 + client.sub("t", "c") + client.rdy(2_500)
        publisher.readable()
        subscriber.readable()
        turn.end()
        topic = broker.topics.by_name["t"]
        channel = topic.channels["c"]
        topic.gate.limit(TokenBucket.of(1_000_000_000, 1_000_000), now_ns)
        publishing.words = client.pub("t", BODY) * many
        best = [float("inf")] * len(STAGES)
        gc.collect()
        gc.disable()
        for number in range(MESSAGES // many):
            released: list[Any] = []
            steps: list[Callable[[], object]] = [
                publisher.readable,
                lambda released=released: released.extend(topic.gate.drain(now_ns)),  # type: ignore[misc]
                lambda released=released: topic.distribute(released, now_ns),  # type: ignore[misc]
                lambda: channel.pump(now_ns),
                subscriber.flush,
                publisher.flush,
            ]
            parts = _timed(steps)
            (consumer,) = channel.consumers
            consuming.words = b"".join(map(client.fin, consumer.flights))
            subscriber.heard_ns = 0  # long ago: it need not rest
            parts += _timed([subscriber.readable])
            best = [min(least, part / many) for least, part in zip(best, parts, strict=True)]
            assert not consumer.flights
            for touched in (turn.to_drain, turn.to_pump, turn.to_deliver, turn.to_flush, topic.senders):
                touched.clear()
            if not number % _SECOND:
                topic.end_second(now_ns)
        gc.enable()
    return best


def _timed(steps: list[Callable[[], object]]) -> list[int]:
    clock = time.perf_counter_ns
    times = [clock()]
    for step in steps:
        step()
        times.append(clock())
    return [after - before for before, after in pairwise(times)]
