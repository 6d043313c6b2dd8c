"""Lending on the page, in a real browser: who lends to whom, and who lied."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.broker.running import running
from tests.control.running import controller_with_page
from tests.programs import wait_for
from tests.web.browsing import looking
from tests.web.test_page import alive, get, picture

pytestmark = pytest.mark.needs("chromium")
CONTRACT: dict[str, Any] = {
    "r": 100,
    "b": 40,
    "policy": "lb",
    "fit": "none",
    "adapt": False,
    "publishers": [{"id": "one"}, {"id": "two"}],
}


def test_lending_is_turned_on_seen_and_a_lie_is_shown(browser: Browser) -> None:
    with ExitStack() as stack:
        served, url = stack.enter_context(controller_with_page(exchange_s=0.2))
        at: dict[str, Any] = {"controller": f"127.0.0.1:{served.tcp}", "broadcast_address": "127.0.0.1"}
        brokers = {name: stack.enter_context(running(name=name, **at)) for name in ("one", "two")}
        alive(served, 2)
        api = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False))
        api.put("/v1/topics/t", json=CONTRACT).raise_for_status()
        page = stack.enter_context(looking(browser, f"{url}#topic=t"))
        expect(page.locator("#shares tbody tr")).to_have_count(2)
        expect(page.locator("#lending")).to_be_hidden()
        page.get_by_role("button", name="Change…").click()
        dialog = page.get_by_role("dialog", name="Change t")
        dialog.get_by_label("Brokers lend tokens").select_option("when_waiting")
        dialog.get_by_role("button", name="Change").click()
        expect(page.locator("#lending-said")).to_contain_text("Rule: when_waiting.")

        def lent() -> float:
            brokers["one"].post("/mpub?topic=t", b"\n".join([b"x"] * 28))
            return float(get(served, "/v1/topics/t")["lending"]["borrowed"])

        wait_for(lambda: lent() > 20)
        pair = page.locator("#lending-pairs").get_by_role("row", name=re.compile("^two → one"))
        expect(pair).to_contain_text(re.compile(r"[\d.]+ ms"))
        expect(page.locator("#lending-said")).to_contain_text(
            re.compile(r"Brokers asked \d+ times and lent \d+ tokens")
        )
        expect(page.locator("#lending-accused")).to_be_hidden()
        picture(page, "lending")
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.set_viewport_size({"width": 1360, "height": 900})

        def lie() -> None:
            books, peer = brokers["one"].broker.topics["t"].gate.books, brokers["two"].broker.started_ns
            assert books is not None
            books.of("two").borrow(peer, 50 * 10**12, 0)

        brokers["one"].do(lie)
        expect(page.locator("#lending-accused")).to_contain_text(
            re.compile(r"Broker one is excluded from lending: one says it borrowed [\d.]+ tokens from two")
        )
        expect(page.locator("#events")).to_contain_text("one is excluded from lending")
