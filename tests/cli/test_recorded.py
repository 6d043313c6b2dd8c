"""From a plan to the report of its run, verb by verb, on one Spark that is started once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtm.cli.app import run
from srtm.model.placement import Publisher
from srtm.workload.publishers import Arrivals
from srtm.workload.trace import BROKER_KEY, MOVED_KEY, Recorded

pytestmark = pytest.mark.usefixtures("warm")


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
    for title in (
        "Traffic, and the token buckets",
        "Publishers that burst together",
        "What splitting",
        "keep its contract",
        "other splits",
    ):
        assert title in page
    assert '<span class="good">yes</span>' in page
    assert "<script src=" not in page
    assert run(["report", str(folder), "--out", str(out)]) == 2
    assert "exists; choose another name" in capsys.readouterr().err


def test_groups_that_were_found_are_planned_with(
    recorded: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, contract = recorded
    scarce = ["--r", str(contract["r"]), "--b", str(0.9 * contract["b"])]  # messages wait wherever groups are put
    found = tmp_path / "groups.json"
    assert run(["groups", str(folder), "--out", str(found)]) == 0
    capsys.readouterr()
    tails = []
    found_alone = tmp_path / "nobody.json"
    found_alone.write_text('{"groups": []}')
    for given in ([], ["--groups", str(found)], ["--groups", str(found_alone)]):
        options = [
            "--policies",
            "srtm",
            "--k",
            "2",
            "--brokers",
            "2",
            "--slo-p99",
            "1s",
            "--no-fit",
            "--json",
            "--seed",
            "4",
        ]
        assert run(["plan", str(folder), *options, *scarce, *given]) == 0
        tails.append(json.loads(capsys.readouterr().out)["chosen"]["access_ms"]["p99"])
    declared, as_found, apart = tails
    assert as_found <= declared * 1.1 < apart


def test_what_is_missing_is_named(
    recorded: tuple[Path, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = recorded
    assert run(["conformance", str(folder)]) == 2
    assert "give --r and --b, or --contract FILE" in capsys.readouterr().err
    assert run(["plan", "--r", "5"]) == 2
    assert "--r and --b must be given together" in capsys.readouterr().err
    assert run(["plan", "--brokers", "nowhere.json"]) == 2
    assert "give a number or a JSON file" in capsys.readouterr().err
    brokers = tmp_path / "brokers.json"
    brokers.write_text('[{"broker": "x", "mcp": 5}]')
    assert run(["plan", "--brokers", str(brokers)]) == 2
    assert "unknown key 'mcp'" in capsys.readouterr().err
    assert run(["plan", "--broker-model", "9"]) == 2
    assert "three costs in ns" in capsys.readouterr().err
    assert run(["plan", "--k", "a"]) == 2
    assert "whole numbers separated by commas" in capsys.readouterr().err
    (tmp_path / "c.json").write_text('{"topics": [{"topic": "topic", "r": 5}]}')
    assert run(["penalty", str(folder), "--contract", str(tmp_path / "c.json")]) == 2
    assert "b must be given as numbers" in capsys.readouterr().err


def test_names_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets that rich would read as its own, control characters, and names that are paths."""
    names = ["x[/]", "[bold]y", "\x1b[31mred", "<script>alert(1)</script>"]
    table = pa.table(
        {
            "topic": pa.array(names),
            "publisher": pa.array(["p"] * len(names)),
            "arrival_ns": pa.array(range(len(names)), pa.int64()),
            "broker": pa.array(["../b[/red]"] * len(names)),
            "release_ns": pa.array(range(len(names)), pa.int64()),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    for verb in (["profile"], ["penalty", "--r", "1", "--b", "1"], ["conformance", "--r", "1", "--b", "1"]):
        assert run([verb[0], str(tmp_path / "t.parquet"), *verb[1:]]) == 0
        shown = capsys.readouterr().out
        assert "x[/]" in shown
        assert "[bold]y" in shown
        assert "\x1b[31mred" not in shown
    out = tmp_path / "report.html"
    assert run(["report", str(tmp_path / "t.parquet"), "--r", "1", "--b", "1", "--out", str(out)]) == 0
    assert "<script>alert" not in out.read_text()
    brokers = tmp_path / "brokers.json"
    brokers.write_text('[{"broker": "../b[/red]"}]')
    options = ["--topic", "x[/]", "--brokers", str(brokers), "--no-fit", "--record", str(tmp_path / "run")]
    assert run(["plan", str(tmp_path / "t.parquet"), *options]) == 0
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["..%2Fb%5B%2Fred%5D.parquet"]


def test_a_topic_that_cannot_be_judged_fails_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"topic": ["good", "absurd"], "publisher": ["p", "p"], "arrival_ns": pa.array([1, 2**63 - 1], pa.int64())}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert run(["report", str(tmp_path / "t.parquet"), "--out", str(tmp_path / "r.html")]) == 1
    assert "topic 'absurd': arrival time 9223372036854775807 ns" in capsys.readouterr().err
    assert "check the unit" in (tmp_path / "r.html").read_text()
    assert run(["report", str(tmp_path / "t.parquet"), "--out", "/proc/r.html"]) == 1
    assert "cannot write /proc/r.html" in capsys.readouterr().err


def test_plans_that_cannot_be_are_refused_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "[]": "must list brokers",
        '[{"broker": "a"}, {"broker": "a"}]': "with different names",
        '[{"broker": "a", "mcap": "x"}]': "mcap must be a number of at least 0, not 'x'",
        '[{"broker": "a", "mcap": NaN}]': "mcap must be a number",
        '[{"broker": "a", "load": 1e9}]': "exceeds mcap",
        '[{"broker": "a", "load_batch": 0}]': "batch of at least 1",
    }
    for text, message in cases.items():
        (tmp_path / "b.json").write_text(text)
        assert run(["plan", "--brokers", str(tmp_path / "b.json")]) == 2
        assert message in capsys.readouterr().err
    assert run(["plan", "--load", "1e9"]) == 2
    assert "exceeds the 35,971 msg/s" in capsys.readouterr().err


