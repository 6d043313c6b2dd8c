"""Consumers over real sockets: what a busy one says is heard late, but heard."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

pytest.importorskip("starlette")

from srtm.broker.broker import Broker
from srtm.broker.options import BrokerOptions
from srtm.broker.run import serving
from srtm.protocol.frames import MAX_ATTEMPTS


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    def publish(self, *bodies: bytes) -> None:
        for body in bodies:
            self.say(b"PUB t\n" + struct.pack(">i", len(body)) + body)

    async def frame(self) -> tuple[int, bytes]:
        size, kind = struct.unpack(">ii", await self.reader.readexactly(8))
        return kind, await self.reader.readexactly(size - 4)

    async def message(self) -> tuple[bytes, bytes]:
        """The id and the body of the next message; responses are passed over."""
        while True:
            kind, data = await self.frame()
            assert kind != 1, data
            if kind == 2:
                return data[10:26], data[26:]

    async def finished(self, count: int) -> list[bytes]:
        bodies = []
        for _ in range(count):
            message_id, body = await self.message()
            self.say(b"FIN " + message_id + b"\n")
            bodies.append(body)
        return bodies


@contextlib.asynccontextmanager
async def at_work() -> AsyncIterator[tuple[Broker, Callable[[int], Awaitable[Client]]]]:
    clients: list[Client] = []
    async with serving(BrokerOptions(tcp_port=0, http_port=0)) as broker:

        async def connect(ready: int) -> Client:
            client = Client(*await asyncio.open_connection("127.0.0.1", broker.tcp_port))
            clients.append(client)
            client.say(b"  V2" + (b"SUB t c\nRDY %d\n" % ready if ready else b""))
            if ready:
                assert await client.frame() == (0, b"OK")
            return client

        yield broker, connect
        for client in clients:
            client.writer.close()
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not met():
            await asyncio.sleep(0.005)


def run(test: Callable[[Broker, Callable[[int], Awaitable[Client]]], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(20), at_work() as (broker, connect):
            await test(broker, connect)

    asyncio.run(whole())


@pytest.mark.parametrize("ready", [1, 10, 2500])
def test_every_message_is_finished_once_whatever_rdy_leaves_room_for(ready: int) -> None:
    async def test(broker: Broker, connect: Callable[[int], Awaitable[Client]]) -> None:
        consumer, publisher = await connect(ready), await connect(0)
        bodies = [b"%d" % i for i in range(2_000)]
        publisher.publish(*bodies)
        assert await consumer.finished(len(bodies)) == bodies
        channel = broker.topics["t"].channels["c"]
        await until(lambda: channel.finished == len(bodies))
        assert channel.flying == channel.depth == channel.tally.timed_out == channel.tally.requeued == 0

    run(test)


def test_a_busy_consumer_is_heard_when_it_gives_back_and_when_it_leaves() -> None:
    async def test(broker: Broker, connect: Callable[[int], Awaitable[Client]]) -> None:
        consumer, publisher = await connect(2_500), await connect(0)
        for i in range(200):
            publisher.publish(b"%d" % i)
            assert await consumer.finished(1) == [b"%d" % i]
        publisher.publish(b"again")
        message_id, _ = await consumer.message()
        consumer.say(b"REQ " + message_id + b" 0\n")
        assert (await consumer.message())[1] == b"again"
        consumer.writer.close()
        channel = broker.topics["t"].channels["c"]
        await until(lambda: not channel.consumers)
        other = await connect(10)
        assert await other.finished(1) == [b"again"]
        await until(lambda: channel.finished == 201)

    run(test)


def test_messages_are_shared_by_consumers() -> None:
    async def test(_: Broker, connect: Callable[[int], Awaitable[Client]]) -> None:
        one, other, publisher = await connect(50), await connect(50), await connect(0)
        publisher.publish(*(b"%d" % i for i in range(100)))
        got = await asyncio.gather(one.finished(50), other.finished(50))
        assert sorted(map(int, got[0] + got[1])) == list(range(100))

    run(test)


def test_a_message_of_another_or_of_nobody_is_refused_as_nsqd_does() -> None:
    async def test(_: Broker, connect: Callable[[int], Awaitable[Client]]) -> None:
        owner, publisher = await connect(1), await connect(0)
        publisher.publish(b"x")
        message_id, _body = await owner.message()
        other = await connect(1)
        other.say(b"FIN " + message_id + b"\n")
        assert await other.frame() == (1, b"E_FIN_FAILED FIN " + message_id + b" failed client does not own message")
        other.say(b"FIN " + b"0" * 16 + b"\n")
        assert await other.frame() == (1, b"E_FIN_FAILED FIN " + b"0" * 16 + b" failed ID not in flight")

    run(test)


def test_attempts_stay_within_their_two_bytes() -> None:
    async def test(broker: Broker, connect: Callable[[int], Awaitable[Client]]) -> None:
        consumer, publisher = await connect(1), await connect(0)
        publisher.publish(b"x")
        for _ in range(2):
            message_id, _body = await consumer.message()
            [message] = broker.topics["t"].channels["c"].everything()
            message.attempts = MAX_ATTEMPTS
            consumer.say(b"REQ " + message_id + b" 0\n")
        assert await consumer.finished(1) == [b"x"]

    run(test)
