"""One source of numbers: the page, `srtm top`, a broker's /stats and both /metrics agree."""

from __future__ import annotations

import json
import re
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from srtm.cli.app import run
from tests.broker.http.test_metrics import metrics
from tests.broker.running import Client, Running, fetch, running
from tests.control.running import controller_with_page
from tests.programs import wait_for
from tests.web.browsing import looking

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.needs("chromium")

BIN = 33 / 32  # the controller knows latencies by bins, and says the upper end


def cells(page: Page, table: str, name: str) -> dict[str, str]:
    """A row of the page, by its headings."""
    found: dict[str, str] = page.locator(f"#{table} tbody tr", has_text=name).evaluate(
        "row => Object.fromEntries([...row.querySelectorAll('td')].map(c => [c.dataset.label, c.textContent]))"
    )
    return found


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


def shown_ms(value: float) -> float:
    """As the page rounds it."""
    return float(f"{value:.3g}") if value < 100 else round(value)


def top(url: str, capfd: pytest.CaptureFixture[str]) -> Any:
    capfd.readouterr()
    assert run(["top", "--json", "--controller", url]) == 0
    return json.loads(capfd.readouterr().out)


def test_everything_that_shows_numbers_agrees(browser: Browser, capfd: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        served, page_url = stack.enter_context(controller_with_page())
        url, at = f"http://127.0.0.1:{served.http}", f"127.0.0.1:{served.tcp}"
        broker: Running = stack.enter_context(running(controller=at, broadcast_address="127.0.0.1", name="one"))
        api = stack.enter_context(httpx.Client(base_url=url, trust_env=False))
        wait_for(lambda: [each["status"] for each in api.get("/v1/brokers").json()["brokers"]] == ["alive"])
        for name, r, b in (("brisk", 1000, 100), ("slow", 0.001, 3)):
            contract = {"r": r, "b": b, "slo_ms": 50, "fit": "none", "publishers": [{"id": "p"}]}
            api.put(f"/v1/topics/{name}", json=contract).raise_for_status()
        wait_for(lambda: {each["state"] for each in api.get("/v1/topics").json()["topics"]} == {"placed"})
        client = stack.enter_context(Client(broker.address))
        reader = stack.enter_context(Client(broker.address)).subscribe("brisk", "c", 100)
        client.publish("slow", *[b"x"] * 10)
        client.publish("brisk", *[b"x"] * 60)
        for _ in range(60):
            reader.message()
        wait_for(lambda: (api.get("/v1/topics/brisk").json()["total_ms"] or {}).get("p99"))
        wait_for(lambda: api.get("/v1/topics/slow").json()["waiting"])
        page = stack.enter_context(looking(browser, page_url))
        for _ in range(20):  # whatever comes between two looks makes them differ
            seen = top(url, capfd)
            brisk, slow = cells(page, "topics", "brisk"), cells(page, "topics", "slow")
            shares = api.get("/metrics").text
            topics = {each["topic"]: each for each in seen["topics"]}
            points, same = topics["brisk"]["total_ms"], number(slow["Waiting"]) == topics["slow"]["waiting"]
            if same and points and number(brisk["p99 total"]) == shown_ms(points["p99"]):
                break
            page.wait_for_timeout(100)

        (member,) = seen["brokers"]
        shown = cells(page, "brokers", "one")
        assert number(shown["mcap"]) == member["mcap"]
        assert number(shown["rcap"]) == round(member["rcap"])  # as people read it

        stats = {each["topic_name"]: each["srtm"] for each in broker.get("/stats?format=json")["topics"]}
        own = metrics(broker)
        cluster = dict(re.findall(r"^(srtm_cluster_\S+) (\S+)$", shares, re.MULTILINE))
        for name, cell in (("brisk", brisk), ("slow", slow)):
            (share,) = topics[name]["brokers"]
            for key, label in (("r", "rate_limit"), ("b", "burst_limit")):
                assert share[key] == stats[name][key] == own[f"srtm_topic_{label}", (name,)] == topics[name][key]
            share_r = cluster[f'srtm_cluster_topic_share_tokens_per_second{{broker="one",topic="{name}"}}']
            assert float(share_r) == share["r"]
            waiting = topics[name]["waiting"]
            assert number(cell["Waiting"]) == waiting == stats[name]["waiting"]
            assert own["srtm_topic_waiting", (name,)] == waiting
            assert float(cluster[f'srtm_cluster_topic_waiting_messages{{topic="{name}"}}']) == waiting
            assert number(cell["k"]) == topics[name]["k"] == 1
        seconds = [each for each in stats["brisk"]["seconds"] if each["total_ns"]]
        worst_ms = max(each["total_ns"]["p99"] for each in seconds) / 1e6
        p99_ms = topics["brisk"]["total_ms"]["p99"]
        assert number(brisk["p99 total"]) == shown_ms(p99_ms)
        assert p99_ms <= worst_ms * BIN
        if len(seconds) == 1:
            assert p99_ms >= worst_ms
        latency = cluster['srtm_cluster_topic_latency_seconds{part="total",quantile="0.99",topic="brisk"}']
        assert float(latency) == pytest.approx(p99_ms / 1000)


def test_prometheus_finds_brokers_by_itself() -> None:
    with controller_with_page() as (served, _):
        at = f"127.0.0.1:{served.tcp}"
        with running(controller=at, broadcast_address="127.0.0.1", name="one") as broker:
            url = f"http://127.0.0.1:{served.http}/v1/targets"

            def targets() -> Any:
                return json.loads(fetch(urllib.request.Request(url))[1])

            wait_for(targets)
            assert targets() == [{"targets": [broker.url.removeprefix("http://")], "labels": {"broker": "one"}}]
