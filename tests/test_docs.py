"""The documentation: links resolve, generated parts match the code, and the site loads nothing from elsewhere."""

from __future__ import annotations

import ast
import functools
import http.server
import importlib
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect
from tools import http_api, modules, penalty_figure

from srtm.control.api import reference
from tests.conftest import ROOT
from tests.web.browsing import chromium

DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "srtm"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures, including HTML."""
    text = prose(page)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", text)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    code_free = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", code_free, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            if parts.scheme != "https" or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc):
                broken.append(link)
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        if not target.exists() or (parts.fragment and parts.fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_http_api_is_that_of_the_code() -> None:
    assert http_api.PAGE.read_text() == reference.page(http_api.document()), "run `make docs`"


def test_the_pages_on_the_code_name_methods_that_exist() -> None:
    """`Gate.drain` in a text or a drawing is a method or an attribute of a class `Gate`."""
    has: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.ClassDef):
                code = ast.unparse(each)
                found = re.findall(r"\bdef (\w+)|\bself\.(\w+)\b|^    (\w+)(?: =|:)", code, re.MULTILINE)
                has.setdefault(each.name, set()).update("".join(names) for names in found)
    pages = [DOCS / "architecture.md", *sorted((DOCS / "adr").glob("*.md"))]
    named = [(page.name, *pair) for page in pages for pair in re.findall(r"\b([A-Z]\w+)\.(\w+)\b", page.read_text())]
    assert [each for each in named if each[1] in has and each[2] not in has[each[1]]] == []


def test_the_architecture_lists_the_modules_that_exist() -> None:
    text = modules.PAGE.read_text()
    assert text == modules.page(text), "run `make docs`"


def test_the_picture_of_the_penalty_is_that_of_the_model() -> None:
    instant, p99_ms = penalty_figure.measured()
    assert p99_ms[0] == 0
    assert p99_ms == sorted(set(p99_ms))
    assert sum(instant.tokens_of) <= instant.tokens
    assert penalty_figure.FIGURE.read_text() == penalty_figure.drawn(instant, p99_ms), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_names_what_exists(page: Path) -> None:
    """Imports of Python examples work, and files that the prose names exist."""
    text = page.read_text()
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(f"async def _():\n{textwrap.indent(code, ' ')}")):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("srtm"):
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
    code_free = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    files = re.findall(r"`((?:\w+/)+\w+\.(?:py|md|toml|txt|yaml|service))`", code_free)
    assert [name for name in files if not (ROOT / name).exists() and not (SOURCE / name).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    decisions = (DOCS / "adr" / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert f": {page.name}\n" in navigation
    for page in (DOCS / "adr").glob("0*.md"):
        assert f"({page.name})" in decisions


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The documentation as `make docs` builds it, without a warning, and served."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS, folder / "docs")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    (folder / "src").symlink_to(ROOT / "src")
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    handler = functools.partial(Quiet, directory=str(folder / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            serving.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files, without a line for each."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@pytest.mark.needs("chromium")
def test_the_site_is_searched_and_asks_nobody_else(site: str) -> None:
    asked: set[str] = set()
    said: list[str] = []
    with chromium() as browser:
        page = browser.new_page()
        page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        for name in ("api.html", "evaluation.html"):
            page.goto(site + name)
            assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
        expect(page.locator("h1")).to_contain_text("Evaluation")
        page.goto(site)
        page.get_by_role("button", name="Search").first.click()
        page.wait_for_function("document.activeElement.tagName === 'DIV'")  # its input is in a closed shadow root
        page.keyboard.insert_text("tombstoned")
        for _ in range(80):
            page.keyboard.press("Enter")  # opens the first result, as soon as there is one
            page.wait_for_timeout(250)
            if "discovery.html" in page.url:
                break
        expect(page.locator("h1")).to_contain_text("Discovery")
    assert asked == {urlsplit(site).netloc}
    assert said == []
