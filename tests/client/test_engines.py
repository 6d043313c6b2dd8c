"""Subscribers at real engines: channels of JetStream, logins, and that a refusal costs no message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats
import pytest

from srtm.client import Cluster, Publisher, Subscriber, places
from srtm.client.connection import ConnectionOptions
from srtm.client.load import Load, LoadOptions, LoadReport
from srtm.errors import InputError, ProtocolError
from srtm.protocol import client as say
from srtm.units import NS_PER_S
from srtm.workload.publishers import Population, Workload
from tests import programs
from tests.broker.running import Client, Running, running
from tests.client.test_publisher import at
from tests.client.test_subscriber import take, until
from tests.control.running import controller
from tests.engines import Load as Sending
from tests.engines import NatsCluster, NatsServer, Nsqd, leader_of

BODIES = [b"%d" % number for number in range(200)]


@contextmanager
def brokered(engine: str, **options: Any) -> Iterator[Running]:
    with running(engine=engine, broadcast_address="127.0.0.1", **options) as broker:
        yield broker


async def publish(broker: Running, *bodies: bytes, topic: str = "t") -> None:
    async with Publisher(topic, broker=at(broker)) as publisher:
        await asyncio.gather(*(publisher.publish(body) for body in bodies))


async def channels(server: NatsServer) -> dict[str, Any]:
    """What JetStream says of a topic's consumers, by name."""
    client = await nats.connect(server.url)
    try:
        return {each.name: each for each in await client.jetstream().consumers_info("t")}
    finally:
        await client.close()


@pytest.mark.needs("nats-server")
def test_messages_are_finished_requeued_and_touched_at_jetstream(tmp_path: Path) -> None:
    async def story(server: NatsServer, broker: Running) -> None:
        await publish(broker, b"late")
        seen: list[tuple[bytes, int]] = []
        async with Subscriber("t", "c", brokers=[at(broker)], msg_timeout_ms=1000) as subscriber:
            early = await subscriber.get()
            assert early is not None  # neither finished nor touched: it comes again
            late = await subscriber.get()
            assert late is not None
            assert (late.body, late.attempts) == (b"late", 2)
            await late.finish()
            await publish(broker, b"back", b"slow")
            began = time.monotonic()
            async with asyncio.timeout(20):
                async for message in subscriber:
                    seen.append((message.body, message.attempts))
                    assert message.broker == server.url
                    assert abs(message.timestamp_ns - time.time_ns()) < 60e9
                    if message.body == b"back" and message.attempts == 1:
                        await message.requeue(1.5)
                        continue
                    if message.body == b"slow":
                        for _ in range(3):
                            await asyncio.sleep(0.5)
                            await message.touch()
                    if message.body == b"back":
                        assert time.monotonic() - began >= 1.5
                    await message.finish()
                    if len(seen) == 3:
                        break
        assert sorted(seen) == [(b"back", 1), (b"back", 2), (b"slow", 1)]
        found = (await channels(server))["c@t"]
        assert (found.num_ack_pending, found.num_pending) == (0, 0)

    with NatsServer(tmp_path) as server, brokered(server.url) as broker:
        asyncio.run(story(server, broker))


@pytest.mark.needs("nats-server")
def test_a_channel_of_jetstream_is_shared_and_stays(tmp_path: Path) -> None:
    async def story(broker: Running) -> None:
        await publish(broker, *BODIES)
        where: dict[str, Any] = {"brokers": [at(broker)], "max_in_flight": 10}
        async with Subscriber("t", "c", **where) as a, Subscriber("t", "c", **where) as b:
            found = [await take(a, 50), await take(b, 100)]
            assert len(set(found[0]) | set(found[1])) == 150
        await publish(broker, b"meanwhile")
        async with Subscriber("t", "c", **where) as again:
            rest = await take(again, 51)
        assert sorted([*found[0], *found[1], *rest]) == sorted([*BODIES, b"meanwhile"])

    with NatsServer(tmp_path) as server, brokered(server.url) as broker:
        asyncio.run(story(broker))


