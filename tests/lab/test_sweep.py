"""The sweep: the same rows on any number of executors, kept cells never run again, a killed sweep goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from srtm.cli.app import run
from srtm.errors import InputError
from srtm.lab.results import RESULTS, named
from srtm.lab.sweep import Cell, Kept, Settings, cells_of, unfinished, work
from srtm.lab.world import Simulated
from tests.lab.conftest import TINY

SMALL = ("fig6a", "kernel_time")
SETTINGS = Settings(seed=3, repetitions=2, tiny=True)


def lab(out: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "srtm", "lab", "run", *SMALL, "--tiny", "--seed", "3", "--repetitions", "2"]
    return [*command, "--json", "--out", str(out), *more]


def rows_of(out: Path) -> list[object]:
    return [Kept(out).rows(RESULTS[name], SETTINGS) for name in SMALL]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on one core, and the claims that it printed."""
    out = tmp_path_factory.mktemp("one")
    done = subprocess.run(lab(out, "--master", "local[1]"), capture_output=True, text=True, check=True)
    return out, done.stdout


def test_rows_are_what_the_result_says_without_spark(alone: tuple[Path, str]) -> None:
    for cell in cells_of(RESULTS["fig6a"], SETTINGS)[:2]:
        named_too = [
            {**row, "result": cell.result, "repetition": cell.repetition, "seed": cell.seed}
            for row in RESULTS["fig6a"].run(cell.world, cell.point, cell.seed)
        ]
        assert [row for row in rows_of(alone[0])[0] if row in named_too] == named_too  # type: ignore[attr-defined]


@pytest.mark.processes
def test_a_killed_sweep_goes_on_with_another_number_of_cores_and_ends_with_the_same_table(
    alone: tuple[Path, str], tmp_path: Path
) -> None:
    first = subprocess.Popen(
        lab(tmp_path, "--master", "local[1]"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while len(done := list(tmp_path.rglob("*.parquet"))) < 4:
        assert first.poll() is None, "the sweep ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    done = list(tmp_path.rglob("*.parquet"))
    written = {path: path.stat().st_mtime_ns for path in done}
    total = sum(len(cells_of(result, SETTINGS)) for result in named(SMALL))
    assert 4 <= len(done) < total
    assert len(unfinished(named(SMALL), SETTINGS, Kept(tmp_path))) == total - len(done)
    again = subprocess.run(lab(tmp_path, "--master", "local[2]"), capture_output=True, text=True, check=True)
    assert again.stdout == alone[1]
    assert rows_of(tmp_path) == rows_of(alone[0])  # cells of one core and of two
    assert None not in rows_of(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in done} == written  # what was finished was not run again


def test_what_is_finished_needs_no_spark(
    alone: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert run(lab(alone[0])[3:]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(alone[1])


def test_cells_that_take_longest_start_first(tmp_path: Path) -> None:
    weights = [cell.weight for cell in unfinished(list(RESULTS.values()), Settings(), Kept(tmp_path))]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > weights[-1]


def test_a_cell_is_known_by_all_that_changes_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cells_of(RESULTS["fig6a"], TINY)[0]
    others = [
        replace(cell, seed=cell.seed + 1),
        replace(cell, point={**cell.point, "k": 2}),
        replace(cell, world=Simulated(seconds=7)),
        replace(cell, result="fig6b"),
    ]
    before = cell.digest
    monkeypatch.setitem(RESULTS, "fig6a", replace(RESULTS["fig6a"], version=2))
    digests = {before, cell.digest, *(other.digest for other in others)}
    assert len(digests) == 6


def test_rows_pass_through_the_wire_unchanged() -> None:
    cell = Cell("fig6a", {"publishers": 50, "k": 2}, 0, 5, Simulated(seconds=2))
    assert json.loads(work(cell)) == RESULTS["fig6a"].run(cell.world, cell.point, cell.seed)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "fig9c"], "unknown result 'fig9c'; did you mean fig9"),
        (["run", "everything"], "known results: prop1"),
        (["run", "fig6a", "--repetitions", "0"], "repetitions must be between 1 and 500, not 0"),
        (["run", "fig6a", "--seed", "-1", "--repetitions", "501"], "seed must be between 0 and 2**31, not -1; repet"),
        (["run", "fig6a", "--out", "FILE"], "--out: cannot write to"),
        (["run", "fig6a", "--spark-conf", "cores=2"], "write spark.name=value"),
        (["run", "fig6a", "--tiny", "--master", "here"], "is not a Spark address"),
        (["report", "--out", "EMPTY"], "start one with srtm lab run all"),
    ],
)
def test_what_cannot_be_used_is_named(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    assert run(["lab", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    settings = Settings(repetitions=1, tiny=True)
    kept = Kept(tmp_path)
    kept.begin(settings)
    for cell in cells_of(RESULTS["fig6a"], settings):
        kept.put(cell, [{"k": 1, "p99_ms": 0.5}])
    broken = next(tmp_path.rglob("*.parquet"))
    broken.write_bytes(b"PAR1 no more")
    with pytest.raises(InputError, match=rf"cannot read .*{broken.name} .*; remove it"):
        kept.rows(RESULTS["fig6a"], settings)
