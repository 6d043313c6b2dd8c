"""The commands and the code of README.md and of docs/pipeline.md work, in the order of the page."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from srtm.pipeline.runtime.server import Server
from tests.conftest import ROOT

pytestmark = pytest.mark.processes

README = (ROOT / "README.md").read_text()
CONTROLLER = "http://127.0.0.1:4161"


def srtm(words: list[str], folder: Path, **environment: str) -> str:
    """Run a command to its end and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "srtm", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"srtm {shlex.join(words)}: {done.stderr}"
    return done.stdout


@contextmanager
def cluster(up: list[str], folder: Path) -> Iterator[str]:
    """The cluster that `srtm up` starts, on free ports; gives its controller's URL."""
    command = [sys.executable, "-m", "srtm", *up, "--free-ports"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            url = re.search(r"http://\S+", next(lines))
            assert url
            assert any(line.startswith("ready") for line in lines)
            yield url[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_the_readme_works(tmp_path: Path) -> None:
    up, *others = [shlex.split(command) for command in re.findall(r"^\$ srtm (.*)$", README, re.MULTILINE)]
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert CONTROLLER in code
    with cluster(up, tmp_path) as url:
        shown = [srtm(words, tmp_path, SRTM_CONTROLLER=url) for words in others]
        command = [sys.executable, "-c", code.replace(CONTROLLER, url)]
        program = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    of = {" ".join(words[: 1 + (words[0] == "topic")]): text for words, text in zip(others, shown, strict=True)}
    assert of["sub"].strip() == "hello"
    assert ", 0 lost, 0 duplicates" in of["load"]
    assert "traffic: k = 1 by srtm" in of["topic explain"]
    assert program.stdout.strip() == "b'hello'"


def test_every_number_of_the_readmes_table_was_measured() -> None:
    """The cells that say what we measured stand in the pages that say how."""
    documented = "".join((ROOT / "docs" / page).read_text() for page in ("evaluation.md", "measurements.md"))
    table = README.partition("## The paper says, we measured")[2].partition("##")[0]
    cells = [row.split("|")[3] for row in table.splitlines() if row.startswith("| ") and "the paper" not in row]
    numbers = {number for cell in cells for number in re.findall(r"\d+\.\d+", cell)}
    assert len(numbers) > 10
    assert {number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", documented)} == set()


def test_the_pipeline_page_works(tmp_path: Path, connect_server: Server) -> None:
    assert connect_server.url
    page = (ROOT / "docs" / "pipeline.md").read_text()
    jobs, store = (block.splitlines() for block in re.findall(r"(?<!-->\n)```sh\n(.*?)```", page, re.DOTALL))
    assert (len(jobs), len(store)) == (9, 2)
    for line in jobs:
        command, _, target = line.partition(" > ")
        shown = srtm(shlex.split(command.removeprefix("srtm ")), tmp_path)
        if target:
            (tmp_path / target).write_text(shown)
    assert "report.html: 1 topic, " in shown
    added, folded = (srtm(shlex.split(line.removeprefix("srtm ")), tmp_path) for line in store)
    assert "added 1 hour; it now holds 1" in added
    assert "no smaller b is enough" in folded
