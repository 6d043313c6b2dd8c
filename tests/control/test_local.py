"""A cluster of processes: started whole or not at all, and gone afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from srtm.control.local import LocalCluster, LocalOptions
from srtm.errors import ControlError


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
