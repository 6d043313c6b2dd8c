"""A cluster of processes: started whole or not at all, and gone afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import httpx
import pytest

from srtm.control.local.cluster import LocalCluster, LocalOptions
from srtm.errors import ControlError

pytestmark = pytest.mark.processes


def gone(cluster: LocalCluster) -> bool:
    children = [cluster.controller, *cluster.brokers]
    return all(child.process is None or child.process.returncode is not None for child in children)


def test_it_is_whole_when_it_has_started_and_gone_when_it_is_left(tmp_path: Path) -> None:
    async def go() -> None:
        options = LocalOptions(2, trace_folder=tmp_path / "traces", free_ports=True)
        async with LocalCluster(options) as cluster:
            found = httpx.get(f"{cluster.url}/v1/brokers", trust_env=False).json()["brokers"]
            assert {each["name"]: each["status"] for each in found} == {"broker-1": "alive", "broker-2": "alive"}
            for child in cluster.brokers:
                url = f"{cluster.http(child)}/srtm/trace/start?file={child.name}.parquet"
                assert httpx.post(url, trust_env=False).status_code == 200
        assert gone(cluster)

    asyncio.run(go())


def test_a_broker_that_cannot_start_takes_all_down() -> None:
    async def go() -> None:
        cluster = LocalCluster(LocalOptions(1, free_ports=True, broker_flags=["--no-such-flag"]))
        with pytest.raises(ControlError, match=r"broker-1 did not start \(exit code 2\)"):
            async with cluster:
                pytest.fail("it must not be there")
        assert gone(cluster)

    asyncio.run(go())


def test_a_store_that_is_lost_is_begun_anew_once(tmp_path: Path) -> None:
    store = tmp_path / "controller" / "controller.sqlite"
    store.parent.mkdir()
    store.write_bytes(b"nonsense" * 1000)

    async def go(*, recover: bool) -> None:
        async with LocalCluster(LocalOptions(1, data_path=tmp_path, free_ports=True, recover=recover)) as cluster:
            assert "--recover" not in cluster.controller.arguments

    with pytest.raises(ControlError, match="controller did not start"):
        asyncio.run(go(recover=False))
    asyncio.run(go(recover=True))
    assert store.with_name("controller.sqlite.1").read_bytes().startswith(b"nonsense")
    asyncio.run(go(recover=False))


def test_others_go_on_while_a_port_is_in_the_way_of_a_process_that_starts_again() -> None:
    said: list[str] = []

    async def go() -> None:
        async with LocalCluster(LocalOptions(1, free_ports=True)) as cluster:
            watching = asyncio.create_task(cluster.watch(said.append))
            assert cluster.controller.process
            cluster.controller.process.kill()
            with socket.socket() as squatter:
                squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                await bound(squatter, cluster.controller.ports["HTTP"])
                squatter.listen()
                async with asyncio.timeout(60):
                    while not any("; retrying" in line for line in said):
                        await asyncio.sleep(0.1)
            await wait_until_alive(cluster)
            assert cluster.brokers[0].failures == 0
            watching.cancel()

    asyncio.run(go())


async def bound(squatter: socket.socket, port: int) -> None:
    """Take a port as soon as it is free, sooner than a program can start."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(OSError):
                squatter.bind(("127.0.0.1", port))
                return
            await asyncio.sleep(0.001)


async def wait_until_alive(cluster: LocalCluster) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                found = (await client.get(f"{cluster.url}/v1/brokers")).json()["brokers"]
                if [each["status"] for each in found] == ["alive"]:
                    return
            await asyncio.sleep(0.1)
