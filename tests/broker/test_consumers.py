"""Busy consumers: the broker reads them now and then, and still carries out everything they say."""

from __future__ import annotations

import pytest

from srtm.protocol import client as say
from srtm.protocol.client import Message
from tests.broker.running import Client, Running


def next_message(client: Client) -> Message:
    """The next message; responses are passed over."""
    while not isinstance(found := client.next(), Message):
        pass
    return found


def finish(client: Client, count: int) -> list[bytes]:
    """The bodies of the next messages, each finished as it comes."""
    bodies = []
    for _ in range(count):
        message = next_message(client)
        client.send(say.fin(message.id))
        bodies.append(message.body)
    return bodies


@pytest.mark.parametrize("ready", [1, 10, 2500])
def test_every_message_is_finished_once_whatever_rdy_leaves_room_for(ready: int, each: Running) -> None:
    with Client(each.address) as consumer, Client(each.address) as publisher:
        consumer.subscribe("t", "c", ready)
        bodies = [b"%d" % number for number in range(2_000)]
        publisher.send(*(say.pub("t", body) for body in bodies))
        assert finish(consumer, len(bodies)) == bodies
        each.wait_until(lambda b: b.topics["t"].channels["c"].finished == len(bodies))
        (channel,) = each.do(each.broker.statistics).topics[0].channels
        assert channel.in_flight == channel.depth == channel.timed_out == channel.requeued == 0


def test_a_busy_consumer_is_heard_when_it_gives_back_and_when_it_leaves(each: Running) -> None:
    with Client(each.address) as publisher:
        with Client(each.address) as consumer:
            consumer.subscribe("t", "c", 2_500)
            for number in range(200):
                publisher.send(say.pub("t", b"%d" % number))
                assert finish(consumer, 1) == [b"%d" % number]
            publisher.send(say.pub("t", b"again"))
            consumer.send(say.req(next_message(consumer).id, 0))
            assert next_message(consumer).body == b"again"
        each.wait_until(lambda b: not b.topics["t"].channels["c"].consumers)
        with Client(each.address) as other:
            assert finish(other.subscribe("t", "c", 10), 1) == [b"again"]
            each.wait_until(lambda b: b.topics["t"].channels["c"].finished == 201)


@pytest.mark.memory
def test_a_consumer_rests_while_it_only_finishes(broker: Running) -> None:
    """It is not read for each FIN, and read at once when messages wait for it."""
    with Client(broker.address) as consumer, Client(broker.address) as publisher:
        consumer.subscribe("t", "c", 100)
        publisher.publish("t", *[b"x"] * 20)
        for _ in range(20):
            consumer.send(say.fin(next_message(consumer).id))
            broker.do(lambda: None)
        (channel,) = broker.do(broker.broker.statistics).topics[0].channels
        assert 0 < channel.in_flight < 20, "the first FIN was read, and the last is not yet"
        broker.sleep(0.01)
        (channel,) = broker.do(broker.broker.statistics).topics[0].channels
        assert (channel.in_flight, channel.finished) == (0, 20)


@pytest.mark.memory
def test_messages_are_shared_by_consumers(broker: Running) -> None:
    with Client(broker.address) as one, Client(broker.address) as other, Client(broker.address) as publisher:
        one.subscribe("t", "c", 50)
        other.subscribe("t", "c", 50)
        publisher.publish("t", *(b"%d" % number for number in range(100)))
        assert sorted(map(int, finish(one, 50) + finish(other, 50))) == list(range(100))
