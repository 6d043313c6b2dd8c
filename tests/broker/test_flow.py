"""What must not happen under load: a late read that costs tokens, a flood that drowns others, memory that grows."""

from __future__ import annotations

import resource
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from srtm.broker.clients import connection
from srtm.broker.poller import AT_ONCE
from srtm.protocol import client as say
from tests.broker.conftest import Start
from tests.broker.running import Client, Running

memory = pytest.mark.memory  # all others need real sockets, or threads


def sent_until_stopped(client: Client, command: bytes, times: int) -> int:
    """How many bytes the broker takes of so many commands before it stops reading."""
    client.sock.settimeout(0.5)
    sent = 0
    try:
        for _ in range(times):
            for at in range(0, len(command), 50_000):
                client.sock.sendall(command[at : at + 50_000])
                sent += len(command[at : at + 50_000])
    except TimeoutError:
        return sent
    pytest.fail("it was never stopped")


def access_ns(broker: Running, topic: str) -> list[int]:
    """What each message of the second that is running waited for its token."""
    return broker.do(lambda: list(broker.broker.topics[topic].recent.access))


def burst_twice_into_a_stall(broker: Running) -> None:
    """Two bursts of 20, 200 ms apart, that the loop reads together, 300 ms after the first."""
    broker.post("/topic/limit?topic=t&r=200&b=20")
    with Client(broker.address) as one, Client(broker.address) as two:
        one.subscribe("t", "c", ready=2500)
        with broker.stalled():
            one.send(say.mpub("t", [b"x"] * 20))
            broker.sleep(0.2)
            two.send(say.mpub("t", [b"x"] * 20))
            broker.sleep(0.1)
        for _ in range(40):
            found = one.next()
            while not isinstance(found, say.Message):
                found = one.next()


def test_a_conformant_burst_that_is_read_late_is_not_delayed(each: Running) -> None:
    each.wait_for_stamps()
    burst_twice_into_a_stall(each)
    assert each.do(each.broker.statistics).unstamped_reads == 0
    waited = access_ns(each, "t")
    assert sum(1 for delay_ns in waited if delay_ns) == 0, "both bursts had their tokens when they came"


def test_more_clients_than_a_turn_reads_are_read_in_order_after_a_stall(each: Running) -> None:
    """The first of them say something twice, so that what is read of them first is the latest of all."""
    each.wait_for_stamps()
    each.post("/topic/limit?topic=t&r=1000000&b=1000")
    with ExitStack() as clients:
        connected = [clients.enter_context(Client(each.address)) for _ in range(2 * AT_ONCE)]
        for client in connected:
            client.publish("t", b"x")
        (before,) = each.do(each.broker.statistics).topics
        with each.stalled():
            for client in [*connected, *connected[:AT_ONCE]]:
                client.send(say.pub("t", b"x"))
                each.sleep(0.002)
        for client in connected:
            assert client.response() == b"OK"
        (topic,) = each.do(each.broker.statistics).topics
        assert topic.late == before.late


def test_clients_are_read_in_order_after_a_stop_in_the_middle_of_reading(broker: Running) -> None:
    """The client that is read after the stop has spoken later than one that was not looked for yet."""
    broker.wait_for_stamps()
    broker.post("/topic/limit?topic=t&r=1000000&b=1000")
    near, far = socket.socketpair()
    with near, far, Client(broker.address) as known, Client(broker.address) as unknown:
        for client in (known, unknown):
            client.publish("t", b"x")
        before = broker.do(lambda: broker.broker.topics["t"].limiter.late)  # type: ignore[union-attr]
        watched, found, reading, spoken = (threading.Event() for _ in range(4))

        def stop() -> None:
            near.recv(1)
            reading.set()
            assert spoken.wait(5)

        def begin() -> None:
            broker.broker.poller.add(near, stop)
            watched.set()
            assert found.wait(5)

        broker.loop.call_soon_threadsafe(begin)
        assert watched.wait(5)
        far.send(b"x")  # the first to be read of two that are found together
        known.send(say.pub("t", b"x"))
        found.set()
        assert reading.wait(5)
        unknown.send(say.pub("t", b"x"))
        time.sleep(0.02)
        known.send(say.pub("t", b"x"))
        time.sleep(0.02)
        spoken.set()
        for client in (known, known, unknown):
            assert client.response() == b"OK"
        assert broker.do(lambda: broker.broker.topics["t"].limiter.late) == before  # type: ignore[union-attr]
        broker.do(lambda: broker.broker.poller.remove(near))


@memory
def test_with_times_of_reading_it_would_have_been(start: Start) -> None:
    """The same bursts with user-space stamps: the second one seems to come with the first, and waits 100 ms."""
    broker = start(kernel_time=False)
    burst_twice_into_a_stall(broker)
    assert broker.do(broker.broker.statistics).unstamped_reads > 0
    assert max(access_ns(broker, "t")) == 100_000_000  # 20 messages at 200 per second


