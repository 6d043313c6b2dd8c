"""What operators do through the controller: pausing, and the record of who did what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from srtm.control.store import Store
from srtm.model.bucket import TokenBucket
from tests.broker.running import Client, Running, running
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


def statuses(api: httpx.Client) -> list[str]:
    return [each["status"] for each in api.get("/v1/brokers").json()["brokers"]]


@contextmanager
def one_broker() -> Iterator[tuple[httpx.Client, Running, ExitStack]]:
    """A controller, its broker, and what ends the broker."""
    with (
        controller() as served,
        httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False) as api,
        ExitStack() as broker,
    ):
        under = f"127.0.0.1:{served.tcp}"
        started = broker.enter_context(running(controller=under, broadcast_address="127.0.0.1", name="one"))
        wait_for(lambda: statuses(api) == ["alive"])
        yield api, started, broker


def test_a_broker_that_answers_is_not_forgotten() -> None:
    """Its shares would be granted a second time."""
    with one_broker() as (api, _, broker):
        answer = api.delete("/v1/brokers/one")
        assert (answer.status_code, "drain it, and stop it first" in answer.text) == (409, True)
        broker.close()
        wait_for(lambda: statuses(api) == ["dead"])
        assert api.delete("/v1/brokers/one").status_code == 204


def test_a_bucket_under_contract_is_not_changed_by_hand() -> None:
    with one_broker() as (api, broker, _):
        assert broker.post("/topic/limit?topic=t&r=5&b=5")[0] == 200
        api.put("/v1/topics/t", json={"r": 20, "b": 5}).raise_for_status()
        wait_for(lambda: api.get("/v1/topics/t").json()["state"] != "opening")
        status, body = broker.post("/topic/limit?topic=t&r=5000&b=1000")
        assert (status, b"UNDER_CONTRACT" in body) == (409, True)


def test_a_share_stays_where_it_was_useful_last() -> None:
    """Stock clients declare nothing: after a pause, their next message is not to wait for a share again."""
    with one_broker() as (api, broker, _):
        api.put("/v1/topics/t", json={"r": 20, "b": 5}).raise_for_status()
        wait_for(lambda: api.get("/v1/topics/t").json()["state"] != "opening")
        with Client(broker.address) as client:
            client.publish("t", b"x")
            broker.wait_until(lambda b: b.topics["t"].limiter is not None)
        time.sleep(3)
        assert broker.do(lambda: broker.broker.topics["t"].limiter.bucket) == TokenBucket.of(20, 5)  # type: ignore[union-attr]


def test_publishers_that_were_there_before_the_contract_are_under_it() -> None:
    with (
        one_broker() as (api, broker, _),
        Client(broker.address, srtm={"publisher": "p", "group": "g", "topic": "t"}) as client,
    ):
        client.publish("t", b"free")
        api.put("/v1/topics/t", json={"r": 20, "b": 5}).raise_for_status()
        wait_for(lambda: api.get("/v1/topics/t").json()["publishers"] == 1)
        found = api.get("/v1/topics/t/publishers").json()["publishers"]
        assert [(each["id"], each["group"], each["broker"]) for each in found] == [("p", "g", "one")]
