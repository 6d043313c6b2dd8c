"""Reads after a stall: each message keeps the stamp of its own segment, and nothing else costs more than before."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.broker.clients import reads
from srtm.broker.message import Message
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.protocol import client as say
from srtm.protocol.commands import Nop, Pub
from srtm.testing.network import MemorySocket
from tests.broker.conftest import Start
from tests.broker.running import Client, InMemory, Running

pytestmark = pytest.mark.memory
MS = 1_000_000
MERGED = 17  # segments that Linux makes one of


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often sockets were read and peeked at."""
    found: Counter[str] = Counter()
    read = MemorySocket.recvmsg_into

    def counted(sock: MemorySocket, buffers: list[memoryview], ancillary: int = 0, flags: int = 0) -> Any:
        found["peek" if flags & socket.MSG_PEEK else "read"] += 1
        return read(sock, buffers, ancillary, flags)

    monkeypatch.setattr(MemorySocket, "recvmsg_into", counted)
    return found


def merging(broker: Running, segments: int) -> None:
    """Have the network make one segment of so many that wait."""
    assert isinstance(broker, InMemory)
    broker.memory.loop.network.merges = segments


def steadily(broker: Running, client: Client, count: int, say_it: Callable[[int], bytes]) -> None:
    """Say one thing a millisecond."""
    for number in range(count):
        broker.sleep(0.001)
        client.send(say_it(number))


