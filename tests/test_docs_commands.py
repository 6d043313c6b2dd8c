"""Run every shell command of the documentation, unless a mark directly before its block says why not.

A shell that finds `srtm`, `.venv/bin/srtm` and `python` runs the `sh` and `console` blocks of a page in order, in a
folder that holds nothing but `examples`. Servers get free ports, which replace the well-known ones in the commands that
follow. tests/test_readme.py runs the commands of README.md and docs/pipeline.md.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtm.pipeline.runtime.server import Server
from tests.conftest import ROOT, require

pytestmark = pytest.mark.processes

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>sh|console)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
ELSEWHERE = {"README.md", "pipeline.md"}  # tests/test_readme.py
HERE = {
    "concepts.md",
    "control.md",
    "discovery.md",
    "engines.md",
    "import.md",
    "operations.md",
    "quickstart.md",
}
NEED_CURL = {"control.md"}  # it shows the API
SETUP = "make setup"  # it has run, or this test would not
FREE = {
    "up": "--free-ports",
    "controller": "--tcp-port 0 --http-port 0 --web-port 0",
    "broker": "--tcp-port 0 --http-port 0",
}
PATIENCE_S = 120


class Block(NamedTuple):
    """Commands of one block, each with the output that the page shows, and why the test does not run them, if so."""

    page: str
    commands: list[tuple[str, list[str]]]
    reason: str | None


def blocks() -> list[Block]:
    """All blocks of all pages."""
    found = []
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            commands: list[tuple[str, list[str]]] = []
            for line in match["code"].splitlines():
                if match["language"] == "sh" or line.startswith("$ "):
                    commands.append((line.removeprefix("$ "), []))
                elif commands:
                    commands[-1][1].append(line)
            found.append(Block(page.name, commands, match["reason"]))
    return found


def commands(page: str) -> list[tuple[str, list[str]]]:
    """The commands of a page that the test runs."""
    found = [command for block in blocks() if block.page == page and not block.reason for command in block.commands]
    return [(command, output) for command, output in found if command != SETUP]


class Shell:
    """A reader at a terminal, who opens another terminal for each server."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.folder = folder
        self._ends = ends
        self._addresses: dict[str, str] = {}  # as they are written: as they are
        self._before = ["shopt -s expand_aliases"]  # what later commands build on
        (folder / "examples").symlink_to(ROOT / "examples")
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        for name, arguments in (("srtm", "-m srtm "), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
            (programs / name).chmod(0o755)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "NO_PROXY": "*", "COLUMNS": "200", "PATH": path}

    def real(self, text: str) -> str:
        """A text with the servers' real ports."""
        return re.sub(r"(?:localhost|127\.0\.0\.1):4\d\d\d\b", lambda found: self._addresses[_plain(found[0])], text)

    def run(self, command: str) -> str:
        """Run a command and return what it printed; a server runs until the end of the test."""
        if re.match(r"(alias|export) ", command):
            self._before.append(command)
            return ""
        if found := re.match(r"(?:\w+=\S+ )*srtm (up|controller|broker)\b", command):
            return self._serve(found[1], self.real(command))
        done = subprocess.run(
            ["bash", "-c", "\n".join([*self._before, self.real(command).replace("-sN", "-sN --max-time 2")])],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        fine = {0}
        if "curl -sN" in command:
            fine = {28}  # it would go on for ever, and was stopped
        elif command.startswith("srtm check"):
            fine = {0, 1, 2}  # what a monitor says depends on how busy this host is
        assert done.returncode in fine, f"{command}: {done.stdout}"
        return done.stdout

    def follow(self, page: str) -> None:
        """Run a page's commands; each prints the first line of output that the page shows."""
        if any("curl" in command for command, _ in commands(page)):
            require("curl")
        for command, output in commands(page):
            shown = self.run(command)
            if output and "explain" not in command:  # where a topic is best depends on how busy this host is
                assert self.real(output[0]) in shown, command

    def _serve(self, kind: str, command: str) -> str:
        process = subprocess.Popen(
            ["bash", "-c", f"{command} {FREE[kind]}"],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ends.callback(_end, process)
        assert process.stdout is not None
        shown = process.stdout.readline()
        while kind == "up" and not re.search("^ready", shown, re.MULTILINE):
            line = process.stdout.readline()
            assert line, f"{command} ended: {shown}"
            shown += line
        found = dict(re.findall(r"(TCP|HTTP|controller:|page:) (?: *http://)?([\d.]+:\d+)", shown))
        if kind == "controller":
            self._addresses |= {"127.0.0.1:4160": found["TCP"], "127.0.0.1:4161": found["HTTP"]}
        elif kind == "broker":
            self._addresses |= {"127.0.0.1:4150": found["TCP"], "127.0.0.1:4151": found["HTTP"]}
        elif kind == "up":
            self._addresses |= {"127.0.0.1:4161": found["controller:"], "127.0.0.1:4171": found["page:"]}
            self._environment["SRTM_CONTROLLER"] = f"http://{found['controller:']}"
            answer = httpx.get(f"http://{found['controller:']}/v1/brokers", trust_env=False).json()
            for number, broker in enumerate(sorted(answer["brokers"], key=lambda each: str(each["name"]))):
                self._addresses[f"127.0.0.1:{4150 + 2 * number}"] = broker["address"]
                self._addresses[f"127.0.0.1:{4151 + 2 * number}"] = broker["http"].removeprefix("http://")
        return shown


def _plain(address: str) -> str:
    return address.replace("localhost", "127.0.0.1")


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    process.communicate(timeout=30)


@contextmanager
def shell(folder: Path) -> Iterator[Shell]:
    """A shell in an empty folder; its servers end with it."""
    with ExitStack() as ends:
        yield Shell(folder, ends)


def test_only_the_page_on_the_api_needs_curl() -> None:
    """A fresh machine has no curl."""
    assert {page for page in HERE if any("curl" in command for command, _ in commands(page))} <= NEED_CURL


def test_every_block_is_run_or_says_why_not() -> None:
    assert {block.page for block in blocks() if not block.reason} == ELSEWHERE | HERE
    marks = sum(page.read_text().count("\n<!-- not run: ") for page in PAGES)
    assert marks == sum(block.reason is not None for block in blocks()), "a mark stands directly before its block"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A reader who has followed the quickstart; the page on operations continues from there."""
    with shell(tmp_path_factory.mktemp("cluster")) as here:
        here.follow("quickstart.md")
        yield here


def test_the_quickstart_works(cluster: Shell) -> None:
    assert "traffic: k = " in cluster.run("srtm topic explain traffic")


def test_the_page_on_operations_works(cluster: Shell) -> None:
    cluster.follow("operations.md")
    for name in ("srtm-alerts.yml", "prometheus.yml", "srtm-dashboard.json", "srtm-debug.tar.gz"):
        assert (cluster.folder / name).exists()


@pytest.mark.needs("nats-server")
def test_the_page_on_engines_works(tmp_path: Path) -> None:
    with shell(tmp_path) as here:
        here.follow("engines.md")
        url = here.real("http://localhost:4151/stats?format=json&topic=orders.new")
        (found,) = httpx.get(url, trust_env=False).json()["topics"]
    assert (found["srtm"]["engine"]["kind"], found["srtm"]["engine"]["state"]) == ("nats", "open")
    assert found["srtm"]["engine"]["probe"]["messages"] > 0


def test_the_page_on_concepts_works(tmp_path: Path) -> None:
    with shell(tmp_path) as here:
        here.follow("concepts.md")


@pytest.mark.parametrize("page", ["control.md", "discovery.md"])
def test_pages_with_clusters_of_their_own_work(page: str, tmp_path: Path) -> None:
    with shell(tmp_path) as here:
        here.follow(page)


def test_the_page_on_importing_works(tmp_path: Path, connect_server: Server) -> None:
    assert connect_server.url
    (tmp_path / "logs").mkdir()
    times = [1_700_000_000 + number / 8 for number in range(800)]
    for part in range(2):
        rows = "".join(f"car-{number % 5},{time}\n" for number, time in enumerate(times[part::2]))
        (tmp_path / "logs" / f"{part}.csv.gz").write_bytes(gzip.compress(f"car,at\n{rows}".encode()))
    rooms = [
        {"room": "r", "sensor": f"s-{second % 3}", "time": f"2026-01-01T00:00:{second:02}Z"} for second in range(60)
    ]
    (tmp_path / "rooms.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rooms))
    stamps = pa.array([int(time * 1e6) for time in times], pa.timestamp("us"))
    pq.write_table(pa.table({"device": ["d"] * len(times), "ts": stamps}), tmp_path / "frames.parquet")
    with shell(tmp_path) as here:
        here.follow("import.md")
    assert (tmp_path / "cars").is_dir()
    assert (tmp_path / "frames.trace.parquet").exists()