def test_a_flood_on_one_topic_leaves_the_other_alone(start: Start) -> None:
    """20 times its rate: its publisher is made to wait, nothing is lost, and the other topic gets through."""
    broker = start(max_held_messages=500)
    rate, count = 500, 1500
    for topic in ("flood", "calm"):
        broker.post(f"/topic/limit?topic={topic}&r={rate}&b=50")
    received: list[bytes] = []

    def consume() -> None:
        with Client(broker.address) as client:
            client.subscribe("flood", "c", ready=500)
            while len(received) < count:
                message = client.message()
                received.append(message.body)
                client.send(say.fin(message.id))

    def flood() -> None:
        with Client(broker.address) as client:
            for i in range(count):
                client.send(say.pub("flood", b"%d" % i))
                if i % 200 == 0:
                    time.sleep(0.02)
            for _ in range(count):
                assert client.response() == b"OK"

    threads = [threading.Thread(target=consume), threading.Thread(target=flood)]
    for thread in threads:
        thread.start()
    delays = []
    with Client(broker.address) as publisher, Client(broker.address) as subscriber:
        subscriber.subscribe("calm", "c", ready=10)
        for _ in range(50):
            begin = time.monotonic()
            publisher.publish("calm", b"x")
            subscriber.send(say.fin(subscriber.message().id))
            delays.append(time.monotonic() - begin)
            time.sleep(0.02)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert received == [b"%d" % i for i in range(count)], "all of it, in order"
    assert sorted(delays)[40] < 0.05, "a message of the calm topic does not wait for the flood"


@memory
def test_who_floods_a_topic_is_stopped_long_before_memory_is(broker: Running) -> None:
    """Nothing of what was sent is lost, and a client of another topic is served meanwhile."""
    broker.post("/topic/limit?topic=t&r=500&b=600")
    pub = say.pub("t", b"x" * 100)
    with Client(broker.address) as publisher, Client(broker.address) as other:
        sent = sent_until_stopped(publisher, pub * 400, 2000)
        topic = broker.do(lambda: broker.broker.topics["t"])
        assert topic.waiting
        assert not topic.full
        assert topic.messages < 10_000
        other.publish("u", b"x")
        broker.post("/topic/limit?topic=t")
        broker.wait_until(lambda b: b.topics["t"].messages >= sent // len(pub))
        for _ in range(sent // len(pub)):
            assert publisher.response() == b"OK"


@memory
def test_two_topics_on_one_connection_do_not_wait_for_each_other(broker: Running) -> None:
    """The flooded topic's messages wait for tokens, more than would stop a publisher of it alone."""
    broker.post("/topic/limit?topic=flood&r=10&b=1")
    with Client(broker.address) as publisher, Client(broker.address) as subscriber:
        subscriber.subscribe("calm", "c", ready=100)
        for number in range(50):
            publisher.send(say.pub("flood", b"x") * 100, say.pub("calm", b"%d" % number))
            began = broker.monotonic()
            assert subscriber.message().body == b"%d" % number
            assert broker.monotonic() - began < 0.01
        flood = broker.do(lambda: broker.broker.topics["flood"])
        assert flood.crowded
        assert len(flood.waiting) > 4_900


@memory
def test_a_full_topic_stops_the_connection_whatever_else_it_says(start: Start) -> None:
    """Memory is bounded, and TCP has no second lane."""
    broker = start(max_held_messages=500)
    broker.post("/topic/limit?topic=flood&r=10&b=1")
    with Client(broker.address) as publisher:
        publisher.publish("calm", b"x")
        sent_until_stopped(publisher, say.pub("flood", b"x" * 100) * 400, 2000)
        assert broker.do(lambda: len(broker.broker.topics["flood"].waiting)) < 5_000


@memory
def test_many_who_flooded_are_read_again_in_turn(broker: Running) -> None:
    """They wait one after another, and all get through in the end."""
    broker.post("/topic/limit?topic=t&r=5000&b=10")
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(broker.address)) for _ in range(30)]
        for _ in range(4):
            for client in clients:
                client.send(say.pub("t", b"x" * 100) * 100)
        for client in clients:
            for _ in range(400):
                assert client.response() == b"OK"
        assert broker.do(lambda: broker.broker.topics["t"].messages) == 12_000


@memory
def test_a_dead_subscriber_stops_its_publisher_and_no_memory_grows(start: Start) -> None:
    broker = start(max_held_messages=1000, max_unsent_bytes=100_000)
    with Client(broker.address) as dead, Client(broker.address) as publisher, Client(broker.address) as other:
        dead.subscribe("t", "c", ready=2500)
        assert sent_until_stopped(publisher, say.mpub("t", [b"x" * 1000] * 1000), 200) < 50_000_000
        topic = broker.do(lambda: broker.broker.topics["t"])
        assert topic.messages < 10_000
        other.publish("u", b"x")


