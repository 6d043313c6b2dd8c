"""Topics and channels that are deleted and created again under the same name: nothing of the old ones is in the new."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from srtm.broker.disk.log import Log
from srtm.broker.http.publishing import HttpSender
from srtm.broker.topic import Topic
from srtm.protocol import client as say
from srtm.protocol.orders import Migrate, Throttle
from tests.broker.disk.test_durable import bodies_of, broker_process, disk_topic
from tests.broker.disk.test_log import made
from tests.broker.running import Client, Running, fetch, in_memory, running


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Running]:
    with in_memory(data_path=str(tmp_path)) as found:
        yield found


@pytest.fixture
def on_sockets(tmp_path: Path) -> Iterator[Running]:
    """For tests that keep the disk busy, which would stop virtual time."""
    with running(data_path=str(tmp_path)) as found:
        yield found


def publish(broker: Running, *bodies: bytes) -> None:
    with Client(broker.address) as publisher:
        publisher.publish("t", *bodies)


def log_of(broker: Running) -> str:
    found = broker.get("/srtm/log?topic=t")["log"]
    assert isinstance(found, str)
    return found


def again(broker: Running) -> None:
    """Delete the disk topic t, and create it again at once."""
    assert broker.post("/topic/delete?topic=t")[0] == 200
    disk_topic(broker)


def messages_of(path: Path) -> tuple[int, int]:
    """Where the log of t in a folder begins and ends."""
    log = Log.open(path)
    try:
        return log.begin("t"), log.end("t")
    finally:
        log.close()


@contextmanager
def busy_disk(broker: Running) -> Iterator[None]:
    """What is handed to the log meanwhile stays there, as behind a slow disk."""
    durable, go_on = broker.broker.durable, threading.Event()
    assert durable is not None
    thread = threading.Thread(target=lambda: durable._log.call(lambda: go_on.wait(10)))
    thread.start()
    try:
        yield
    finally:
        go_on.set()
        thread.join()


def test_a_log_has_an_id_that_outlives_the_broker_and_not_its_topic(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker:
        disk_topic(broker)
        publish(broker, b"1")
        first = log_of(broker)
    with in_memory(data_path=str(tmp_path)) as broker:
        assert log_of(broker) == first
        disk_topic(broker)  # it is there already
        assert log_of(broker) == first
        again(broker)
        second = log_of(broker)
        assert second != first
    with in_memory(data_path=str(tmp_path)) as broker:
        assert log_of(broker) == second
    with in_memory(data_path=str(tmp_path / "new")) as broker:
        disk_topic(broker)
        assert log_of(broker) not in (first, second)


def test_an_offset_of_the_old_log_is_refused_by_the_new_one_that_has_grown_beyond_it(broker: Running) -> None:
    disk_topic(broker)
    publish(broker, *(b"old" for _ in range(10)))
    old = log_of(broker)
    again(broker)
    publish(broker, *(b"new" for _ in range(20)))
    new = log_of(broker)
    read = f"/srtm/log/read?topic=t&begin=5&log={old}"
    status, said = broker.page(read)
    assert (status, b"LOG_REPLACED: topic 't' no longer has log '%b'" % old.encode() in said) == (410, True)
    assert b"deleted and created again" in said
    assert broker.page(f"/srtm/log/read?topic=t&begin=5&log={new}")[0] == 200
    assert broker.post(f"/srtm/log/trim?topic=t&before=9&log={old}")[0] == 410
    assert broker.get("/srtm/log?topic=t")["begin"] == 0
    with Client(broker.address, srtm={"replay": {"offset": 5, "log": old}}) as client:
        client.send(say.sub("t", "r#ephemeral"))
        assert client.error().startswith(b"E_SUB_FAILED SUB failed topic 't' no longer has log")
        assert client.ended()
    with Client(broker.address, srtm={"replay": {"offset": 18, "log": new}}) as client:
        assert client.settled["srtm"] == {"replay": {"offset": 18, "log": new}}
        client.subscribe("t", "r#ephemeral", 10)
        assert bodies_of(client, 2) == [b"new", b"new"]
    assert broker.post(f"/srtm/log/trim?topic=t&before=9&log={new}")[0] == 200
    assert broker.get("/srtm/log?topic=t")["begin"] == 9


def test_progress_and_messages_do_not_survive_a_deletion(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as consumer:
        disk_topic(broker)
        consumer.subscribe("t", "c", 100)
        publish(broker, *(b"old %d" % number for number in range(10)))
        bodies_of(consumer, 7)
        broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == 7)
        again(broker)
        assert [consumer.message().body for _ in range(3)] == [b"old 7", b"old 8", b"old 9"]  # sent before
        assert consumer.ended()
        assert broker.get("/srtm/log?topic=t")["end"] == 0
        publish(broker, *(b"new %d" % number for number in range(9)))
        assert broker.do(lambda: list(broker.broker.topics["t"].channels)) == []
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as consumer:
        consumer.subscribe("t", "c", 100)
        assert bodies_of(consumer, 9) == [b"new %d" % number for number in range(9)]
        assert consumer.silent()


@pytest.mark.processes
def test_kill_9_after_a_deletion_was_answered(tmp_path: Path) -> None:
    """It is gone, and does not come back in memory either; what is created next is another log."""
    ids = set()
    for turn in range(6):
        with broker_process(tmp_path) as (process, tcp, http):
            url = f"http://127.0.0.1:{http}"

            def post(path: str, at: str = url) -> int:
                return fetch(urllib.request.Request(at + path, data=b"", method="POST"))[0]

            assert fetch(urllib.request.Request(f"{url}/srtm/log?topic=t"))[0] == 404
            for topic in ("t", "other"):
                assert post(f"/topic/create?topic={topic}&durability=disk") == 200
            assert post("/topic/create?topic=m") == 200
            with Client(("127.0.0.1", tcp)) as client:
                client.publish("t", b"%d" % turn)
                client.publish("other", b"%d" % turn)
            for topic in ("t", "m"):
                assert post(f"/channel/create?topic={topic}&channel=c") == 200
            ids.add(fetch(urllib.request.Request(f"{url}/srtm/log?topic=t"))[1])
            if turn % 2:
                assert post("/channel/delete?topic=t&channel=c") == 200
            assert post("/topic/delete?topic=t") == post("/topic/delete?topic=m") == 200
            process.kill()
    assert len(ids) == 6
    with running(data_path=str(tmp_path)) as broker:
        assert broker.do(lambda: list(broker.broker.topics)) == ["other"]
        assert broker.get("/srtm/log?topic=other")["end"] == 6


@pytest.mark.processes
def test_kill_9_after_the_deletion_of_a_channel_was_answered(tmp_path: Path) -> None:
    with broker_process(tmp_path) as (process, _, http):
        url = f"http://127.0.0.1:{http}"
        for path in (
            "/topic/create?topic=t&durability=disk",
            "/channel/create?topic=t&channel=c",
            "/channel/delete?topic=t&channel=c",
        ):
            assert fetch(urllib.request.Request(url + path, data=b"", method="POST"))[0] == 200
        process.kill()
    with running(data_path=str(tmp_path)) as broker:
        assert broker.do(lambda: list(broker.broker.topics["t"].channels)) == []


@pytest.mark.processes
def test_messages_that_a_stop_saved_go_with_their_topic(tmp_path: Path) -> None:
    """Also if the broker is killed right after the deletion was answered."""
    with running(data_path=str(tmp_path)) as broker:
        broker.post("/topic/create?topic=t")
        broker.post("/topic/create?topic=u")
        broker.post("/channel/create?topic=u&channel=c")
        for topic in ("t", "u"):
            broker.post(f"/pub?topic={topic}", b"old")
    with broker_process(tmp_path) as (process, _, http):
        for path in ("/topic/delete?topic=t", "/channel/delete?topic=u&channel=c"):
            assert fetch(urllib.request.Request(f"http://127.0.0.1:{http}{path}", data=b"", method="POST"))[0] == 200
        process.send_signal(signal.SIGKILL)
    with running(data_path=str(tmp_path)) as broker:
        assert broker.do(lambda: [*broker.broker.topics, *broker.broker.topics["u"].channels]) == ["u"]


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_message_on_its_way_to_the_log_goes_with_its_topic(on_sockets: Running, *, comes_back: bool) -> None:
    """It is neither in the new topic's memory, where no restart would find it, nor does it make the topic anew."""
    disk_topic(on_sockets)
    with Client(on_sockets.address) as publisher, Client(on_sockets.address) as consumer:
        with busy_disk(on_sockets):
            publisher.send(say.pub("t", b"old"))
            on_sockets.wait_until(lambda b: any(each.holds for each in b.clients.connections))
            deleting = threading.Thread(target=on_sockets.post, args=("/topic/delete?topic=t",))
            deleting.start()
            on_sockets.wait_until(lambda b: "t" not in b.topics)
            if comes_back:
                creating = threading.Thread(target=disk_topic, args=(on_sockets,))
                creating.start()
                on_sockets.wait_until(lambda b: "t" in b.topics)
                consumer.subscribe("t", "c", 10)
        assert publisher.response() == b"OK"
        deleting.join()
        if not comes_back:
            assert "t" not in on_sockets.do(lambda: list(on_sockets.broker.topics))
            return
        creating.join()
        publisher.publish("t", b"new")
        assert on_sockets.get("/srtm/log?topic=t")["end"] == 1
        assert bodies_of(consumer, 1) == [b"new"]
        assert consumer.silent()


