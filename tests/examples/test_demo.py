"""The demo: to its end, stopped with Ctrl-C, its processes killed. Nothing runs on, and the last line says why.

Of the kills a few; `SRTM_DEMO_KILLS=all pytest -s tests/examples/test_demo.py` tries every process at every moment, and
prints how each went.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.conftest import ROOT

MOMENTS = {  # the line after which it happens
    "at once": "starting a controller",
    "set-up": "first message received",
    "lb": "policy lb: 40 sensors",
    "between": "policy lb: done",
    "srtm": "policy srtm: 40 sensors",
    "analysis": "analyzing the run under lb",
}
PROCESSES = {  # what its command line holds
    "demo.py": "demo.py",
    "play.py": "play.py",
    "srtm up": "srtm up",
    "controller": "srtm controller",
    **{f"broker-{n}": f"--name broker-{n} " for n in (1, 2, 3, 4)},
    "Spark's JVM": "org.apache.spark.deploy.SparkSubmit",
    "Spark's Python": "pyspark.daemon",
    "lights.py": "lights.py",
    "sensors.py": "sensors.py",
    "probe.py": "probe.py",
}
NOT_THERE = {
    "set-up": {"Spark's Python"},
    "between": {"sensors.py"},
    "analysis": {"lights.py", "sensors.py", "probe.py"},
}
ALL = [("Ctrl-C", moment) for moment in MOMENTS] + [
    (process, moment)
    for moment in MOMENTS
    for process in PROCESSES
    if moment != "at once" and process not in NOT_THERE.get(moment, ())
]
FEW = [("Ctrl-C", "set-up"), ("demo.py", "set-up"), ("Spark's JVM", "lb")]
MEASURED = (
    "brokers used",
    "p99 access:",
    "p99 total",
    "SLO",
    "minimum of r in force",
    "host",
    "sensor to traffic light",
)
ROWS = (*MEASURED, *(f"Spark, {job}" for job in ("profile", "groups", "penalty", "conformance")))
STARTED_AGAIN = {"controller", *(f"broker-{n}" for n in (1, 2, 3, 4))}


class Demo:
    """A short demo, its lines as they come, and its processes, told by a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self._mark = f"SRTM_DEMO_MARK={uuid4()}"
        name, _, value = self._mark.partition("=")
        self.files = folder / "files"
        self.files.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples/transport/demo.py"), "--seconds", "4", "--json", "figures.json"],
            cwd=folder,
            env={**os.environ, name: value, "TMPDIR": str(self.files)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if text in line:
                return
        raise AssertionError(f"{text!r} was not said: {self.lines}")

    def read_to_the_end(self) -> None:
        """The output ends with the last process that could write to it."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        self.process.wait()

    def processes(self) -> Iterator[tuple[int, str]]:
        """Those that run, with their command lines."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # not ours, or gone

    def find(self, text: str) -> int:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for pid, command in self.processes():
                if text in command:
                    return pid
            time.sleep(0.02)
        raise AssertionError(f"there is no {text}: {self.lines}")

    def listening(self) -> set[tuple[str, str]]:
        """Addresses at which its processes listen, each with its socket, which no other process can have."""
        opened = [file for pid, _ in self.processes() for file in Path(f"/proc/{pid}/fd").iterdir()]
        sockets = {str(file.readlink()) for file in opened if file.is_symlink()}
        return {(address, inode) for address, inode in all_listening() if f"socket:[{inode}]" in sockets}

    def kill_all(self) -> None:
        """What a failed test leaves."""
        for pid, _ in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def all_listening() -> set[tuple[str, str]]:
    """Addresses, as Linux writes them, at which anybody listens, and the sockets."""
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    return {(row[1], row[9]) for row in rows if row[3] == "0A"}


def test_it_ends_with_a_table(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    try:
        demo.read_to_the_end()
    finally:
        demo.kill_all()
    said = "\n".join(demo.lines)
    assert demo.process.returncode == 0, said
    assert demo.lines[-1] == "Done; nothing is left running."
    assert re.search(r"^ policy +lb +srtm *$", said, re.MULTILINE), said
    cells = {name: re.findall(rf"^ {name}.*? {{2,}}(\S.*?) {{2,}}(\S.*?) *$", said, re.MULTILINE) for name in ROWS}
    assert all(len(found) == 1 and "—" not in found[0] for found in cells.values()), said
    assert cells["brokers used"][0][0] == "4"
    assert cells["Spark, conformance"] == [("yes", "yes")]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [(run["policy"], run["k"]) for run in figures["runs"]] == [("lb", 4), ("srtm", 1)]
    causes = [cause for run in figures["runs"] for cause in run["causes"]]
    assert all(cause in said for cause in causes or ["Both runs are valid"]), said
    assert {file.name for file in tmp_path.glob("*.html")} == {"demo-report-lb.html", "demo-report-srtm.html"}


@pytest.mark.parametrize(("who", "moment"), ALL if os.environ.get("SRTM_DEMO_KILLS") == "all" else FEW)
def test_nothing_is_left(who: str, moment: str, tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    try:
        demo.read_until(MOMENTS[moment])
        victim = demo.process.pid if who in ("Ctrl-C", "demo.py") else demo.find(PROCESSES[who])
        held = demo.listening()
        os.kill(victim, signal.SIGINT if who == "Ctrl-C" else signal.SIGKILL)
        began = time.monotonic()
        demo.read_to_the_end()
        took_s = time.monotonic() - began
        left = list(demo.processes())
    finally:
        demo.kill_all()
    said = "\n".join(demo.lines)
    (tmp_path / "output").write_text(said)
    print(f"\n| {moment} | {who} | {took_s:.1f} s | {demo.lines[-1]} |")
    assert not left
    assert held or moment == "at once"
    assert not held & all_listening()
    assert list(demo.files.iterdir()) == []
    assert "Traceback" not in said, said
    assert who == "play.py" or "\tat " not in said, said  # nobody is left who could keep Java from telling its story
    if demo.lines[-1] == "Done; nothing is left running.":
        assert who in STARTED_AGAIN or who == "Spark's Python"  # Spark starts it again, too
        assert who not in STARTED_AGAIN or f"{who} ended (-9); restarting" in said, said
    else:
        ended = r"The demo ended early: .+[^.]\. Nothing is left running; start again with `make demo`\."
        assert re.fullmatch(ended, demo.lines[-1]), said
