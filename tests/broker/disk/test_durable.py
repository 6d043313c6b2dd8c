"""Topics on disk on real sockets: nothing that was answered with OK is lost, whatever ends the broker."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest

from srtm.broker.disk.log import Log
from srtm.model.bucket import TokenBucket
from srtm.protocol import client as say
from srtm.protocol.client import Error
from srtm.protocol.frames import OK
from srtm.protocol.names import MAGIC_V2
from srtm.units import NANO_PER_TOKEN
from tests.broker.disk.test_log import free, small_disk, until
from tests.broker.running import Client, Running, fetch, in_memory, running

__all__ = ["small_disk"]


def bodies_of(client: Client, count: int) -> list[bytes]:
    """The next messages, finished."""
    found = []
    for _ in range(count):
        message = client.message()
        client.send(say.fin(message.id))
        found.append(message.body)
    return found


def disk_topic(broker: Running, name: str = "t") -> None:
    assert broker.post(f"/topic/create?topic={name}&durability=disk")[0] == 200


def test_what_was_answered_is_there_after_a_restart_and_what_was_finished_is_not(tmp_path: Path) -> None:
    with running(data_path=str(tmp_path)) as broker:
        disk_topic(broker)
        with Client(broker.address) as consumer, Client(broker.address) as publisher:
            consumer.send(say.sub("t", "c") + say.rdy(3))
            ok(consumer)
            publisher.send(b"".join(say.pub("t", b"%d" % number) for number in range(10)))
            publisher.send(say.mpub("t", [b"10", b"11"]))
            for _ in range(11):
                ok(publisher)
            assert bodies_of(consumer, 3) == [b"0", b"1", b"2"]
            broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == 3)
    with running(data_path=str(tmp_path)) as broker, Client(broker.address) as consumer:
        assert broker.get("/srtm/log?topic=t")["end"] == 12
        consumer.send(say.sub("t", "c") + say.rdy(100))
        ok(consumer)
        assert bodies_of(consumer, 9) == [b"%d" % number for number in range(3, 12)]
        broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == 9)
    with running(data_path=str(tmp_path)) as broker:
        broker.wait_until(lambda b: "c" in b.topics["t"].channels)
        assert broker.do(lambda: broker.broker.topics["t"].channels["c"].held) == 0


def test_the_first_channel_gets_everything_and_a_later_one_what_comes(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as publisher:
        disk_topic(broker)
        publisher.send(say.pub("t", b"early"))
        ok(publisher)
        with Client(broker.address) as first, Client(broker.address) as second:
            first.send(say.sub("t", "one") + say.rdy(10))
            ok(first)
            assert bodies_of(first, 1) == [b"early"]
            second.send(say.sub("t", "two") + say.rdy(10))
            ok(second)
            publisher.send(say.pub("t", b"late"))
            ok(publisher)
            assert bodies_of(first, 1) == bodies_of(second, 1) == [b"late"]


def test_the_first_channel_gets_everything_also_if_it_is_ephemeral_and_after_a_restart(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as publisher:
        broker.post("/topic/create?topic=t&durability=disk")
        publisher.publish("t", b"1", b"2")
    with (
        in_memory(data_path=str(tmp_path)) as broker,
        Client(broker.address) as publisher,
        Client(broker.address) as reader,
        Client(broker.address) as second,
    ):
        publisher.publish("t", b"3")
        reader.subscribe("t", "c#ephemeral", 10)
        assert [reader.message().body for _ in range(3)] == [b"1", b"2", b"3"]
        second.subscribe("t", "d#ephemeral", 10)
        publisher.publish("t", b"4")
        assert second.message().body == b"4"


def test_a_limited_disk_topic_gives_each_message_once(tmp_path: Path) -> None:
    """A channel that comes while messages wait for tokens gets those through the bucket alone."""
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as publisher:
        disk_topic(broker)
        assert broker.post("/topic/limit?topic=t&r=20&b=2")[0] == 200
        publisher.send(b"".join(say.pub("t", b"%d" % number) for number in range(8)))
        for _ in range(8):
            ok(publisher)
        with Client(broker.address) as consumer:
            consumer.send(say.sub("t", "c") + say.rdy(100))
            ok(consumer)
            # What had its token is read from the log, and may come after what got one meanwhile.
            assert sorted(bodies_of(consumer, 8)) == [b"%d" % number for number in range(8)]
            broker.sleep(0.3)
            assert broker.channel("t", "c")["message_count"] == 8


def test_a_channel_that_comes_with_a_change_of_the_limit_gets_each_message_once(tmp_path: Path) -> None:
    """Messages that got their tokens when (r, b) changed are in nobody's queue until the turn ends."""
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as publisher:
        disk_topic(broker)
        assert broker.post("/topic/limit?topic=t&r=0.001&b=1")[0] == 200
        publisher.send(say.mpub("t", [b"%d" % number for number in range(8)]))
        ok(publisher)
        found = broker.broker.topics["t"]

        def change() -> None:
            found.gate.limit(TokenBucket.of(1_000, 100), broker.now_ns(), 100 * NANO_PER_TOKEN)
            found.gate.limit(TokenBucket.of(1_000, 100), broker.now_ns())
            broker.broker.topics.channel(found, "c")
            broker.broker.turn.wake()

        broker.do(change)
        with Client(broker.address) as consumer:
            consumer.subscribe("t", "c", 100)
            assert sorted(bodies_of(consumer, 8)) == [b"%d" % number for number in range(8)]
            assert consumer.silent()


