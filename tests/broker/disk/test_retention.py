"""What disk topics keep, and what channels that are behind lose, on real sockets."""

from __future__ import annotations

import json
import sqlite3
import zlib
from pathlib import Path

import pytest

from srtm.broker.disk.batch import Record
from srtm.broker.disk.file import FILE
from srtm.broker.disk.log import Log, Retention
from srtm.protocol import client as say
from tests.broker.http.test_metrics import metrics
from tests.broker.running import Client, Running, in_memory, running

KB = bytes(1000)
V1 = bytes.fromhex(  # two messages as the first version wrote them
    "02000000190000005b5b2270222c202267225d2c205b2271222c206e756c6c5d5d0700000000000000080000000000000000000000010000"
    "0003000000030000000200000030303030303030303030303030303030313131313131313131313131313131316f6e6574776f"
)


def create(broker: Running, more: str = "") -> None:
    status, text = broker.post(f"/topic/create?topic=t&durability=disk{more}")
    assert status == 200, text


def publish(broker: Running, count: int) -> None:
    """Messages of a kilobyte, each in a commit of its own."""
    with Client(broker.address) as publisher:
        for number in range(count):
            publisher.publish("t", b"%04d" % number + KB)


def numbers(client: Client, count: int) -> list[int]:
    found = []
    for _ in range(count):
        message = client.message()
        client.send(say.fin(message.id))
        found.append(int(message.body[:4]))
    return found


def begin(broker: Running) -> int:
    return int(broker.get("/srtm/log?topic=t")["begin"])


def test_nothing_is_lost_unless_it_was_chosen(tmp_path: Path) -> None:
    with running(data_path=str(tmp_path)) as broker:
        create(broker)
        broker.post("/channel/create?topic=t&channel=behind")
        publish(broker, 20)
        with Client(broker.address) as consumer:
            consumer.subscribe("t", "c")
            publish(broker, 5)
            assert numbers(consumer, 5) == list(range(5))
        assert begin(broker) == 0
        with Client(broker.address) as consumer:
            consumer.subscribe("t", "behind")
            assert numbers(consumer, 25) == [*range(20), *range(5)]
        broker.wait_until(lambda b: b.durable.extent(b.topics["t"]).begin == 25)  # type: ignore[union-attr]
        assert broker.channel("t", "behind")["srtm"]["lost"] == 0


def test_by_size_a_channel_that_is_behind_loses_the_oldest_and_that_is_counted(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path), retain_bytes=10_500, max_held_messages=20) as broker:
        create(broker)
        with Client(broker.address) as consumer:
            consumer.subscribe("t", "c", 1)
            publish(broker, 40)  # more than memory may hold: it goes on because old ones go
            assert consumer.message().body[:4] == b"0000"  # it keeps what it has
            broker.wait_until(lambda b: b.durable.extent(b.topics["t"]).bytes <= 10_500)  # type: ignore[union-attr]
            first = begin(broker)
            assert first >= 30
            broker.wait_until(lambda b: b.topics["t"].channels["c"].tally.lost == first - 1)
            assert broker.get("/srtm/log?topic=t")["bytes"] <= 10_500
            assert broker.channel("t", "c")["srtm"]["lost"] == first - 1
            assert metrics(broker)["srtm_channel_lost_total", ("c", "t")] == first - 1
            consumer.send(say.rdy(2))
            assert numbers(consumer, 40 - first) == list(range(first, 40))
            assert consumer.silent(0.05)


def test_what_a_paused_topic_loses_is_lost_to_its_channels(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path), retain_bytes=5200) as broker:
        create(broker)
        broker.post("/channel/create?topic=t&channel=c")
        broker.post("/topic/pause?topic=t")
        publish(broker, 20)
        broker.wait_until(lambda b: b.durable.extent(b.topics["t"]).begin >= 15)  # type: ignore[union-attr]
        first = begin(broker)
        broker.wait_until(lambda b: b.topics["t"].channels["c"].tally.lost == first)
        broker.post("/topic/unpause?topic=t")
        with Client(broker.address) as consumer:
            assert numbers(consumer.subscribe("t", "c"), 20 - first) == list(range(first, 20))
        assert broker.channel("t", "c")["srtm"]["lost"] == first


