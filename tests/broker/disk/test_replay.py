"""A subscriber that begins at an offset of a disk topic, in memory and on real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from srtm.broker.disk import replay
from srtm.protocol import client as say
from srtm.protocol.client import Message
from tests.broker.http.test_metrics import metrics
from tests.broker.running import Client, Running, in_memory, running


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Running]:
    """A broker in memory with a disk topic t that holds 0 to 49."""
    with in_memory(data_path=str(tmp_path)) as found:
        fill(found)
        yield found


@pytest.fixture(params=[in_memory, running], ids=["memory", "sockets"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    """The same, and then one on a real socket."""
    with request.param(data_path=str(tmp_path)) as found:
        fill(found)
        yield found


def fill(broker: Running) -> None:
    assert broker.post("/topic/create?topic=t&durability=disk")[0] == 200
    publish(broker, 0, 50)


def publish(broker: Running, begin: int, end: int) -> None:
    with Client(broker.address) as publisher:
        publisher.send(say.mpub("t", [b"%d" % number for number in range(begin, end)]))
        assert publisher.response() == b"OK"


def replaying(broker: Running, offset: int, ready: int = 1, channel: str = "r#ephemeral") -> Client:
    client = Client(broker.address, srtm={"replay": {"offset": offset}})
    assert client.settled["srtm"] == {"replay": {"offset": offset}}
    return client.subscribe("t", channel, ready)


def numbers(client: Client, count: int) -> list[int]:
    """The next messages, finished one by one."""
    found = []
    for _ in range(count):
        message = client.message()
        client.send(say.fin(message.id))
        found.append(int(message.body))
    return found


def test_it_begins_at_the_offset_and_goes_on_with_what_comes(either: Running) -> None:
    with replaying(either, 30) as client, replaying(either, 50, channel="end#ephemeral") as at_the_end:
        assert numbers(client, 20) == list(range(30, 50))
        publish(either, 50, 60)
        publish(either, 60, 61)
        assert numbers(client, 11) == numbers(at_the_end, 11) == list(range(50, 61))
        assert client.silent()


def test_it_moves_nobodys_progress(either: Running) -> None:
    with replaying(either, 0) as client, Client(either.address) as consumer:
        consumer.subscribe("t", "c")
        assert numbers(client, 50) == numbers(consumer, 50) == list(range(50))
    with replaying(either, 49, channel="later#ephemeral") as later:
        assert numbers(later, 1) == [49]
    either.wait_until(lambda b: list(b.topics["t"].channels) == ["c"])


def test_what_is_given_back_comes_again(broker: Running) -> None:
    with replaying(broker, 48) as client:
        first = client.message()
        client.send(say.req(first.id, 0))
        assert numbers(client, 2) == [49, 48]


def test_memory_is_bounded_and_nothing_is_dropped(either: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_MESSAGES", 10)
    monkeypatch.setattr("srtm.broker.disk.readers._BATCH", 10)
    either.post("/channel/create?topic=t&channel=c")  # what nobody has yet would be in memory anyway
    held = []
    with replaying(either, 0) as client:
        for begin in range(50, 450, 50):
            publish(either, begin, begin + 50)
            held.append(either.do(lambda: either.broker.topics["t"].channels["r#ephemeral"].held))
        assert max(held) < 20
        assert numbers(client, 450) == list(range(450))
        assert metrics(either)["srtm_channel_dropped_total", ("r#ephemeral", "t")] == 0


def test_messages_that_wait_for_tokens_are_not_taken_from_the_log(broker: Running) -> None:
    assert broker.post("/topic/limit?topic=t&r=0.001&b=2")[0] == 200
    with replaying(broker, 49, ready=100) as client:
        publish(broker, 50, 55)
        assert numbers(client, 3) == [49, 50, 51]
        assert client.silent()
        assert broker.post("/topic/limit?topic=t")[0] == 200
        assert numbers(client, 3) == [52, 53, 54]


def test_a_paused_topic_gives_nothing_twice(broker: Running) -> None:
    with Client(broker.address) as consumer:
        consumer.subscribe("t", "c", 1)
        assert numbers(consumer, 50) == list(range(50))
        broker.post("/topic/pause?topic=t")
        publish(broker, 50, 55)
        with replaying(broker, 48) as client:
            assert numbers(client, 2) == [48, 49]
            assert client.silent()
            broker.post("/topic/unpause?topic=t")
            assert numbers(client, 5) == numbers(consumer, 5) == list(range(50, 55))


def test_emptied_it_goes_on_with_what_comes(broker: Running) -> None:
    with replaying(broker, 0, ready=0) as client:
        broker.wait_until(lambda b: b.topics["t"].channels["r#ephemeral"].held == 50)
        assert broker.post("/channel/empty?topic=t&channel=r%23ephemeral")[0] == 200
        publish(broker, 50, 52)
        client.send(say.rdy(1))
        assert numbers(client, 2) == [50, 51]


@pytest.mark.parametrize(
    ("offset", "topic", "channel", "why"),
    [
        (5, "t", "r#ephemeral", b"topic 't' no longer holds offset 5: it begins at 20"),
        (51, "t", "r#ephemeral", b"topic 't' has no offset 51: it ends at 50; was its log removed?"),
        (0, "m", "r#ephemeral", b"topic 'm' is not on disk: only disk topics can be replayed"),
        (30, "t", "r", b"cannot replay to channel 'r': use a new name that ends with #ephemeral"),
        (30, "t", "c#ephemeral", b"cannot replay to channel 'c#ephemeral': use a new name"),
    ],
)
def test_what_cannot_be_replayed(broker: Running, offset: int, topic: str, channel: str, why: bytes) -> None:
    assert broker.post("/srtm/log/trim?topic=t&before=20")[0] == 200
    with Client(broker.address) as other, Client(broker.address, srtm={"replay": {"offset": offset}}) as client:
        other.subscribe("t", "c#ephemeral", 0)
        client.send(say.sub(topic, channel))
        assert client.error().startswith(b"E_SUB_FAILED SUB failed " + why)
        assert client.ended()
    assert "m" not in broker.broker.topics


def test_a_log_that_is_trimmed_past_a_slow_client_is_its_error(
    broker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST_MESSAGES", 10)
    monkeypatch.setattr("srtm.broker.disk.readers._BATCH", 10)
    broker.post("/channel/create?topic=t&channel=c")
    with replaying(broker, 0) as client:
        broker.wait_until(lambda b: b.topics["t"].channels["r#ephemeral"].held >= 10)  # two reads: one is in flight
        assert broker.post("/srtm/log/trim?topic=t&before=40")[0] == 200
        found = []
        while isinstance(event := client.next(), Message):
            found.append(int(event.body))
            client.send(say.fin(event.id))
        assert found == list(range(len(found)))
        assert 10 <= len(found) <= 20  # the error overtakes what still waits for the client
        assert event.problem.wire == b"E_SUB_FAILED SUB failed topic 't' no longer holds offset 20: it begins at 40"
        assert client.ended()
