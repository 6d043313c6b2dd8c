"""A lender and a borrower are killed under load, as processes: nothing acknowledged is lost, and the contract holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.control.processes import Processes, Sender, processes, started, stopped
from tests.control.test_cluster import conforms, soon

pytestmark = pytest.mark.processes

R, B, COUNT = 300, 60, 30
BORROWER = "broker-1"


@pytest.mark.parametrize("victim", [BORROWER, "broker-2"], ids=["borrower", "lender"])
def test_a_broker_that_lends_or_borrows_is_killed_under_load(victim: str, tmp_path: Path) -> None:
    """Shares go by what publishers declare, so one broker has too few tokens, and the others lend it theirs."""

    async def story(cluster: Processes) -> list[Sender]:
        senders = [Sender("t", cluster.url, f"p{number}", 8) for number in range(COUNT)]
        await started(senders)
        for sender in senders:
            hot = cluster.places("t")[sender.publisher.id] == BORROWER
            sender.rate = 16 if hot else 2  # 160 of 100, and 20 of 100: less than r together
        await asyncio.to_thread(cluster.record, *cluster.brokers)
        borrowed = await soon(lambda: _borrowed(cluster, BORROWER, 20))
        assert borrowed
        await asyncio.to_thread(cluster.recorded, victim)
        cluster.brokers[victim].kill()
        rest = cluster.brokers.keys() - {victim}
        await soon(lambda: cluster.shares("t").keys() == rest)
        # All of r is in force again, and nothing waits that static shares would have released.
        await soon(lambda: sum(cluster.shares("t").values()) == pytest.approx(R))
        before = {sender.publisher.id: len(sender.acknowledged) for sender in senders}
        await soon(lambda: all(len(each.acknowledged) > before[each.publisher.id] + 2 for each in senders))
        for sender in senders:
            sender.rate = 4
        await soon(lambda: not cluster.topic("t")["waiting"])
        await stopped(senders)
        return senders

    with processes(tmp_path) as cluster:
        for name in (BORROWER, "broker-2", "broker-3"):
            cluster.broker(name)
        cluster.all_alive()
        cluster.create("t", r=R, b=B, durability="disk", policy="lb", adapt=False, lending="when_waiting")
        senders = asyncio.run(story(cluster))
        shown = cluster.topic("t")["lending"]
        assert (shown["chosen"], shown["accused"]) == ("when_waiting", [])
        cluster.recorded(*(cluster.brokers.keys() - {victim}))
        assert conforms(cluster, "t", R, B)
        cluster.restart_broker(victim)
        cluster.all_alive()
        logged = cluster.logged("t")
        assert cluster.topic("t")["lending"]["accused"] == []
    acknowledged = {body for sender in senders for body in sender.acknowledged}
    assert len(acknowledged) > 3 * COUNT
    assert acknowledged <= set(logged)


def _borrowed(cluster: Processes, broker: str, tokens: float) -> bool:
    found = {each["broker"]: each["lending"] for each in cluster.topic("t")["brokers"]}.get(broker)
    return found is not None and found["borrowed"] > tokens