def test_a_range_is_replayed_exactly(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as publisher:
        disk_topic(broker)
        publisher.send(say.mpub("t", [b"%d" % number for number in range(50)]))
        ok(publisher)
        reads = [_read(broker, "topic=t&begin=10&limit=20") for _ in range(2)]
        assert reads[0] == reads[1]
        assert reads[0]["body"].to_pylist() == [b"%d" % number for number in range(10, 30)]
        assert reads[0]["offset"].to_pylist() == list(range(10, 30))
        assert broker.post("/srtm/log/trim?topic=t&before=20")[0] == 200
        status, text = _get(broker, "/srtm/log/read?topic=t&begin=10")
        assert (status, b"OFFSET_TRIMMED" in text) == (410, True)
        assert _get(broker, "/srtm/log/read?topic=t&begin=99")[0] == 400
        assert _get(broker, "/srtm/log/read?topic=t&begin=-1")[0] == 400


def test_a_trim_that_waits_for_channels(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path), retain_acknowledged=True) as broker, Client(broker.address) as publisher:
        disk_topic(broker)
        publisher.send(say.mpub("t", [b"%d" % number for number in range(10)]))
        ok(publisher)
        with Client(broker.address) as consumer:
            consumer.send(say.sub("t", "c") + say.rdy(4))
            ok(consumer)
            assert bodies_of(consumer, 4) == [b"0", b"1", b"2", b"3"]
            broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == 4)
            assert broker.post("/srtm/log/trim?topic=t&before=7&finished=true")[0] == 200
            assert broker.get("/srtm/log?topic=t")["begin"] == 4
            assert broker.post("/srtm/log/trim?topic=t&before=2&finished=true")[0] == 200
            assert broker.get("/srtm/log?topic=t")["begin"] == 4
        assert broker.post("/srtm/log/trim?topic=t&before=7&finished=maybe")[0] == 400
        assert broker.post("/srtm/log/trim?topic=t&before=7")[0] == 200
        assert broker.get("/srtm/log?topic=t")["begin"] == 7


def test_without_a_channel_a_topic_is_never_full(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path), max_held_messages=10) as broker, Client(broker.address) as publisher:
        disk_topic(broker)
        for number in range(40):
            publisher.publish("t", b"%d" % number)
        assert broker.do(lambda: broker.broker.topics["t"].depth) == 5
        with Client(broker.address, srtm={"replay": {"offset": 30}}) as replaying:
            assert bodies_of(replaying.subscribe("t", "r#ephemeral", 5), 10) == [b"%d" % n for n in range(30, 40)]
        with Client(broker.address) as consumer:
            assert bodies_of(consumer.subscribe("t", "c", 5), 40) == [b"%d" % number for number in range(40)]


