"""The optional parts that later tests build on are what they are taken for."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.conftest import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def nsqd_http(tmp_path: Path) -> Iterator[str]:
    """A real nsqd on ports of its own choice; gives the address of its HTTP side."""
    process = subprocess.Popen(
        [
            PARTS["nsqd"].path or "",
            "--tcp-address=127.0.0.1:0",
            "--http-address=127.0.0.1:0",
            f"--data-path={tmp_path}",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"HTTP: listening on (\S+)", line):
                yield found[1]
                break
        else:
            pytest.fail("nsqd ended without listening")
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.needs("nsqd")
def test_nsqd_is_the_version_that_srtm_is_compared_with(nsqd_http: str) -> None:
    with urllib.request.urlopen(f"http://{nsqd_http}/info", timeout=10) as answer:
        assert json.load(answer)["version"] == "1.3.0"


@pytest.mark.needs("chromium")
def test_chromium_runs_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<title>x</title><script>document.title = 6 * 7</script>")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    shown = subprocess.run(
        [
            PARTS["chromium"].path or "",
            *flags,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "<title>42</title>" in shown.stdout
