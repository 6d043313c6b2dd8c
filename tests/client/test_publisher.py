"""Publishers in memory, against real brokers, a real nsqd, and a controller over real HTTP."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from msgspec import structs

from srtm.client import Cluster, Publisher, Subscriber
from srtm.errors import ClientError, InputError, ProtocolError, WindowFull
from srtm.protocol.exchange import Grant, Move
from tests.broker.running import Client, Running, in_memory, running
from tests.broker.test_control import BIRTH, NOBODY, TOKEN, exchange, said, share
from tests.client.controller import Controller, controlling

NUMBERS = count(3)  # of exchanges, which brokers want in order


def at(broker: Running) -> str:
    return f"127.0.0.1:{broker.broker.tcp_port}"


def bodies_of(broker: Running, count: int, topic: str = "t") -> list[bytes]:
    """The next messages of a topic, in the order they are delivered."""
    found = []
    with Client(broker.address) as client:
        client.subscribe(topic, "check", 2500)
        for _ in range(count):
            message = client.message()
            found.append(message.body)
            client.send(b"FIN %b\n" % message.id)
        assert client.silent()
    return found


@contextmanager
def managed(**options: Any) -> Iterator[Running]:
    """A broker that takes orders of a controller, which has granted it more of t than anybody needs."""
    with running(controller=NOBODY, **options) as broker:
        exchange(broker, said(grants={"t": Grant(BIRTH, 1, share(10**6, 10**5), 10**14)}))
        yield broker


def migrate(broker: Running, publishers: Iterable[str], *to: str) -> None:
    """Have a broker send publishers of t elsewhere."""
    exchange(broker, said(next(NUMBERS), contracts=None, moves=[Move("t", BIRTH, to, list(publishers))]))


def test_publishes_in_every_way(each: Running) -> None:
    async def story() -> None:
        async with Publisher("t", broker=at(each), id="p", group="g") as publisher:
            await publisher.publish(b"one")
            await publisher.publish_many([b"two", b"three"])
            later = [publisher.publish_nowait(b"%d" % n) for n in range(4, 9)]
            assert publisher.in_flight == 5
            await asyncio.gather(*later)
            await publisher.publish(b"deferred", delay_ms=100)
            assert each.do(lambda: dict(each.broker.control.groups)) == {"p": "g"}

    each.run(story())
    assert bodies_of(each, 9) == [b"one", b"two", b"three", b"4", b"5", b"6", b"7", b"8", b"deferred"]


@pytest.mark.memory
def test_closing_waits_for_what_is_in_flight(broker: Running) -> None:
    async def story() -> None:
        async with Publisher("t", broker=at(broker)) as publisher:
            for n in range(1000):
                publisher.publish_nowait(b"%d" % n)
            with pytest.raises(WindowFull, match="window of 1000 is full"):
                publisher.publish_nowait(b"x")

    broker.run(story())
    assert bodies_of(broker, 1000) == [b"%d" % n for n in range(1000)]


@pytest.mark.parametrize("layer", ["deflate", "snappy", "tls", "tls deflate"])
def test_through_layers(layer: str, tmp_path: Any) -> None:
    import ssl

    from tests.broker.test_transport import Certificates

    certificates = Certificates(tmp_path)
    context = ssl.create_default_context(cafile=certificates.ca) if "tls" in layer else None

    async def story(a: Running, b: Running) -> None:
        publisher = Publisher(
            "t", broker=f"localhost:{a.broker.tcp_port}", tls=context, deflate="deflate" in layer,
            snappy=layer == "snappy", id="p",
        )  # fmt: skip
        async with publisher:
            later = [publisher.publish_nowait(b"%d" % n * 100) for n in range(1000)]
            await later[0]
            await asyncio.to_thread(migrate, a, ["p"], f"localhost:{b.broker.tcp_port}")
            while not publisher.migrations:
                await asyncio.sleep(0.01)
            await publisher.publish(b"last")
            assert publisher.address == f"localhost:{b.broker.tcp_port}"

    with managed(**certificates.options) as a, running(**certificates.options) as b:
        asyncio.run(story(a, b))
        first = a.do(lambda: a.broker.topics["t"].messages)
        found = bodies_of(a, first) + bodies_of(b, 1001 - first)
    assert found == [*(b"%d" % n * 100 for n in range(1000)), b"last"]


def test_with_auth(authority: Any) -> None:
    async def story(broker: Running) -> None:
        async with Publisher("t", broker=at(broker), auth_secret=b"s3cret") as publisher:
            await publisher.publish(b"x")
        with pytest.raises(ProtocolError, match="E_AUTH_FIRST"):
            async with Publisher("t", broker=at(broker)) as publisher:
                await publisher.publish(b"x")

    with running(auth_http_addresses=(authority.address,)) as broker:
        asyncio.run(story(broker))


def test_what_is_refused_is_told_and_the_rest_goes_on() -> None:

    async def story(broker: Running) -> None:
        async with Publisher("t", broker=at(broker)) as publisher:
            before, wrong, after = (publisher.publish_nowait(body) for body in (b"before", b"x" * 101, b"after"))
            await before
            with pytest.raises(ProtocolError, match="E_BAD_MESSAGE"):
                await wrong
            await after

    with in_memory(max_msg_size=100) as broker:
        broker.run(story(broker))
        assert bodies_of(broker, 2) == [b"before", b"after"]


def test_bad_input_is_named() -> None:
    async def story() -> None:
        for wrong, words in (
            ({"broker": "nowhere"}, "write host:port"),
            ({"broker": "h:1", "controller": "http://h"}, "exclude each other"),
            ({"window": 0}, "window = 0"),
            ({"deflate": True, "snappy": True}, "choose one"),
        ):
            with pytest.raises(InputError, match=words):
                Publisher("t", **wrong)
        with pytest.raises(InputError, match="invalid topic or channel name"):
            Publisher("a b")
        publisher = Publisher("t", broker="127.0.0.1:1", timeout_s=0.2)
        for text in ("text", b""):
            with pytest.raises(InputError, match="message"):
                await publisher.publish(text)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="nothing to publish"):
            await publisher.publish_many([])
        with pytest.raises(ClientError, match="not open"):
            await publisher.publish(b"x")
        with pytest.raises(ClientError, match=r"within 0\.2 s: cannot connect to 127\.0\.0\.1:1"):
            await publisher.open()
        with pytest.raises(ClientError, match=r"no controller answers at http://127\.0\.0\.1:1 "):
            await Publisher("t", controller="http://127.0.0.1:1", timeout_s=0.2).open()

    asyncio.run(story())


def test_questions_of_many_are_one_request_and_passing_publishers_say_farewell(broker: Running) -> None:
    async def story(controller: Controller) -> None:
        publishers = [
            Publisher("t", controller=controller.url, id=f"p{n}" if n else None, group="g", rate=2.5) for n in range(50)
        ]
        await asyncio.gather(*(publisher.open() for publisher in publishers))
        assert len(controller.requests) == 1
        assert controller.specs["p7"] == {
            "id": "p7", "group": "g", "rate": 2.5, "process": None, "batch": 1, "jitter_ms": 0.0,
        }  # fmt: skip
        await asyncio.gather(*(publisher.publish(b"x") for publisher in publishers))
        await asyncio.gather(*(publisher.close() for publisher in publishers))
        assert controller.removed == [publishers[0].id]
        assert not Cluster._shared

    with controlling(Controller({"a": at(broker)})) as controller:
        asyncio.run(story(controller))
    assert bodies_of(broker, 50) == [b"x"] * 50


def test_a_token_is_needed_where_one_is_configured(broker: Running) -> None:
    async def story(controller: Controller) -> None:
        controller.token = "s3cret"
        with pytest.raises(ClientError, match="give the controller's token"):
            await Publisher("t", controller=controller.url).open()
        async with Publisher("t", controller=controller.url, token="s3cret") as publisher:
            await publisher.publish(b"x")

    with controlling(Controller({"a": at(broker)})) as controller:
        asyncio.run(story(controller))


def test_a_throttled_publisher_waits_and_loses_nothing() -> None:
    async def story(broker: Running) -> None:
        async with Publisher("t", broker=at(broker), id="p", window=100) as publisher:
            publishing = asyncio.gather(*(publisher.publish(b"%d" % n) for n in range(300)))
            assert publisher._stream is not None
            while not publisher._stream.moves.throttles:
                await asyncio.sleep(0.01)
            assert broker.broker.topics["t"].full
            async with Subscriber("t", "c", brokers=[at(broker)]) as subscriber:
                for n in range(300):
                    message = await subscriber.get()
                    assert message is not None
                    assert message.body == b"%d" % n
                    await message.finish()
            await publishing

    with in_memory(max_held_messages=10) as broker:
        broker.run(story(broker))


def test_a_thousand_publishers_move_under_load_and_nothing_is_lost_doubled_or_reordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "srtm.client.cluster._ANSWER_S", 60.0
    )  # a busy host takes its time; no fall-back is wanted here
    count, after = 1000, 5
    sent = [0] * count

    async def publish(publisher: Publisher, number: int) -> None:
        left = after
        while left:
            await publisher.publish(b"%d %d" % (number, sent[number]))
            sent[number] += 1
            left -= publisher.migrations
            await asyncio.sleep(0.02)

    async def story(a: Running, b: Running, controller: Controller) -> None:
        publishers = [Publisher("t", controller=controller.url, id=f"p{n}") for n in range(count)]
        await asyncio.gather(*(publisher.open() for publisher in publishers))
        assert {publisher.address for publisher in publishers} == {at(a)}
        working = asyncio.gather(*(publish(publisher, n) for n, publisher in enumerate(publishers)))
        while not all(sent):
            await asyncio.sleep(0.02)
        to_b, asking = [f"p{n}" for n in range(500)], [f"p{n}" for n in range(500, 1000)]
        controller.target = "b"
        controller.alive.add("b")  # on a busy host, opening a thousand connections may take longer than one may
        controller.placed.clear()
        await asyncio.to_thread(migrate, a, to_b, at(b))
        # One in vain, then whom the controller says.
        await asyncio.to_thread(migrate, a, asking, NOBODY)
        await working
        assert {publisher.address for publisher in publishers} == {at(b)}
        assert all(publisher.migrations == 1 for publisher in publishers)
        await asyncio.gather(*(publisher.close() for publisher in publishers))

    with managed() as a, running() as b, controlling(Controller({"a": at(a), "b": at(b)})) as controller:
        asyncio.run(story(a, b, controller))
        first = a.do(lambda: a.broker.topics["t"].messages)
        assert first >= count
        found = [tuple(map(int, body.split())) for body in bodies_of(a, first) + bodies_of(b, sum(sent) - first)]
    by_publisher: dict[int, list[int]] = {}
    for number, n in found:
        by_publisher.setdefault(number, []).append(n)
    assert len(by_publisher) == count
    assert all(by_publisher[number] == list(range(sent[number])) for number in range(count))


def test_a_publisher_goes_on_only_when_its_last_message_has_its_token() -> None:
    with in_memory(controller=NOBODY) as a, in_memory(a, tcp_port=4152) as b:

        def send_to_b() -> None:
            order = said(2, contracts=None, moves=[Move("t", BIRTH, (at(b),), ["p"])])
            order = structs.replace(order, incarnation=a.broker.started_ns)
            a.broker.control.exchange(order, a.now_ns(), a.broker.clock.monotonic_ns())

        async def story() -> None:
            async with Publisher("t", broker=at(a), id="p") as publisher:
                began_s = a.monotonic()
                await asyncio.gather(*(publisher.publish(b"%d" % n) for n in range(20)))
                send_to_b()
                while not publisher.migrations:
                    await asyncio.sleep(0.001)
                (topic,) = a.broker.statistics().topics
                assert topic.waiting == 0
                assert 0.94 < a.monotonic() - began_s < 0.97  # 19 tokens, one every 50 ms
                await publisher.publish(b"at b")

        exchange(a, said(grants={"t": Grant(BIRTH, 1, share(20, 1), TOKEN)}))
        a.run(story())
        assert bodies_of(a, 20) == [b"%d" % n for n in range(20)]
        assert bodies_of(b, 1) == [b"at b"]


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A broker that can be killed, and its address."""
    command = [sys.executable, "-m", "srtm", "broker", "--tcp-port", "0", "--http-port", "0", "--name", "mortal"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            assert broker.stdout is not None
            (address,) = re.findall(r"TCP ([\d.]+:\d+)", broker.stdout.readline())
            yield broker, address
        finally:
            broker.kill()


@pytest.mark.processes
@pytest.mark.parametrize("away", [False, True], ids=["controller", "controller away"])
def test_what_a_killed_broker_did_not_acknowledge_is_published_elsewhere_in_order(away: bool) -> None:
    count, each = 50, 100
    acknowledged: dict[int, int] = {}

    async def publish(publisher: Publisher, number: int) -> None:
        for n in range(each):
            await publisher.publish(b"%d %d" % (number, n))
            acknowledged[number] = n
            await asyncio.sleep(0.005)

    async def story(controller: Controller, mortal: subprocess.Popen[str]) -> None:
        with controlling(controller):
            publishers = [Publisher("t", controller=controller.url, id=f"p{n}") for n in range(count)]
            await asyncio.gather(*(publisher.open() for publisher in publishers))
            controller.target = "b"
            async with Publisher("t", controller=controller.url, id="other"):  # so that there is a second broker
                pass
            working = asyncio.gather(*(publish(publisher, n) for n, publisher in enumerate(publishers)))
            await asyncio.sleep(0.2)
            if not away:
                mortal.kill()
                await working
                assert controller.requests[-1]["lost"] == ["a"]
        if away:
            mortal.kill()
            await working
        assert {publisher.address for publisher in publishers} == {controller.brokers["b"]}
        await asyncio.gather(*(publisher.close() for publisher in publishers))

    with running() as b, process() as (mortal, address):
        asyncio.run(story(Controller({"a": address, "b": at(b)}), mortal))
        left = b.do(lambda: b.broker.topics["t"].messages)
        found = [tuple(map(int, body.split())) for body in bodies_of(b, left)]
    assert acknowledged == dict.fromkeys(range(count), each - 1)
    by_publisher: dict[int, list[int]] = {}
    for number, n in found:
        by_publisher.setdefault(number, []).append(n)
    for sent in by_publisher.values():
        assert sent == list(range(sent[0], each))  # from some message on, all of them, in order, once here
    assert len(by_publisher) == count


@pytest.mark.needs("nsqd")
def test_a_stock_nsqd_will_do(nsqd: str) -> None:
    async def story() -> None:
        async with Publisher("t", broker=nsqd, deflate=True, id="p") as publisher:
            await asyncio.gather(*(publisher.publish(b"%d" % n) for n in range(100)))
            await publisher.publish_many([b"a", b"b"])

    asyncio.run(story())
    host, _, port = nsqd.partition(":")
    with Client((host, int(port))) as client:
        client.subscribe("t", "c", 200)
        assert sorted(client.message().body for _ in range(102)) == sorted(
            [b"%d" % n for n in range(100)] + [b"a", b"b"]
        )