def test_a_topic_that_may_hold_one_message_passes_on_every_message(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path), max_held_messages=1) as broker, Client(broker.address) as publisher:
        disk_topic(broker)
        publisher.publish("t", *(b"%d" % number for number in range(10)))
        with Client(broker.address) as consumer:
            assert bodies_of(consumer.subscribe("t", "c", 1), 10) == [b"%d" % number for number in range(10)]
            publisher.send(*(say.pub("t", b"%d" % number) for number in range(10)))
            assert bodies_of(consumer, 10) == [b"%d" % number for number in range(10)]
            broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == 20)
    with in_memory(data_path=str(tmp_path), max_held_messages=1) as broker, Client(broker.address) as publisher:
        publisher.send(*(say.pub("t", b"%d" % number) for number in range(10)))
        with Client(broker.address) as consumer:
            assert bodies_of(consumer.subscribe("t", "c", 2), 10) == [b"%d" % number for number in range(10)]


def test_an_emptied_disk_topic_gives_nothing_to_its_first_channel(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as publisher:
        disk_topic(broker)
        publisher.publish("t", b"1", b"2")
        assert broker.post("/topic/empty?topic=t")[0] == 200
        publisher.publish("t", b"3")
        with Client(broker.address) as consumer:
            assert bodies_of(consumer.subscribe("t", "c", 10), 1) == [b"3"]


def test_what_waited_when_a_disk_topic_was_emptied_is_not_there_after_a_restart(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        disk_topic(broker)
        broker.post("/channel/create?topic=t&channel=c")
        broker.post("/topic/pause?topic=t")
        client.publish("t", b"1", b"2")
        broker.wait_until(lambda b: b.topics["t"].depth == 2)
        assert broker.post("/topic/empty?topic=t")[0] == 200
        client.publish("t", b"3")
        broker.post("/topic/unpause?topic=t")
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        assert bodies_of(client.subscribe("t", "c", 10), 1) == [b"3"]


def test_queues_of_memory_topics_outlive_a_stop(tmp_path: Path) -> None:
    with (
        in_memory(data_path=str(tmp_path)) as broker,
        Client(broker.address) as publisher,
        Client(broker.address) as consumer,
    ):
        consumer.subscribe("m", "c", 1)
        publisher.publish("m", *(b"%d" % number for number in range(5)))
        assert consumer.message().body == b"0"  # in flight when the broker stops
        publisher.publish("nobody", b"x")
        broker.wait_until(lambda b: len(b.topics["nobody"].unclaimed) == 1)
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as consumer:
        consumer.send(say.sub("m", "c") + say.rdy(10))
        ok(consumer)
        assert sorted(bodies_of(consumer, 5)) == [b"%d" % number for number in range(5)]
        with Client(broker.address) as other:
            other.send(say.sub("nobody", "c") + say.rdy(10))
            ok(other)
            assert bodies_of(other, 1) == [b"x"]


@pytest.mark.processes
def test_kill_9_takes_nothing_that_a_stop_had_saved_and_nobody_had_got(tmp_path: Path) -> None:
    saved = {"unclaimed": 3, "waiting": 5, "queued": 5, "deferred": 1}
    with running(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        broker.post("/topic/limit?topic=waiting&r=0.001&b=1")
        for topic in ("queued", "deferred", "waiting"):
            broker.post(f"/topic/create?topic={topic}")
            broker.post(f"/channel/create?topic={topic}&channel=c")
        for topic in ("unclaimed", "queued", "waiting"):
            client.publish(topic, *(b"%d" % number for number in range(saved[topic])))
        client.send(say.dpub("deferred", 3_600_000, b"x"))
        ok(client)
    for delivered in (False, True, True):
        with broker_process(tmp_path) as (process, tcp_port, http_port):
            stats = f"http://127.0.0.1:{http_port}/stats?format=json"
            found = {
                topic["topic_name"]: topic for topic in json.loads(fetch(urllib.request.Request(stats))[1])["topics"]
            }
            assert found["unclaimed"]["depth"] == 3
            assert found["waiting"]["depth"] == 4
            assert found["deferred"]["channels"][0]["deferred_count"] == 1
            with Client(("127.0.0.1", tcp_port)) as client:
                if delivered:
                    client.subscribe("queued", "c", 10)
                    if found["queued"]["channels"][0]["depth"]:
                        assert bodies_of(client, 5) == [b"0", b"1", b"2", b"3", b"4"]
                        time.sleep(1)  # it is looked at ten times a second
                    else:
                        assert client.silent()
                process.kill()
    assert found["queued"]["channels"][0]["depth"] == 0


def test_a_stop_saves_all_topics_in_one_transaction(tmp_path: Path) -> None:
    said: list[str] = []
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        for number in range(30):
            client.publish(f"t{number}", b"x")
        broker.post("/topic/pause?topic=t0")  # names are on disk
        durable = broker.broker.durable
        assert durable is not None
        durable._log.call(lambda: durable._log._store._db.set_trace_callback(said.append))
    assert len([statement for statement in said if statement.startswith("INSERT INTO queue")]) == 30
    assert said.count("COMMIT") == 1


@pytest.mark.processes
def test_a_stop_that_finds_no_room_says_what_is_lost_and_leaves_some(small_disk: Path) -> None:
    command = f"exec {sys.executable} -m srtm broker --tcp-port 0 --http-port 0 --data-path {small_disk}"
    with subprocess.Popen(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        port = int(process.stdout.readline().split(", ")[0].rpartition(":")[2])
        with Client(("127.0.0.1", port)) as client:
            client.publish("t", *(random.Random(7).randbytes(500_000) for _ in range(8)))
        process.terminate()
        text = process.stderr.read()
    assert process.returncode
    assert "8 messages of memory topics are lost: no room" in text
    assert "Traceback" not in text
    with running(data_path=str(small_disk)) as broker:
        assert broker.do(lambda: list(broker.broker.topics)) == ["t"]


@pytest.mark.processes
@pytest.mark.parametrize("small_disk", [64], indirect=True)
def test_a_disk_that_is_full_twice_leaves_a_broker_that_serves(small_disk: Path) -> None:
    """First the log fills it, until old messages are deleted; then another program does, until it goes."""
    body = random.Random(1).randbytes(100_000)
    with running(data_path=str(small_disk / "data")) as broker:
        disk_topic(broker)

        def refused() -> bytes:
            for _ in range(1_000):
                status, text = broker.post("/pub?topic=t", body)
                if status != 200:
                    return text
            raise AssertionError("it is never full")

        def serves() -> bool:
            return broker.post("/pub?topic=t", body) == (200, b"OK") and broker.page("/ping") == (200, b"OK")

        assert b"PUB_FAILED" in refused()
        assert broker.page("/ping")[1].startswith(b"NOK - ")
        assert broker.post("/srtm/log/trim?topic=t&before=1000000")[0] == 200
        until(serves)
        (small_disk / "filler").write_bytes(bytes(free(small_disk) - 3_000_000))
        assert b"PUB_FAILED" in refused()
        (small_disk / "filler").unlink()
        until(serves)


def test_a_folder_that_vanishes_stops_disk_topics_alone(tmp_path: Path) -> None:
    with running(data_path=str(tmp_path / "data")) as broker, Client(broker.address) as publisher:
        disk_topic(broker)
        publisher.publish("t", b"1")
        (tmp_path / "data").rename(tmp_path / "elsewhere")
        until(lambda: broker.page("/ping")[0] == 500)  # though nobody publishes
        assert b"was removed, moved or replaced" in broker.page("/ping")[1]
        assert "was removed" in broker.get("/stats?format=json")["health"]
        publisher.publish("memory", b"1")
        publisher.send(say.pub("t", b"2"))
        assert b"E_PUB_FAILED PUB failed" in publisher.error()
        (tmp_path / "elsewhere").rename(tmp_path / "data")
        until(lambda: broker.page("/ping") == (200, b"OK"))
        assert broker.post("/pub?topic=t", b"2") == (200, b"OK")


def test_what_was_deferred_is_due_at_the_same_time_after_a_restart(tmp_path: Path) -> None:
    """DPUB of a disk topic, with a channel and without; DPUB and REQ of a memory topic."""
    due_ns = {}
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        for topic in ("disk", "early"):
            disk_topic(broker, topic)
        for topic in ("disk", "memory"):
            broker.post(f"/topic/create?topic={topic}")
            broker.post(f"/channel/create?topic={topic}&channel=c")
        for topic in ("disk", "early", "memory"):
            due_ns[topic] = broker.now_ns() + 1_500_000_000
            client.send(say.dpub(topic, 1_500, topic.encode()))
            ok(client)
        client.subscribe("memory", "c")
        client.publish("memory", b"given back")
        message = client.message()
        due_ns["given back"] = broker.now_ns() + 1_500_000_000
        client.send(say.req(message.id, 1_500))
        broker.wait_until(lambda b: len(b.topics["memory"].channels["c"].deferred) == 2)
    with in_memory(data_path=str(tmp_path)) as broker:
        for topic, names in {"disk": ["disk"], "early": ["early"], "memory": ["memory", "given back"]}.items():
            with Client(broker.address) as client:
                client.subscribe(topic, "c", 10)
                for name in names:
                    assert client.message().body == name.encode()
                    assert broker.now_ns() >= due_ns[name]


def test_disk_topics_need_a_folder() -> None:
    with in_memory() as broker:
        status, text = broker.post("/topic/create?topic=t&durability=disk")
        assert (status, b"start it with --data-path" in text) == (400, True)
        assert broker.post("/topic/create?topic=t&durability=tape")[0] == 400


@pytest.mark.processes
def test_a_full_disk_is_the_publishers_error_and_the_broker_lives(tmp_path: Path) -> None:
    """Files may not grow beyond 18 MB: the log's reserve takes 16 of them."""
    with broker_process(tmp_path, "ulimit -f 18432;") as (_, tcp_port, http_port):
        make_disk_topic(http_port)
        stored = 0
        with Client(("127.0.0.1", tcp_port)) as publisher:
            while True:
                publisher.send(say.pub("t", bytes(500_000)))
                answer = publisher.next()
                if isinstance(answer, Error):
                    break
                stored += 1
                assert stored < 100
        assert answer.problem.wire.startswith(b"E_PUB_FAILED PUB failed ")
        status, health = fetch(urllib.request.Request(f"http://127.0.0.1:{http_port}/ping"))
        assert (status, health[:6]) == (500, b"NOK - ")  # as nsqd says it
        _, extent = fetch(urllib.request.Request(f"http://127.0.0.1:{http_port}/srtm/log?topic=t"))
        assert json.loads(extent)["end"] == stored


KILLS = int(os.environ.get("SRTM_KILLS", "12"))


@pytest.mark.processes
def test_kill_9_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    """A broker is killed at random moments while it is published to; then its log is looked at."""
    rng = random.Random(7)
    stored: list[int] = []
    sent = 0
    for _ in range(KILLS):
        before, begun = len(stored), sent
        with broker_process(tmp_path) as (process, tcp_port, http_port):
            make_disk_topic(http_port)
            sent, answered = publish_until_killed(process, tcp_port, sent, rng.uniform(0.0, 0.3))
        log = Log.open(tmp_path)
        try:
            stored = [int(r.body) for at in range(0, log.end("t"), 1_000) for r in log.read("t", at, 1_000)]
        finally:
            log.close()
        assert stored[before : before + answered] == list(range(begun, begun + answered))
        assert stored == sorted(set(stored))


@contextmanager
def broker_process(folder: Path, limits: str = "", flags: str = "") -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A broker as a process of its own, which ends with the block if not before; and its ports."""
    command = f"{limits} exec {sys.executable} -m srtm broker --tcp-port 0 --http-port 0 --data-path {folder} {flags}"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            tcp_port, http_port = [int(part.rpartition(":")[2]) for part in process.stdout.readline().split(", ")]
            yield process, tcp_port, http_port
        finally:
            process.kill()


def publish_until_killed(process: subprocess.Popen[str], tcp_port: int, first: int, seconds: float) -> tuple[int, int]:
    """Publish numbers to a broker, and kill it after a while; the next number, and how many were answered."""
    sent, got, ends = first, b"", time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", tcp_port), timeout=5) as publisher:
        publisher.sendall(MAGIC_V2)
        while time.monotonic() < ends:
            publisher.sendall(b"".join(say.pub("t", b"%d" % number) for number in range(sent, sent + 7)))
            sent += 7
            got += publisher.recv(4096)
        process.kill()
        with suppress(ConnectionError):
            while more := publisher.recv(4096):
                got += more
    return sent, len(got) // len(OK)


def make_disk_topic(http_port: int) -> None:
    url = f"http://127.0.0.1:{http_port}/topic/create?topic=t&durability=disk"
    assert fetch(urllib.request.Request(url, data=b"", method="POST"))[0] == 200


def ok(client: Client) -> None:
    assert client.response() == b"OK"


def _get(broker: Running, path: str) -> tuple[int, bytes]:
    return broker.page(path)


def _read(broker: Running, query: str) -> pa.Table:
    status, body = _get(broker, f"/srtm/log/read?{query}")
    assert status == 200, body
    return pa.ipc.open_stream(body).read_all()
