"""Subscribers in memory, against real brokers, a real nsqd with its nsqlookupd, and a controller over real HTTP."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from srtm.client import Publisher, Subscriber
from srtm.errors import ClientError, InputError, ProtocolError
from tests import programs
from tests.broker.running import Client, Running, in_memory, running
from tests.client.controller import Controller, controlling
from tests.client.test_publisher import at, process
from tests.control.running import controller


def publish(broker: Running, *bodies: bytes) -> None:
    with Client(broker.address) as client:
        client.publish("t", *bodies)


async def take(subscriber: Subscriber, count: int) -> list[bytes]:
    """The next bodies, finished."""
    found = []
    async with asyncio.timeout(10):
        for _ in range(count):
            message = await subscriber.get()
            assert message is not None
            found.append(message.body)
            await message.finish()
    return found


async def until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.memory
def test_messages_are_finished_requeued_and_touched(broker: Running) -> None:
    async def story() -> None:
        async with Subscriber("t", "c", brokers=[at(broker)], msg_timeout_ms=1000) as subscriber:
            seen = []
            async for message in subscriber:
                seen.append((message.body, message.attempts))
                assert message.broker == at(broker)
                if seen == [(b"back", 1)]:
                    await message.requeue(1.8)  # later than the slow one ends
                    continue
                if message.body == b"slow":
                    for _ in range(3):
                        await asyncio.sleep(0.5)
                        await message.touch()
                await message.finish()
                with pytest.raises(ClientError, match="already"):
                    await message.finish()
                if len(seen) == 3:
                    break
            assert sorted(seen) == [(b"back", 1), (b"back", 2), (b"slow", 1)]

    publish(broker, b"back", b"slow")
    broker.run(story())
    channel = broker.channel("t", "c")
    assert (channel["depth"], channel["in_flight_count"], channel["requeue_count"]) == (0, 0, 1)
    assert channel["timeout_count"] == 0


def test_a_handler_is_called_and_a_failure_brings_the_message_back(
    each: Running, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[bytes, int]] = []

    async def story() -> None:
        async with Subscriber("t", "c", brokers=[at(each)]) as subscriber:

            async def handle(message: Any) -> None:
                seen.append((message.body, message.attempts))
                if message.body == b"1" and message.attempts == 1:
                    raise ValueError("on purpose")

            running = asyncio.create_task(subscriber.run(handle, concurrency=4))
            await until(lambda: len(seen) == 11)
            await subscriber.close()
            await running

    publish(each, *(b"%d" % n for n in range(10)))
    each.run(story())
    assert sorted(seen) == sorted([(b"%d" % n, 1) for n in range(10)] + [(b"1", 2)])
    assert "handler failed" in caplog.text
    assert each.channel("t", "c")["in_flight_count"] == 0


def test_what_was_not_taken_goes_back_at_once_when_it_closes(each: Running) -> None:
    async def story() -> None:
        async with Subscriber("t", "c", brokers=[at(each)]) as subscriber:
            await take(subscriber, 1)
            await until(lambda: subscriber.in_flight == 9)

    publish(each, *(b"%d" % n for n in range(10)))
    each.run(story())
    each.wait_until(lambda b: b.topics["t"].channels["c"].depth == 9)


def test_max_in_flight_is_shared_out_and_goes_to_the_busy() -> None:
    async def story(brokers: list[Running]) -> None:
        async with Subscriber("t", "c", brokers=[at(broker) for broker in brokers], max_in_flight=30) as subscriber:
            await until(lambda: sorted(link.ready for link in subscriber._links.values()) == [10, 10, 10])
            async with Publisher("t", broker=at(brokers[0])) as publisher:
                await publisher.publish_many([b"%d" % n for n in range(100)])
            await until(lambda: sorted(link.ready for link in subscriber._links.values()) == [1, 1, 28])
            await until(lambda: subscriber.in_flight == 28)
            await take(subscriber, 100)
            async with Publisher("t", broker=at(brokers[1])) as publisher:
                await publisher.publish(b"x")  # room for one is always left
            assert await take(subscriber, 1) == [b"x"]

    with in_memory() as a, in_memory(a, tcp_port=4152) as b, in_memory(a, tcp_port=4154) as c:
        a.run(story([a, b, c]))


def test_fewer_in_flight_than_brokers_means_turns() -> None:
    async def story(brokers: list[Running]) -> None:
        async with Subscriber("t", "c", brokers=[at(broker) for broker in brokers], max_in_flight=1) as subscriber:
            await until(lambda: len(subscriber.brokers) == 2)
            assert sum(link.ready for link in subscriber._links.values()) <= 1
            assert sorted(await take(subscriber, 2)) == [b"0", b"1"]

    with in_memory() as a, in_memory(a, tcp_port=4152) as b:
        publish(a, b"0")
        publish(b, b"1")
        a.run(story([a, b]))


def test_brokers_that_a_topic_gets_are_followed_and_the_old_ones_emptied() -> None:
    async def story(a: Running, b: Running, controller: Controller) -> None:
        async with Subscriber("t", "c", controller=controller.url) as subscriber:
            await until(lambda: subscriber.brokers == [at(a)])
            publish(a, b"first")
            assert await take(subscriber, 1) == [b"first"]
            controller.target = "b"
            async with Publisher("t", controller=controller.url) as publisher:
                await publisher.publish(b"second")
            publish(a, b"left behind")
            assert sorted(await take(subscriber, 2)) == [b"left behind", b"second"]
            assert set(subscriber.brokers) == {at(a), at(b)}

    with running() as a, running() as b, controlling(Controller({"a": at(a), "b": at(b)})) as controller:
        asyncio.run(story(a, b, controller))


@pytest.mark.processes
def test_a_broker_that_comes_back_is_subscribed_to_again() -> None:
    with running() as steady, process() as (mortal, address):

        async def story() -> None:
            async with Subscriber("t", "c", brokers=[at(steady), address]) as subscriber:
                await until(lambda: len(subscriber.brokers) == 2)
                mortal.kill()
                await asyncio.to_thread(mortal.wait)
                await until(lambda: subscriber.brokers == [at(steady)])
                publish(steady, b"meanwhile")
                assert await take(subscriber, 1) == [b"meanwhile"]
                port = int(address.rpartition(":")[2])
                with running(tcp_port=port) as back:
                    await until(lambda: len(subscriber.brokers) == 2)
                    publish(back, b"again")
                    assert await take(subscriber, 1) == [b"again"]

        asyncio.run(story())


@pytest.mark.needs("nsqd")
@pytest.mark.needs("nsqlookupd")
def test_stock_nsqds_are_found_by_a_stock_nsqlookupd(tmp_path: Path) -> None:
    async def story(lookupd: str, addresses: list[str]) -> None:
        async with Subscriber("t", "c", lookupd=[lookupd], poll_s=0.1) as subscriber:
            for number, address in enumerate(addresses):
                async with Publisher("t", broker=address) as publisher:
                    await publisher.publish(b"%d" % number)
            assert sorted(await take(subscriber, 2)) == [b"0", b"1"]
            assert sorted(subscriber.brokers) == sorted(addresses)

    with programs.nsqlookupd(tmp_path) as (tcp, http), ExitStack() as stack:
        addresses = []
        for name in "ab":
            (tmp_path / name).mkdir()
            started = programs.nsqd(tmp_path / name, f"--lookupd-tcp-address=127.0.0.1:{tcp}")
            addresses.append(f"127.0.0.1:{stack.enter_context(started)[0]}")
        asyncio.run(story(f"127.0.0.1:{http}", addresses))


@pytest.mark.needs("nsqd")
def test_stock_nsqds_at_a_controller_are_found_beside_its_brokers(tmp_path: Path) -> None:
    async def story(url: str) -> list[bytes]:
        async with Subscriber("t", "c", controller=url, poll_s=0.2) as subscriber:
            return sorted(await take(subscriber, 2))

    with (
        controller() as served,
        running(controller=f"127.0.0.1:{served.tcp}", broadcast_address="127.0.0.1") as broker,
        programs.nsqd(tmp_path, f"--lookupd-tcp-address=127.0.0.1:{served.tcp}") as (tcp, _),
    ):
        publish(broker, b"ours")
        with Client(("127.0.0.1", tcp)) as client:
            client.publish("t", b"stock")
        assert asyncio.run(story(f"http://127.0.0.1:{served.http}")) == [b"ours", b"stock"]


def test_refusals_are_raised(authority: Any) -> None:
    async def story(broker: Running) -> None:
        with pytest.raises(InputError, match="exclude each other"):
            Subscriber("t", "c", brokers=[], lookupd=[])
        with pytest.raises(InputError, match="max_in_flight = 0"):
            Subscriber("t", "c", max_in_flight=0)
        with pytest.raises(InputError, match="invalid topic or channel name"):
            Subscriber("t", "a b")
        async with Subscriber("t", "c", brokers=[at(broker)]) as subscriber:
            with pytest.raises(ProtocolError, match="E_AUTH_FIRST"):
                await subscriber.get()

    with running(auth_http_addresses=(authority.address,)) as broker:
        asyncio.run(story(broker))
