"""Brokers in memory that lend each other tokens, told to by exchanges."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from srtm.broker.lending.lender import Lender
from srtm.broker.lending.lenders import Heard
from srtm.protocol.lending import MAGIC, Entry
from tests.broker.lending.running import BIRTH, TOKEN, in_memory_lending, links
from tests.broker.running import Client, Running


def lender_of(broker: Running) -> Lender | None:
    return broker.broker.topics["t"].gate.lender


def test_a_burst_at_one_broker_borrows_from_the_other() -> None:
    with (
        in_memory_lending(rule="when_waiting") as lending,
        Client(lending.brokers[0].address) as publisher,
        Client(lending.brokers[0].address).subscribe("t", "c", 100) as reader,
    ):
        here, there = lending.brokers
        began = here.now_ns()
        publisher.publish("t", *[b"x"] * 14)
        for _ in range(14):
            reader.message()
        assert here.now_ns() - began < 50_000_000  # four messages would have waited for 0.4 s
        lent, borrowed = lending.lent(there), lending.lent(here)
        assert borrowed.asks >= 1
        assert lent.lent_ntok == borrowed.borrowed_ntok + borrowed.lost_ntok
        assert borrowed.borrowed_ntok + TOKEN >= 4 * TOKEN  # its own refill brings a part
        report = lending.tell(here)
        assert report.lent is not None
        assert structs.replace(report.lent, peers=[]) == borrowed
        (peer,), (lender,) = report.lent.peers, lending.peers(there).values()
        assert (peer.name, peer.asks, peer.unanswered, peer.heard) == ("broker-1", borrowed.asks, 0, 0)
        assert peer.amounts == [(there.broker.started_ns, 0, borrowed.borrowed_ntok)]
        assert lender["peer"] == "broker-0"
        assert (lender["heard"], lender["refused"], lender["lent_ntok"]) == (peer.asks, 0, lent.lent_ntok)
        assert lending.peers(here)["broker-1"]["round_trip_ns"].keys() == {"p50", "p99"}
        assert borrowed.spent == 14
        assert b"srtm_topic_borrowed_tokens_total" in here.metrics()


def test_without_terms_nothing_is_lent() -> None:
    with (
        in_memory_lending() as lending,
        Client(lending.brokers[0].address) as publisher,
        Client(lending.brokers[0].address).subscribe("t", "c", 100) as reader,
    ):
        here, there = lending.brokers
        for broker in lending.brokers:
            lending.tell(broker, lends=False)
            assert lender_of(broker) is None
        began = here.now_ns()
        publisher.publish("t", *[b"x"] * 14)
        for _ in range(14):
            reader.message()
        assert here.now_ns() - began >= 390_000_000
        assert (lending.lent(here).asks, lending.lent(there).lent_ntok) == (0, 0)
        assert b"borrowed" not in here.metrics()
        assert not links(there.broker)._links


def test_a_peer_under_another_birth_is_not_lent_to() -> None:
    with (
        in_memory_lending() as lending,
        Client(lending.brokers[0].address) as publisher,
        Client(lending.brokers[0].address).subscribe("t", "c", 100) as reader,
    ):
        here, there = lending.brokers
        lending.grant_again(here, BIRTH + 1)
        began = here.now_ns()
        publisher.publish("t", *[b"x"] * 14)
        for _ in range(14):
            reader.message()
        assert here.now_ns() - began >= 390_000_000
        assert lending.lent(here).unanswered
        assert lending.lent(there).lent_ntok == 0
        # Nor does it take an answer that was meant for the contract before.
        here.broker.control.lenders.inbox.append(Heard("broker-1", False, Entry("t", BIRTH, 1, 10**12, 0)))
        here.broker.control.hear_peers(here.now_ns(), 0)
        assert lending.lent(here).borrowed_ntok == 0


def test_lending_ends_with_the_lease() -> None:
    with in_memory_lending() as lending, Client(lending.brokers[0].address) as publisher:
        here, there = lending.brokers
        lending.lease_ns = 10**9
        lending.tell(there, lease=True)
        assert lender_of(there) is not None
        there.sleep(0.95)
        assert lender_of(there) is not None
        # Read before the next tick, but after the end.
        clock: Any = there.broker.clock
        clock.advance(0.06)
        entry = Entry("t", BIRTH, 2**60, 10**12, 0)
        there.broker.control.lenders.inbox.append(Heard("broker-0", True, entry))
        there.broker.control.hear_peers(there.now_ns(), there.broker.clock.monotonic_ns())
        assert lender_of(there) is None
        lending.tell(there)
        assert lender_of(there) is None  # not before the share is granted again
        publisher.publish("t", *[b"x"] * 14)
        here.sleep(0.1)
        assert lending.lent(here).borrowed_ntok == 0
        lending.tell(there, full=True, lease=True)
        assert lender_of(there) is not None


def test_an_old_ask_in_a_backlog_is_not_answered() -> None:
    with in_memory_lending() as lending:
        _, there = lending.brokers
        now_ns = there.now_ns()
        asks = [Entry("t", BIRTH, now_ns + number, 2 * 10**12, 0) for number in range(100)]
        there.broker.control.lenders.inbox += [Heard("broker-0", True, each) for each in asks]
        there.broker.control.hear_peers(now_ns, 0)
        assert lending.lent(there).lent_ntok == 2 * TOKEN


def test_only_brokers_with_the_token_are_heard() -> None:
    with in_memory_lending(control_token=None) as lending:
        here, there = lending.brokers
        assert set(links(there.broker).visitors) == {"broker-0"}
        links(here.broker).token = "wrong"
        visitor = links(there.broker).visitors["broker-0"]
        visitor.pipe.close()
        here.wait_until(lambda it: not links(it)._links["broker-1"].greeted)
        here.sleep(5)
        assert not links(here.broker)._links["broker-1"].greeted
        assert links(here.broker)._links["broker-1"]._problem.endswith("tokens of these brokers differ")
        links(here.broker).token = None
        lending.meet()


def test_a_peer_that_was_started_again_is_answered_though_its_clock_was_set_back() -> None:
    with in_memory_lending() as lending:
        here, there = lending.brokers
        control, now_ns = there.broker.control, there.now_ns()

        def ask(number: int) -> int:
            control.lenders.inbox.append(Heard("broker-0", True, Entry("t", BIRTH, number, 10**12, 0)))
            control.hear_peers(now_ns, 0)
            return lending.lent(there).lent_ntok

        assert ask(100) == ask(99) == TOKEN
        links(here.broker).incarnation -= 1
        links(there.broker).visitors["broker-0"].pipe.close()
        here.wait_until(lambda it: not links(it)._links["broker-1"].greeted)
        lending.meet()
        assert ask(50) == 2 * TOKEN


@pytest.mark.parametrize("wire", [b"\x00\x00\x00\x00\x05", b"noise and more noise"])
def test_a_stranger_is_left(wire: bytes) -> None:
    with in_memory_lending() as lending:
        here = lending.brokers[0]
        sock = here.address.connect()
        sock.sendall(MAGIC)
        assert len(sock.recv(100)) == 5 + 16
        sock.sendall(wire)
        assert sock.recv(100) == b""
        silent = here.address.connect()
        silent.sendall(MAGIC)
        assert silent.recv(100)
        assert silent.recv(100) == b""  # after a while
        with Client(here.address) as client:
            client.publish("t", b"x")
