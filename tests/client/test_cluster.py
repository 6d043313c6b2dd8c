"""Clients of a whole cluster: a controller and two brokers, each a process."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from srtm.client import Cluster, Publisher, Subscriber
from srtm.errors import ClientError

PATIENCE_S = 30.0


@pytest.fixture
def controller() -> Iterator[str]:
    command = [sys.executable, "-m", "srtm", "up", "--brokers", "2", "--free-ports"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as cluster:
        try:
            assert cluster.stdout is not None
            (url,) = re.findall(r"controller: (\S+)", cluster.stdout.readline())
            yield url
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.communicate(timeout=PATIENCE_S)


async def until(cluster: Cluster, path: str, holds: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(ClientError):
                if holds(await cluster.request("GET", path)):
                    return
            await asyncio.sleep(0.1)


@pytest.mark.processes
def test_publishers_of_a_contract_are_moved_by_the_controller_and_nothing_is_lost_or_doubled(controller: str) -> None:
    count, each = 20, 100
    received: dict[bytes, list[int]] = {}

    async def publish(publisher: Publisher) -> None:
        for n in range(each):
            await publisher.publish(b"%s %d" % (publisher.id.encode(), n))
            await asyncio.sleep(0.02)

    async def hear(subscriber: Subscriber) -> None:
        async for message in subscriber:
            who, n = message.body.split()
            received.setdefault(who, []).append(int(n))
            await message.finish()

    async def story() -> None:
        async with Cluster(controller) as cluster:
            await until(cluster, "/v1/brokers", lambda found: len(found["brokers"]) == 2)
            contract = {"r": 5000, "b": 100, "slo_ms": 1000, "fit": "none"}
            await cluster.request("PUT", "/v1/topics/t", contract)
            publishers = [Publisher("t", controller=cluster, id=f"p{n}", rate=50) for n in range(count)]
            await asyncio.gather(*(publisher.open() for publisher in publishers))
            async with Subscriber("t", "c", controller=cluster) as subscriber:
                hearing = asyncio.create_task(hear(subscriber))
                working = asyncio.gather(*(publish(publisher) for publisher in publishers))
                await until(cluster, "/v1/topics/t", lambda found: sum(at["connected"] for at in found["brokers"]))
                places = {await cluster.where("t", publisher._spec) for publisher in publishers}
                (here,) = places
                names = {
                    name["address"]: name["name"] for name in (await cluster.request("GET", "/v1/brokers"))["brokers"]
                }
                (there,) = names.keys() - places
                move = {"publishers": [publisher.id for publisher in publishers], "broker": names[there]}
                await cluster.request("POST", "/v1/topics/t/move", move)
                await working
                assert {publisher.address for publisher in publishers} == {there}
                assert [publisher.migrations for publisher in publishers] == [1] * count
                assert here != there
                async with asyncio.timeout(PATIENCE_S):
                    while sum(map(len, received.values())) < count * each:
                        await asyncio.sleep(0.05)
                await asyncio.gather(*(publisher.close() for publisher in publishers))
                await subscriber.close()
                await hearing

    asyncio.run(story())
    assert len(received) == count
    assert all(sorted(found) == list(range(each)) for found in received.values())


@pytest.mark.processes
def test_what_a_controller_refuses_is_a_sentence(controller: str) -> None:
    async def story() -> None:
        async with Cluster(controller) as cluster:
            with pytest.raises(ClientError, match=r"^http://\S+: policy: [^\[{]+$"):
                await cluster.request("PUT", "/v1/topics/t", {"r": 1, "b": 1, "slo_ms": 1, "policy": "foo"})

    asyncio.run(story())