class Releases:
    """In place of a recorder: what each message waited for its token."""

    def __init__(self, broker: Running) -> None:
        self.access_ms: list[int] = []
        broker.broker.turn.recorder = self  # type: ignore[assignment]

    def released(self, _topic: str, messages: list[Message]) -> None:
        self.access_ms += [(message.release_ns - message.arrival_ns) // MS for message in messages]

    def sent(self, *_: object) -> None:
        """Not of interest."""

    async def stop(self) -> None:
        """Nothing is open."""


def a_stall(broker: Running, client: Client) -> list[int]:
    """The access delays of a publisher of one message a millisecond, before and after a stall of 40 ms."""
    broker.post("/topic/limit?topic=t&r=1000&b=5")
    releases = Releases(broker)
    steadily(broker, client, 100, lambda _: say.pub("t", b"x"))
    with broker.stalled():
        steadily(broker, client, 40, lambda _: say.pub("t", b"x"))
    for _ in range(140):
        assert client.response() == b"OK"
    broker.sleep(0.1)
    assert len(releases.access_ms) == 140
    return releases.access_ms


def test_after_a_stall_every_message_has_the_stamp_of_its_segment(broker: Running) -> None:
    with Client(broker.address) as client:
        assert Counter(a_stall(broker, client)) == {0: 140}


def test_merged_segments_are_taken_to_have_come_evenly(broker: Running) -> None:
    """But for the first of a stall: nothing says how long before its stamp the messages in it came."""
    merging(broker, MERGED)
    with Client(broker.address) as client:
        waited = a_stall(broker, client)
    assert Counter(waited[:100]) == {0: 100}
    assert max(waited) == MERGED - 5, "with one stamp for all it would be 35"
    assert waited[-1] == MERGED - 5, "at one message a token, a wait lasts"


def test_what_is_merged_whole_has_one_stamp(broker: Running) -> None:
    """Nothing says when its messages came, and none is taken to have come earlier than can be shown."""
    merging(broker, 1000)
    with Client(broker.address) as client:
        assert max(a_stall(broker, client)) == 35  # 40 messages, 5 of them with tokens


def test_a_pause_excuses_no_burst(broker: Running) -> None:
    """The loop did not stand still; nobody spoke."""
    broker.post("/topic/limit?topic=t&r=1000&b=5")
    releases = Releases(broker)
    with Client(broker.address) as client:
        steadily(broker, client, 100, lambda _: say.pub("t", b"x"))
        broker.sleep(0.1)
        client.send(*[say.pub("t", b"x")] * 40)
        broker.sleep(0.1)
    assert max(releases.access_ms) == 35


def test_reads_in_time_cost_one_call_each(broker: Running, calls: Counter[str]) -> None:
    with Client(broker.address) as client:
        steadily(broker, client, 100, lambda _: say.pub("t", b"x"))
        broker.do(lambda: None)
        calls.clear()
        steadily(broker, client, 1000, lambda _: say.pub("t", b"x"))
        broker.do(lambda: None)
        assert calls == {"read": 1000}


def test_a_message_after_a_pause_costs_a_peek(broker: Running, calls: Counter[str]) -> None:
    """Once: if pauses become usual, they cost nothing."""
    with Client(broker.address) as client:
        steadily(broker, client, 100, lambda _: say.pub("t", b"x"))
        broker.do(lambda: None)
        calls.clear()
        for _ in range(20):
            broker.sleep(0.1)
            client.send(say.pub("t", b"x"))
        broker.do(lambda: None)
        assert calls["read"] == 20
        assert calls["peek"] < 8


def test_peeks_after_a_stall_are_bounded(broker: Running, calls: Counter[str]) -> None:
    with Client(broker.address) as client:
        steadily(broker, client, 100, lambda _: say.pub("t", b"x"))
        calls.clear()
        with broker.stalled():
            steadily(broker, client, 1000, lambda number: say.pub("t", b"x" * (1 + number % 50)))
        for _ in range(1100):
            assert client.response() == b"OK"
        assert calls["peek"] <= reads.PEEKS + 20  # and those that find the run it has begun with


def test_who_has_gone_is_noticed(broker: Running) -> None:
    with Client(broker.address) as client, Client(broker.address) as other:
        steadily(broker, client, 100, lambda _: say.pub("t", b"x"))
        with broker.stalled():
            steadily(broker, client, 10, lambda _: say.pub("t", b"x"))
            client.sock.shutdown(socket.SHUT_WR)
            other.sock.close()
            broker.sleep(0.01)
        broker.wait_until(lambda b: not b.clients.connections)
        assert broker.do(lambda: broker.broker.topics["t"].messages) == 110


def test_the_disk_does_not_cost_stamps(start: Start, tmp_path: Path) -> None:
    """A publisher is held until its messages are stored; those that came before are of the same read."""
    broker = start(data_path=str(tmp_path))
    broker.post("/topic/create?topic=t&durability=disk")
    with Client(broker.address) as client:
        assert Counter(a_stall(broker, client)) == {0: 140}


def test_commands_keep_their_order_after_a_stall(start: Start, tmp_path: Path) -> None:
    """SUB waits until the message before it is stored, and what follows waits for SUB, in segments of their own."""
    broker = start(data_path=str(tmp_path))
    broker.post("/topic/create?topic=t&durability=disk")
    said = [say.pub("t", b"1"), say.sub("t", "c"), say.rdy(5), say.pub("t", b"2"), say.pub("t", b"3")]
    with Client(broker.address) as client:
        steadily(broker, client, 100, lambda _: say.pub("u", b"x"))
        with broker.stalled():
            steadily(broker, client, len(said), said.__getitem__)
            broker.sleep(0.01)
        answers = 0
        bodies: list[bytes] = []
        while answers < 104 or len(bodies) < 3:
            found = client.next()
            if isinstance(found, say.Message):
                bodies.append(found.body)
            else:
                answers += 1
        assert bodies == [b"1", b"2", b"3"]


class Told:
    """A client that carries out nothing, and closes at some command."""

    def __init__(self, closes_at: int = 3) -> None:
        self.connection: Any = self
        self._closes_at = closes_at
        self.closing = False
        self.heard: list[tuple[list[Any], int]] = []

    def carry_out(self, events: list[Any], arrival_ns: int) -> None:
        self.heard.append((events, arrival_ns))
        self.closing = len(self.heard) == self._closes_at


def test_messages_are_spread_up_to_the_stamp_until_one_fails() -> None:
    told, pubs = Told(), [Pub("t", b"%d" % number) for number in range(4)]
    reads.carry_out_evenly(told, pubs, 100, 20)
    assert told.heard == [([pubs[0]], 40), ([pubs[1]], 60), ([pubs[2]], 80)]


@pytest.mark.parametrize("since_ns", [100, 101])
def test_what_came_no_later_is_not_spread(since_ns: int) -> None:
    told, pubs = Told(), [Pub("t", b"x")] * 2
    reads.carry_out_evenly(told, pubs, 100, since_ns)
    assert told.heard == [(pubs, 100)]


def test_other_commands_are_not_taken_apart() -> None:
    told, events = Told(), [Pub("t", b"x"), Nop(), Pub("t", b"x")]
    reads.carry_out_evenly(told, events, 100, 20)
    assert told.heard == [(events, 100)]


@given(
    st.lists(st.integers(0, 20 * MS), min_size=1, max_size=40),
    st.integers(2, 40),
    st.integers(1, 20),
    st.sampled_from([100, 1000, 5000]),
)
def test_no_release_is_later_than_with_the_stamp_of_all(others: list[int], merged: int, b: int, r: int) -> None:
    """The n-th of them, whoever sent it: a run of merged messages, spread over 20 ms, among messages of others."""
    bucket, last_ns = TokenBucket.of(r, b), 20 * MS
    told = Told(closes_at=0)
    reads.carry_out_evenly(told, [Pub("t", b"x")] * merged, last_ns, 0)
    evenly = [arrival_ns for _, arrival_ns in told.heard]
    assert evenly == sorted(evenly)
    assert evenly[0] > 0
    assert evenly[-1] == last_ns

    def releases(arrivals_ns: list[int]) -> Any:
        arrivals = np.array(sorted(arrivals_ns), np.int64)
        return arrivals + scan.access_delays(arrivals, bucket)

    assert (releases([*others, *evenly]) <= releases([*others, *[last_ns] * merged])).all()


def test_segments_of_a_real_socket_are_told_apart(start_on_sockets: Start) -> None:
    """Linux merges some of them; those that it keeps have times of their own, and none is later than the read's."""
    broker = start_on_sockets()
    broker.wait_for_stamps()
    arrivals: list[int] = []

    class Arrivals(Releases):
        def released(self, _topic: str, messages: list[Message]) -> None:
            arrivals.extend(message.arrival_ns for message in messages)

    broker.do(lambda: Arrivals(broker))
    with Client(broker.address) as client:
        for _ in range(30):  # by now, the kernel acknowledges answers with what follows, and not at once
            broker.sleep(0.001)
            client.publish("t", b"x")
        began_ns = broker.now_ns()
        broker.do(lambda: setattr(broker.broker.poller, "late_ns", 0))  # a busy host may be used to such stalls
        with broker.stalled():
            for _ in range(5):
                broker.sleep(0.01)
                client.send(say.pub("t", b"x"))
            ended_ns = broker.now_ns()
        for _ in range(5):
            assert client.response() == b"OK"
    broker.do(lambda: setattr(broker.broker.turn, "recorder", None))
    late = arrivals[-5:]
    assert late == sorted(late)
    assert len(set(late)) >= 3
    assert began_ns < late[0] < ended_ns - 20 * MS
