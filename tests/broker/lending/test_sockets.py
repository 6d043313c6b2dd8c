"""Brokers that lend each other tokens on real sockets: what it brings, and what happens when one of them fails."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline, largest_excess
from srtm.units import NS_PER_MS
from tests.broker.lending.running import Lending, links, running_lending
from tests.broker.running import Client, Running


class Releases:
    """Release times and access delays of a topic at brokers, taken where a recorder would take them."""

    def __init__(self, brokers: list[Running]) -> None:
        self.released_ns: list[int] = []
        self.access_ns: list[int] = []
        for broker in brokers:
            broker.broker.turn.recorder = self  # type: ignore[assignment]

    def released(self, _topic: str, messages: list) -> None:  # type: ignore[type-arg]
        for message in messages:
            self.released_ns.append(message.release_ns)
            self.access_ns.append(message.release_ns - message.arrival_ns)

    def mean_ms(self) -> float:
        """The mean wait: one burst that the host's scheduling held up does not decide it."""
        return float(np.mean(self.access_ns)) / NS_PER_MS

    def excess(self, lending: Lending) -> float:
        """By how much the worst window of all brokers together is above b + r·Δt."""
        contract = lending.contract
        timeline = Timeline(TokenBucket(contract.r_mtps, contract.b_ntok), ())
        return float(largest_excess(np.sort(np.array(self.released_ns, np.int64)), timeline).tokens)


@contextmanager
def recorded(lending: Lending) -> Iterator[Releases]:
    found = Releases(lending.brokers)
    try:
        yield found
    finally:
        for broker in lending.brokers:
            broker.broker.turn.recorder = None


def publish_bursts(lending: Lending, bursts: int, size: int, gap_s: float) -> None:
    """Bursts, at one broker after another."""
    clients = [Client(broker.address) for broker in lending.brokers]
    try:
        for number in range(bursts):
            clients[number % len(clients)].publish("t", *[b"x"] * size)
            time.sleep(gap_s)
    finally:
        for client in clients:
            client.sock.close()


def wait_for_all(releases: Releases, count: int) -> None:
    until = time.monotonic() + 10
    while len(releases.released_ns) < count:
        assert time.monotonic() < until, f"{len(releases.released_ns)} of {count}"
        time.sleep(0.01)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rule", ["when_waiting", "early"])
def test_bursts_at_one_broker_wait_less_and_all_together_conform(count: int, rule: str) -> None:
    waits_ms = {}
    for lends in (False, True):
        with running_lending(count, r=100, b=20, rule=rule) as lending:
            if not lends:
                for broker in lending.brokers:
                    lending.tell(broker, lends=False)
            with recorded(lending) as releases:
                publish_bursts(lending, 10, 28, 0.2)  # 140/s of 200/s and more; eight more than a share holds
                wait_for_all(releases, 10 * 28)
            assert releases.excess(lending) <= 0
            waits_ms[lends] = releases.mean_ms()
            if lends:
                assert sum(lending.lent(broker).borrowed_ntok for broker in lending.brokers) > 0
    assert waits_ms[True] < waits_ms[False] / 2, waits_ms


@pytest.mark.parametrize("rule", ["when_waiting", "early"])
def test_brokers_that_use_every_token_conform_together(rule: str) -> None:
    rng = random.Random(3)
    with running_lending(3, r=200, b=10, rule=rule) as lending, recorded(lending) as releases, ExitStack() as stack:
        clients = [stack.enter_context(Client(broker.address)) for broker in lending.brokers]
        sent = 0
        for _ in range(60):
            count = rng.randrange(1, 40)  # 1,000/s of 600/s
            rng.choice(clients).publish("t", *[b"x"] * count)
            sent += count
            time.sleep(0.02)
        wait_for_all(releases, sent)
        assert -10 < releases.excess(lending) <= 0  # more was used at once than two of the three hold
        assert sum(lending.lent(broker).borrowed_ntok for broker in lending.brokers) > 0