@memory
def test_bytes_count_as_messages_do(start: Start) -> None:
    broker = start(max_held_bytes=1_000_000)
    broker.post("/topic/create?topic=t")
    broker.post("/channel/create?topic=t&channel=c")
    with Client(broker.address) as publisher:
        assert sent_until_stopped(publisher, say.pub("t", b"x" * 500_000), 200) < 50_000_000
        assert broker.do(lambda: broker.broker.topics["t"].channels["c"].bytes) < 3_000_000


@memory
def test_an_ephemeral_channel_drops_and_counts(start: Start) -> None:
    broker = start(max_held_messages=100, max_unsent_bytes=1000)
    with Client(broker.address) as dead, Client(broker.address) as publisher:
        dead.subscribe("t", "c#ephemeral", ready=0)
        publisher.publish("t", *[b"x"] * 1000)
        channel = broker.do(lambda: broker.broker.topics["t"].channels["c#ephemeral"])
        assert (channel.messages, channel.depth, channel.tally.dropped) == (1000, 100, 900)
        publisher.publish("alone#ephemeral", *[b"x"] * 1000)
        assert broker.do(lambda: broker.broker.topics["alone#ephemeral"].depth) == 100


@memory
def test_an_ephemeral_topic_drops_by_bytes_as_by_messages(start: Start) -> None:
    broker = start(max_held_bytes=10_000)
    with Client(broker.address) as publisher:
        publisher.publish("t#ephemeral", *[b"x" * 1000] * 100)
        topic = broker.do(lambda: broker.broker.topics["t#ephemeral"])
        assert (topic.messages, topic.depth) == (100, 10)


@memory
def test_who_publishes_and_consumes_on_one_connection_is_told_instead_of_stopped(start: Start) -> None:
    """Were it made to wait, its own FINs would wait with it, and the topic would stay full for ever."""
    broker = start(max_held_messages=10)
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=0)
        client.publish("t", *[b"x"] * 10)
        client.send(say.pub("t", b"too much"))
        assert client.error() == b"E_PUB_FAILED PUB failed topic is full"
        assert client.ended()
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=10)
        for _ in range(10):
            client.send(say.fin(client.message().id))
        broker.wait_until(lambda b: b.topics["t"].channels["c"].finished == 10)
        client.publish("t", b"room again")


@memory
def test_a_bucket_taken_away_lets_what_waits_go(broker: Running) -> None:
    broker.post("/topic/limit?topic=t&r=1&b=1")
    with Client(broker.address) as client:
        client.subscribe("t", "c", ready=100)
        client.publish("t", *[b"x"] * 50)
        client.message()
        assert client.silent(0.1)
        broker.post("/topic/limit?topic=t")
        for _ in range(49):
            client.message()
        assert max(access_ns(broker, "t")) < 2_000_000_000


@memory
@pytest.mark.parametrize("subscribed", [False, True])
def test_who_does_not_read_its_answers_is_not_read_either(subscribed: bool, start: Start) -> None:
    broker = start(max_unsent_bytes=100_000)
    command = say.identify({"feature_negotiation": True})
    with Client(broker.address) as mute:
        if subscribed:
            mute.subscribe("t", "c")
            command = say.fin(b"0123456789abcdef")
        sent = sent_until_stopped(mute, command * 1000, 3000)
        assert sent < 100_000_000
        (held,) = broker.do(lambda: list(broker.broker.clients.connections))
        assert len(held.out) < 10_000_000
        for _ in range(sent // len(command)):  # and is answered when it reads
            assert mute.next()
        broker.wait_until(lambda _: not held.choked)
        mute.publish("t", b"x")


@memory
def test_who_does_not_read_that_it_failed_is_closed_and_others_get_what_it_had(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start(max_unsent_bytes=20_000_000)
    with Client(broker.address) as mute, Client(broker.address) as other:
        mute.subscribe("t", "c", ready=2500)
        other.publish("t", *[b"x" * 500_000] * 30)
        broker.wait_until(lambda b: b.topics["t"].channels["c"].flying == 30)
        monkeypatch.setattr(connection, "LAST_WORDS_S", 1.0)
        mute.send(b"BOGUS\n")
        broker.wait_until(lambda b: b.topics["t"].channels["c"].depth == 30)
        assert len(broker.broker.clients.connections) == 2, "it may read its error yet"
        assert sent_until_stopped(mute, b"NOP\n" * 10_000, 1000) < 40_000_000
        broker.wait_until(lambda b: len(b.clients.connections) == 1)


@memory
def test_who_reads_nothing_for_long_is_let_go(start: Start) -> None:
    broker = start(max_unsent_bytes=100_000)
    with Client(broker.address, heartbeat_interval=1000) as mute:
        sent_until_stopped(mute, say.identify({"heartbeat_interval": 1000, "feature_negotiation": True}) * 1000, 3000)
        broker.wait_until(lambda b: not b.clients.connections)


def test_running_out_of_descriptors_is_in_the_log(broker: Running, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client, socket.socket() as spare:
        fd = spare.fileno()
        spare.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd, hard))  # all below are in use
        try:
            client.connect(broker.address)
            until = time.monotonic() + 5
            while "ulimit -n" not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with Client(broker.address) as late:
        late.publish("t", b"x")