@pytest.mark.needs("nats-server")
def test_new_channels_of_jetstream_begin_as_those_of_nsq(tmp_path: Path) -> None:
    """The first has what no channel had, others what comes; an ephemeral one leaves what it did not finish."""

    async def story(server: NatsServer, broker: Running) -> None:
        where: dict[str, Any] = {"brokers": [at(broker)]}
        await publish(broker, b"1", b"2", b"3")
        async with Subscriber("t", "first#ephemeral", **where) as first:
            assert await take(first, 2) == [b"1", b"2"]
        assert set(await channels(server)) == {"@t"}
        async with Subscriber("t", "next", **where) as following:
            assert await take(following, 1) == [b"3"]
            async with Subscriber("t", "other", **where) as other:
                await other.wait_subscribed()
                await publish(broker, b"4")
                assert await take(following, 1) == [b"4"]
                assert await take(other, 1) == [b"4"]
        assert set(await channels(server)) == {"@t", "next@t", "other@t"}

    with NatsServer(tmp_path) as server, brokered(server.url) as broker:
        asyncio.run(story(server, broker))


@pytest.mark.needs("nats-server")
def test_an_ephemeral_channel_of_jetstream_lives_as_long_as_a_member(tmp_path: Path) -> None:
    async def story(server: NatsServer, broker: Running) -> None:
        where: dict[str, Any] = {"brokers": [at(broker)]}
        await publish(broker, b"1")
        async with Subscriber("t", "c#ephemeral", **where) as a:
            assert await take(a, 1) == [b"1"]
            async with Subscriber("t", "c#ephemeral", **where) as b:
                await b.wait_subscribed()
            await publish(broker, b"2")
            assert await take(a, 1) == [b"2"]
            await publish(broker, b"3")
            held = await a.get()
            assert held is not None
            async with Subscriber("t", "c#ephemeral", **where) as b:
                await b.wait_subscribed()
            assert "c#ephemeral@t" in await channels(server)  # a message of the other is under way
            await held.finish()
        assert set(await channels(server)) == {"@t"}

    with NatsServer(tmp_path) as server, brokered(server.url) as broker:
        asyncio.run(story(server, broker))


@pytest.mark.needs("nats-server")
@pytest.mark.parametrize("channel", ["c", "c#ephemeral"])
def test_a_server_of_nats_that_comes_back_goes_on(channel: str, tmp_path: Path) -> None:
    async def story(server: NatsServer, broker: Running) -> None:
        await publish(broker, *BODIES[:10])
        async with Subscriber("t", channel, brokers=[at(broker)]) as subscriber:
            found = set(await take(subscriber, 4))
            held = await subscriber.get()
            assert held is not None
            server.kill()
            await until(lambda: not subscriber.brokers)
            await held.finish()  # said when there is somebody to say it to
            await asyncio.to_thread(server.start)
            await publish(broker, b"again")
            found.add(held.body)
            async with asyncio.timeout(30):
                while found != {*BODIES[:10], b"again"}:  # what was finished just before may come again
                    found |= set(await take(subscriber, 1))

    with NatsServer(tmp_path) as server, brokered(server.url) as broker:
        asyncio.run(story(server, broker))


@pytest.mark.needs("nats-server")
def test_a_login_of_nats_is_given_by_the_client_and_told_by_nobody(tmp_path: Path) -> None:
    async def story(url: str, broker: Running, engine: str) -> None:
        await publish(broker, *BODIES)
        async with Subscriber("t", "c#ephemeral", controller=url) as subscriber:
            with pytest.raises(InputError, match=r"Authorization Violation; set SRTM_ENGINE to another login"):
                await subscriber.get()
        async with Subscriber("t", "c#ephemeral", controller=url, engine=engine) as subscriber:
            assert sorted(await take(subscriber, 200)) == sorted(BODIES)

    with NatsServer(tmp_path, "n0", "--user", "me", "--pass", "secret") as server, controller() as served:
        engine = server.url.replace("://", "://me:secret@")
        with brokered(engine, controller=f"127.0.0.1:{served.tcp}") as broker:
            url = f"http://127.0.0.1:{served.http}"
            programs.wait_for(
                lambda: (
                    [
                        each["engine_address"]
                        for each in programs.ask(served.http, "/v1/brokers")["brokers"]
                        if each["status"] == "alive"
                    ]
                    == [server.url]
                )
            )
            asyncio.run(story(url, broker, engine))


