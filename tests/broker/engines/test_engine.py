"""Delivery engines: a real nsqd, a real server of NATS and a cluster of three, before and after kill -9."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pyarrow.parquet as pq
import pytest

from srtm.broker.options import BrokerOptions
from srtm.broker.run import serving
from srtm.errors import BrokerError
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline, largest_excess
from srtm.protocol import client as say
from srtm.protocol.client import Response
from srtm.protocol.orders import Throttle
from tests.broker.conftest import Start
from tests.broker.running import Client, Running
from tests.control.discovery.test_interop import READER, needs_pynsq
from tests.engines import (
    Load,
    NatsCluster,
    NatsServer,
    Nsqd,
    bodies,
    engine_of,
    free_port,
    leader_of,
    probed,
    released,
    stored,
    until,
)
from tests.programs import ask, nsqadmin, nsqlookupd


def test_messages_are_with_the_engine_when_they_are_answered(engine: Any, start: Start) -> None:
    engine.start()
    broker = start(engine=engine.url)
    with Client(broker.address) as client:
        client.publish("a.b", b"1", b"2")
        client.send(say.mpub("a.b", [b"3", b"4"]), say.pub("a.b", b"5"))
        assert [client.response(), client.response()] == [b"OK", b"OK"]
    assert broker.post("/pub?topic=a.b", b"6") == (200, b"OK")
    assert broker.post("/mpub?topic=a.b", b"7\n8") == (200, b"OK")
    assert bodies(engine, "a.b", 8) == [str(number).encode() for number in range(1, 9)]
    assert engine_of(broker, "a.b") == {
        "kind": type(broker.broker.engine).kind,  # type: ignore[union-attr]
        "state": "open",
        "reason": None,
        "unacknowledged": 0,
        "unacknowledged_bytes": 0,
        "in_log": 0,
        "lost": 0,
        "probe": None,
    }


def test_latency_is_measured_to_the_acknowledgement(engine: Any, start: Start, tmp_path: Path) -> None:
    engine.start()
    broker = start(engine=engine.url, trace_folder=str(tmp_path))
    broker.post("/srtm/trace/start?file=t.parquet")
    with Client(broker.address) as client:
        client.publish("t", b"1")
        engine.signal(signal.SIGSTOP)
        client.send(say.pub("t", b"2"))
        assert client.silent(0.3)  # no answer without an acknowledgement
        engine.signal(signal.SIGCONT)
        assert client.response() == b"OK"
    broker.post("/srtm/trace/stop")
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    taken_ns = [row["sent_ns"] - row["arrival_ns"] for row in rows]
    assert len(taken_ns) == 2
    assert taken_ns[1] > 300_000_000
    broker.wait_until(lambda each: any(second.sent for second in each.topics["t"].recent.history))


def test_a_probe_times_messages_to_a_consumer(engine: Any, start: Start) -> None:
    engine.start()
    broker = start(engine=engine.url)
    with Client(broker.address) as client:
        client.publish("t", b"before")
        found = probed(broker, client)
        assert found["problem"] is None
        assert 0 < found["end_to_end_ns"]["p50"] <= found["end_to_end_ns"]["p99"]
        assert b'srtm_topic_latency_seconds{part="end_to_end",quantile="0.5",topic="t"}' in broker.metrics()
        assert broker.post("/srtm/probe?topic=t&on=false")[0] == 200
        assert engine_of(broker, "t")["probe"] is None


def test_only_engines_need_probes(broker: Running) -> None:
    broker.post("/topic/create?topic=t")
    assert broker.post("/srtm/probe?topic=t")[0] == 409
    assert broker.post("/srtm/probe?topic=t&on=maybe")[0] == 400


def test_answers_keep_the_order_of_commands(engine: Any, start: Start) -> None:
    engine.start()
    broker = start(engine=engine.url)
    broker.post("/topic/limit?topic=slow&r=1&b=1")
    with Client(broker.address) as client:
        client.send(say.pub("slow", b"1"), say.pub("slow", b"2"), say.pub("fast", b"3"))
        assert client.response() == b"OK"
        assert client.silent(0.2)  # fast has its acknowledgement, but slow comes before it
        assert [client.response(), client.response()] == [b"OK", b"OK"]


def test_a_client_that_leaves_gets_its_answers_first(engine: Any, start: Start) -> None:
    broker = start(engine=engine.url)
    with Client(broker.address) as client:
        client.send(say.pub("t", b"1"), say.pub("t", b"2"))
        client.sock.shutdown(1)
        assert client.silent(0.2)
        engine.start()
        assert [client.response(), client.response()] == [b"OK", b"OK"]
        assert client.ended()


def test_an_engine_that_is_away_pushes_back(engine: Any, start: Start) -> None:
    broker = start(engine=engine.url, max_held_messages=100)
    declared = {"publisher": "p", "group": None, "topic": "t"}
    with Client(broker.address, srtm=declared) as ours, Client(broker.address) as other:
        ours.send(*(say.pub("t", b"%d" % number) for number in range(100)))
        assert isinstance(ours.next(), Throttle)
        broker.wait_until(lambda each: each.topics["t"].full)
        broker.wait_until(lambda each: each.engine is not None and each.engine.problem is not None)
        found = engine_of(broker, "t")
        assert (found["state"], found["unacknowledged"]) == ("shut", 100)
        assert "the engine is unavailable: cannot connect" in found["reason"]
        assert broker.post("/pub?topic=t", b"x") == (503, b'{"message":"TOPIC_FULL"}')
        assert b'srtm_engine_connected{engine="%b"} 0.0' % found["kind"].encode() in broker.metrics()
        ours.send(say.pub("t", b"100"))
        other.send(say.pub("t", b"101"))
        assert other.silent(0.2)
        engine.start()
        for _ in range(101):
            while isinstance(answer := ours.next(), Throttle):
                pass
            assert answer == Response(b"OK")
        assert other.response() == b"OK"
        assert b'srtm_topic_engine_open{topic="t"} 1.0' in broker.metrics()
    got = bodies(engine, "t", 102)
    assert got[:100] == [b"%d" % number for number in range(100)]
    assert sorted(got[100:]) == [b"100", b"101"]


def test_what_waits_for_the_engine_gets_its_tokens_when_that_is_there(
    engine: Any, start: Start, tmp_path: Path
) -> None:
    broker = start(engine=engine.url, trace_folder=str(tmp_path))
    broker.post("/srtm/trace/start?file=t.parquet")
    broker.post("/topic/limit?topic=t&r=100&b=10")
    with Client(broker.address) as client:
        client.send(*(say.pub("t", b"%d" % number) for number in range(60)))
        assert client.silent(1.0)
        before_ns = time.time_ns()
        engine.start()
        assert [client.response() for _ in range(60)] == [b"OK"] * 60
    broker.post("/srtm/trace/stop")
    times = released(tmp_path / "t.parquet", "t")
    assert times[0] >= before_ns
    assert times[-1] - times[0] >= 490_000_000  # fifty that found no token, at 100 a second
    assert largest_excess(times, Timeline(TokenBucket.of(100, 10))).conforms


def test_messages_that_are_dropped_are_answered(engine: Any, start: Start) -> None:
    engine.start()
    broker = start(engine=engine.url)
    broker.post("/topic/limit?topic=t&r=1&b=2")
    broker.do(lambda: setattr(broker.broker.topics["t"].gate, "drops", True))
    with Client(broker.address) as client:
        client.publish("t", b"1", b"2", b"3", b"4")
    assert bodies(engine, "t", 2) == [b"1", b"2"]


def test_pausing_holds_messages_back_and_emptying_forgets_them(engine: Any, start: Start) -> None:
    engine.start()
    broker = start(engine=engine.url)
    with Client(broker.address) as client:
        client.publish("t", b"1")
        assert broker.post("/topic/pause?topic=t")[0] == 200
        client.send(say.pub("t", b"2"))
        assert client.silent(0.2)
        assert broker.post("/topic/unpause?topic=t")[0] == 200
        assert client.response() == b"OK"
        broker.post("/topic/pause?topic=t")
        client.send(say.pub("t", b"3"))
        broker.wait_until(lambda each: len(each.topics["t"].unclaimed) == 1)
        assert broker.post("/topic/empty?topic=t")[0] == 200
        assert client.response() == b"OK"
    assert bodies(engine, "t", 2) == [b"1", b"2"]


def test_what_an_engine_cannot_do_is_said(engine: Any, start: Start) -> None:
    engine.start()
    broker = start(engine=engine.url)
    place = engine.url.encode()
    with Client(broker.address) as client:
        client.send(say.sub("t", "c"))
        assert (
            client.error()
            == b"E_SUB_FAILED SUB failed topic 't' is delivered by the engine %b: subscribe to it there" % place
        )
    with Client(broker.address, srtm={"replay": {"offset": 0}}) as client:
        client.send(say.sub("t", "c#ephemeral"))
        assert b"subscribe to it there" in client.error()
    status, body = broker.post("/channel/create?topic=t&channel=c")
    assert (status, b"NO_CHANNELS" in body) == (409, True)


@pytest.mark.needs("nats-server")
@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (say.pub("t#ephemeral", b"1"), b"E_BAD_TOPIC topic 't#ephemeral' cannot be ephemeral"),
        (say.mpub("a..b", [b"1"]), b"E_BAD_TOPIC topic 'a..b' is not a subject of the engine nats"),
        (say.dpub("t", 1000, b"1"), b"E_DPUB_FAILED DPUB failed the engine nats cannot defer messages"),
        (
            say.pub("t", bytes(1024 * 1024)),
            b"E_PUB_FAILED PUB failed the engine nats refuses it: a message may have at most 1048576 bytes",
        ),
    ],
)
def test_what_nats_cannot_take_is_refused(command: bytes, problem: bytes, start: Start, tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        broker = start(engine=server.url)
        with Client(broker.address) as client, Client(broker.address) as other:
            client.send(command)
            assert client.error().startswith(problem)
            assert client.ended()
            other.publish("t", b"fine")
        assert broker.post("/pub?topic=a..b", b"x")[0] == 400
        assert broker.post("/pub?topic=t&defer=1000", b"x")[0] == 400


@pytest.mark.needs("nats-server")
def test_a_stream_that_is_there_already_is_used(start: Start, tmp_path: Path) -> None:
    async def make() -> None:
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(name="all", subjects=["orders.>"], max_msg_size=1000)
        await client.close()

    with NatsServer(tmp_path) as server:
        asyncio.run(make())
        broker = start(engine=server.url)
        with Client(broker.address) as client:
            client.publish("orders.new", b"1")
            client.send(say.pub("orders.new", bytes(1000)))
            assert b"message size exceeds maximum allowed" in client.error()
        assert [body for _, body in asyncio.run(stored(server.url, "all"))] == [b"1"]


@pytest.mark.needs("nats-server")
def test_a_stream_that_refuses_stops_its_own_topic_alone(start: Start, tmp_path: Path) -> None:
    async def do(action: Callable[[Any], Any]) -> None:
        client = await nats.connect(server.url)
        await action(client.jetstream())
        await client.close()

    with NatsServer(tmp_path) as server:
        asyncio.run(do(lambda js: js.add_stream(name="full", subjects=["full"], max_msgs=2, discard="new")))
        broker = start(engine=server.url)
        with Client(broker.address) as client, Client(broker.address) as other:
            client.publish("full", b"1", b"2")
            client.send(say.pub("full", b"3"), say.pub("full", b"4"))
            broker.wait_until(lambda each: not each.topics["full"].lane.ready)  # type: ignore[union-attr]
            assert "maximum messages exceeded" in engine_of(broker, "full")["reason"]
            other.publish("free", b"5")
            assert client.silent(0.1)
            asyncio.run(do(lambda js: js.purge_stream("full")))
            assert [client.response(), client.response()] == [b"OK", b"OK"]
        found = asyncio.run(stored(server.url, "full"))
    assert [body for _, body in found] == [b"3", b"4"]


@pytest.mark.needs("nsqd")
def test_one_message_that_nsqd_never_takes_does_not_stop_the_others(start: Start, tmp_path: Path) -> None:
    with Nsqd(tmp_path, "--max-msg-size=100") as server:
        broker = start(engine=server.url)
        with Client(broker.address) as client, Client(broker.address) as other:
            client.send(say.pub("t", bytes(200)))
            other.send(*(say.pub("t", b"%d" % number) for number in range(50)))
            assert client.error().startswith(b"E_PUB_FAILED PUB failed the engine nsqd refuses it: E_BAD_MESSAGE")
            assert [other.response() for _ in range(50)] == [b"OK"] * 50
        assert {b"%d" % number for number in range(50)} == set(bodies(server, "t", 50))


@pytest.mark.needs("nsqd")
def test_nsqd_at_a_unix_socket_defers_messages(start: Start, tmp_path: Path) -> None:
    with Nsqd(tmp_path, unix=True) as server:
        broker = start(engine=server.url)
        with Client(broker.address) as client:
            client.send(say.dpub("t", 60_000, b"later"), say.pub("t", b"now"))
            assert [client.response(), client.response()] == [b"OK", b"OK"]
        until(lambda: server.stats("t")["message_count"] == 2)


@needs_pynsq
@pytest.mark.needs("nsqd")
@pytest.mark.needs("nsqlookupd")
@pytest.mark.needs("nsqadmin")
def test_stock_consumers_find_nsqd_and_nsqadmin_shows_it(start: Start, tmp_path: Path) -> None:
    with (
        nsqlookupd(tmp_path) as (lookupd, http),
        nsqadmin(tmp_path, http) as admin,
        Nsqd(tmp_path, f"--lookupd-tcp-address=127.0.0.1:{lookupd}") as server,
    ):
        broker = start(engine=server.url, lookupd=(f"127.0.0.1:{lookupd}",))
        with Client(broker.address) as client:
            client.publish("t", *(b"%d" % number for number in range(20)))
        until(lambda: [each["tcp_port"] for each in ask(http, "/lookup?topic=t").get("producers", ())] == [server.port])
        command = [sys.executable, "-W", "ignore", "-c", READER, f"http://127.0.0.1:{http}", "20"]
        got = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert got.returncode == 0, got.stderr
        assert set(json.loads(got.stdout)) == {str(number) for number in range(20)}
        shown = until(lambda: ask(admin, "/api/topics/t").get("nodes"))
        assert shown[0]["message_count"] == 20


@pytest.mark.needs("nsqd")
def test_nsqd_is_killed_under_load(start: Start, tmp_path: Path) -> None:
    server = Nsqd(tmp_path)
    with server:
        broker = start(engine=server.url, trace_folder=str(tmp_path))
        broker.post("/topic/limit?topic=t&r=1000&b=20")
        broker.post("/srtm/trace/start?file=t.parquet")
        with Load(broker.address, "t") as load:
            for _ in range(2):
                load.flows()
                server.kill()
                time.sleep(0.5)
                server.start()
            load.flows()
        broker.post("/srtm/trace/stop")
        assert engine_of(broker, "t")["unacknowledged"] == 0
        got = Counter(bodies(server, "t", len(load.acknowledged)))
        assert load.acknowledged.keys() <= got.keys()
        resent = broker.get("/stats?format=json")["srtm"]["engine"]["resent"]
        assert got.total() - len(got) <= resent  # twice is what was under way, and nothing else
    assert largest_excess(released(tmp_path / "t.parquet", "t"), Timeline(TokenBucket.of(1000, 20))).conforms


@pytest.mark.needs("nats-server")
@pytest.mark.parametrize("victim", ["leader", "ours", "follower"])
def test_a_node_of_three_is_killed_under_load(victim: str, start: Start, tmp_path: Path, record_property: Any) -> None:
    with NatsCluster(tmp_path) as cluster:
        broker = start(engine=cluster.url, trace_folder=str(tmp_path))
        broker.post("/topic/limit?topic=t&r=1000&b=20")
        broker.post("/srtm/trace/start?file=t.parquet")
        with Load(broker.address, "t") as load:
            load.flows()
            leader = asyncio.run(leader_of(cluster.url, "t"))
            ours = f"n{[server.port for server in cluster.servers].index(broker.do(lambda: _port(broker)))}"
            others = [server.name for server in cluster.servers if server.name not in (leader, ours)]
            name = {"leader": leader, "ours": ours, "follower": others[0]}[victim]
            server = next(each for each in cluster.servers if each.name == name)
            killed = time.monotonic()
            server.kill()
            load.flows()
            record_property("resumed_s", load.resumed_s(killed))
            print(f"{victim} ({'leader' if name == leader else 'no leader'}): {load.resumed_s(killed):.2f} s")
            server.start(wait=False)
            load.flows()
        broker.post("/srtm/trace/stop")
        assert load.resumed_s(killed) < 30  # NATS waits for 4 to 9 s before it elects a new leader
        rows = asyncio.run(stored(cluster.url, "t"))
    got = Counter(body for _, body in rows)
    assert load.acknowledged.keys() <= got.keys()
    assert max(got.values()) == 1
    assert largest_excess(released(tmp_path / "t.parquet", "t"), Timeline(TokenBucket.of(1000, 20))).conforms


def _port(broker: Running) -> int:
    engine = broker.broker.engine
    assert engine is not None
    assert engine.link._sock is not None
    return int(engine.link._sock.getpeername()[1])


def test_an_engine_that_is_none(start: Start) -> None:
    for text in (
        "redis://localhost",
        "nats",
        "nats://",
        "nsqd://a:1,b:2",
        "nats://a?replicas=9",
        "nsqd://a?x=1",
        "nats://a:x",
    ):
        with pytest.raises(ValueError, match=r"invalid engine"):
            start(engine=text)


def test_a_broker_is_not_its_own_engine() -> None:
    async def go() -> None:
        port = free_port()
        options = BrokerOptions(tcp_port=port, http_port=0, engine=f"nsqd://localhost:{port}")
        with pytest.raises(BrokerError, match="is this broker itself"):
            async with serving(options):
                pass

    asyncio.run(go())
