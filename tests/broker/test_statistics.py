"""One source of numbers: /stats, /metrics and the exchange agree with `statistics()`, wherever messages are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from srtm.broker.broker import Broker
from srtm.broker.statistics import BrokerStatistics, SecondStatistics, TopicStatistics
from srtm.protocol.exchange import Contract, Grant, Listed, Share
from tests.broker.conftest import Start
from tests.broker.disk.test_durable import disk_topic
from tests.broker.http.test_metrics import metrics
from tests.broker.running import Client, Running
from tests.broker.test_control import BIRTH, NOBODY, TOKEN, exchange, said
from tests.engines import free_port

SLOW = Share(1, 3 * TOKEN)  # three messages pass, and no more for a quarter of an hour
SENT, SIZE = 60, 4


def contract(durability: str = "memory") -> dict[str, Any]:
    terms = Contract(SLOW.r_mtps, SLOW.b_ntok, durability=durability)
    return {"contracts": {"t": Listed(BIRTH, terms)}, "grants": {"t": Grant(BIRTH, 1, SLOW, SLOW.b_ntok)}}


def snapshot(broker: Running) -> BrokerStatistics:
    return broker.do(lambda: broker.broker.statistics(clients=True))


def topic_of(broker: Running) -> TopicStatistics:
    return broker.do(lambda: only(broker.broker))


def only(broker: Broker) -> TopicStatistics:
    (topic,) = broker.statistics().topics
    return topic


def check_agreement(broker: Running, number: int) -> TopicStatistics:
    """Everything that shows a topic's numbers shows those of its snapshot."""
    answer = exchange(broker, said(number, **contract("disk" if topic_of(broker).log else "memory")))
    document, found, topic = broker.get("/stats?format=json"), metrics(broker), topic_of(broker)
    (shown,) = document["topics"]
    ours, report = shown["srtm"], answer.topics["t"]
    assert ours["waiting"] == found["srtm_topic_waiting", ("t",)] == report.waiting == topic.waiting
    assert shown["message_count"] == found["srtm_topic_messages_total", ("t",)] == report.arrived == topic.messages
    assert shown["message_bytes"] == found["srtm_topic_bytes_total", ("t",)] == topic.bytes
    assert shown["depth"] == topic.depth
    assert topic.limit == SLOW.bucket == report.share.bucket  # type: ignore[union-attr]
    assert ours["r"] == found["srtm_topic_rate_limit", ("t",)] == topic.limit.r
    assert ours["b"] == found["srtm_topic_burst_limit", ("t",)] == topic.limit.b
    assert report.durable == (topic.log is not None) == (ours["log"] is not None)
    if topic.log:
        assert ours["log"] == dataclasses.asdict(topic.log)
        assert found["srtm_topic_log_bytes", ("t",)] == topic.log.bytes
    if topic.lane:
        assert ours["engine"]["in_log"] == found["srtm_topic_in_log", ("t",)] == topic.lane.in_log
        held = found["srtm_topic_unacknowledged", ("t",)]
        assert ours["engine"]["unacknowledged"] == held == topic.lane.unacknowledged
        assert (ours["engine"]["state"] == "open") == found["srtm_topic_engine_open", ("t",)] == topic.lane.open
    for channel, listed in zip(topic.channels, shown["channels"], strict=True):
        assert listed["depth"] == found["srtm_channel_depth", (channel.name, "t")] == channel.depth
        assert listed["in_flight_count"] == found["srtm_channel_in_flight", (channel.name, "t")] == channel.in_flight
        assert listed["client_count"] == len(listed["clients"]) == channel.consumers
    status, text = broker.page("/stats")
    (line,) = [each for each in text.decode().splitlines() if each.startswith("   [t ")]
    assert (status, line.split()[2:8]) == (
        200,
        ["depth:", str(topic.depth), "be-depth:", "0", "msgs:", str(topic.messages)],
    )
    return topic


