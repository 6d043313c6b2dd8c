"""`srtm calibrate`: it claims nothing that was not tried, and measures nothing that it could not write."""

from __future__ import annotations

from pathlib import Path

import pytest

from srtm.cli.app import run
from srtm.cli.servers.calibrate import held_mps
from srtm.cli.servers.trials import Point
from srtm.units import NS_PER_MS


def point(rate_mps: float, p99_ms: float, batch: int = 1) -> Point:
    return Point(rate_mps, batch, 20_000.0, 100_000, round(p99_ms * NS_PER_MS), 0, late=False)


@pytest.mark.parametrize(
    ("points", "most_mps", "mcap_mps"),
    [
        ([point(2000, 1), point(5000, 20), point(7838, 27.7)], 10_563.0, 5000.0),
        ([point(2000, 1), point(9000, 10)], 8000.0, 8000.0),
        ([point(2000, 1), point(9000, 10, batch=10)], 8000.0, 2000.0),
        ([point(2000, 21)], 8000.0, None),
        ([point(2000, 1)], 0.0, None),
    ],
)
def test_mcap_was_tried_and_held(points: list[Point], most_mps: float, mcap_mps: float | None) -> None:
    assert held_mps(points, 20 * NS_PER_MS, most_mps) == mcap_mps


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("srtm.cli.servers.calibrate.a_broker", lambda _: pytest.fail("a broker was started"))
    for out in (tmp_path / "nowhere" / "x", tmp_path):
        assert run(["calibrate", "--out", str(out)]) == 2
        assert f"--out: cannot write {out}; " in capfd.readouterr().err
