"""A broker in memory: sockets as Linux has them, times to the nanosecond, and the example of its documentation."""

from __future__ import annotations

import socket
import textwrap
from collections.abc import Iterator
from struct import unpack

import pytest

from srtm.broker.options import BrokerOptions
from srtm.net.stamps import SO_TIMESTAMPNS
from srtm.protocol import client as say
from srtm.testing import memory
from srtm.testing.loop import VirtualLoop
from srtm.testing.memory import MemoryBroker
from srtm.testing.network import BUFFER_BYTES
from srtm.units import NS_PER_MS, NS_PER_S
from tests.broker.running import Client


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    found = VirtualLoop()
    yield found
    found.close()


def test_the_example_runs() -> None:
    assert memory.__doc__ is not None
    lines = memory.__doc__.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("    "))
    end = max(number for number, line in enumerate(lines) if line.startswith("    "))
    exec(textwrap.dedent("\n".join(lines[begin : end + 1])), {})


def test_messages_get_their_tokens_to_the_nanosecond() -> None:
    with MemoryBroker() as broker, Client(broker) as client:
        broker.request("POST", "/topic/limit?topic=t&r=8&b=2")
        client.subscribe("t", "c", ready=10)
        began_s = broker.loop.time()
        client.publish("t", *[b"x"] * 5)
        taken_s = []
        for _ in range(5):
            client.message()
            taken_s.append(broker.loop.time() - began_s)
        assert taken_s == pytest.approx([0, 0, 0.125, 0.25, 0.375], abs=2e-9)
        broker.run_until(lambda b: bool(b.statistics().topics[0].seconds))
        (second,) = broker.broker.statistics().topics[0].seconds
        assert second.processing is not None
        assert second.processing.p99 <= 2  # work takes no virtual time; a timer is late by its rounding


def test_an_hour_passes_in_a_moment_and_heartbeats_keep_a_client() -> None:
    with MemoryBroker() as broker, Client(broker, heartbeat_interval=60_000) as client:
        assert client.silent(3_600)
        assert 58 <= client.heartbeats <= 60
        assert broker.loop.time() >= 3_600


@pytest.mark.parametrize(("merges", "ages_ms"), [(1, [100, 50]), (2, [50, 50])])
def test_a_read_is_stamped_with_the_arrival_of_its_last_segment(
    merges: int, ages_ms: list[int], loop: VirtualLoop
) -> None:
    """Segments that wait may become one, with the newest stamp; a look takes nothing."""
    loop.network.merges = merges
    near, far = loop.network.pair()
    far.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    view = memoryview(bytearray(100))
    near.send(b"one")
    loop.clock.advance(0.05)
    near.send(b"two")
    loop.clock.advance(0.05)

    def age_ms(size: int, flags: int = 0) -> tuple[int, int]:
        taken, [(_, _, stamp)], _, _ = far.recvmsg_into([view[:size]], 64, flags)
        seconds, nanoseconds = unpack("@ll", stamp)
        return taken, (loop.clock.time_ns() - (seconds * NS_PER_S + nanoseconds)) // NS_PER_MS

    assert [age_ms(size, socket.MSG_PEEK) for size in (3, 4, 97)] == [(3, ages_ms[0]), (4, ages_ms[1]), (6, ages_ms[1])]
    assert [age_ms(size) for size in (3, 97)] == [(3, ages_ms[0]), (3, ages_ms[1])]
    with pytest.raises(BlockingIOError):
        far.recv(1)


def test_without_the_option_a_read_has_no_stamp(loop: VirtualLoop) -> None:
    near, far = loop.network.pair()
    near.send(b"x")
    assert far.recvmsg_into([memoryview(bytearray(9))], 64)[1] == []


def test_a_full_buffer_takes_no_more_until_a_third_is_free(loop: VirtualLoop) -> None:
    near, far = loop.network.pair()
    assert near.send(b"x" * (BUFFER_BYTES + 5)) == BUFFER_BYTES
    with pytest.raises(BlockingIOError):
        near.send(b"x")
    near.settimeout(2.0)
    with pytest.raises(TimeoutError):
        near.send(b"x")
    assert loop.time() == 2.0
    loop.call_later(1.0, far.recv, BUFFER_BYTES // 2)
    assert near.send(b"x") == 1
    assert loop.time() == 3.0


def test_one_end_may_be_closed_before_the_other(loop: VirtualLoop) -> None:
    near, far = loop.network.pair()
    near.send(b"last words")
    near.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenPipeError):
        near.send(b"x")
    assert (far.recv(100), far.recv(100)) == (b"last words", b"")
    far.send(b"answer")
    far.close()
    assert (near.recv(100), near.recv(100)) == (b"answer", b"")


def test_unread_bytes_reset_the_connection(loop: VirtualLoop) -> None:
    near, far = loop.network.pair()
    near.send(b"nobody reads this")
    far.close()
    with pytest.raises(ConnectionResetError):
        near.recv(1)


def test_a_write_to_a_closed_end_is_told_at_the_next(loop: VirtualLoop) -> None:
    near, far = loop.network.pair()
    far.close()
    assert near.send(b"x") == 1
    with pytest.raises(ConnectionResetError):
        near.send(b"x")


def test_a_port_belongs_to_one_listener(loop: VirtualLoop) -> None:
    with pytest.raises(ConnectionRefusedError):
        loop.network.connect(4150)
    with MemoryBroker(loop=loop), pytest.raises(OSError, match="in use"):
        loop.network.listen(4150, lambda sock, _: sock)
    with pytest.raises(ConnectionRefusedError):
        loop.network.connect(4150)


def test_waiting_for_nothing_is_an_error_and_not_a_hang(loop: VirtualLoop) -> None:
    near, _ = loop.network.pair()
    near.settimeout(None)
    with pytest.raises(RuntimeError, match="nothing will ever happen"):
        near.recv(1)


def test_two_brokers_share_a_loop(loop: VirtualLoop) -> None:
    options = BrokerOptions(tcp_port=1), BrokerOptions(tcp_port=2)
    with MemoryBroker(options[0], loop) as one, MemoryBroker(options[1], loop) as two:
        with Client(one) as first, Client(two) as second:
            first.publish("t", b"x")
            second.publish("u", b"x")
        assert set(one.broker.topics) == {"t"}
        assert set(two.broker.topics) == {"u"}


def test_a_run_is_the_same_every_time() -> None:
    def story() -> list[float]:
        with MemoryBroker() as broker, Client(broker) as client, Client(broker) as publisher:
            broker.request("POST", "/topic/limit?topic=t&r=7&b=3")
            client.subscribe("t", "c", ready=2)
            times = []
            for number in range(20):
                publisher.publish("t", b"%d" % number)
            for _ in range(20):
                message = client.message()
                times.append(broker.loop.time())
                broker.sleep(0.003)
                client.send(say.fin(message.id))
            return times

    assert story() == story()
