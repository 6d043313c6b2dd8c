"""The commands and the code of the README and of the docs work, in the order in which they stand there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from srtm.pipeline.runtime.server import Server
from tests.conftest import ROOT

NOT_RUN = {"make setup"}  # it has run, or this test would not


def run(language: str, code: str, folder: Path) -> str:
    """Run a block and return what its last command printed."""
    commands = [[sys.executable, "-c", code]] if language == "python" else []
    if language == "sh":
        for line in code.strip().splitlines():
            if line not in NOT_RUN:
                program, *arguments = shlex.split(line)
                tool = Path(program).name
                commands.append([sys.executable, *(["-m", "srtm"] if tool == "srtm" else []), *arguments])
    shown = ""
    for command in commands:
        *command, target = command if command[-2:-1] == [">"] else [*command, ""]
        command = [word for word in command if word != ">"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
        shown = done.stdout
        if target:
            (folder / target).write_text(shown)
    return shown


def test_the_readme_works(tmp_path: Path, connect_server: Server) -> None:
    assert connect_server.url
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    blocks = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [language for language, _ in blocks] == ["sh", "sh", "sh", "python"]
    *_, shown = [run(language, code, tmp_path) for language, code in blocks]
    plans = [line.split() for line in shown.splitlines()]
    assert [plan[0] for plan in plans] == ["lb", "conc", "max_min", "srtm"]
    assert plans[-1][2] == "True"
    assert (tmp_path / "report.html").exists()


def test_the_readmes_cluster_works(tmp_path: Path) -> None:
    """Its commands one after the other, on free ports; what is published is there when it is read."""
    commands = re.findall(r"^\$ \.venv/bin/(srtm .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    up, *others = [shlex.split(command)[1:] for command in commands]
    with subprocess.Popen(
        [sys.executable, "-m", "srtm", *up, "--free-ports"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            url = re.search(r"http://\S+", next(lines))
            assert url
            assert any(line.startswith("ready") for line in lines)
            shown = {
                words[0] + words[1] * (words[0] == "topic"): subprocess.run(
                    [sys.executable, "-m", "srtm", *words],
                    env={**os.environ, "SRTM_CONTROLLER": url[0]},
                    cwd=tmp_path,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                for words in others
            }
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
    assert "traffic: k = 1 by srtm" in shown["topicexplain"]
    assert ", 0 lost, 0 doubled" in shown["load"]
    assert shown["sub"].strip() == "hello"
    assert "broker-3" in shown["top"]


def test_the_pipeline_page_works(tmp_path: Path, connect_server: Server) -> None:
    assert connect_server.url
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "pipeline.md").read_text(), re.DOTALL)
    assert block.count("\n") == 8
    assert "report.html: 1 topics" in run("sh", block, tmp_path)
