"""Channels: which consumer owns a message, until when, and what happens to it then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from srtm.broker.message import Message
from srtm.protocol import client as say
from srtm.protocol.frames import MAX_ATTEMPTS
from srtm.protocol.names import Settings
from tests.broker.conftest import Start
from tests.broker.running import Client, Running

pytestmark = pytest.mark.memory
SHORT = Settings(min_msg_timeout_ms=100, max_msg_timeout_ms=600)


def test_every_channel_gets_every_message_and_consumers_share(each: Running) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(each.address)).subscribe("t", name, 100) for name in ("a", "b", "b")]
        publisher = stack.enter_context(Client(each.address))
        publisher.publish("t", *(b"%d" % i for i in range(10)))
        found: list[set[bytes]] = []
        for client in clients:
            found.append(set())
            while not client.silent(0.1):
                found[-1].add(client.message().body)
    assert found[0] == found[1] | found[2] == {b"%d" % i for i in range(10)}
    assert found[1]
    assert found[2]
    assert not found[1] & found[2]


def test_ready_is_a_limit_and_zero_means_none(broker: Running) -> None:
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=2)
        client.publish("t", b"1", b"2", b"3", b"4")
        first, second = client.message(), client.message()
        assert client.silent(0.1)
        client.send(say.rdy(0), say.fin(first.id), say.fin(second.id))
        assert client.silent(0.1)
        client.send(say.rdy(1))
        assert client.message().body == b"3"


@pytest.mark.parametrize("timeouts", [(60_000, 60_000), (60_000, 30_000)])
@pytest.mark.parametrize("verb", ["FIN", "REQ", "TOUCH"])
def test_a_message_belongs_to_its_consumer(verb: str, timeouts: tuple[int, int], broker: Running) -> None:
    with Client(broker.address, msg_timeout=timeouts[0]) as owner, Client(broker.address, msg_timeout=timeouts[1]) as b:
        owner.subscribe("t", "c")
        owner.publish("t", b"x")
        message = owner.message()
        b.subscribe("t", "c")
        verbs: dict[str, Callable[[bytes], bytes]] = {
            "FIN": say.fin,
            "TOUCH": say.touch,
            "REQ": lambda i: say.req(i, 0),
        }
        say_it = verbs[verb]
        b.send(say_it(message.id))
        failed = f"E_{verb}_FAILED {verb} {message.id.decode()} failed"
        assert b.error().decode() == f"{failed} client does not own message"
        owner.send(say.fin(message.id))
        broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == 1)
        b.send(say_it(message.id))
        assert b.error().decode() == f"{failed} ID not in flight"


@pytest.mark.parametrize("verb", ["FIN", "REQ", "TOUCH"])
def test_too_late(verb: str, start: Start) -> None:
    broker = start(settings=SHORT)
    with Client(broker.address, msg_timeout=150) as slow, Client(broker.address) as other:
        slow.subscribe("t", "c")
        slow.publish("t", b"x")
        message = slow.message()
        slow.send(say.rdy(0))
        other.subscribe("t", "c")
        again = other.message()
        assert (again.id, again.attempts) == (message.id, 2)
        slow.send({"FIN": say.fin(message.id), "TOUCH": say.touch(message.id), "REQ": say.req(message.id, 0)}[verb])
        assert slow.error().endswith(b"client does not own message")
        other.send(say.fin(again.id))
    assert broker.channel("t", "c")["timeout_count"] == 1


def test_touch_gives_time_up_to_a_limit(start: Start) -> None:
    broker = start(settings=SHORT)
    with Client(broker.address, msg_timeout=300) as client:
        client.subscribe("t", "c", ready=10)
        client.publish("t", b"touched")
        message = client.message()
        begin = broker.monotonic()
        while client.silent(0.1):
            client.send(say.touch(message.id))
            assert broker.monotonic() - begin < 3, "never timed out"
        again = client.message()
        assert again.attempts == 2
        assert 0.55 < broker.monotonic() - begin < 1.5


def test_a_message_at_its_limit_does_not_wait_for_those_before_it(start: Start) -> None:
    """Touched to its last time, it runs out before a message that was taken earlier and may still be extended."""
    broker = start(settings=Settings(min_msg_timeout_ms=100, max_msg_timeout_ms=2_500))
    with Client(broker.address, msg_timeout=2_000) as client:
        client.subscribe("t", "c", ready=10)
        client.publish("t", b"limited")
        limited = client.message()
        begin = broker.monotonic()
        broker.sleep(1.0)
        client.publish("t", b"fresh")
        client.message()
        client.send(say.touch(limited.id))  # until 2.5 s after its delivery; the fresh one until 3 s
        again = client.message()
        assert again.body == b"limited"
        assert 2.4 < broker.monotonic() - begin < 2.9


def test_requeued_later_comes_later(broker: Running) -> None:
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=5)
        client.publish("t", b"x")
        client.send(say.req(client.message().id, 300))
        assert client.silent(0.2)
        assert broker.channel("t", "c")["deferred_count"] == 1
        assert client.message().attempts == 2


def test_deferred_publishing(broker: Running) -> None:
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=5)
        client.send(say.dpub("t", 300, b"later"), say.pub("t", b"now"))
        assert [client.response(), client.response()] == [b"OK", b"OK"]
        assert client.message().body == b"now"
        assert client.silent(0.15)
        assert client.message().body == b"later"


def test_what_a_lost_consumer_had_goes_to_others_at_once(each: Running) -> None:
    with Client(each.address) as other:
        with Client(each.address) as lost:
            lost.subscribe("t", "c", ready=3)
            lost.publish("t", b"1", b"2", b"3")
            ids = {lost.message().id for _ in range(3)}
            other.subscribe("t", "c", ready=3)
        assert {other.message().id for _ in range(3)} == ids
    each.wait_until(lambda b: not b.topics["t"].channels["c"].consumers)
    channel = each.channel("t", "c")
    assert (channel["requeue_count"], channel["timeout_count"]) == (0, 6)  # both consumers were lost with all three


def test_cls_ends_delivery_and_lets_finish(broker: Running) -> None:
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=1)
        client.publish("t", b"1", b"2")
        message = client.message()
        client.send(say.cls())
        assert client.response() == b"CLOSE_WAIT"
        client.send(say.fin(message.id), say.rdy(5))
        assert client.silent(0.1)
    assert broker.channel("t", "c")["depth"] == 1


def test_a_paused_channel_keeps_and_goes_on(broker: Running) -> None:
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=5)
        broker.post("/channel/pause?topic=t&channel=c")
        client.publish("t", b"x")
        assert client.silent(0.1)
        broker.post("/channel/unpause?topic=t&channel=c")
        client.send(say.fin(client.message().id))
        broker.post("/topic/pause?topic=t")
        client.publish("t", b"y")
        assert client.silent(0.1)
        broker.post("/topic/unpause?topic=t")
        assert client.message().body == b"y"


def test_deleted_with_messages_in_flight(broker: Running) -> None:
    with Client(broker.address) as consumer, Client(broker.address) as publisher:
        consumer.subscribe("t", "c", ready=1)
        publisher.publish("t", b"1", b"2", b"3")
        consumer.message()
        assert broker.post("/channel/delete?topic=t&channel=c")[0] == 200
        assert consumer.ended()
        publisher.publish("t", b"4")
        assert broker.post("/topic/delete?topic=t")[0] == 200
        publisher.publish("t", b"5")
        with Client(broker.address) as again:
            assert again.subscribe("t", "c").message().body == b"5"


def test_emptied_with_messages_in_flight(broker: Running) -> None:
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=1)
        client.publish("t", b"1", b"2", b"3")
        message = client.message()
        broker.post("/channel/empty?topic=t&channel=c")
        client.send(say.fin(message.id))
        assert client.error().endswith(b"ID not in flight")
        client.publish("t", b"4")
        assert client.message().body == b"4"
    assert broker.do(lambda: broker.broker.topics["t"].channels["c"].bytes) == 1


def test_a_sample_is_about_as_large_as_asked_for(broker: Running) -> None:
    with Client(broker.address, sample_rate=25) as client:
        client.subscribe("t", "c", ready=2500)
        client.publish("t", *[b"x"] * 2000)
        broker.wait_until(lambda b: not b.topics["t"].channels["c"].queue)
        assert 400 < broker.channel("t", "c")["in_flight_count"] < 600


def test_attempts_stop_at_what_a_frame_can_say(broker: Running) -> None:
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=1)
        client.publish("t", b"x")
        message = client.message()

        def wear_out() -> Message:
            (flight,) = broker.broker.topics["t"].channels["c"].everything()
            flight.attempts = MAX_ATTEMPTS - 1
            return flight

        broker.do(wear_out)
        for _ in range(3):
            client.send(say.req(message.id, 0))
            assert client.message().attempts == MAX_ATTEMPTS


def test_ephemeral_things_go_with_their_last_consumer(broker: Running) -> None:
    with Client(broker.address) as one, Client(broker.address) as two:
        one.subscribe("lasting", "c#ephemeral")
        one.publish("lasting", b"x")
        one.message()
        two.subscribe("short#ephemeral", "c")
        two.publish("short#ephemeral", b"x")
        assert broker.do(lambda: set(broker.broker.topics)) == {"lasting", "short#ephemeral"}
    broker.wait_until(lambda b: not b.clients.connections)
    assert broker.do(lambda: {name: set(topic.channels) for name, topic in broker.broker.topics.items()}) == {
        "lasting": set(),
        "short#ephemeral": {"c"},  # a channel that lasts keeps its topic, as in nsqd
    }
    broker.post("/channel/delete?topic=short%23ephemeral&channel=c")
    broker.wait_until(lambda b: set(b.topics) == {"lasting"})
    with Client(broker.address) as client:
        client.subscribe("brief#ephemeral", "c#ephemeral")
    broker.wait_until(lambda b: set(b.topics) == {"lasting"})


def test_heartbeats_come_once_an_interval(broker: Running) -> None:
    with Client(broker.address, heartbeat_interval=1000) as client:
        assert client.silent(2.6)
        assert client.heartbeats == 2


def test_a_silent_client_is_let_go(each: Running) -> None:
    with Client(each.address, heartbeat_interval=1000) as client:
        client.send(say.identify({"heartbeat_interval": 1000}))  # again: not a second row of heartbeats
        assert client.response() == b"OK"
        begin = each.monotonic()
        while client.sock.recv(100):  # a heartbeat, which it does not answer
            pass
        assert 1.9 < each.monotonic() - begin < 4


def test_an_identify_that_is_too_big_is_refused_before_its_body_comes(broker: Running) -> None:
    limit = 64 * 1024
    with Client(broker.address) as client:
        client.send(b"IDENTIFY\n" + (limit + 1).to_bytes(4, "big"))
        assert client.error() == b"E_BAD_BODY IDENTIFY body too big 65537 > 65536"
        assert client.ended()
    with Client(broker.address) as client:
        client.send(say.identify({"user_agent": "x" * (limit - len('{"user_agent":""}'))}))
        assert client.response() == b"OK"
