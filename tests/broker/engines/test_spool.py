"""Topics on disk at a broker with an engine: OK from the log, whatever the engine does, and everything arrives."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
import pytest

from srtm.broker.disk.log import Log
from srtm.errors import BrokerError
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline, largest_excess
from srtm.protocol import client as say
from tests.broker.conftest import Start
from tests.broker.disk.test_durable import broker_process, disk_topic, make_disk_topic, publish_until_killed
from tests.broker.running import Client, Running, fetch, running
from tests.engines import Load, NatsCluster, NatsServer, Nsqd, bodies, engine_of, leader_of, released, stored, until
from tests.programs import post


def delivered(broker: Running, topic: str = "t") -> None:
    """Until the engine has all of a topic."""
    until(lambda: broker.do(lambda: owed(broker, topic)) == 0)


def owed(broker: Running, topic: str) -> int:
    """Messages that a topic's engine has not acknowledged, by the log's account."""
    found, engine, durable = broker.broker.topics[topic], broker.broker.engine, broker.broker.durable
    assert engine is not None
    assert durable is not None
    spool = engine.lanes[topic].spool
    assert spool is not None
    return spool.cursor.missing(durable.extent(found).end)


def by_publisher(found: list[bytes]) -> dict[bytes, list[int]]:
    """Numbers of messages in the order they were found, by publisher."""
    numbers: dict[bytes, list[int]] = {}
    for body in found:
        publisher, number = body.split()
        numbers.setdefault(publisher, []).append(int(number))
    return numbers


def test_publishing_goes_on_while_the_engine_is_away_and_memory_is_bounded(
    engine: Any, start: Start, tmp_path: Path
) -> None:
    broker = start(
        engine=engine.url, data_path=str(tmp_path / "data"), trace_folder=str(tmp_path), max_held_messages=200
    )
    disk_topic(broker)
    broker.post("/srtm/trace/start?file=t.parquet")
    broker.post("/topic/limit?topic=t&r=500&b=20")
    with Client(broker.address) as one, Client(broker.address) as two:
        for number in range(0, 300, 10):
            one.publish("t", *(b"one %d" % each for each in range(number, number + 10)))
            two.publish("t", *(b"two %d" % each for each in range(number, number + 10)))
        found = engine_of(broker, "t")
        assert found["state"] == "shut"
        assert 480 <= found["in_log"] <= 500  # the rest is half of what may be held, and what came with it
        assert broker.do(lambda: broker.broker.topics["t"].depth) == 600
        assert b'srtm_topic_in_log{topic="t"} %.1f' % found["in_log"] in broker.metrics()
        assert broker.post("/pub?topic=t", b"http 0") == (200, b"OK")
        back_ns = time.time_ns()
        engine.start()
        for number in range(300, 320):  # behind what is in the log
            one.publish("t", b"one %d" % number)
        delivered(broker)
    broker.post("/srtm/trace/stop")
    got = by_publisher(bodies(engine, "t", 621))
    assert got == {b"one": list(range(320)), b"two": list(range(300)), b"http": [0]}
    times = released(tmp_path / "t.parquet", "t")
    assert len(times) == 621
    assert times[0] >= back_ns
    assert largest_excess(times, Timeline(TokenBucket.of(500, 20))).conforms
    assert broker.get("/stats?format=json&topic=t")["topics"][0]["message_count"] == 621
    until(lambda: broker.get("/srtm/log?topic=t")["begin"] == 621)  # what the engine has is not kept


def test_a_topic_without_a_bucket_leaves_to_the_log_too(engine: Any, start: Start, tmp_path: Path) -> None:
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"), max_held_messages=100)
    disk_topic(broker)
    with Client(broker.address) as client:
        for number in range(20):
            client.send(say.mpub("t", [b"p %d" % each for each in range(20 * number, 20 * (number + 1))]))
            assert client.response() == b"OK"
        assert engine_of(broker, "t")["in_log"] >= 300
        engine.start()
        delivered(broker)
    assert bodies(engine, "t", 400) == [b"p %d" % number for number in range(400)]


def test_a_topic_that_may_hold_one_message_gets_everything_from_the_log(
    engine: Any, start: Start, tmp_path: Path
) -> None:
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"), max_held_messages=1)
    disk_topic(broker)
    with Client(broker.address) as client:
        client.publish("t", *(b"%d" % number for number in range(20)))
        engine.start()
        delivered(broker)
        client.publish("t", *(b"%d" % number for number in range(20, 40)))
        delivered(broker)
    assert bodies(engine, "t", 40) == [b"%d" % number for number in range(40)]


def test_an_engine_that_is_there_holds_publishers_beyond_a_burst_and_a_second(
    engine: Any, start: Start, tmp_path: Path
) -> None:
    engine.start()
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"))
    disk_topic(broker)
    broker.post("/topic/limit?topic=t&r=1&b=1")
    with Client(broker.address) as client:
        client.send(*(say.mpub("t", [b"x"] * 100) for _ in range(40)))
        broker.wait_until(lambda each: each.topics["t"].crowded)
        assert broker.post("/pub?topic=t", b"x") == (503, b'{"message":"TOPIC_FULL"}')
        assert engine_of(broker, "t")["in_log"] == 0


def test_what_was_kept_while_a_topic_was_paused_gets_its_tokens_afterwards(
    engine: Any, start: Start, tmp_path: Path
) -> None:
    engine.start()
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"), trace_folder=str(tmp_path))
    disk_topic(broker)
    broker.post("/srtm/trace/start?file=t.parquet")
    broker.post("/topic/limit?topic=t&r=200&b=5")
    broker.post("/topic/pause?topic=t")
    with Client(broker.address) as client:
        client.publish("t", *(b"%d" % number for number in range(60)))
        time.sleep(0.3)
        assert broker.do(lambda: len(broker.broker.topics["t"].waiting)) == 60
        back_ns = time.time_ns()
        broker.post("/topic/unpause?topic=t")
        delivered(broker)
    broker.post("/srtm/trace/stop")
    times = released(tmp_path / "t.parquet", "t")
    assert len(times) == 60
    assert times[0] >= back_ns
    assert largest_excess(times, Timeline(TokenBucket.of(200, 5))).conforms


def test_to_end_a_pause_that_there_is_not_changes_nothing(engine: Any, start: Start, tmp_path: Path) -> None:
    engine.start()
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"))
    disk_topic(broker)
    broker.post("/topic/limit?topic=t&r=1&b=1")
    with Client(broker.address) as client:
        client.publish("t", *[b"x"] * 10)
        broker.wait_until(lambda each: len(each.topics["t"].waiting) == 9)
        before = broker.do(lambda: [message.release_ns for message in broker.broker.topics["t"].waiting])
        broker.post("/topic/unpause?topic=t")
        after = broker.do(lambda: [message.release_ns for message in broker.broker.topics["t"].waiting])
    assert before[-len(after) :] == after  # nobody claims a second token


def test_an_emptied_topic_has_no_claims_on_tokens(engine: Any, start: Start, tmp_path: Path) -> None:
    engine.start()
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"))
    disk_topic(broker)
    broker.post("/topic/limit?topic=t&r=1&b=2")
    with Client(broker.address) as client:
        client.publish("t", *[b"x"] * 500)
        broker.wait_until(lambda each: len(each.topics["t"].waiting) > 400)
        broker.post("/topic/empty?topic=t")
        client.publish("t", b"y")
        delivered(broker)  # and not after minutes


@pytest.mark.needs("nats-server")
def test_a_stream_that_refuses_for_now_loses_nothing_and_one_that_was_deleted_is_made_again(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with NatsServer(tmp_path) as server:
        broker = start(engine=server.url, data_path=str(tmp_path / "data"))
        disk_topic(broker)
        with Client(broker.address) as client:
            client.publish("t", b"1")
            delivered(broker)
            asyncio.run(jetstream(server.url, lambda js: js.update_stream(name="t", subjects=["t"], sealed=True)))
            client.publish("t", b"2", b"3")
            until(lambda: "sealed" in str(engine_of(broker, "t")["reason"]))
            assert "TOPIC(t): the engine accepts no messages: topic t: " in caplog.text
            assert broker.do(lambda: owed(broker, "t")) == 2
            assert broker.get("/stats?format=json")["srtm"]["engine"]["refused"] == 0
            asyncio.run(jetstream(server.url, lambda js: js.delete_stream("t")))
            delivered(broker)
        assert bodies(server, "t", 2) == [b"2", b"3"]


async def jetstream(url: str, action: Callable[[Any], Awaitable[Any]]) -> None:
    client = await nats.connect(url)
    try:
        await action(client.jetstream())
    finally:
        await client.close()


@pytest.mark.needs("nsqd")
def test_a_message_that_is_deferred_for_too_long_for_nsqd_holds_up_nobody(start: Start, tmp_path: Path) -> None:
    with Nsqd(tmp_path, "--max-req-timeout=1s") as server:
        broker = start(engine=server.url)
        with Client(broker.address) as client, Client(broker.address) as other:
            client.send(say.dpub("t", 60_000, b"late"))
            assert b"E_DPUB_FAILED" in client.error()
            other.publish("u", b"x")
            until(lambda: server.stats("u")["message_count"] == 1)


def test_what_the_engine_does_not_have_is_sent_after_a_restart_once(engine: Any, tmp_path: Path) -> None:
    options = {"engine": engine.url, "data_path": str(tmp_path / "data"), "trace_folder": str(tmp_path)}
    with running(**options) as broker:
        disk_topic(broker)
        broker.post("/topic/limit?topic=t&r=200&b=5")
        with Client(broker.address) as client:
            client.publish("t", *(b"p %d" % number for number in range(100)))
    engine.start()
    with running(**options) as broker:
        broker.post("/srtm/trace/start?file=t.parquet")
        with Client(broker.address) as client:
            client.publish("t", *(b"p %d" % number for number in range(100, 120)))
        delivered(broker)
        broker.post("/srtm/trace/stop")
    assert bodies(engine, "t", 120) == [b"p %d" % number for number in range(120)]
    times = released(tmp_path / "t.parquet", "t")
    assert largest_excess(times, Timeline(TokenBucket.of(200, 5))).conforms
    assert times[-1] - times[0] >= 0.9 * 115 / 200 * 1e9  # new tokens for all


@pytest.mark.needs("nats-server")
def test_kill_9_of_the_broker_doubles_nothing_at_jetstream(tmp_path: Path) -> None:
    """What JetStream had, and the log did not know of yet, is sent again by the same id."""
    folder, sent, again = tmp_path / "data", 0, 0
    acknowledged: set[bytes] = set()
    with NatsServer(tmp_path) as server:
        for _ in range(5):
            begun = sent
            with broker_process(folder, flags=f"--engine {server.url}") as (process, tcp_port, http_port):
                make_disk_topic(http_port)
                sent, answered = publish_until_killed(process, tcp_port, sent, 0.5)
            acknowledged |= {b"%d" % number for number in range(begun, begun + answered)}
            there = {body for _, body in asyncio.run(stored(server.url, "t"))}
            again += len(there & not_finished(folder))
        with running(engine=server.url, data_path=str(folder)) as broker:
            delivered(broker)
        found = Counter(body for _, body in asyncio.run(stored(server.url, "t")))
    assert len(acknowledged) > 100
    assert again > 0  # or else nothing was tried
    assert acknowledged <= found.keys()
    assert max(found.values()) == 1


def not_finished(folder: Path) -> set[bytes]:
    """What a broker that is gone would send to its engine again."""
    log = Log.open(folder)
    try:
        (cursor,) = log.cursors("t")
        return {
            record.body
            for begin, end in cursor.unfinished(log.end("t"))
            for at in range(begin, end, 100)
            for record in log.read("t", at, min(100, end - at))
        }
    finally:
        log.close()


@pytest.mark.needs("nats-server")
def test_the_leader_is_killed_under_load_and_publishing_goes_on(
    start: Start, tmp_path: Path, record_property: Any
) -> None:
    with NatsCluster(tmp_path) as cluster:
        broker = start(engine=cluster.url, data_path=str(tmp_path / "data"), trace_folder=str(tmp_path))
        disk_topic(broker)
        broker.post("/topic/limit?topic=t&r=1000&b=20")
        broker.post("/srtm/trace/start?file=t.parquet")
        broker.wait_until(lambda each: each.topics["t"].lane.ready)  # type: ignore[union-attr]
        with Load(broker.address, "t", pause_s=0.02) as load:
            load.flows()
            leader = asyncio.run(leader_of(cluster.url, "t"))
            server = next(each for each in cluster.servers if each.name == leader)
            killed = time.monotonic()
            server.kill()
            broker.wait_until(lambda each: not each.topics["t"].lane.ready)  # type: ignore[union-attr]
            until(lambda: broker.do(lambda: broker.broker.topics["t"].lane.ready), 60)  # type: ignore[union-attr]
            elected_s = time.monotonic() - killed
            server.start(wait=False)
            load.flows()
        delivered(broker)
        broker.post("/srtm/trace/stop")
        times = sorted(load.acknowledged.values())
        longest_s = max(b - a for a, b in pairwise([at for at in times if at > killed - 1]))
        record_property("longest_gap_s", longest_s)
        print(f"longest gap between two OKs: {1000 * longest_s:.0f} ms; the stream had no leader for {elected_s:.1f} s")
        assert longest_s < 5
        found = Counter(body for _, body in asyncio.run(stored(cluster.url, "t")))
    assert load.acknowledged.keys() == found.keys()
    assert max(found.values()) == 1
    assert largest_excess(released(tmp_path / "t.parquet", "t"), Timeline(TokenBucket.of(1000, 20))).conforms


def test_an_engine_that_stops_under_load_delays_nobody(engine: Any, start: Start, tmp_path: Path) -> None:
    engine.start()
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"))
    disk_topic(broker)
    with Client(broker.address) as client:
        client.publish("t", b"1")
        delivered(broker)
        engine.signal(signal.SIGSTOP)
        client.publish("t", b"2", b"3")  # answered before anything has timed out
        assert broker.do(lambda: owed(broker, "t")) == 2
        engine.signal(signal.SIGCONT)
        delivered(broker)
    assert list(dict.fromkeys(bodies(engine, "t", 3))) == [b"1", b"2", b"3"]


def test_a_publisher_that_moves_on_does_not_wait_for_an_engine_that_is_away(
    engine: Any, start: Start, tmp_path: Path
) -> None:
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"))
    disk_topic(broker)
    broker.post("/topic/limit?topic=t&r=1&b=1")
    with Client(broker.address, srtm={"publisher": "p", "group": None, "topic": "t"}) as client:
        client.publish("t", b"1", b"2", b"3")
        client.sock.shutdown(socket.SHUT_WR)
        assert client.ended()
    assert broker.do(lambda: owed(broker, "t")) == 3


@pytest.mark.needs("nats-server")
def test_what_nats_will_not_take_is_refused_before_it_is_stored_or_dropped_after(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = bytes(1024 * 1024)
    server = NatsServer(tmp_path)
    broker = start(engine=server.url, data_path=str(tmp_path / "data"))
    disk_topic(broker)
    with Client(broker.address) as early:
        early.publish("t", b"1", large, b"2", large)  # nobody knows yet what is too large
    try:
        with caplog.at_level(logging.WARNING):
            server.start()
            delivered(broker)
        said = [record.message for record in caplog.records if "dropped a message" in record.message]
        problem = "a message may have at most 1048576 bytes, header and body"
        assert said == [f"TOPIC(t): dropped a message because the engine refuses it: {problem}"]
        assert broker.get("/stats?format=json")["srtm"]["engine"]["refused"] == 2
        with Client(broker.address) as late:
            late.send(say.pub("t", b"3"), say.pub("t", large))
            assert late.response() == b"OK"
            assert late.error().startswith(
                b"E_PUB_FAILED PUB failed the engine nats refuses it: a message may have at most 1048576 bytes"
            )
        status, body = broker.post("/pub?topic=t", large)
        assert (status, body.startswith(b'{"message":"MSG_TOO_BIG: the engine nats refuses it')) == (413, True)
        with Client(broker.address) as late:
            late.send(say.dpub("t", 1000, b"4"))
            assert late.error().startswith(b"E_DPUB_FAILED DPUB failed the engine nats cannot defer messages")
        delivered(broker)
        assert bodies(server, "t", 3) == [b"1", b"2", b"3"]
    finally:
        server.kill()


@pytest.mark.needs("nsqd")
def test_what_nsqd_refuses_is_dropped_and_the_rest_goes_on(start: Start, tmp_path: Path) -> None:
    with Nsqd(tmp_path, "--max-msg-size=100") as server:
        broker = start(engine=server.url, data_path=str(tmp_path / "data"))
        disk_topic(broker)
        with Client(broker.address) as client:
            client.publish("t", *(b"%d" % number for number in range(20)), bytes(200), b"20")
        delivered(broker)
        assert broker.get("/stats?format=json")["srtm"]["engine"]["refused"] == 1
        assert {b"%d" % number for number in range(21)} == set(bodies(server, "t", 21))
        broker.wait_until(lambda each: any(second.dropped == 1 for second in each.topics["t"].recent.history))


def test_pausing_emptying_and_deleting(engine: Any, start: Start, tmp_path: Path) -> None:
    engine.start()
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"), max_held_messages=40)
    disk_topic(broker)
    with Client(broker.address) as client:
        client.publish("t", b"1")
        delivered(broker)
        broker.post("/topic/pause?topic=t")
        for _ in range(100):
            client.publish("t", b"never")
        assert engine_of(broker, "t")["in_log"] > 0
        assert broker.post("/topic/empty?topic=t")[0] == 200
        assert broker.do(lambda: (owed(broker, "t"), broker.broker.topics["t"].depth)) == (0, 0)
        client.publish("t", *(b"%d" % number for number in range(2, 100)))
        broker.post("/topic/unpause?topic=t")
        delivered(broker)
        assert broker.post("/topic/delete?topic=t")[0] == 200
        disk_topic(broker)
        client.publish("t", *(b"%d" % number for number in range(100, 110)))  # of the same offsets as before
        delivered(broker)
    assert bodies(engine, "t", 109) == [b"%d" % number for number in range(1, 110)]


@pytest.mark.needs("nats-server")
class Clock:
    """The system's clocks, except that the first look says when the broker started."""

    def __init__(self, start_ns: int) -> None:
        self._first = [start_ns]

    def time_ns(self) -> int:
        return self._first.pop() if self._first else time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def process_time_ns(self) -> int:
        return time.process_time_ns()