def publish(broker: Running) -> None:
    with Client(broker.address) as publisher:
        for _ in range(SENT // 10):
            publisher.publish("t", *[b"x" * SIZE] * 10)


@pytest.mark.memory
def test_a_memory_topic(start: Start) -> None:
    broker = start(controller=NOBODY)
    exchange(broker, said(**contract()))
    with Client(broker.address) as consumer:
        consumer.subscribe("t", "c", ready=2)
        publish(broker)
        broker.wait_until(lambda b: only(b).channels[0].depth == 1)
        topic = check_agreement(broker, 2)
    assert (topic.messages, topic.bytes, topic.waiting, topic.channels[0].in_flight) == (60, 240, 57, 2)


@pytest.mark.memory
def test_a_disk_topic(start: Start, tmp_path: Path) -> None:
    broker = start(controller=NOBODY, data_path=str(tmp_path))
    exchange(broker, said(**contract("disk")))
    publish(broker)
    broker.wait_until(lambda b: only(b).messages == SENT)
    topic = check_agreement(broker, 2)
    assert topic.log is not None
    assert (topic.bytes, topic.waiting, topic.depth, topic.log.end) == (240, 57, 60, 60)


@pytest.mark.memory
def test_a_disk_topic_whose_engine_is_away_counts_spooled_messages(start: Start, tmp_path: Path) -> None:
    away = f"nsqd://127.0.0.1:{free_port()}"
    broker = start(controller=NOBODY, engine=away, data_path=str(tmp_path), max_held_messages=20)
    exchange(broker, said(**contract("disk")))
    publish(broker)
    broker.wait_until(lambda b: only(b).messages == SENT)
    topic = check_agreement(broker, 2)
    assert topic.lane is not None
    assert topic.lane.in_log >= 40
    assert (topic.waiting, topic.bytes, topic.lane.open) == (60, 240, False)
    broker.wait_until(lambda b: bool(only(b).seconds))
    broker.wait_until(lambda b: only(b).seconds[-1].waiting == SENT)  # a second counts as the topic does


def test_a_topic_of_an_engine(engine: Any, start: Start, tmp_path: Path) -> None:
    engine.start()
    broker = start(controller=NOBODY, engine=engine.url, data_path=str(tmp_path / "data"))
    exchange(broker, said(**contract("disk")))
    publish(broker)
    broker.wait_until(lambda b: b.statistics().engine.acknowledged == 3)  # type: ignore[union-attr]
    topic = check_agreement(broker, 2)
    assert topic.lane is not None
    assert (topic.waiting, topic.lane.open, topic.lane.unacknowledged) == (57, True, 0)
    shown, counted = broker.get("/stats?format=json")["srtm"]["engine"], snapshot(broker).engine
    assert counted is not None
    found, kind = metrics(broker), counted.kind
    assert shown["state"] == "connected"
    assert shown["acknowledged"] == found["srtm_engine_acknowledged_total", (kind,)] == counted.acknowledged == 3
    assert shown["refused"] == found["srtm_engine_refused_total", (kind,)] == counted.refused == 0


@pytest.mark.memory
def test_the_last_second_is_the_same_everywhere(start: Start) -> None:
    broker = start(controller=NOBODY)
    exchange(broker, said(**contract()))
    publish(broker)
    broker.wait_until(lambda b: sum(second.messages for second in only(b).seconds) == SENT)
    report = exchange(broker, said(2, **contract())).topics["t"]
    shown = broker.get("/stats?format=json")["topics"][0]["srtm"]["seconds"]
    seconds = topic_of(broker).seconds
    busy = next(each for each in seconds if each.messages)
    (listed,) = [each for each in shown if each["at_ns"] == busy.at_ns]
    (told,) = [each for each in report.seconds if each.number == busy.number]
    assert listed["messages"] == told.messages == busy.messages
    assert listed["released"] == busy.released == 3
    assert listed["max_backlog"] == busy.max_backlog == told.max_backlog_ntok / TOKEN


def _frozen(kind: type) -> bool:
    return bool(kind.__dataclass_params__.frozen) and "__slots__" in vars(kind)  # type: ignore[attr-defined]


@pytest.mark.memory
def test_snapshots_are_frozen_and_stay_as_they_were(start: Start, tmp_path: Path) -> None:
    broker = start(data_path=str(tmp_path))
    disk_topic(broker)
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=0)
        client.publish("t", b"one")
        broker.wait_until(lambda b: only(b).channels[0].depth == 1)
        before = snapshot(broker)
        text = msgspec.json.encode(msgspec.to_builtins(before))
        client.publish("t", b"two", b"three")
        broker.post("/topic/limit?topic=t&r=5&b=5")
        broker.wait_until(lambda b: only(b).channels[0].depth == 3)
        assert msgspec.json.encode(msgspec.to_builtins(before)) == text
    topic = before.topics[0]
    for each in (before, topic, topic.channels[0], topic.log, topic.channels[0].clients[0]):  # type: ignore[index]
        assert _frozen(type(each))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, dataclasses.fields(each)[0].name, 1)  # type: ignore[arg-type]
    assert _frozen(SecondStatistics)