@pytest.mark.needs("nsqd")
def test_a_secret_of_nsqd_is_given_by_the_client(tmp_path: Path, authority: Any) -> None:
    async def story(broker: Running) -> None:
        await publish(broker, *BODIES)
        async with Subscriber("t", "c", brokers=[at(broker)]) as subscriber:
            with pytest.raises(ProtocolError, match=r"E_AUTH_FIRST .* put its secret into SRTM_ENGINE"):
                await subscriber.get()
        async with Subscriber("t", "c", brokers=[at(broker)], engine="nsqd://secret@localhost") as subscriber:
            assert sorted(await take(subscriber, 200)) == sorted(BODIES)

    server = Nsqd(tmp_path, f"--auth-http-address={authority.address}")
    with server, brokered(server.url.replace("://", "://secret@")) as broker:
        asyncio.run(story(broker))


@pytest.mark.parametrize("channel", ["c", "c#ephemeral"])
def test_who_refuses_costs_nothing_at_other_places(channel: str, authority: Any) -> None:
    """Neither one that refuses before it is subscribed to, nor one that refuses just that."""

    async def story(open_: Running, shut: Running) -> None:
        await publish(open_, *BODIES)
        both = [at(open_), at(shut)]
        async with Subscriber("t", channel, brokers=both) as subscriber:
            with pytest.raises(ProtocolError, match="E_AUTH_FIRST"):
                await subscriber.get()
        authority.judge = lambda _: None
        async with Subscriber("t", channel, brokers=both, auth_secret=b"wrong") as subscriber:
            with pytest.raises(ProtocolError, match="E_AUTH"):
                await subscriber.get()
        assert not open_.do(lambda: open_.broker.topics["t"].channels)
        async with Subscriber("t", channel, brokers=[at(open_)]) as subscriber:
            assert sorted(await take(subscriber, 200)) == sorted(BODIES)

    with running() as open_, running(auth_http_addresses=(authority.address,)) as shut:
        asyncio.run(story(open_, shut))


def test_who_refuses_later_is_left_out_while_others_deliver(caplog: pytest.LogCaptureFixture, authority: Any) -> None:
    async def story(open_: Running, shut: Running) -> None:
        async with Subscriber("t", "c", brokers=[at(open_)]) as subscriber:
            await subscriber.wait_subscribed()
            subscriber._found[0] = {at(open_), at(shut)}
            subscriber._settle()
            await until(lambda: "E_AUTH_FIRST" in caplog.text)
            await publish(open_, b"x")
            assert await take(subscriber, 1) == [b"x"]

    with running() as open_, running(auth_http_addresses=(authority.address,)) as shut:
        asyncio.run(story(open_, shut))


@pytest.mark.needs("nsqd")
def test_a_broker_with_an_engine_says_so_before_it_is_subscribed_to(tmp_path: Path) -> None:
    with Nsqd(tmp_path) as server, brokered(server.url) as broker, Client(broker.address) as client:
        client.send(say.identify({"feature_negotiation": True}))
        assert f'"srtm":{{"engine":"{server.url}"}}'.encode() in client.response()
    with running() as plain, Client(plain.address) as client:
        client.send(say.identify({"feature_negotiation": True}))
        assert b"srtm" not in client.response().replace(b"srtm-", b"")