def under_load(lending: Lending, seconds: float, at: int, act: Callable[[], None]) -> Releases:
    """Bursts at broker `at` for a while; `act` comes in the middle."""
    with recorded(lending) as releases, Client(lending.brokers[at].address) as client:
        middle = threading.Timer(seconds / 2, act)
        middle.start()
        until, sent = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            client.publish("t", *[b"x"] * 14)
            sent += 14
            time.sleep(0.1)
        middle.join()
        wait_for_all(releases, sent)
    return releases


def test_when_the_lender_dies_its_peer_goes_on_alone() -> None:
    with running_lending(2, r=200, b=10) as lending:
        borrower, _ = lending.brokers
        releases = under_load(lending, 2.0, 0, lambda: lending.end(1))
        assert releases.excess(lending) <= 0
        assert lending.lent(borrower).borrowed_ntok > 0
        borrower.wait_until(lambda it: not links(it)._links["broker-1"].greeted)


def test_when_the_borrower_dies_the_lender_keeps_its_share() -> None:
    with running_lending(2, r=200, b=10) as lending:
        borrower, lender = lending.brokers
        with recorded(lending) as releases:
            with Client(borrower.address) as client:
                client.publish("t", *[b"x"] * 30)
                borrower.wait_until(lambda it: it.topics["t"].gate.lender._lending.counts.asks > 0)  # type: ignore[union-attr]
                lending.end(0)
            with Client(lender.address) as client:
                client.publish("t", *[b"x"] * 30)
            lender.wait_until(lambda it: it.topics["t"].messages == 30 and not it.topics["t"].waiting)
            assert releases.excess(lending) <= 0


def test_a_peer_that_stands_still_is_done_without() -> None:
    with running_lending(2, r=100, b=10) as lending:
        borrower, lender = lending.brokers
        with recorded(lending) as releases:
            with lender.stalled(), Client(borrower.address) as client:
                client.publish("t", *[b"x"] * 40)
                wait_for_all(releases, 40)  # by its own share
                took_ns = max(releases.access_ns)
                assert lending.lent(borrower).unanswered > 0
            assert 290 * NS_PER_MS <= took_ns < 600 * NS_PER_MS  # thirty tokens at 100/s
            lender.wait_until(lambda it: bool(it.topics["t"].gate.lender))
            time.sleep(0.2)
            assert lending.lent(lender).lent_ntok <= 10 * 10**9  # not once for each ask that it slept through
            with Client(borrower.address) as client:
                client.publish("t", *[b"x"] * 14)
            wait_for_all(releases, 54)
            assert releases.excess(lending) <= 0


def test_a_wrong_token_is_refused_and_nothing_is_lent() -> None:
    with running_lending(2, r=10, b=10) as lending:
        here, there = lending.brokers
        there.do(lambda: setattr(links(there.broker), "token", "secret"))
        there.do(lambda: links(there.broker).visitors["broker-0"].pipe.close())
        here.wait_until(lambda it: "tokens of these brokers differ" in links(it)._links["broker-1"]._problem)
        with Client(here.address) as client:
            client.publish("t", *[b"x"] * 14)
        here.wait_until(lambda it: it.topics["t"].gate.lender._lending.counts.unanswered > 0)  # type: ignore[union-attr]
        assert lending.lent(here).borrowed_ntok == 0
        here.do(lambda: setattr(links(here.broker), "token", "secret"))
        lending.meet()


def test_a_peer_that_never_greets_is_left_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srtm.broker.lending.links._GREET_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, running_lending(2, r=10, b=10) as lending:
        here, address = lending.brokers[0], f"127.0.0.1:{mute.getsockname()[1]}"
        here.do(lambda: links(here.broker).meet({"mute": address}))
        mute.settimeout(10)
        for _ in range(2):
            connection, _ = mute.accept()
            with connection:
                connection.settimeout(10)
                while connection.recv(100):  # until it has left
                    pass
        assert "no greeting within 0.2 s" in links(here.broker)._links["mute"]._problem


def test_a_broker_that_stops_meets_nobody_any_more() -> None:
    with running_lending(2, r=10, b=10) as lending:
        here = lending.brokers[0]
        here.do(lambda: links(here.broker).close())
        here.do(lambda: links(here.broker).meet({"broker-1": lending.brokers[1].address}))
        assert links(here.broker)._links == {}
