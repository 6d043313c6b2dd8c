"""One way to publish: every verb, over TCP and HTTP, to topics in memory, on disk and at an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from srtm.broker.http.publishing import HttpSender
from srtm.broker.message import Ids
from srtm.errors import PublishRefused
from srtm.protocol import client as say
from tests.broker.conftest import Start
from tests.broker.running import Client, Running

pytestmark = pytest.mark.memory
VERBS: dict[str, Callable[[str, int], bytes]] = {
    "PUB": lambda topic, _: say.pub(topic, b"x"),
    "MPUB": lambda topic, count: say.mpub(topic, [b"x"] * count),
    "DPUB": lambda topic, _: say.dpub(topic, 1, b"x"),
}


def topic_of(kind: str, start: Start, folder: Path, **options: int) -> Running:
    """A broker with an empty topic `t` of a kind."""
    if kind == "engine":
        broker = start(engine="nsqd://127.0.0.1:1", **options)  # nobody is there, so everything waits
    else:
        broker = start(data_path=str(folder), **options)
    durability = "disk" if kind == "disk" else "memory"
    assert broker.post(f"/topic/create?topic=t&durability={durability}")[0] == 200
    return broker


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_full_topic_refuses_a_publisher_that_also_subscribes(
    verb: str, kind: str, start: Start, tmp_path: Path
) -> None:
    broker = topic_of(kind, start, tmp_path, max_held_messages=5)
    with Client(broker.address) as both, Client(broker.address) as other:
        both.subscribe("t", "c", ready=0)
        other.publish("t", *[b"x"] * 5)
        broker.wait_until(lambda b: b.topics["t"].full)
        both.send(VERBS[verb]("t", 2))
        assert both.error() == f"E_{verb}_FAILED {verb} failed topic is full".encode()
        assert both.ended()
        assert broker.do(lambda: broker.broker.topics["t"].messages) == 5


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_full_topic_holds_a_publisher_that_only_publishes(verb: str, kind: str, start: Start, tmp_path: Path) -> None:
    broker = topic_of(kind, start, tmp_path, max_held_messages=5)
    with Client(broker.address) as other, Client(broker.address) as publisher:
        other.subscribe("t", "c", ready=0)
        publisher.publish("t", *[b"x"] * 4)
        publisher.send(VERBS[verb]("t", 2))
        assert publisher.response() == b"OK"
        broker.wait_until(lambda b: [each.holds for each in b.clients.connections] == [0, 1])


@pytest.mark.parametrize("kind", ["memory", "disk", "engine"])
def test_a_full_topic_refuses_a_sender_that_cannot_wait(kind: str, start: Start, tmp_path: Path) -> None:
    broker = topic_of(kind, start, tmp_path, max_held_messages=5)
    if kind != "engine":
        assert broker.post("/channel/create?topic=t&channel=c")[0] == 200

    def publish(count: int) -> None:
        sender = HttpSender("p", broker.loop.create_future())
        broker.broker.intake.publish(sender, "t", [b"x"] * count, broker.now_ns())
        broker.broker.turn.wake()

    broker.do(lambda: publish(5))
    broker.wait_until(lambda b: b.topics["t"].full)
    for count in (1, 2):
        with pytest.raises(PublishRefused, match="topic is full"):
            broker.do(lambda count=count: publish(count))  # type: ignore[misc]
    assert broker.do(lambda: broker.broker.topics["t"].messages) == 5


@pytest.mark.parametrize("over", ["tcp", "http"])
@pytest.mark.parametrize("kind", ["memory", "disk", "engine"])
def test_the_largest_batch_of_a_second_is_recorded(kind: str, over: str, start: Start, tmp_path: Path) -> None:
    """The TB Adaptor fits no burst below it."""
    broker = topic_of(kind, start, tmp_path)

    def largest() -> int:
        recent = broker.broker.topics["t"].recent
        return max(recent.largest_batch, *(second.largest_batch for second in recent.history), 0)

    def publish(count: int) -> None:
        sender = HttpSender("p", broker.loop.create_future())
        broker.broker.intake.publish(sender, "t", [b"x"] * count, broker.now_ns())

    with Client(broker.address) as client:
        for count in (2, 7, 3):
            if over == "tcp":
                client.send(say.mpub("t", [b"x"] * count))
            elif kind == "engine":  # whose requests are never answered
                broker.do(lambda count=count: publish(count))  # type: ignore[misc]
            else:
                assert broker.post("/mpub?topic=t", b"\n".join([b"x"] * count))[0] == 200
        broker.wait_until(lambda _: largest() == 7)


def test_answers_keep_the_order_of_commands(start: Start, tmp_path: Path) -> None:
    """A message on disk is answered later than one in memory; a client counts its answers."""
    broker = topic_of("disk", start, tmp_path)
    with Client(broker.address) as client:
        who = say.identify({"feature_negotiation": True})
        client.send(say.pub("t", b"1"), say.pub("m", b"2"), who, say.pub("t", b"3"), say.sub("t", "c"), b"BOGUS\n")
        assert [client.response(), client.response()] == [b"OK", b"OK"]
        assert "max_rdy_count" in json.loads(client.response())
        assert [client.response(), client.response()] == [b"OK", b"OK"]
        assert client.error() == b"E_INVALID invalid command BOGUS"
        assert client.ended()
    assert broker.do(lambda: broker.broker.topics["t"].messages) == 2


def test_an_empty_mpub_over_http_is_answered(start: Start, tmp_path: Path) -> None:
    for kind in ("memory", "disk", "engine"):
        broker = topic_of(kind, start, tmp_path / kind)
        assert broker.post("/mpub?topic=t", b"\n\n") == (200, b"OK")


def test_ids_count_on_from_any_start() -> None:
    for start in (0, 700, 2**62 - 1):
        found = [int(each, 16) for each in islice(iter(Ids(start).take, None), 1_000)]
        assert found == list(range(found[0], found[0] + 1_000))
        assert start - 256 < found[0] <= start
