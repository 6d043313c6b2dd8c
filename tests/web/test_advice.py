"""Advice on the page, in a real browser: it comes with findings, and goes when the contract changes."""

from __future__ import annotations

import re
from contextlib import ExitStack

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.control.api.test_advice import findings
from tests.control.running import controller_with_page
from tests.web.browsing import looking

pytestmark = pytest.mark.needs("chromium")


def test_advice_comes_and_goes(browser: Browser) -> None:
    with ExitStack() as stack:
        served, url = stack.enter_context(controller_with_page())
        api = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False))
        birth = api.put("/v1/topics/t", json={"r": 100, "b": 50}).json()["birth"]
        page = stack.enter_context(looking(browser, f"{url}#topic=t"))
        expect(page.locator("#detail-title")).to_have_text("t")
        expect(page.locator("#advice")).to_be_hidden()
        api.post("/v1/findings", json=findings(birth)).raise_for_status()
        line = page.locator("#advice-list li")
        expect(line).to_have_count(1)
        expect(line).to_contain_text(
            re.compile(r"contract too small: the contract \(r, b\) = \(100/s, 50\) is too small")
        )
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        api.patch("/v1/topics/t", json={"r": 300}).raise_for_status()
        expect(page.locator("#advice")).to_be_hidden()
