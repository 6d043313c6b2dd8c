"""/metrics of the controller and of a broker, as Prometheus' own tool judges them."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack

import httpx
import pytest

from tests.broker.running import Client, running
from tests.conftest import PARTS
from tests.control.running import controller
from tests.programs import wait_for


@pytest.mark.needs("promtool")
def test_names_and_units_are_as_prometheus_wants_them() -> None:
    with ExitStack() as stack:
        served = stack.enter_context(controller())
        at = f"127.0.0.1:{served.tcp}"
        broker = stack.enter_context(running(controller=at, broadcast_address="127.0.0.1", name="one"))
        api = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False))
        wait_for(lambda: [each["status"] for each in api.get("/v1/brokers").json()["brokers"]] == ["alive"])
        api.put("/v1/topics/t", json={"r": 100, "b": 10}).raise_for_status()
        wait_for(lambda: api.get("/v1/topics/t").json()["state"] == "placed")
        client = stack.enter_context(Client(broker.address))
        stack.enter_context(Client(broker.address)).subscribe("t", "c", 10)
        client.publish("t", b"x")
        wait_for(lambda: api.get("/v1/topics/t").json()["total_ms"])
        for page in (api.get("/metrics"), httpx.get(f"{broker.url}/metrics", trust_env=False)):
            command = [PARTS["promtool"].path or "", "check", "metrics"]
            judged = subprocess.run(command, input=page.content, capture_output=True, check=False)
            assert (judged.returncode, judged.stdout + judged.stderr) == (0, b"")


def test_a_gauge_for_every_state() -> None:
    with controller() as served, httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False) as api:
        api.put("/v1/topics/t", json={"r": 100, "b": 10}).raise_for_status()
        page = api.get("/metrics").text
        assert 'srtm_cluster_topic_state{state="opening",topic="t"} 1.0' in page
        assert 'srtm_cluster_topic_state{state="fitted",topic="t"} 0.0' in page
        assert "srtm_cluster_topic_slo_met{" not in page  # nothing was sent
        assert "process_cpu_seconds_total" in page
