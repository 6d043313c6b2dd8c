"""A controller and two brokers that lend each other tokens because a contract says so."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import httpx

from tests.broker.running import PATIENCE_S, running
from tests.control.running import controller
from tests.programs import wait_for

CONTRACT: dict[str, Any] = {
    "r": 100,
    "b": 40,
    "policy": "lb",
    "fit": "none",
    "adapt": False,
    "lending": "when_waiting",
    "publishers": [{"id": "one"}, {"id": "two"}],
}


def test_a_burst_at_one_broker_finds_the_tokens_of_the_other() -> None:
    with ExitStack() as stack:
        served = stack.enter_context(controller(exchange_s=0.2))
        at: dict[str, Any] = {"controller": f"127.0.0.1:{served.tcp}", "broadcast_address": "127.0.0.1"}
        brokers = {name: stack.enter_context(running(name=name, **at)) for name in ("one", "two")}
        url = f"http://127.0.0.1:{served.http}"
        api = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False))

        def shown() -> Any:
            return api.get("/v1/topics/t").json()

        wait_for(lambda: [each["status"] for each in api.get("/v1/brokers").json()["brokers"]] == ["alive"] * 2)
        api.put("/v1/topics/t", json=CONTRACT).raise_for_status()
        # Both have shares, know each other, and report that they lend.
        wait_for(lambda: [each["b"] for each in shown()["brokers"] if each["lending"]] == [20, 20])
        assert (shown()["lending"]["chosen"], shown()["lending"]["asked"]) == ("when_waiting", 0)
        status, _ = brokers["one"].post("/mpub?topic=t", b"\n".join([b"x"] * 35))
        assert status == 200
        wait_for(lambda: shown()["lending"]["borrowed"] >= 5)
        lending = shown()["lending"]
        assert lending["asked"] >= 1
        by_broker = {each["broker"]: each["lending"] for each in shown()["brokers"]}
        assert by_broker["two"]["lent"] >= by_broker["one"]["borrowed"] >= 5
        assert by_broker["one"]["lent"] == 0
        (pair,) = lending["peers"]
        assert (pair["lender"], pair["borrower"]) == ("two", "one")
        assert pair["lent"] >= pair["borrowed"] >= 5
        assert 0 < pair["rtt_ms"]["p50"] <= pair["rtt_ms"]["p99"] == lending["rtt_ms"]["p99"]
        assert lending["accused"] == []
        api.patch("/v1/topics/t", json={"lending": "off"}).raise_for_status()
        wait_for(lambda: [each["lending"] for each in shown()["brokers"]] == [None, None])
