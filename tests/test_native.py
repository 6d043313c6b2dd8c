"""The compiled build: it runs only if it was made from the sources that are here, and nothing needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools import constraints
from tools import native as compiling

from srtm import native
from tests.conftest import ROOT

SAYS = "import srtm.broker.gate as gate, srtm.native as n; print(n.build()); print(gate.__file__)"
COMPILED = compiling.PACKAGE / "_native"


def run(source: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the sources of a folder, without the variables by which tests choose a build."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SRTM_")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**own, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", **variables},
        cwd=source.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def says(source: Path, **variables: str) -> tuple[str, str]:
    """The build that runs there, and the file of one of its hot modules."""
    done = run(source, "-c", SAYS, **variables)
    assert done.returncode == 0, done.stderr
    build, file = done.stdout.splitlines()
    return build, file


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project's sources and tools, with its compiled modules if they are fresh."""
    ignored = ["__pycache__", *([] if compiling.fresh() else ["_native"])]
    for folder in ("src", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns(*ignored))
    return tmp_path / "src"


@pytest.fixture
def compiled(checkout: Path) -> Path:
    if not (checkout / "srtm/_native").exists():
        missing = "needs compiled modules: run make native"
        if os.environ.get("SRTM_REQUIRE_PARTS"):
            pytest.fail(missing)
        pytest.skip(missing)
    return checkout


def test_tests_run_the_build_that_they_ask_for() -> None:
    import srtm.broker.gate as hot

    wanted = bool(os.environ.get("SRTM_COMPILED"))
    assert native.is_compiled() is wanted
    assert Path(hot.__file__ or "").suffix == (".so" if wanted else ".py")


@pytest.mark.processes
def test_compiled_modules_run_unless_they_are_forbidden(compiled: Path) -> None:
    build, file = says(compiled)
    assert build == "compiled"
    assert Path(file).parent == compiled / "srtm/_native"
    build, file = says(compiled, SRTM_INTERPRETED="1")
    assert build == "interpreted: SRTM_INTERPRETED is set"
    assert Path(file) == compiled / "srtm/broker/gate.py"


@pytest.mark.processes
@pytest.mark.parametrize("edited", ["broker/gate.py", "units.py"])
def test_edited_sources_run_at_once(edited: str, compiled: Path) -> None:
    """Also if a source is edited that is not compiled itself: its constants are."""
    with (compiled / "srtm" / edited).open("a") as file:
        file.write("\nEDITED = True\n")
    build, where = says(compiled)
    assert build == f"interpreted: {edited} changed since it was compiled; run make native"
    assert where.endswith("gate.py")


@pytest.mark.processes
def test_without_a_manifest_nothing_is_believed(compiled: Path) -> None:
    (compiled / "srtm/_native/manifest").unlink()
    assert says(compiled)[0] == "interpreted: the compiled modules have no manifest; run make native"


@pytest.mark.processes
def test_without_a_compiler_it_runs_interpreted_and_says_so_once(checkout: Path) -> None:
    shutil.rmtree(checkout / "srtm/_native", ignore_errors=True)
    done = run(checkout, "-m", "tools.native", CC="no-such-compiler", PYTHONPATH=f"{checkout}:{checkout.parent}")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "SRTM runs interpreted: there is no C compiler (no-such-compiler)"
    assert says(checkout)[0] == "interpreted"
    done = run(checkout, "-m", "tools.native", "--required", CC="no-such-compiler")
    assert done.returncode == 1
    assert done.stderr == "tools.native: there is no C compiler (no-such-compiler)\n"


def test_hashes_cover_what_the_compiler_reads() -> None:
    known = compiling.sources()
    assert set(compiling.MODULES) < set(known)
    assert {"units.py", "errors.py", "protocol/names.py", "model/law.py"} < set(known)
    assert "control/controller.py" not in known


def test_wheels_are_compiled_by_the_versions_that_tests_use() -> None:
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    pinned = set(constraints.CONSTRAINTS.read_text().splitlines())
    needed = hook["custom"]["dependencies"]
    assert {Requirement(each).name for each in needed} == {"mypy", "setuptools"}
    assert set(needed) <= pinned
