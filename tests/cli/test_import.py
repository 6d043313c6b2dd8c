"""`srtm trace import` as a user runs it, and what it says before it starts a Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from srtm.cli.app import run
from srtm.cli.traces.ingest import _summary
from srtm.pipeline.importing.ingest import Imported
from srtm.workload.trace import load


@pytest.mark.usefixtures("warm")
def test_a_log_of_cars_becomes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{1_700_000_000 + i}.000000001;car {i % 3}" for i in range(300)] + ["yesterday;car 1"]
    (tmp_path / "cars.log").write_text("at;car\n" + "\n".join(lines))
    options = "--from csv --delimiter ; --column arrival_ns=at --column publisher=car --unit s --topic cars --json"
    out = tmp_path / "cars.parquet"
    command = ["trace", "import", str(tmp_path / "cars.log"), *options.split(), "--out", str(out)]
    assert run(command) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert (said["rows"], said["messages"], said["topics"], said["publishers"]) == (301, 300, 1, 3)
    assert (said["first"], said["last"]) == ("2023-11-14T22:13:20.000000001Z", "2023-11-14T22:18:19.000000001Z")
    assert [line["reason"] for line in said["rejected"]] == ["unparsable arrival_ns"]
    assert "srtm: rejected 1 row:\n  unparsable arrival_ns: 1\n" in printed.err
    assert "cars.log: at = 'yesterday'" in printed.err
    (topic,) = load(out)
    assert topic.topic == "cars"
    assert topic.arrivals.times_ns[0] == 1_700_000_000_000_000_001
    assert said["bytes"] == out.stat().st_size
    assert run([*command, "--force", "--max-rejects", "0"]) == 1
    assert "srtm: 1 of 301 rows are rejected, but at most 0 may be" in capsys.readouterr().err
    assert load(out)


def test_the_line_for_people_says_when() -> None:
    done = Imported(Path("x"), 2, 1_001, 1_000, (), {}, 1, 25, 17 * 10**17, 17 * 10**17 + 1, 5_000)
    assert _summary(done, 1.23) == (
        "x: 1,000 messages from 1,001 rows in 2 files; 1 topic, 25 publishers;"
        " from 2023-11-14T22:13:20.000000000Z to 2023-11-14T22:13:20.000000001Z; 5,000 bytes, in 1.2 s"
    )


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ["--column", "publisher"],
            2,
            "invalid --column 'publisher'; write NAME=COLUMN, as in --column publisher=device",
        ),
        (["--column", "topic=a", "--column", "topic=b"], 2, "--column topic is given twice: a and b"),
        (["--unit", "s", "--unit", "ms"], 2, "invalid --unit 's'; write NAME=UNIT, as in --unit release_ns=ms"),
        (["--delimiter", ";;"], 2, "--delimiter must be one character or the word tab, not ';;'"),
        (["--out", "/nowhere/x"], 2, "folder /nowhere does not exist; create it first"),
        (["absent.csv"], 1, "absent.csv does not exist: check the name"),
    ],
)
def test_what_is_wrong_is_said_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, message: str
) -> None:
    (tmp_path / "x.csv").write_text("at,who\n")
    assert run(["trace", "import", str(tmp_path / "x.csv"), "--out", str(tmp_path / "out"), *options]) == code
    assert message in capsys.readouterr().err


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "import", "--help"]) == 0
    assert "srtm trace import 'logs/*.csv.gz' --topic cars" in capsys.readouterr().out
