"""The notebook of examples/, cell by cell, as a notebook's kernel would run it in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.pipeline.runtime.standalone import environment

NOTEBOOK = ROOT / "examples" / "profile.ipynb"


@pytest.mark.spark
def test_the_notebook_runs_and_leaves_the_session_running() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells)
    lines = ["".join(cell["source"]) for cell in cells]
    end = "assert spark.range(3).count() == 3\nprint(len(found), plan)"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, end])],
        env=environment("127.0.0.1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|messages|" in done.stdout
