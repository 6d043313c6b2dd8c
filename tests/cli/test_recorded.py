"""From a plan to the report of its run, verb by verb, on one Spark that is started once."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from srtm.cli.app import run
from srtm.pipeline import session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def _warm(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def shared(**_: object) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(session, "spark_session", shared)


@pytest.fixture
def recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, dict[str, float]]:
    """A run over three brokers that a plan recorded, and its (r, b)."""
    folder = tmp_path / "run"
    workload = ["--publishers", "200", "--rate", "20", "--group-size", "20", "--duration", "10s"]
    plan = ["plan", *workload, "--brokers", "3", "--policies", "lb", "--k", "3", "--no-fit", "--json"]
    assert run([*plan, "--slo-p99", "1s", "--record", str(folder), "--figure", str(tmp_path / "plan.html")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["chosen"]["policy"] == "lb"
    assert document["plans"] == [document["chosen"]]
    assert set(document["chosen"]["total_ms"]) == {"p50", "p95", "p99"}
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    return folder, {"r": document["r"], "b": document["b"]}


def test_a_run_is_judged_by_its_contract(
    recorded: tuple[Path, dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, contract = recorded
    options = ["--r", str(contract["r"]), "--b", str(contract["b"])]
    assert run(["conformance", str(folder), *options]) == 0
    assert "yes" in capsys.readouterr().out
    assert run(["conformance", str(folder), "--r", str(contract["r"]), "--b", str(contract["b"] / 2), "--json"]) == 1
    (topic,) = json.loads(capsys.readouterr().out)["topics"]
    assert not topic["conforms"]
    assert topic["excess"] > 0


def test_the_profile_of_a_run_is_a_contract_file(
    recorded: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, contract = recorded
    assert run(["profile", str(folder), "--json", "--figure", str(tmp_path / "envelope.html")]) == 0
    said = capsys.readouterr().out
    (topic,) = json.loads(said)["topics"]
    assert (topic["r"], topic["b"]) == (contract["r"], contract["b"])
    assert topic["batch"] == {"mean": 10, "p50": 10, "p99": 10, "max": 10}
    assert topic["peak_rates"]["1ms"] >= topic["peak_rates"]["10s"]
    assert "fullest window of the trace" in (tmp_path / "envelope.html").read_text()
    (tmp_path / "contract.json").write_text(said)
    assert run(["penalty", str(folder), "--contract", str(tmp_path / "contract.json"), "--window", "2s", "--json"]) == 0
    (account,) = json.loads(capsys.readouterr().out)["topics"]
    assert account["penalty_ns"] > 0
    assert account["penalty_ns"] == sum(window["penalty_ns"] for window in account["windows"])
    assert [broker["broker"] for broker in account["brokers"]] == ["broker-1", "broker-2", "broker-3"]
    assert account["waited"]["messages"] == topic["messages"]
    assert run(["penalty", str(folder), "--contract", str(tmp_path / "contract.json"), "--window", "2s"]) == 0
    table = capsys.readouterr().out
    assert "broker-3" in table
    assert "costliest 5 of 5" in table


def test_the_report_is_one_page_that_needs_nothing_else(
    recorded: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, contract = recorded
    out = tmp_path / "report.html"
    options = ["--r", str(contract["r"]), "--b", str(contract["b"]), "--window", "2s", "--brokers", "2"]
    assert run(["report", str(folder), "--out", str(out), *options]) == 0
    page = out.read_text()
    for title in ("What the topics sent", "Who bursts together", "What splitting", "keep its contract", "other splits"):
        assert title in page
    assert '<span class="good">yes</span>' in page
    assert "<script src=" not in page
    assert run(["report", str(folder), "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_groups_that_were_found_are_planned_with(
    recorded: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = recorded
    found = tmp_path / "groups.json"
    assert run(["groups", str(folder), "--out", str(found)]) == 0
    capsys.readouterr()
    tails = []
    found_alone = tmp_path / "nobody.json"
    found_alone.write_text('{"groups": []}')
    for given in ([], ["--groups", str(found)], ["--groups", str(found_alone)]):
        options = ["--policies", "srtm", "--k", "2", "--brokers", "2", "--slo-p99", "1s", "--no-fit", "--json"]
        assert run(["plan", str(folder), *options, *given]) == 0
        tails.append(json.loads(capsys.readouterr().out)["chosen"]["access_ms"]["p99"])
    declared, as_found, apart = tails
    assert as_found <= declared * 1.1 < apart


def test_what_is_missing_is_named(
    recorded: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = recorded
    assert run(["conformance", str(folder)]) == 2
    assert "--r and --b, or --contract" in capsys.readouterr().err
    assert run(["plan", "--r", "5"]) == 2
    assert "both --r and --b" in capsys.readouterr().err
    assert run(["plan", "--brokers", "nowhere.json"]) == 2
    assert "give a number, or a JSON file" in capsys.readouterr().err
    brokers = tmp_path / "brokers.json"
    brokers.write_text('[{"broker": "x", "mcp": 5}]')
    assert run(["plan", "--brokers", str(brokers)]) == 2
    assert "'mcp' is unknown" in capsys.readouterr().err
    assert run(["plan", "--service", "9"]) == 2
    assert "three costs in ns" in capsys.readouterr().err
    assert run(["plan", "--k", "a"]) == 2
    assert "whole numbers with commas" in capsys.readouterr().err
    (tmp_path / "c.json").write_text('{"topics": [{"topic": "topic", "r": 5}]}')
    assert run(["penalty", str(folder), "--contract", str(tmp_path / "c.json")]) == 2
    assert "b must be given as numbers" in capsys.readouterr().err


def test_what_a_broker_recorded_is_judged_like_any_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limited topic at a real broker: the run keeps to its bucket, and one bucket costs what one bucket would."""
    from tests.broker import test_recorder as broker_runs
    from tests.broker.running import running

    with running(trace_folder=str(tmp_path)) as broker:
        broker.post("/topic/limit?topic=t&r=2000&b=20")
        broker_runs.record(broker)
        broker_runs.bursts(broker, "t", [5, 80, 1, 300])
        broker_runs.stop(broker)
    trace = str(tmp_path / "run.parquet")
    assert run(["conformance", trace, "--r", "2000", "--b", "20", "--json"]) == 0
    (topic,) = json.loads(capsys.readouterr().out)["topics"]
    assert (topic["topic"], topic["messages"], topic["conforms"]) == ("t", 386, True)
    assert run(["conformance", trace, "--r", "2000", "--b", "10"]) == 1
    capsys.readouterr()
    assert run(["penalty", trace, "--r", "2000", "--b", "20", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["topics"][0]["messages"] == 386