def test_a_disk_that_refuses_a_deletion_says_so_and_lets_go_of_the_name_later(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker:
        disk_topic(broker)
        publish(broker, b"old")
        old, durable = log_of(broker), broker.broker.durable
        assert durable is not None
        durable._log.call(lambda: durable._log._store._db.execute("PRAGMA query_only = ON"))
        status, said = broker.post("/topic/delete?topic=t")
        assert (status, b"NOT_SAVED" in said) == (503, True)
        assert broker.post("/topic/create?topic=t&durability=disk")[0] == 503
        durable._log.call(lambda: durable._log._store._db.execute("PRAGMA query_only = OFF"))
        disk_topic(broker)
        assert broker.get("/srtm/log?topic=t")["end"] == 0
        assert log_of(broker) != old
        publish(broker, b"new")
    assert messages_of(tmp_path) == (0, 1)


def test_a_deletion_that_a_disk_refused_is_made_good_without_anybody(tmp_path: Path) -> None:
    log = Log.open(tmp_path)
    try:
        log.append_wait("t", made(0, 1))
        log.call(lambda: log._store._db.execute("PRAGMA query_only = ON"))
        log.delete_topic("t")
        log.call()
        assert log.topics == []
        log.call(lambda: log._store._db.execute("PRAGMA query_only = OFF"))
        until = time.monotonic() + 10
        while log.call(lambda: log._store._db.execute("SELECT count(*) FROM topic").fetchone()[0]):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        log.close()


def test_a_deleted_topics_number_is_not_the_next_ones(tmp_path: Path) -> None:
    """A reader in another thread may still look for its batches by that number."""
    log = Log.open(tmp_path)
    try:
        numbers = []
        for name in ("a", "b", "a"):
            log.append_wait(name, made(0, 1))
            numbers.append(log._topics[name].id)
            log.delete_topic(name)
            log.call()
        assert len(set(numbers)) == 3
    finally:
        log.close()


def test_a_channel_that_is_created_again_has_nothing_of_the_old_one(broker: Running) -> None:
    """As in nsqd: consumers are disconnected, and what they had is nobody's."""
    broker.post("/topic/create?topic=t")
    with Client(broker.address) as consumer, Client(broker.address) as second:
        consumer.subscribe("t", "c", 2)
        publish(broker, b"in flight", b"deferred", b"queued")
        flying, deferred = consumer.message(), consumer.message()
        consumer.send(say.req(deferred.id, 300), say.rdy(1))
        broker.wait_until(lambda b: len(b.topics["t"].channels["c"].deferred) == 1)
        assert broker.post("/channel/pause?topic=t&channel=c")[0] == 200
        assert broker.post("/channel/delete?topic=t&channel=c")[0] == 200
        assert broker.post("/channel/create?topic=t&channel=c")[0] == 200
        assert consumer.ended()
        second.subscribe("t", "c", 10)
        second.send(say.fin(flying.id), say.touch(flying.id), say.req(flying.id, 0))
        assert [second.error().split()[0] for _ in range(3)] == [b"E_FIN_FAILED", b"E_TOUCH_FAILED", b"E_REQ_FAILED"]
        assert second.silent(0.5)  # longer than it was deferred
        publish(broker, b"new")  # nor is it paused
        assert bodies_of(second, 1) == [b"new"]
        found = broker.channel("t", "c")
        assert (found["message_count"], found["depth"], found["deferred_count"], found["paused"]) == (1, 0, 0, False)


def test_a_topic_that_is_created_again_has_nothing_of_the_old_one(broker: Running) -> None:
    with Client(broker.address) as publisher, Client(broker.address) as consumer, Client(broker.address) as second:
        consumer.subscribe("t", "c", 1)
        publisher.publish("t", b"in flight", b"queued")
        assert consumer.message().body == b"in flight"
        publisher.send(say.dpub("t", 300, b"deferred"))
        assert publisher.response() == b"OK"
        for path in ("/topic/limit?topic=t&r=0.001&b=1", "/topic/pause?topic=t"):
            assert broker.post(path)[0] == 200
        publisher.publish("t", b"has the token", b"waits for one")
        assert broker.post("/topic/delete?topic=t")[0] == 200
        assert broker.post("/topic/create?topic=t")[0] == 200
        assert consumer.ended()
        second.subscribe("t", "c", 10)
        publisher.publish("t", b"new", b"newer")  # on the connection that used the old one
        assert bodies_of(second, 2) == [b"new", b"newer"]
        assert second.silent(0.5)
        (found,) = broker.get("/stats?format=json&topic=t")["topics"]
        assert (found["message_count"], found["paused"]) == (2, False)


def test_nobody_reads_on_for_a_topic_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channel has more to read from the log than it may hold; deleted, it is not waited for, for ever."""
    monkeypatch.setattr("srtm.broker.disk.readers._BATCH", 20)
    with in_memory(data_path=str(tmp_path), max_held_messages=100) as broker:
        disk_topic(broker)
        publish(broker, *(b"%d" % number for number in range(300)))
        durable = broker.broker.durable
        assert durable is not None
        before = broker.do(lambda: len(durable._readers._tasks))
        broker.post("/channel/create?topic=t&channel=c")
        broker.wait_until(lambda b: b.topics["t"].channels["c"].held >= 50)
        assert broker.do(lambda: len(durable._readers._tasks)) == before + 1
        again(broker)
        broker.wait_until(lambda _: len(durable._readers._tasks) == before)


def test_whoever_waits_for_an_engine_is_answered_when_the_topic_is_deleted() -> None:
    """Also for a message that came in the same turn."""
    with running(engine="nsqd://127.0.0.1:1") as broker:
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(broker.post("/pub?topic=t", b"x")))
        waiting.start()
        broker.wait_until(lambda b: b.engine is not None and b.engine.lanes["t"].held == 1)

        def both() -> asyncio.Future[str | None]:
            topic: Topic = broker.broker.topics["t"]
            sender = HttpSender("p", broker.loop.create_future())
            assert broker.broker.intake.publish(sender, "t", [b"y"], time.time_ns()) is not None
            broker.broker.topics.delete(topic)
            return sender.answer

        assert broker.do(both).done()
        waiting.join(10)
        assert answers == [(200, b"OK")]


def test_publishers_that_were_held_by_a_crowded_topic_are_told_to_go_on() -> None:
    with in_memory(max_held_messages=10) as broker:
        broker.post("/topic/create?topic=t")
        broker.post("/topic/pause?topic=t")
        with Client(broker.address, srtm={"publisher": "p", "group": None, "topic": "t"}) as publisher:
            publisher.send(say.mpub("t", [b"old"] * 20))
            assert publisher.response() == b"OK"
            assert publisher.next().retry_after_ms > 0
            broker.post("/topic/delete?topic=t")
            assert publisher.next() == Throttle("t", 0)
            publisher.publish("t", b"new")


def leaving(broker: Running, *bodies: bytes) -> Client:
    """A publisher that has said that it sends no more, as after MIGRATE, and waits for the broker's own end."""
    client = Client(broker.address, srtm={"publisher": "p", "group": None, "topic": "t"})
    client.publish("t", *bodies)
    client.sock.shutdown(socket.SHUT_WR)
    broker.wait_until(lambda b: len(b.turn.farewells.waiting[b.topics["t"]]) == 1)
    return client


@pytest.mark.parametrize("path", ["/topic/empty?topic=t", "/topic/delete?topic=t"])
def test_who_leaves_does_not_wait_for_messages_that_are_gone(broker: Running, path: str) -> None:
    assert broker.post("/topic/limit?topic=t&r=0.001&b=1")[0] == 200
    with leaving(broker, b"1", b"2", b"3") as client:
        assert client.silent()
        assert broker.post(path)[0] == 200
        assert client.ended()


def test_who_leaves_a_topic_without_a_share_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may be there any more who could give it one."""
    monkeypatch.setattr("srtm.broker.backpressure.PARTING_S", 0.5)
    with in_memory(controller="127.0.0.1:1") as broker, leaving(broker, b"1") as client:
        assert broker.do(lambda: broker.broker.topics["t"].gate.closed)
        assert client.silent(0.2)
        assert client.ended()
        assert broker.do(lambda: len(broker.broker.topics["t"].waiting)) == 1  # it keeps its message


def test_a_publisher_that_is_here_twice_is_here_until_both_are_gone(broker: Running) -> None:
    """Its old connection is half-open: nobody has told the broker that it is dead."""
    declared = {"publisher": "p", "group": None, "topic": "t"}
    with Client(broker.address, srtm=declared) as new:
        with Client(broker.address, srtm=declared):
            broker.wait_until(lambda b: len(b.control._publishers["t"]["p"]) == 2)
        broker.wait_until(lambda b: len(b.control._publishers["t"]["p"]) == 1)
        broker.do(lambda: broker.broker.control.migrate("t", ["p"], ("127.0.0.1:9",)))
        assert new.next() == Migrate("t", ("127.0.0.1:9",))
    broker.wait_until(lambda b: not b.control._publishers["t"])
