"""The examples run, and say what the README says that they say."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

from tests.conftest import ROOT


def run(example: str) -> str:
    done = subprocess.run([sys.executable, ROOT / "examples" / example], capture_output=True, text=True, check=True)
    return done.stdout


def test_drl_penalty_grows_with_every_broker_and_srtm_avoids_it() -> None:
    shown = run("drl_penalty.py")
    access = [float(number) for number in re.findall(r"^ +\d +([0-9.]+) ms", shown, re.MULTILINE)]
    assert len(access) == 6
    assert access[0] == 0
    assert all(before < after for before, after in pairwise(access))
    assert "SRTM chooses 1 of 6" in shown


def test_the_readme_shows_what_the_example_prints() -> None:
    readme = (ROOT / "README.md").read_text()
    for line in run("drl_penalty.py").splitlines():
        assert line in readme, f"README.md does not show: {line}"