@pytest.mark.processes
def test_jetstream_takes_no_new_message_for_one_that_it_has(tmp_path: Path) -> None:
    """Within the time that it remembers ids: a clock that is set back, an empty disk, a topic that is created again."""
    numbers, start_ns = iter(range(1_000)), time.time_ns()
    published: list[bytes] = []

    def use(broker: Running) -> None:
        with Client(broker.address) as client:
            for topic in ("t", "m"):
                client.publish(topic, *(some := [b"%d" % next(numbers) for _ in range(20)]))
                published.extend(some)
        delivered(broker)

    with NatsServer(tmp_path) as server:
        for folder in ("one", "one", "two"):
            with running(clock=Clock(start_ns), engine=server.url, data_path=str(tmp_path / folder)) as broker:
                assert broker.broker.started_ns == start_ns
                disk_topic(broker)
                use(broker)
                if folder == "two":
                    for topic in ("t", "m"):
                        assert broker.post(f"/topic/delete?topic={topic}")[0] == 200
                    disk_topic(broker)
                    use(broker)
        assert sorted(bodies(server, "t", 0) + bodies(server, "m", 0)) == sorted(published)


def test_the_log_can_be_read_and_channels_are_the_engines(engine: Any, start: Start, tmp_path: Path) -> None:
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"))
    disk_topic(broker)
    with Client(broker.address) as client:
        client.publish("t", b"1", b"2")
        client.send(say.sub("t", "c"))
        assert b"is delivered by the engine" in client.error()
    status, body = fetch_log(broker)
    assert status == 200
    assert pa.ipc.open_stream(body).read_all()["body"].to_pylist() == [b"1", b"2"]
    assert broker.post("/topic/create?topic=t&retain_acknowledged=true")[0] == 200
    engine.start()
    delivered(broker)
    assert broker.get("/srtm/log?topic=t")["begin"] == 0


