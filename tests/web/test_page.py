"""The page in a real browser, over real brokers: what an operator sees and does."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from srtm.model.placement import POLICIES
from tests.broker.running import running
from tests.control.discovery.transcripts import Service
from tests.control.running import controller_with_page
from tests.programs import wait_for
from tests.web.browsing import looking, process

pytestmark = pytest.mark.needs("chromium")

FIGURES = Path(__file__).parent.parent.parent / "docs" / "figures"
FIT_MS = 120_000.0  # three seconds of traffic, a prediction, and a round until it is certain
TOKEN = "s3cret"
NAME = "<img src=x onerror=document.title='!'>&amp;"


def picture(page: Page, name: str) -> None:
    """For the documentation, where it is asked for."""
    if os.environ.get("SRTM_SCREENSHOTS"):
        page.screenshot(path=FIGURES / f"page-{name}.png", full_page=True)


def get(served: Service, path: str) -> Any:
    answer = httpx.get(f"http://127.0.0.1:{served.http}{path}", trust_env=False)
    answer.raise_for_status()
    return answer.json()


def alive(served: Service, count: int) -> None:
    wait_for(lambda: [each["status"] for each in get(served, "/v1/brokers")["brokers"]].count("alive") == count)


@contextmanager
def broker(served: Service, name: str, tcp: str = "0", http: str = "0") -> Iterator[tuple[str, str]]:
    """A broker in a process of its own, which is killed at the end; gives its ports."""
    where = ["--controller", f"127.0.0.1:{served.tcp}", "--broadcast-address", "127.0.0.1"]
    with process("broker", "--name", name, "--tcp-port", tcp, "--http-port", http, *where) as started:
        assert started.stdout
        ports = re.findall(r":(\d+)", started.stdout.readline().partition(": ")[2])
        yield ports[0], ports[1]


def create(page: Page, name: str, r: float, b: float, slo_ms: float, **choices: str) -> None:
    page.get_by_role("button", name="New topic…").click()
    dialog = page.get_by_role("dialog", name="New topic")
    for label, value in {"Name": name, "r (tokens per second)": r, "b (tokens)": b, "SLO (ms)": slo_ms}.items():
        dialog.get_by_label(label, exact=True).fill(str(value))
    for label, choice in choices.items():
        dialog.get_by_label(label).select_option(choice)
    dialog.get_by_role("button", name="Create").click()


def topic_row(page: Page, name: str) -> Locator:
    return page.locator("#topics").get_by_role("row", name=re.compile(rf"^{re.escape(name)}\b"))


def test_a_topic_is_created_fitted_and_outlives_a_broker(browser: Browser) -> None:
    with ExitStack() as stack:
        served, url = stack.enter_context(controller_with_page(mcap_mps=400))
        lives = {f"broker-{number}": stack.enter_context(ExitStack()) for number in (1, 2, 3)}
        ports = {name: life.enter_context(broker(served, name)) for name, life in lives.items()}
        alive(served, 3)
        page = stack.enter_context(looking(browser, url))
        expect(page.get_by_role("row", name=re.compile("broker-1 ● alive"))).to_be_visible()
        create(page, "junctions", 3000, 600, 300)
        create(page, "parking", 150, 50, 300, Fitting="none")
        expect(page.locator("#news")).to_contain_text("Created topic parking.")
        expect(topic_row(page, "junctions")).to_contain_text("placed")

        address = f"http://127.0.0.1:{served.http}"
        to_controller = ["--controller", address, "--duration", "10m", "--batch", "1", "--group-size", "1"]
        stack.enter_context(process("load", "junctions", "--publishers", "60", *to_controller))
        stack.enter_context(process("load", "parking", "--publishers", "3", *to_controller))
        page.get_by_role("button", name="junctions").click()
        expect(page.get_by_role("heading", name="junctions")).to_be_focused()
        expect(page.locator("#fitting")).to_contain_text("Fitting 60 publishers", timeout=FIT_MS)
        expect(topic_row(page, "junctions")).to_contain_text("fitted", timeout=FIT_MS)
        expect(page.locator("#events")).to_contain_text(re.compile(r"k = 2 after \d+ rounds: SLO met"))
        expect(topic_row(page, "junctions")).to_contain_text("✓ 300 ms")
        assert get(served, "/v1/topics/junctions")["k"] == 2
        expect(page.locator("#shares tbody tr")).to_have_count(2)
        for part in ("access", "processing", "total"):
            line = page.locator("figure", has_text=f"({part})").locator("path.p99")
            expect(line).to_have_attribute("d", re.compile(r"^M[\d.]+ [\d.]+L"))
        page.get_by_role("button", name="Predict").click()
        expect(page.locator("#prices tbody tr")).to_have_count(3)
        expect(page.get_by_role("row", name=re.compile(r"^2 \(now\)"))).to_contain_text("✓ met")
        page.evaluate("scrollTo(0, 0)")
        picture(page, "light")
        page.emulate_media(color_scheme="dark")
        picture(page, "dark")
        page.emulate_media(color_scheme="light")

        name = min(each["broker"] for each in get(served, "/v1/topics/junctions")["brokers"] if each["publishers"])
        row = page.locator("#brokers tbody tr", has_text=name)
        before = row.evaluate("row => getComputedStyle(row).backgroundColor")
        lives[name].close()
        expect(row).to_contain_text("✕ dead")
        assert row.evaluate("row => getComputedStyle(row).backgroundColor") != before
        expect(page.locator("#sum-brokers")).to_have_text("2 of 3 alive")
        expect(page.locator("#news")).to_contain_text(f"Broker {name} is dead.")
        expect(page.locator("#events")).to_contain_text(f"{name} is dead")
        expect(page.locator("#events")).to_contain_text(f"publishers away from {name}")
        picture(page, "failure")
        with broker(served, name, *ports[name]):
            expect(row).to_contain_text("● alive")
            expect(page.locator("#sum-brokers")).to_have_text("3 of 3 alive")
            assert row.evaluate("row => getComputedStyle(row).backgroundColor") == before
            page.set_viewport_size({"width": 390, "height": 844})
            expect(page.locator("#topics tbody tr")).to_have_count(2)
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            picture(page, "phone")


def test_what_an_operator_does_is_asked_first_and_written_down(browser: Browser) -> None:
    with ExitStack() as stack:
        served, url = stack.enter_context(controller_with_page())
        for name in ("one", "two"):
            at = f"127.0.0.1:{served.tcp}"
            stack.enter_context(running(controller=at, broadcast_address="127.0.0.1", name=name))
        alive(served, 2)
        api = httpx.Client(base_url=f"http://127.0.0.1:{served.http}", trust_env=False)
        stack.enter_context(api)
        publishers = [{"id": f"p{number}"} for number in range(4)]
        assert api.put("/v1/topics/t", json={"r": 100, "b": 10, "publishers": publishers}).status_code == 200
        wait_for(lambda: get(served, "/v1/topics/t")["state"] == "placed")
        page = stack.enter_context(looking(browser, f"{url}#topic=t"))

        page.get_by_role("button", name="Pause…").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        assert not get(served, "/v1/topics/t")["paused"]
        page.get_by_role("button", name="Pause…").click()
        page.get_by_role("dialog", name="Pause t?").get_by_role("button", name="Pause").click()
        expect(page.get_by_role("button", name="Resume…")).to_be_visible()
        assert get(served, "/v1/topics/t")["paused"]

        page.get_by_role("button", name="Change…").click()
        dialog = page.get_by_role("dialog", name="Change t")
        assert [dialog.get_by_label(label).input_value() for label in ("SLO", "r (", "b (")] == ["1", "100", "10"]
        dialog.get_by_label("r (").fill("200")
        dialog.get_by_role("button", name="Change").click()
        expect(page.locator("#contract")).to_contain_text("(200/s, 10)")

        page.get_by_role("button", name="Move publishers…").click()
        dialog = page.get_by_role("dialog", name="Move publishers of t")
        source = dialog.get_by_label("From").input_value()
        target = {"one": "two", "two": "one"}[source]
        dialog.get_by_label("To").select_option(target)
        dialog.get_by_label("Number of publishers").fill("2")
        dialog.get_by_role("button", name="Move").click()
        expect(page.locator("#events")).to_contain_text(f"2 publishers to {target}")

        page.get_by_role("button", name="Fit again…").click()
        page.get_by_role("dialog").get_by_role("button", name="Fit").click()
        expect(page.locator("#events")).to_contain_text("4 publishers, 2 candidate brokers")

        page.get_by_role("button", name="Drain one").click()
        page.get_by_role("dialog", name="Drain one?").get_by_role("button", name="Drain").click()
        expect(page.locator("#brokers tbody tr", has_text="one")).to_contain_text("● alive, draining")
        page.get_by_role("button", name="Use one again").click()
        page.keyboard.press("Escape")  # and so it stays
        page.locator("#audit summary").click()
        expect(page.locator("#actions tr")).to_have_count(6)
        expect(page.locator("#actions tr").first).to_contain_text("drain")
        entries = get(served, "/v1/audit")["entries"]
        assert [each["action"] for each in entries] == ["drain", "fit", "move", "change", "pause", "create"]
        assert {each["who"] for each in entries} == {"127.0.0.1"}
        assert entries[2]["arguments"]["broker"] == target
        assert abs(entries[0]["at_ms"] / 1000 - time.time()) < 600


def test_with_a_token_nothing_is_done_without_it(browser: Browser) -> None:
    with controller_with_page(token=TOKEN) as (served, url), looking(browser, url) as page:
        create(page, "t", 100, 10, 5)
        dialog = page.get_by_role("dialog", name="New topic")
        assert sorted(dialog.get_by_label("Policy").locator("option").all_text_contents()) == sorted(POLICIES)
        assert dialog.get_by_label("Policy").input_value() == "srtm"
        expect(dialog).to_be_visible()  # the browser itself wants the field to be filled
        dialog.get_by_label("Token", exact=True).fill("wrong")
        dialog.get_by_role("button", name="Create").click()
        expect(dialog.get_by_role("alert")).to_have_text("The controller requires a valid token.")
        assert get(served, "/v1/topics")["topics"] == []
        dialog.get_by_label("Token", exact=True).fill(TOKEN)
        dialog.get_by_role("button", name="Create").click()
        expect(topic_row(page, "t")).to_be_visible()
        page.reload()
        expect(page.locator("#link")).to_have_text("● live")
        create(page, "u", 100, 10, 5)  # it is kept for the tab
        expect(topic_row(page, "u")).to_be_visible()
        assert [each["arguments"]["topic"] for each in get(served, "/v1/audit")["entries"]] == ["u", "t"]


def test_a_closed_controller_shows_itself_to_whoever_logs_in(browser: Browser, tmp_path: Path) -> None:
    with controller_with_page(data_path=str(tmp_path)) as (served, url):
        api = f"http://127.0.0.1:{served.http}/v1/tokens"
        root = httpx.post(api, json={"name": "root", "role": "admin"}, trust_env=False).json()["secret"]
        shown = {"Authorization": f"Bearer {root}"}
        wish = {"name": "eyes", "role": "viewer"}
        eyes = httpx.post(api, json=wish, headers=shown, trust_env=False).json()["secret"]
        context = browser.new_context()
        try:
            page = context.new_page()
            page.goto(url)
            expect(page.locator("#link")).to_have_text("◌ log in to see the cluster")
            expect(page.locator("#topics")).to_be_hidden()
            page.get_by_role("button", name="Log in…").click()
            dialog = page.get_by_role("dialog", name="Log in")
            dialog.get_by_label("Token", exact=True).fill("wrong")
            dialog.get_by_role("button", name="Log in").click()
            expect(dialog.get_by_role("alert")).to_have_text("The controller requires a valid token.")
            dialog.get_by_label("Token", exact=True).fill(eyes)
            dialog.get_by_role("button", name="Log in").click()
            expect(page.locator("#link")).to_have_text("● live")
            assert page.evaluate("document.cookie + JSON.stringify({...sessionStorage, ...localStorage})") == "{}"
            create(page, "t", 100, 10, 5)
            expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("'eyes' has the role viewer")
            page.get_by_role("button", name="Cancel").click()
            page.reload()
            expect(page.locator("#link")).to_have_text("● live")
            page.get_by_role("button", name="Log out eyes (viewer)").click()
            expect(page.locator("#link")).to_have_text("◌ log in to see the cluster")
        finally:
            context.close()


def test_what_users_name_is_text(browser: Browser) -> None:
    with ExitStack() as stack:
        served, url = stack.enter_context(controller_with_page())
        at = f"127.0.0.1:{served.tcp}"
        stack.enter_context(running(controller=at, broadcast_address="127.0.0.1", name=NAME))
        alive(served, 1)
        page = stack.enter_context(looking(browser, url))
        expect(page.locator("#brokers tbody th")).to_have_text(NAME)
        create(page, "t", 100, 10, 5)
        publishers = {"publishers": [{"id": NAME, "group": NAME}]}
        url = f"http://127.0.0.1:{served.http}/v1/topics/t/publishers"
        assert httpx.post(url, json=publishers, trust_env=False).status_code == 200
        page.get_by_role("button", name="t", exact=True).click()
        expect(page.locator("#shares tbody th")).to_have_text(NAME)
        page.get_by_role("button", name=re.compile("^Drain")).click()
        expect(page.get_by_role("dialog")).to_contain_text(NAME)
        assert page.locator("img").count() == 0
        assert page.title() == "SRTM"


def test_a_page_may_load_nothing_but_itself_and_others_may_not_use_it(browser: Browser) -> None:
    with controller_with_page() as (served, url), looking(browser, url) as page:
        headers = page.request.get(url).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        for path in ("v1/topics/t/fit", "v1/brokers/one/drain"):
            foreign = {"Origin": "http://elsewhere.example"}
            answer = httpx.post(url + path, headers=foreign, trust_env=False)
            assert answer.status_code == 403, answer.text
            same = {"Origin": url.rstrip("/")}
            assert httpx.post(url + path, headers=same, trust_env=False).status_code == 404
        assert httpx.get(f"{url}../../web/__init__.py", trust_env=False).status_code == 404
        assert get(served, "/v1/audit")["entries"] == []


CONTRAST = """() => {
  const light = (channels) => {
    const [r, g, b] = channels.map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const channels = (color) => color.match(/[\\d.]+/g).map(Number)
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor)
      if (found.length === 3 || found[3] === 1) return found.slice(0, 3)
    }
    return [255, 255, 255]
  }
  const poor = []
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("noscript, svg, .hidden")) continue
    const color = channels(getComputedStyle(node).color).slice(0, 3)
    const [a, b] = [light(color), light(ground(node))].sort((x, y) => y - x)
    const ratio = (a + 0.05) / (b + 0.05)
    if (ratio < 4.5) poor.push([walker.currentNode.data.trim(), ratio])
  }
  return poor
}"""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, [role=img], table")]
  .filter(node => node.checkVisibility() && !(node.ariaLabel || node.getAttribute("aria-labelledby")
    || node.labels?.length || node.textContent.trim()))
  .map(node => node.outerHTML)"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1360, 390])
def test_everybody_can_read_and_use_it(browser: Browser, dark: bool, width: int) -> None:
    with ExitStack() as stack:
        served, url = stack.enter_context(controller_with_page())
        at = f"127.0.0.1:{served.tcp}"
        stack.enter_context(running(controller=at, broadcast_address="127.0.0.1", name="one"))
        with running(controller=at, broadcast_address="127.0.0.1", name="two"):
            alive(served, 2)
        page = stack.enter_context(looking(browser, url, width=width, dark=dark))
        expect(page.locator("#brokers")).to_contain_text("✕ dead")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the topics")).to_be_focused()
        page.keyboard.press("Enter")
        create(page, "t", 100, 10, 5)
        button = page.get_by_role("button", name="t", exact=True)
        button.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="t", exact=True)).to_be_focused()
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.get_by_role("button", name="Close the topic").press("Enter")
        expect(page.locator("#detail")).to_be_hidden()
        page.get_by_label("Filter").fill("nothing like it")
        expect(button).to_have_count(0)


def test_a_page_outlives_its_controller(browser: Browser) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        served, url = first.enter_context(controller_with_page())
        ports = {"tcp_port": served.tcp, "http_port": served.http, "web_port": int(url.split(":")[2].rstrip("/"))}
        context = browser.new_context()
        stack.callback(context.close)
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#link")).to_have_text("● live")
        first.close()
        expect(page.locator("#link")).to_contain_text("✕ controller unreachable")
        with controller_with_page(**ports) as (again, _):
            contract = {"r": 100, "b": 10}
            httpx.put(f"http://127.0.0.1:{again.http}/v1/topics/t", json=contract, trust_env=False).raise_for_status()
            expect(page.locator("#link")).to_have_text("● live")
            expect(topic_row(page, "t")).to_be_visible()