def test_what_only_the_log_has_is_lost_at_once_and_not_when_its_turn_comes(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker:
        create(broker)
        broker.post("/channel/create?topic=t&channel=c")
        with Client(broker.address) as publisher:
            for number in range(0, 2_500, 100):
                publisher.send(say.mpub("t", [b"%04d" % each for each in range(number, number + 100)]))
                assert publisher.response() == b"OK"
    with in_memory(data_path=str(tmp_path), max_held_messages=8, retain_bytes=50_000) as broker:
        broker.wait_until(lambda b: b.durable.extent(b.topics["t"]).begin >= 1_000)  # type: ignore[union-attr]
        first = begin(broker)
        broker.wait_until(lambda b: b.topics["t"].channels["c"].tally.lost >= first)
        with Client(broker.address) as consumer:
            assert numbers(consumer.subscribe("t", "c", 100), 2_500 - first) == list(range(first, 2_500))
        assert broker.channel("t", "c")["srtm"]["lost"] == first


def test_what_an_operator_deletes_is_lost_to_channels_that_have_not_got_it(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker:
        create(broker)
        broker.post("/channel/create?topic=t&channel=c")
        publish(broker, 40)
    with in_memory(data_path=str(tmp_path), max_held_messages=8) as broker:
        broker.wait_until(lambda b: b.topics["t"].channels["c"].held == 4)  # and the others are in the log
        assert broker.post("/srtm/log/trim?topic=t&before=30")[0] == 200
        assert broker.channel("t", "c")["srtm"]["lost"] == 26
        with Client(broker.address) as consumer:
            assert numbers(consumer.subscribe("t", "c"), 14) == [*range(4), *range(30, 40)]
        assert broker.channel("t", "c")["srtm"]["lost"] == 26


def test_what_is_still_delivered_is_not_lost(tmp_path: Path) -> None:
    """Messages that a consumer has, and gives back, and messages that wait for tokens."""
    with in_memory(data_path=str(tmp_path), retain_bytes=2_500) as broker:
        create(broker)
        with Client(broker.address) as consumer:
            consumer.subscribe("t", "c", 1)
            publish(broker, 5)
            held = consumer.message()
            broker.wait_until(lambda b: b.topics["t"].channels["c"].tally.lost == 2)
            consumer.send(say.rdy(0), say.req(held.id, 0))
            broker.wait_until(lambda b: b.topics["t"].channels["c"].tally.requeued == 1)
            broker.post("/topic/limit?topic=t&r=0.001&b=1")
            publish(broker, 5)  # one has a token
            broker.wait_until(lambda b: b.topics["t"].channels["c"].tally.lost == 5)
            assert len(broker.broker.topics["t"].waiting) == 4
            broker.sleep(3)
            broker.post("/topic/limit?topic=t")
            consumer.send(say.rdy(10))
            assert numbers(consumer, 5) == [0, 1, 2, 3, 4]
            assert consumer.silent(0.05)
        assert broker.channel("t", "c")["srtm"]["lost"] == 5


def test_a_channel_that_comes_to_a_paused_topic_loses_what_waits_there(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path), retain_bytes=5200) as broker:
        create(broker)
        broker.post("/channel/create?topic=t&channel=c")
        broker.post("/topic/pause?topic=t")
        publish(broker, 4)
        broker.post("/channel/create?topic=t&channel=late")
        publish(broker, 16)
        broker.wait_until(lambda b: b.durable.extent(b.topics["t"]).begin >= 15)  # type: ignore[union-attr]
        first = begin(broker)
        for channel in ("c", "late"):
            broker.wait_until(lambda b, name=channel: b.topics["t"].channels[name].tally.lost == first)  # type: ignore[misc]


def test_by_age_though_all_have_finished_it(tmp_path: Path) -> None:
    """What is finished stays to be replayed, until it is too old."""
    with in_memory(data_path=str(tmp_path), retain_acknowledged=True) as broker:
        create(broker)
        with Client(broker.address) as consumer:
            consumer.subscribe("t", "c")
            publish(broker, 5)
            numbers(consumer, 5)
        broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == 5)
        with Client(broker.address, srtm={"replay": {"offset": 0}}) as replaying:
            assert numbers(replaying.subscribe("t", "r#ephemeral"), 5) == list(range(5))
        create(broker, "&retain_age=1ms")
        broker.wait_until(lambda b: b.durable.extent(b.topics["t"]).begin == 5)  # type: ignore[union-attr]
        assert broker.channel("t", "c")["srtm"]["lost"] == 0


