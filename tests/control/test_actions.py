"""What operators do through the controller: pausing, and the record of who did what."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx

from srtm.control.store import Store
from tests.broker.running import Client, running
from tests.control.running import controller
from tests.programs import wait_for


def test_a_paused_topic_keeps_its_messages_also_over_a_restart_of_the_controller(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        served = first.enter_context(controller(data_path=str(tmp_path)))
        at = f"127.0.0.1:{served.tcp}"
        broker = stack.enter_context(running(controller=at, broadcast_address="127.0.0.1", name="one"))
        api = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False))

        def state() -> str:
            return str(api.get("/v1/topics/t").json()["state"])

        wait_for(lambda: api.get("/v1/brokers").json()["brokers"])
        api.put("/v1/topics/t", json={"r": 1000, "b": 100, "publishers": [{"id": "p"}]}).raise_for_status()
        wait_for(lambda: state() == "placed")
        client = stack.enter_context(Client(broker.address))
        reader = stack.enter_context(Client(broker.address)).subscribe("t", "c", 10)
        client.publish("t", b"before")
        assert reader.message().body == b"before"

        api.post("/v1/topics/t/pause").raise_for_status()
        broker.wait_until(lambda b: b.topics["t"].paused)
        client.publish("t", b"kept")
        assert reader.silent()
        first.close()
        stack.enter_context(controller(data_path=str(tmp_path), tcp_port=served.tcp, http_port=served.http))
        wait_for(lambda: api.get("/v1/brokers").json()["brokers"][0]["status"] == "alive")
        assert api.get("/v1/topics/t").json()["paused"]
        assert broker.do(lambda: broker.broker.topics["t"].paused)
        api.post("/v1/topics/t/pause?on=false").raise_for_status()
        assert reader.message().body == b"kept"
        assert [each["action"] for each in api.get("/v1/audit").json()["entries"]] == ["resume", "pause", "create"]


def test_the_last_thousand_actions_are_remembered_over_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(1003):
        store.note_action(number, "127.0.0.1", "fit", {"topic": f"t{number}"})
    store.close()
    again = Store(tmp_path)
    actions = again.actions()
    again.close()
    assert len(actions) == 1000
    assert actions[0] == (1002, "127.0.0.1", "fit", {"topic": "t1002"})
    assert actions[-1][0] == 3
