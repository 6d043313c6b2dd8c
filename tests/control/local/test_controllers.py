"""`srtm up` with several controllers: a NATS server keeps their state, and each answers for the one that leads."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from srtm.cli.app import run
from srtm.control.local.cluster import LocalCluster, LocalOptions

pytestmark = [pytest.mark.processes, pytest.mark.needs("nats-server")]
PATIENCE_S = 60.0


@pytest.mark.parametrize("engine", ["local", "nats"])
def test_a_contract_survives_the_controller_that_leads(tmp_path: Path, engine: str) -> None:
    async def go() -> None:
        options = LocalOptions(1, data_path=tmp_path, free_ports=True, controllers=3, engine=engine, web_port=None)
        async with LocalCluster(options) as cluster, httpx.AsyncClient(trust_env=False, timeout=10) as client:
            assert [child.name for child in cluster.engines] == ["nats"]
            assert ("--engine" in cluster.brokers[0].arguments) is (engine == "nats")
            urls = [cluster.http(child) for child in cluster.controllers]
            made = await client.put(f"{urls[2]}/v1/topics/t", json={"r": 10, "b": 10, "fit": "none"})
            assert made.status_code == 200, made.text
            leads = [url for url in urls if (await client.get(f"{url}/v1/leader")).json()["leads"]]
            assert len(leads) == 1
            process = cluster.controllers[urls.index(leads[0])].process
            assert process
            process.kill()
            others, ends = [url for url in urls if url not in leads], time.monotonic() + PATIENCE_S
            while (found := await client.get(f"{others[0]}/v1/topics/t")).status_code != 200:
                assert time.monotonic() < ends, found.text
                await asyncio.sleep(0.05)
            assert found.json()["r"] == 10

    asyncio.run(go())


def test_a_file_has_one_controller(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--controllers", "3", "--store", "sqlite:somewhere"]) == 2
    assert "3 controllers cannot share a file; give nats://host:4222" in capsys.readouterr().err