def fetch_log(broker: Running) -> tuple[int, bytes]:
    """The answer to a read of topic t from its beginning."""
    return fetch(urllib.request.Request(f"{broker.url}/srtm/log/read?topic=t&begin=0"))


def test_retention_by_size_takes_what_the_engine_has_not_got_and_says_so(
    engine: Any, start: Start, tmp_path: Path
) -> None:
    broker = start(engine=engine.url, data_path=str(tmp_path / "data"), max_held_messages=20)
    assert broker.post("/topic/create?topic=t&durability=disk&retain_bytes=20000")[0] == 200
    with Client(broker.address) as client:
        for number in range(100):
            client.publish("t", b"%d " % number + bytes(1000))
        until(lambda: engine_of(broker, "t")["lost"] > 0)
        lost, left = (engine_of(broker, "t")[name] for name in ("lost", "in_log"))
        engine.start()
        delivered(broker)
    assert len(bodies(engine, "t", 100 - lost)) == 100 - lost
    assert lost + left < 100  # what is in memory is sent all the same


def test_messages_are_kept_for_whom_they_were_kept_for(tmp_path: Path) -> None:
    folder, away = str(tmp_path), "nsqd://127.0.0.1:1"
    with running(data_path=folder) as broker, Client(broker.address) as client:
        broker.post("/topic/create?topic=m")
        client.publish("m", b"saved")
        disk_topic(broker, "d")
        client.publish("d", b"stored")
        broker.post("/channel/create?topic=d&channel=c")
    with (
        pytest.raises(BrokerError, match=r"has channels \(d/c\), which the engine nsqd cannot serve: .* delete them"),
        running(data_path=folder, engine=away),
    ):
        pass
    with running(data_path=folder) as broker:
        broker.wait_until(lambda each: len(each.topics["m"].unclaimed) == 1)  # a start that failed took nothing
        broker.post("/channel/delete?topic=d&channel=c")
        broker.post("/topic/delete?topic=m")
    with running(data_path=folder, engine=away) as broker:  # the engine gets what nobody had got
        assert broker.do(lambda: owed(broker, "d")) == 1
    with (
        pytest.raises(BrokerError, match=r"an engine delivers \(d: 1 messages not acknowledged\): start with --engine"),
        running(data_path=folder),
    ):
        pass


@pytest.mark.needs("nsqd")
def test_kill_9_of_the_broker_loses_nothing_at_nsqd(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with Nsqd(tmp_path) as server:
        with broker_process(folder, flags=f"--engine {server.url}") as (process, tcp_port, http_port):
            make_disk_topic(http_port)
            assert post(http_port, "/topic/limit?topic=t&r=100&b=5") == 200
            with Client(("127.0.0.1", tcp_port)) as client:
                client.publish("t", *(b"%d" % number for number in range(50)))
            process.kill()
        with running(engine=server.url, data_path=str(folder)) as broker:
            delivered(broker)
        found = Counter(bodies(server, "t", 50))
    assert found.keys() == {b"%d" % number for number in range(50)}
