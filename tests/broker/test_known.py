"""What a broker knows besides messages, over a stop and over kill -9: names, pauses, buckets."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from srtm.broker.disk.log import Known, Log, Record
from tests.broker.disk.test_durable import bodies_of, broker_process, disk_topic
from tests.broker.running import Client, Running, fetch, in_memory, running


def test_a_bucket_set_by_hand_holds_after_a_restart_what_it_held(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        broker.post("/topic/limit?topic=t&r=2.5&b=2")
        broker.post("/channel/create?topic=t&channel=c")
        client.publish("t", *(b"%d" % number for number in range(100)))
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        (topic,) = broker.get("/stats?format=json")["topics"]
        assert (topic["srtm"]["r"], topic["srtm"]["b"]) == (2.5, 2)
        assert topic["srtm"]["waiting"] > 90
        assert bodies_of(client.subscribe("t", "c", 100), 4) == [b"0", b"1", b"2", b"3"]
        assert broker.do(lambda: broker.broker.topics["t"].depth) > 85
        broker.post("/topic/limit?topic=t")
        assert len(bodies_of(client, 96)) == 96
    with in_memory(data_path=str(tmp_path)) as broker:
        assert broker.get("/stats?format=json")["topics"][0]["srtm"]["r"] is None


def test_what_had_its_tokens_needs_no_others(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        client.publish("t", *[b"x"] * 50)
        broker.wait_until(lambda b: len(b.topics["t"].unclaimed) == 50)
        broker.post("/topic/limit?topic=t&r=1&b=1")
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        assert len(bodies_of(client.subscribe("t", "c", 100), 50)) == 50


def test_a_disk_topic_is_held_to_its_bucket_after_a_restart(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        disk_topic(broker)
        broker.post("/channel/create?topic=t&channel=c")
        broker.post("/topic/limit?topic=t&r=5&b=1")
        client.publish("t", *(b"%d" % number for number in range(100)))
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        assert bodies_of(client.subscribe("t", "c", 100), 3) == [b"0", b"1", b"2"]
        assert broker.channel("t", "c")["message_count"] < 50


def test_under_a_controller_a_bucket_set_by_hand_is_not_put_in_force_again(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker:
        broker.post("/topic/limit?topic=t&r=1&b=1")
    with in_memory(data_path=str(tmp_path), controller="127.0.0.1:1") as broker:
        assert broker.do(lambda: broker.broker.topics["t"].limiter) is None
        assert broker.do(lambda: broker.broker.topics["t"].gate.closed)


def paused(broker: Running) -> dict[str, bool]:
    found = {}
    for topic in broker.get("/stats?format=json")["topics"]:
        found[topic["topic_name"]] = topic["paused"]
        for channel in topic["channels"]:
            found[f"{topic['topic_name']}/{channel['channel_name']}"] = channel["paused"]
    return found


@pytest.mark.processes
def test_kill_9_ends_no_pause_and_takes_no_names(tmp_path: Path) -> None:
    posts = ["topic/create?topic=t", "channel/create?topic=t&channel=c", "channel/create?topic=t&channel=d#ephemeral"]
    posts += ["topic/create?topic=u", "channel/create?topic=u&channel=c", "topic/create?topic=gone"]
    posts += ["topic/create?topic=disk&durability=disk", "topic/pause?topic=disk"]
    posts += ["channel/pause?topic=t&channel=c", "topic/delete?topic=gone", "topic/pause?topic=u"]
    with broker_process(tmp_path) as (process, _, http_port):
        for post in posts:
            url = f"http://127.0.0.1:{http_port}/{post.replace('#', '%23')}"
            assert fetch(urllib.request.Request(url, data=b"", method="POST"))[0] == 200
        process.kill()
    with running(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        assert paused(broker) == {"t": False, "t/c": True, "u": True, "u/c": False, "disk": True}
        client.publish("t", b"x")
        client.publish("u", b"y")
        assert client.subscribe("t", "c").silent()
        broker.post("/topic/unpause?topic=u")
        broker.post("/channel/unpause?topic=t&channel=c")
        assert client.message().body == b"x"
    with running(data_path=str(tmp_path)) as broker:
        assert paused(broker) == {"t": False, "t/c": False, "u": False, "u/c": False, "disk": True}


def test_names_that_publishers_and_subscribers_bring_are_written_down(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker, Client(broker.address) as client:
        client.publish("t", b"x")
        client.publish("e#ephemeral", b"x")
        client.subscribe("u", "c")
        broker.post("/topic/pause?topic=t")  # answered when that and all before it is on disk
        log = broker.broker.durable
        assert log is not None
        assert log._log.known() == {"t": [Known("", True)], "u": [Known(), Known("c")]}


def test_a_pause_that_cannot_be_saved_is_said_to_be_so(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker:
        broker.post("/topic/create?topic=t")
        durable = broker.broker.durable
        assert durable is not None
        durable._log.call(lambda: durable._log._store._db.execute("PRAGMA query_only = ON"))
        status, text = broker.post("/topic/pause?topic=t")
        assert (status, b"NOT_SAVED" in text) == (503, True)
        durable._log.call(lambda: durable._log._store._db.execute("PRAGMA query_only = OFF"))
        assert broker.post("/topic/pause?topic=t")[0] == 200


def test_a_log_of_an_older_version_gets_what_it_lacks(tmp_path: Path) -> None:
    log = Log.open(tmp_path)
    for topic in ("a", "b"):
        log.append_wait(topic, [Record(bytes(16), 1, "p", b"x")])
    older = "DROP TABLE known; ALTER TABLE topic DROP COLUMN log; PRAGMA user_version = 2"
    log.call(lambda: log._store._db.executescript(older))
    log.close()
    ids = []
    for _ in range(2):
        log = Log.open(tmp_path)
        assert log.known() == {}
        assert (log.end("a"), log.end("b")) == (1, 1)
        ids.append((log.identity("a"), log.identity("b")))
        log.close()
    assert ids[0] == ids[1]  # given once
    assert len({*ids[0], None}) == 3