def test_contracts_mean_what_they_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        '{"topics": [{"topic": "t", "r": true, "b": 1}]}': "r must be given as numbers",
        '{"topics": [{"topic": "t", "r": 1, "b": 1, "chages": []}]}': "unknown key 'chages'",
        '{"topics": [{"topic": "t", "r": 1, "b": 1, "changes": [{"at_ns": 1, "r": 1}]}]}': "'changes' must be a list",
        '{"topics": [{"topic": "t", "r": 0, "b": 1}]}': "r must lie between",
        '{"topics": []}': "is not a contract file",
        "[": "is not JSON",
    }
    pq.write_table(pa.table({"topic": ["t"]}), tmp_path / "t.parquet")
    for text, message in cases.items():
        (tmp_path / "c.json").write_text(text)
        assert run(["conformance", str(tmp_path / "t.parquet"), "--contract", str(tmp_path / "c.json")]) == 2
        assert message in capsys.readouterr().err


def test_a_trace_without_groups_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"topic": ["t"] * 3, "publisher": ["p", "q", "p"], "arrival_ns": pa.array([1, 2, 3], pa.int64())}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert run(["plan", str(tmp_path / "t.parquet"), "--brokers", "2", "--k", "1", "--no-fit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["k"] == 1


def test_what_brokers_lent_is_told_beside_the_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = np.arange(10, dtype=np.int64) * 10**6
    for broker, moved in (("a", {"b": [3 * 10**12, 0]}), ("b", {"a": [0, 2 * 10**12]})):
        sent = Arrivals(at, np.zeros(10, np.int32))
        about = {BROKER_KEY: broker, MOVED_KEY: json.dumps({"t": moved})}
        Recorded("t", broker, [Publisher("p", 1.0)], sent, at, at).write(tmp_path / f"{broker}.parquet", about)
    options = [str(tmp_path), "--r", "1000", "--b", "30"]
    assert run(["penalty", *options, "--json"]) == 0
    (topic,) = json.loads(capsys.readouterr().out)["topics"]
    assert {each["broker"]: each["lending"] for each in topic["brokers"]} == {
        "a": {"lent": 3, "borrowed": 0},
        "b": {"lent": 0, "borrowed": 2},
    }
    assert run(["penalty", *options]) == 0
    assert "t: a lent 3 tokens and borrowed 0; the waits above include them" in capsys.readouterr().out
    assert run(["conformance", *options]) == 0