def test_engines_on_a_brokers_own_host_are_told_by_its_name() -> None:
    from srtm.protocol.engine import parse, seen_from_elsewhere

    for told, seen in (
        ("nsqd://127.0.0.1:4150", "nsqd://host-a:4150"),
        ("nats+tls://me:secret@localhost:4222,b:4222?ca=x", "nats+tls://host-a:4222,b:4222"),
        (
            "tls://t@localhost:4222?handshake_first=true&ca=x",
            "nats+tls://host-a:4222?handshake_first=true",
        ),
        ("nats://[::1]:4222,[fe80::1]", "nats://host-a:4222,[fe80::1]:4222"),
        ("nsqd:///run/nsqd.sock", "nsqd:///run/nsqd.sock"),
    ):
        address = parse(told)
        assert address is not None
        assert str(seen_from_elsewhere(address, "host-a")) == seen


def test_a_broker_on_a_host_called_nats_is_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    hub: Any = None
    monkeypatch.setattr(places, "BrokerLink", lambda _hub, key, _options, nsqd: (key, nsqd))
    found = places.Places("t", ConnectionOptions(), None)
    for name in ("nats:4150", "nats-1:4150"):
        link: Any = found.link(hub, name, name)
        assert link == (name, False)
        assert found.plain(name, name)
    assert not found.plain("nats://nats:4222", "nats://nats:4222")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("nsqd", marks=pytest.mark.needs("nsqd")),
        pytest.param("nats", marks=pytest.mark.needs("nats-server")),
    ],
)
def test_tls_to_an_engine_is_given_by_the_client(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trustme", reason="pip install trustme makes certificates for tests")
    from tests.broker.engines.test_engine_tls import Files, address, secured

    files = Files(tmp_path)

    async def story(url: str, broker: Running, engine: str) -> LoadReport:
        await publish(broker, *BODIES)
        async with Subscriber("t", "c", controller=url) as subscriber:
            await until(lambda: "certificate" in str(subscriber.trouble))
            assert not subscriber.brokers
        async with Subscriber("t", "c", controller=url, engine=engine) as subscriber:
            assert sorted(await take(subscriber, 200)) == sorted(BODIES)
        workload = Workload((Population(5, 40.0, 1),), NS_PER_S, 1)
        async with Cluster(url) as cluster:
            return await Load(LoadOptions("t", workload, channel="load", engine=engine), cluster).go(lambda _: None)

    with secured(kind, files) as server, controller() as served:
        engine = address(server, f"?ca={files.ca}")
        with brokered(engine, controller=f"127.0.0.1:{served.tcp}") as broker:
            programs.wait_for(lambda: "alive" in str(programs.ask(served.http, "/v1/brokers")))
            report = asyncio.run(story(f"http://127.0.0.1:{served.http}", broker, engine))
    assert report.received == report.sent > 100
    assert (report.lost, report.doubled) == (0, 0)


@pytest.mark.needs("nats-server")
@pytest.mark.parametrize("channel", ["c", "c#ephemeral"])
def test_a_killed_node_of_three_costs_a_subscriber_no_message(channel: str, tmp_path: Path) -> None:
    async def story(engine: NatsCluster, broker: Running) -> tuple[set[bytes], set[bytes]]:
        got: set[bytes] = set()

        async def collect(subscriber: Subscriber) -> None:
            async for message in subscriber:
                got.add(message.body)
                await message.finish()

        async with Subscriber("t", channel, brokers=[at(broker)], msg_timeout_ms=5000) as subscriber:
            collecting = asyncio.create_task(collect(subscriber))
            with Sending(broker.address, "t", publishers=2, pause_s=0.01) as sending:
                await asyncio.to_thread(sending.flows)
                async with asyncio.timeout(40):  # servers that have just met elect their leaders first
                    while not got:
                        await asyncio.sleep(0.05)
                leader = await leader_of(engine.url, "t")
                next(server for server in engine.servers if server.name == leader).kill()
                await asyncio.to_thread(sending.flows)
            async with asyncio.timeout(40):
                while not sending.acknowledged.keys() <= got:
                    await asyncio.sleep(0.05)
            await subscriber.close()
            await collecting
        return set(sending.acknowledged), got

    with NatsCluster(tmp_path) as engine, brokered(engine.url) as broker:
        sent, got = asyncio.run(story(engine, broker))
    assert sent <= got
    assert len(sent) > 300
