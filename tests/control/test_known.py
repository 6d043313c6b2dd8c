"""Brokers and clients that know several controllers."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import httpx
import pytest

from srtm.cli.app import run
from srtm.client.cluster import Cluster, PublisherSpec
from srtm.errors import ClientError, ControllerAway
from tests.broker.conftest import Start
from tests.control.discovery.transcripts import Service
from tests.control.running import controller
from tests.engines import free_port
from tests.programs import wait_for


def brokers_of(served: Service) -> list[str]:
    found = httpx.get(f"http://127.0.0.1:{served.http}/nodes", trust_env=False).json()["producers"]
    return [each["hostname"] for each in found]


def test_a_broker_registers_with_every_controller(start: Start) -> None:
    with controller() as first, controller() as second:
        places = f"127.0.0.1:{first.tcp},127.0.0.1:{second.tcp},127.0.0.1:{free_port()}"
        start(name="one", controller=places)
        wait_for(lambda: [brokers_of(served) for served in (first, second)] == [["one"], ["one"]])


def test_a_client_asks_the_next_controller(start: Start) -> None:
    """Also for a controller that goes while the client lives; a refusal is final."""

    async def story(urls: str, ends: ExitStack) -> None:
        async with Cluster(urls) as cluster:
            for _ in range(3):
                assert (await cluster.where("t", PublisherSpec("p"))).startswith("127.0.0.1:")
            with pytest.raises(ClientError, match="not under contract"):
                await cluster.request("GET", "/v1/topics/none")
            changes = cluster.watch("t")
            assert await anext(changes) == {}
            await changes.aclose()
            await asyncio.to_thread(ends.close)
            with pytest.raises(ControllerAway, match="no controller answers at http"):
                await cluster.request("GET", "/v1/brokers")

    with ExitStack() as ends:
        served = ends.enter_context(controller())
        start(name="one", broadcast_address="127.0.0.1", controller=f"127.0.0.1:{served.tcp}")
        wait_for(lambda: brokers_of(served) == ["one"])
        url = f"http://127.0.0.1:{served.http}"
        wait_for(lambda: httpx.get(f"{url}/v1/brokers", trust_env=False).json()["brokers"][0]["status"] == "alive")
        asyncio.run(story(f"http://127.0.0.1:{free_port()},127.0.0.1:{served.http}", ends))


def test_verbs_ask_the_next_controller(capsys: pytest.CaptureFixture[str]) -> None:
    with controller() as served:
        places = f"127.0.0.1:{free_port()},127.0.0.1:{served.http}"
        assert run(["topic", "ls", "--controller", places, "--json"]) == 0
        assert capsys.readouterr().out
    assert run(["topic", "ls", "--controller", places]) == 1
    assert "no controller answers at" in capsys.readouterr().err
