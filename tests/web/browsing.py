"""A real Chromium that looks at a page, and what it must never do: complain, or ask somebody else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.conftest import PARTS

PATIENCE_MS = 30_000.0
# Chromium's own conversations are not the page's.
_QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run"]


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PARTS["chromium"].path, args=_QUIET)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def looking(browser: Browser, url: str, *, width: int = 1360, height: int = 900, dark: bool = False) -> Iterator[Page]:
    """A page that is live; at the end it has complained of nothing, and asked only where it came from."""
    said: list[str] = []
    asked: set[str] = set()
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", locale="en-GB"
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    try:
        page.goto(url)
        expect(page.locator("#link")).to_have_text("● live")
        yield page
    finally:
        context.close()
    # A browser writes of every answer that is an error; that those come is what some tests are about.
    assert [line for line in said if "Failed to load resource" not in line] == []
    assert asked == {urlsplit(url).netloc}


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command of srtm's, ended at the end."""
    command = [sys.executable, "-m", "srtm", *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()
