"""Live forms: a tiny Fig. 6a on real brokers agrees with the model, and claims are predicates like all others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from srtm.cli.app import run
from srtm.errors import InputError
from srtm.lab.claims import judge
from srtm.lab.live import fig6a
from srtm.lab.live.paced import Paced
from srtm.lab.live.world import Live, Stalls
from srtm.lab.result import Row, Rows
from srtm.lab.results import known, live, named_live
from srtm.lab.sweep import Kept, Settings, cells_of

SCALE = ["--publishers", "60", "--rate", "10", "--seconds", "3"]
SMALL = Live(publishers=60, rate_mps=10, seconds=3)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    assert run(["lab", "run", "fig6a", "--live", "--tiny", *SCALE, "--out", str(folder)]) == 0
    return folder


@pytest.mark.processes
def test_brokers_do_what_the_model_says(out: Path) -> None:
    settings = Kept(out).settings()
    assert settings == Settings(1, 1, tiny=True, live=SMALL, paced=Paced(seconds=3))
    rows = Kept(out).rows(known("fig6a-live"), settings)
    assert rows
    assert [row["k"] for row in rows] == [1, 2]
    for row in rows:
        assert int(row["messages"]) > 1_000
        assert row["lost"] == row["unexplained"] == 0
        assert row["access_p99_ms"] == pytest.approx(row["simulated_p99_ms"], rel=fig6a.NEAR)
        assert float(row["gap_ms"]) > 0
    assert float(rows[1]["access_p99_ms"]) > 0
    verdicts = {verdict.claim: verdict.holds for verdict in judge([known("fig6a-live")], {"fig6a-live": rows})}
    assert verdicts["the model gives the recorded p99 access delay (within 15 %)"] is True


@pytest.mark.processes
def test_finished_cells_are_not_run_again(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Live, "steady", lambda *_, **__: pytest.fail("it was run again"))
    assert run(["lab", "run", "fig6a", "--live", "--tiny", *SCALE, "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["live"]["publishers"] == 60
    assert len(said["rows"]["fig6a-live"]) == 2
    assert run(["lab", "run", "fig6a", "--live", "--tiny", *SCALE, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "live, 60 publishers of 10 msg/s, 3 s" in said
    assert "longest gap ms" in said


@pytest.mark.processes
def test_the_report_has_live_results(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, claims = tmp_path / "lab.html", tmp_path / "claims.md"
    assert run(["lab", "report", "--out", str(out), "--page", str(page), "--claims", str(claims)]) == 0
    assert f"{page}: 1 of {len(live())} results" in capsys.readouterr().out
    assert "evaluation, live" in page.read_text()
    assert "live, 60 publishers of 10 msg/s" in page.read_text()
    assert "| k | messages | p99 access ms |" in claims.read_text()


@pytest.mark.processes
def test_a_broker_that_stalls_does_not_change_what_the_kernel_says() -> None:
    """The recorded arrivals are the kernel's: the law holds of them, in the order in which they were read."""
    seen = SMALL.steady(SMALL.workload(2), 1, stalls=Stalls(50, 200))
    (part,) = seen.parts.values()
    assert len(part.arrival_ns) == len(seen.written_ns)
    assert part.unexplained() == 0
    if not seen.crossed:
        assert (part.access_ns == part.simulated_ns()).all()
    assert replace(part, release_ns=part.release_ns + 1).unexplained() > 0


def table(**columns: list[float | str]) -> Rows:
    """Rows, column by column."""
    names = list(columns)
    return Rows(dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True))


def holds(name: str, rows: list[Row]) -> list[bool | None]:
    return [verdict.holds for verdict in judge([live()[name]], {name: Rows(rows)})]


def test_claims_of_fig6a_can_fail() -> None:
    rows = table(k=[1, 2], access_p99_ms=[0.0, 20.0], simulated_p99_ms=[0.0, 22.0])
    rest: Row = {"differing": 3, "crossed": 3, "unexplained": 0, "messages": 100, "lost": 0}
    assert holds("fig6a-live", [{**row, **rest} for row in rows]) == [True] * 4
    assert holds("fig6a-live", [{**row, **rest, "simulated_p99_ms": 30.0} for row in rows]) == [False, True, True, True]
    assert (
        holds("fig6a-live", [{**row, **rest, "access_p99_ms": 20.0, "lost": 1, "unexplained": 1} for row in rows])
        == [False] * 4
    )


def test_claims_of_kernel_time_can_fail() -> None:
    many = table(
        connections=["many"] * 4,
        stall_ms=[0, 0, 80, 80],
        stamps=["kernel", "user space"] * 2,
        access_p99_ms=[0.0, 0.0, 0.3, 40.0],
        true_p99_ms=[0.0] * 4,
        mistaken=[0.0, 0.001, 0.002, 0.5],
    )
    four = table(connections=["four"] * 2, stall_ms=[0, 80], stamps=["kernel"] * 2, mistaken=[0.0, 0.0009])
    assert holds("kernel_time-live", [*many, *four]) == [True, True, True]
    late = {"kernel": "user space", "user space": "kernel"}
    worse = [{**row, "stamps": late[str(row["stamps"])]} for row in many] + [{**row, "mistaken": 0.001} for row in four]
    assert holds("kernel_time-live", worse) == [False, False, False]


def test_cells_of_another_scale_are_others() -> None:
    own = [result for result in live().values() if not result.rows_of]
    digests = {
        cells_of(result, Settings(live=scale, paced=slow))[0].digest
        for result in own
        for scale, slow in ((Live(), Paced()), (Live(rate_mps=7), Paced(20)))
    }
    assert len(digests) == 2 * len(own)


def test_only_some_results_have_a_live_form() -> None:
    assert [result.name for result in named_live(["all"])] == list(live())
    assert [result.name for result in named_live(["fig9"])] == ["fig9a-live"]
    with pytest.raises(
        InputError, match=r"prop1 cannot run live; results with a live form: kernel_time, fig6a, fig7a, fig7c, fig8a"
    ):
        named_live(["prop1"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fig6b", "--live"], "fig6b cannot run live"),
        (["fig6a", "--publishers", "5"], "publishers: only for live runs; add --live"),
        (["fig9a", "--live", "--patience", "-1s"], "'-1s'"),
        (["fig9a", "--pace", "20"], "factor: only for live runs; add --live"),
        (["fig9a", "--live", "--pace", "20", "--seconds", "0"], "seconds must be positive, not 0.0"),
        (
            ["fig6a", "--live", "--publishers", "0", "--rate", "nan"],
            "publishers must be positive, not 0; rate_mps must be positive, not nan",
        ),
    ],
)
def test_what_cannot_be_used_is_named(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lab", "run", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
