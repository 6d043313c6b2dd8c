"""`srtm plan --all` and the report page that shows it, on one Spark that is started once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from srtm.cli.app import run
from srtm.pipeline.report import window_for
from srtm.units import NS_PER_MS, NS_PER_S

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for number in range(3):
        workload = [
            "--publishers",
            "50",
            "--rate",
            "20",
            "--group-size",
            "5",
            "--duration",
            "5s",
            "--seed",
            str(number),
        ]
        assert (
            run(["trace", "synth", *workload, "--topic", f"t{number}", "--out", str(folder / f"{number}.parquet")]) == 0
        )
    capsys.readouterr()
    return folder


def test_the_document_keeps_its_contract(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["traffic=1.5", "brokers=-1", "slo=20ms", "lending=auto", "traffic=2,brokers=+1"]
    what_if = [word for change in changes for word in ("--what-if", change)]
    options = ["--brokers", "4", "--slo-p99", "10ms"]
    assert run(["plan", "--all", str(traces), *options, *what_if, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == {"topics", "brokers_used", "what_if"}
    assert [line["topic"] for line in document["topics"]] == ["t0", "t1", "t2"]
    for line in document["topics"]:
        assert line.keys() == {"topic", "k", "brokers", "total_ms", "meets_slo"}
        assert line["k"] == len(line["brokers"])
        assert line["total_ms"].keys() == {"p50", "p95", "p99"}
        assert line["meets_slo"]
    assert document["brokers_used"] == len({b["broker"] for line in document["topics"] for b in line["brokers"]})
    assert [each.keys() for each in document["what_if"]] == [{"name", "brokers_used", "meets_slo"}] * len(changes)
    assert [each["name"] for each in document["what_if"]] == changes


def test_one_topic_is_planned_as_by_plan(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, options = str(traces / "1.parquet"), ["--brokers", "3", "--slo-p99", "10ms", "--json"]
    assert run(["plan", trace, *options]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert run(["plan", "--all", trace, *options]) == 0
    document = json.loads(capsys.readouterr().out)
    (line,) = document["topics"]
    assert line == {"topic": "t1", **{name: chosen[name] for name in ("k", "brokers", "total_ms", "meets_slo")}}
    assert document["brokers_used"] == chosen["k"]


def test_the_table_says_how_many_brokers_the_fleet_needs(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--all", str(traces), "--brokers", "4", "--slo-p99", "10ms", "--what-if", "traffic=1.5"]) == 0
    said = capsys.readouterr().out
    assert "3 topics on 4 brokers; SLO p99 ≤ 10 ms: all meet it" in said
    assert "with brokers of their own, these topics would use 3" in said
    assert "traffic=1.5" in said
    assert "t0" not in said
    assert run(["plan", "--all", str(traces), "--brokers", "1", "--mcap-mps", "1500", "--slo-p99", "10ms"]) == 1
    said = capsys.readouterr().out
    assert "3 brokers would have room for all" in said
    assert "no broker has room for it beside the others" in said
    assert run(["plan", "--all", str(traces), "--slo-p99", "10ms", "--compare"]) == 0
    assert "t0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--what-if", "rate=2"], "unknown change 'rate=2'; write traffic=1.5, brokers=-1, slo=2ms or lending=auto"),
        (["--what-if", "brokers=some"], "brokers must be a number, or a change such as -1 or +2, not 'some'"),
        (["--what-if", "brokers=-6"], "a fleet needs at least 1 broker, not 0"),
        (["--what-if", "traffic=fast"], "traffic must be a finite number, not 'fast'"),
        (["--what-if", "traffic=-1"], "traffic = -1: it must be more than 0"),
        (["--what-if", "slo=soon"], "'soon' is not a duration"),
        (["--what-if", "lending=maybe"], "maybe"),
        (["--what-if", "slo=2ms", "--what-if", "slo=2ms"], "--what-if slo=2ms is given more than once"),
        (["--topic", "t0"], "--topic is for one topic, but --all plans every topic"),
        (["--r", "1", "--b", "1"], "--r is for one topic"),
    ],
)
def test_what_is_wrong_is_named(
    words: list[str], message: str, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--all", str(traces), *words]) == 2
    assert message in capsys.readouterr().err


def test_all_needs_a_trace_and_what_ifs_need_all(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--all"]) == 2
    assert "name a file, a folder or a URI" in capsys.readouterr().err
    assert run(["plan", str(traces), "--what-if", "traffic=2"]) == 2
    assert "--what-if needs --all" in capsys.readouterr().err


def test_the_report_shows_the_plan_and_says_what_it_is(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--all", str(traces), "--slo-p99", "10ms", "--what-if", "brokers=-1", "--json"]) == 0
    saved, out = tmp_path / "plan.json", tmp_path / "report.html"
    saved.write_text(capsys.readouterr().out)
    assert run(["report", str(traces), "--plan", str(saved), "--out", str(out)]) == 0
    page = out.read_text()
    assert "<title>SRTM: Traffic report on traces</title>" in page
    assert "<h1>Traffic report on traces</h1>" in page
    assert "3 topics with " in page
    assert "All topics on the same brokers" in page
    assert "brokers=-1" in page
    for text in ("[]", '{"topics": [{}], "brokers_used": 1, "what_if": []}'):
        saved.write_text(text)
        assert run(["report", str(traces), "--plan", str(saved), "--out", str(out), "--force"]) == 2
        assert "is not a fleet's plan" in capsys.readouterr().err
    assert run(["report", str(traces), "--plan", str(tmp_path / "no"), "--out", str(out), "--force"]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "window_ns"),
    [(0, NS_PER_MS), (1, 10 * NS_PER_MS), (25, 500 * NS_PER_MS), (60, NS_PER_S), (3600, 60 * NS_PER_S)],
)
def test_windows_follow_from_the_length_of_the_trace(seconds: int, window_ns: int) -> None:
    assert window_for(7, 7 + seconds * NS_PER_S) == window_ns


def test_the_longest_traces_have_a_hundred_windows() -> None:
    assert window_for(0, 10**18) == 10**16
