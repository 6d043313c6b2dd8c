"""Publishers that would break a neighbour, over HTTP: the controller says whom, and clients pass that on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from srtm.client import Cluster
from srtm.client.cluster import PublisherSpec
from srtm.errors import ClientError
from tests.broker.running import PATIENCE_S, running
from tests.control.running import controller
from tests.programs import wait_for

REASON = "would break the SLO on one of 'strict' (2 ms)"


@pytest.fixture(scope="module")
def api() -> Iterator[httpx.Client]:
    """A controller and one broker that carries a strict topic, as far as its publishers say."""
    with ExitStack() as stack:
        served = stack.enter_context(controller())
        stack.enter_context(running(controller=f"127.0.0.1:{served.tcp}", broadcast_address="127.0.0.1", name="one"))
        url = f"http://127.0.0.1:{served.http}"
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False))
        wait_for(lambda: [each["status"] for each in client.get("/v1/brokers").json()["brokers"]] == ["alive"])
        for name, r, slo_ms in (("strict", 6_000, 2), ("lax", 12_000, 50)):
            assert client.put(f"/v1/topics/{name}", json={"r": r, "b": 500, "slo_ms": slo_ms}).status_code == 200
        answer = client.post("/v1/topics/strict/publishers", json={"publishers": [{"id": "s", "rate": 5_000}]})
        assert answer.json()["publishers"]["s"]["broker"] == "one"
        yield client


def test_a_publisher_that_would_break_a_neighbour_is_refused_and_told_why(api: httpx.Client) -> None:
    answer = api.post("/v1/topics/lax/publishers", json={"publishers": [{"id": "big", "rate": 8_500}]})
    assert answer.status_code == 409
    assert REASON in answer.json()["detail"]
    wait_for(lambda: api.get("/v1/topics/lax").json()["state"] == "no capacity")
    assert REASON in api.get("/v1/topics/lax").json()["fitted"]["reason"]
    assert REASON in api.get("/v1/topics/lax/explain").json()["refused"]


def test_those_that_fit_get_a_place_beside_those_that_do_not(api: httpx.Client) -> None:
    async def ask() -> list[str | BaseException]:
        async with Cluster(str(api.base_url)) as cluster:
            specs = PublisherSpec("small", rate=10.0), PublisherSpec("big", rate=8_500.0)
            asked = (cluster.where("lax", spec) for spec in specs)
            return await asyncio.gather(*asked, return_exceptions=True)

    place, problem = asyncio.run(ask())
    assert isinstance(place, str)
    assert isinstance(problem, ClientError)
    assert REASON in str(problem)
    assert [each["id"] for each in api.get("/v1/topics/lax/publishers").json()["publishers"]] == ["small"]