def test_what_is_kept_without_any_channel_is_bounded_too(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker:
        create(broker, "&retain_bytes=5200")
        publish(broker, 20)
        broker.wait_until(lambda b: b.topics["t"].unclaimed[0].offset >= 15)
        first = begin(broker)
        with Client(broker.address) as consumer:
            assert numbers(consumer.subscribe("t", "c"), 20 - first) == list(range(first, 20))


def test_what_a_channel_lost_while_the_broker_was_away(tmp_path: Path) -> None:
    with in_memory(data_path=str(tmp_path)) as broker:
        create(broker)
        broker.post("/channel/create?topic=t&channel=c")
        publish(broker, 20)
    log = Log.open(tmp_path)
    log.trim("t", 12)
    log.close()
    with in_memory(data_path=str(tmp_path), retain_bytes=10**9) as broker, Client(broker.address) as consumer:
        assert numbers(consumer.subscribe("t", "c"), 8) == list(range(12, 20))
        assert broker.channel("t", "c")["srtm"]["lost"] == 12


def test_a_topic_remembers_what_it_was_told(tmp_path: Path) -> None:
    def kept(broker: Running) -> Retention:
        return broker.do(lambda: broker.broker.durable.retention(broker.broker.topics["t"]))  # type: ignore[union-attr]

    with in_memory(data_path=str(tmp_path), retain_bytes=10**9) as broker:
        create(broker)
        assert kept(broker) == Retention(10**9, None, acknowledged=True)
        create(broker, "&retain_age=36h&retain_acknowledged=true")
    with in_memory(data_path=str(tmp_path)) as broker:  # a disk topic without messages is still one
        assert kept(broker) == Retention(10**9, 36 * 3600 * 10**9, acknowledged=False)
        create(broker)
        create(broker, "&retain_bytes=none")
        assert kept(broker) == Retention(None, 36 * 3600 * 10**9, acknowledged=False)


@pytest.mark.parametrize(
    "query", ["retain_bytes=0", "retain_bytes=-1", "retain_bytes=x", "retain_age=soon", "retain_acknowledged=maybe"]
)
def test_what_cannot_be_kept(tmp_path: Path, query: str) -> None:
    with in_memory(data_path=str(tmp_path)) as broker:
        status, text = broker.post(f"/topic/create?topic=t&durability=disk&{query}")
        assert status == 400
        assert json.loads(text)["message"].startswith("INVALID_RETAIN_")
        status, text = broker.post("/topic/create?topic=m&retain_bytes=5")
        assert (status, b"durability=disk" in text) == (400, True)


def test_a_log_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / FILE)
    db.executescript("""
        CREATE TABLE topic (id INTEGER PRIMARY KEY, name TEXT UNIQUE, begin INTEGER NOT NULL) STRICT;
        CREATE TABLE batch (
            key INTEGER PRIMARY KEY, messages INTEGER NOT NULL, newest_ns INTEGER NOT NULL, total INTEGER NOT NULL,
            crc INTEGER NOT NULL, data BLOB NOT NULL
        ) STRICT;
        CREATE TABLE channel (
            topic INTEGER NOT NULL, name TEXT NOT NULL, low INTEGER NOT NULL, above BLOB NOT NULL,
            PRIMARY KEY (topic, name)
        ) STRICT, WITHOUT ROWID;
        CREATE TABLE queue (topic TEXT NOT NULL, channel TEXT, crc INTEGER NOT NULL, data BLOB NOT NULL) STRICT;
        PRAGMA application_id = 0x5352544D; PRAGMA user_version = 1;
        INSERT INTO topic VALUES (1, 't', 0);
        INSERT INTO channel VALUES (1, 'c', 1, x'');
    """)
    db.execute("INSERT INTO batch VALUES (1 << 48, 2, 8, ?, ?, ?)", (len(V1), zlib.crc32(V1), V1))
    db.commit()
    db.close()
    for _ in range(2):
        log = Log.open(tmp_path)
        assert log.read("t", 0) == [Record(b"0" * 16, 7, "p", b"one", "g", 2), Record(b"1" * 16, 8, "q", b"two")]
        assert (log.retention("t"), [cursor.low for cursor in log.cursors("t")]) == (None, [1])
        log.close()
