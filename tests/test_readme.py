"""The commands and the code of the README work, in the order in which they stand there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

NOT_RUN = {"make setup"}  # it has run, or this test would not


def test_the_readme_works(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    blocks = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [language for language, _ in blocks] == ["sh", "sh", "sh", "python"]
    shown = ""
    for language, code in blocks:
        commands = [[sys.executable, "-c", code]] if language == "python" else []
        if language == "sh":
            for line in code.strip().splitlines():
                if line not in NOT_RUN:
                    program, *arguments = shlex.split(line)
                    tool = Path(program).name
                    commands.append([sys.executable, *(["-m", "srtm"] if tool == "srtm" else []), *arguments])
        for command in commands:
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            shown = done.stdout
    plans = [line.split() for line in shown.splitlines()]
    assert [plan[0] for plan in plans] == ["lb", "conc", "max_min", "srtm"]
    assert plans[-1][2] == "True"
