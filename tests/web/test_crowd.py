"""A hundred topics, each on twenty brokers, every number new each second."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from bench.page import crowded, report, served
from playwright.sync_api import expect

from tests.broker.running import in_thread
from tests.web.browsing import looking

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.needs("chromium")


@pytest.mark.parametrize("width", [1360, 390])
def test_a_crowd_is_shown_and_kept_up_to_date(browser: Browser, width: int) -> None:
    controller = crowded(100, 20)
    report(controller, 1)
    sizes: list[int] = []
    with in_thread(lambda: served(controller, sizes)) as (url, _), looking(browser, url, width=width) as page:
        expect(page.locator("#topics tbody tr")).to_have_count(100)
        expect(page.locator("#brokers tbody tr")).to_have_count(20)
        expect(page.locator("#topics tbody th").nth(9)).to_have_text("topic-10")  # as people count
        page.get_by_role("button", name="topic-42").click()
        expect(page.locator("#shares tbody tr")).to_have_count(20)
        rate = page.locator("#sum-rate")
        before = rate.inner_text()
        expect(rate).not_to_have_text(before)
        expect(page.locator("#shares tbody td[data-label='p99 total']").first).to_have_text(re.compile(r"\d ms"))
        page.get_by_label("Filter").fill("topic-9")
        expect(page.locator("#topics tbody tr")).to_have_count(11)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert len(sizes) > 1
    assert sizes[1] < sizes[0]
