from __future__ import annotations

import bz2
import csv
import gzip
import json
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtm.errors import InputError, PipelineError, SRTMError, TraceError
from srtm.pipeline.importing import ingest as importing
from srtm.pipeline.importing import output
from srtm.pipeline.importing.ingest import Imported, ingest, translated
from srtm.pipeline.profile import COLUMNS, profile
from srtm.pipeline.traces.stretches import row_groups_of
from srtm.units import NS_PER_S
from srtm.workload.publishers import Population, Workload
from srtm.workload.trace import ARRIVAL_SCHEMA, RECORDED_SCHEMA, ArrivalWriter, writing
from srtm.workload.uris import footers_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT = 1_700_000_000_123_456_789
OPTIONS: dict[str, Any] = {"mapping": {"arrival_ns": "at", "publisher": "who"}, "topic": "t", "unit": "s"}


def rows_of(path: Path) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in pq.read_table(path).to_pylist())


def reasons(done: Imported) -> dict[str, int]:
    return {line.reason: line.rows for line in done.rejected}


def left(folder: Path) -> list[str]:
    """What an import left behind besides its input."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".csv")


def wild_rows(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Rows of every kind, good ones mostly; values with commas, quotes and letters of all sorts; duplicates."""
    rows = []
    for _ in range(count):
        at = str(Decimal(AT + rng.randrange(10**12)).scaleb(-9))
        row = {
            "at": rng.choice([at, at, at, at, "", "soon", "-1", "1700000000123", "5"]),
            "who": rng.choice(["a", "b,c", 'd"e', "ünï 😀", "f g", "", " "]),
            "what": rng.choice(["one", "two", "three"]),
            "set": rng.choice(["", "g1", "g2"]),
        }
        rows += [row] * rng.choice([1, 1, 1, 2])
    return rows


def judge(row: dict[str, str]) -> tuple[Any, ...] | str:
    """What must become of a row, said without a word of Spark."""
    if not row["who"].strip():
        return "missing publisher"
    if not row["at"]:
        return "missing arrival_ns"
    if row["at"] == "soon":
        return "unparsable arrival_ns"
    at_ns = int(Decimal(row["at"]) * NS_PER_S)
    if not 365 * 86_400 * NS_PER_S <= at_ns < 2**62:
        return "arrival_ns out of range"
    return (row["what"], row["who"], row["set"] or None, at_ns)


def write_csv(path: Path, rows: list[dict[str, str]], names: list[str], **how: Any) -> None:
    with path.open("w", newline="", encoding=how.pop("encoding", "utf-8")) as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", **how)
        writer.writeheader()
        writer.writerows(rows)


def test_every_row_is_in_the_trace_once_or_in_the_rejects(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(1)
    parts = [wild_rows(rng, count) for count in (600, 40, 1, 300, 300)]
    logs = tmp_path / "logs [all] {x}"
    logs.mkdir()
    names = ["at", "who", "what", "set"]
    write_csv(logs / "plain.csv", parts[0], names, lineterminator="\n")
    write_csv(logs / "other order, BOM and CRLF.csv", parts[1], names[::-1], encoding="utf-8-sig")
    write_csv(logs / "x.csv", parts[2], [*names, "who else"], lineterminator="\n")
    (logs / "x.csv.gz").write_bytes(gzip.compress((logs / "x.csv").read_bytes()))
    (logs / "x.csv").write_text("at,who,what,set\n")  # a header and nothing else
    lines = "".join(json.dumps({key: value for key, value in row.items() if value}) + "\n" for row in parts[3])
    (logs / "lines.jsonl.bz2").write_bytes(bz2.compress(f"{lines}\n{{oops\n5\n".encode()))
    columns = {key: pa.array([row[key] or None for row in parts[4]], pa.string()) for key in names}
    pq.write_table(pa.table(columns), logs / "p.parquet")
    (logs / "empty.csv").touch()
    (logs / "broken.csv").write_bytes(
        b"at,who,what,set\n1700000000,a,one\n1700000000,a,one,,\n1700000000,\xff\xfe,one,\n"
    )

    verdicts = [judge(row) for part in parts for row in part]
    rejected = Counter(verdict for verdict in verdicts if isinstance(verdict, str))
    rejected.update({"malformed line": 4, "publisher is not UTF-8": 1})
    mapping = {"arrival_ns": "at", "publisher": "who", "topic": "what", "group": "set"}
    done = ingest(
        [logs],
        spark,
        tmp_path / "out",
        mapping=mapping,
        unit="s",
        max_rejects="100%",
    )
    assert reasons(done) == rejected
    assert rows_of(done.out) == Counter(verdict for verdict in verdicts if isinstance(verdict, tuple))
    assert done.read == len(verdicts) + 5 == done.written + done.rejects
    assert done.files == 8
    assert row_groups_of(footers_of(done.out), COLUMNS, "arrival_ns") is not None
    for line in done.rejected:
        assert 1 <= len(line.examples) <= min(3, line.rows)
        assert all(example.file and Path(example.file).parent == logs for example in line.examples)


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_what_comes_back_is_the_trace_that_was(spark: SparkSession, tmp_path: Path, form: str) -> None:
    """Exported in disorder, imported again: the same rows, on the fast road, and the same profile."""
    workload = Workload((Population(40, 10.0, 10, "poisson", 8),), 30 * NS_PER_S, seed=3, start_ns=AT)
    original = tmp_path / "original.parquet"
    with writing(original, ARRIVAL_SCHEMA, {}) as writer:
        rows = ArrivalWriter(writer, "t", workload.publishers())
        rows.write(workload.arrivals())
        rows.flush()
    frame = spark.read.parquet(str(original)).orderBy("publisher", "arrival_ns").repartition(3)
    foreign = tmp_path / "foreign"
    frame.write.format({"jsonl": "json"}.get(form, form)).option("header", True).save(str(foreign))
    done = ingest([foreign], spark, tmp_path / "imported", form=form, unit="ns")
    assert rows_of(done.out) == rows_of(original)
    assert (done.topics, done.publishers, done.rejects) == (1, 40, 0)
    assert row_groups_of(footers_of(done.out), COLUMNS, "arrival_ns") is not None
    if form == "csv":
        assert profile(done.out, spark) == profile(original, spark) == profile(frame)


def test_a_recorded_run_keeps_its_order_of_events(spark: SparkSession, tmp_path: Path) -> None:
    lines = [
        "1,2,3,ok",
        "1,1,,never sent",
        "2,1,3,released too early",
        "2,3,2,sent too early",
        "1,,3,x",
        "1,x,3,y",
        "1,2,x,z",
    ]
    (tmp_path / "run.csv").write_text("a,r,s,who\n" + "\n".join(lines))
    mapping = {"arrival_ns": "a", "release_ns": "r", "sent_ns": "s", "broker": "who", "publisher": "who"}
    options = {"topic": "t", "unit": {"arrival_ns": "s", "release_ns": "s", "sent_ns": "s"}, "relative": True}
    out = tmp_path / "run.parquet"
    done = ingest([tmp_path / "run.csv"], spark, out, mapping=mapping, max_rejects="9", **options)  # type: ignore[arg-type]
    assert pq.read_schema(out).equals(RECORDED_SCHEMA)
    second = NS_PER_S
    assert rows_of(out) == {
        ("t", "ok", None, second, "ok", 2 * second, 3 * second): 1,
        ("t", "never sent", None, second, "never sent", second, None): 1,
    }
    assert reasons(done) == {
        "missing release_ns": 1,
        "release_ns before arrival_ns": 1,
        "sent_ns before release_ns": 1,
        "unparsable release_ns": 1,
        "unparsable sent_ns": 1,
    }
    with pytest.raises(TraceError, match="has no column 'release_ns': map one with --column release_ns="):
        ingest([tmp_path / "run.csv"], spark, tmp_path / "o", mapping={"broker": "who"} | OPTIONS["mapping"], topic="t")


def test_too_many_rejects_stop_it_with_examples(spark: SparkSession, tmp_path: Path) -> None:
    lines = [f"17000000{i:02},p" for i in range(98)]
    (tmp_path / "x.csv").write_text("\n".join(["at,who", *lines, "1700000000123,p", "1,p"]))
    with pytest.raises(TraceError) as caught:
        ingest([tmp_path / "x.csv"], spark, tmp_path / "out", **OPTIONS)
    said = str(caught.value)
    assert "2 of 100 rows are rejected, but at most 1% may be: nothing was written" in said
    assert "arrival_ns out of range: 2" in said
    assert f"{tmp_path}/x.csv: at = '1700000000123' (in ms it would be 2023-11-14T22:13:20.123000000Z)" in said
    assert "at = '1' (if times count from the start of the recording, add --relative)" in said
    assert left(tmp_path) == []
    assert ingest([tmp_path / "x.csv"], spark, tmp_path / "out", max_rejects="2%", **OPTIONS).rejects == 2
    (tmp_path / "y.csv").write_text("at,who\n5,p\n")
    with pytest.raises(TraceError, match="no valid rows"):
        ingest([tmp_path / "y.csv"], spark, tmp_path / "o", max_rejects="100%", **OPTIONS)


BAD: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "mistyped": ("x.csv", "at,whom\n1,p\n", {}, r"x\.csv has no column 'who' for publisher. .* are 'at', 'whom'$"),
    "delimiter": ("x.csv", "at;who\n1;p\n", {}, r"'at;who'; if these are several columns, set --delimiter to ';'"),
    "unmapped": ("x.csv", "a,b\n", {"mapping": {}}, r"no column 'publisher': .*, or set one name .* with --publisher"),
    "JSON keys": ("x.jsonl", '{"At": 1, "who": 2}\n', {}, r"no column 'at' for arrival_ns. .* are 'At', 'who'"),
    "no JSON": ("x.jsonl", "at,who\n1,2\n", {}, r"none of its first 1,000 lines is a JSON object"),
    "empty": ("x.csv", "", {}, r"x\.csv: no rows"),
    "header only": ("x.csv", "at,who\n", {}, r"x\.csv: no valid rows"),
    "ending": ("x.log", "at,who\n1,p\n", {}, r"x\.log: its suffix does not tell its format: add --from csv"),
    "hidden": ("_x.csv", "at,who\n1,p\n", {}, r"starts with _"),
    "unit": ("x.csv", "at,who\n1,p\n", {"unit": None}, r"the unit of column 'at' .* --unit s, ms, us, ns"),
    "no unit": ("x.csv", "at,who\n1,p\n", {"unit": "h"}, r"unknown unit of time 'h'; known: s, ms"),
    "no column": ("x.csv", "", {"mapping": {"pub": "at"}}, r"unknown trace column 'pub'; known: topic, pub"),
    "twice": ("x.csv", "", {"mapping": {"topic": "at"}}, r"topic is given both as a column and as a name"),
    "limit": ("x.csv", "", {"max_rejects": "few"}, r"--max-rejects must be a finite number"),
    "below zero": ("x.csv", "", {"max_rejects": "-1%"}, r"must not be negative"),
    "no name": ("x.csv", "", {"topic": ""}, r"the topic name is empty"),
    "form": ("x.csv", "", {"form": "xml"}, r"unknown file format 'xml'; known: csv, jsonl, parquet"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_with_its_remedy(spark: SparkSession, tmp_path: Path, case: str) -> None:
    name, text, options, message = BAD[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(SRTMError, match=message):
        ingest([tmp_path / name], spark, tmp_path / "out", **(OPTIONS | options))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_inputs_that_are_not_there(spark: SparkSession, tmp_path: Path) -> None:
    for name, message in (("nowhere", "nowhere does not exist"), ("*.csv", "matches no file"), ("", "holds no file")):
        with pytest.raises(TraceError, match=message):
            ingest([tmp_path / name], spark, tmp_path / "out", **OPTIONS)
    nested = pa.table({"at": [[1]], "who": ["p"]})
    pq.write_table(nested, tmp_path / "n.parquet")
    with pytest.raises(TraceError, match="'at' is nested"):
        ingest([tmp_path / "n.parquet"], spark, tmp_path / "out", **OPTIONS)


def test_damaged_files_are_named_or_left_out(spark: SparkSession, tmp_path: Path) -> None:
    good = pa.table({"who": ["p"], "at": [1_700_000_000]})
    pq.write_table(good, tmp_path / "good.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"cut\.parquet is not a readable parquet file.*--skip-unreadable"):
        ingest([tmp_path], spark, tmp_path / "out", **OPTIONS)
    (tmp_path / "cut.parquet").unlink()
    rng = random.Random(1)
    text = "at,who\n" + "".join(f"1700000000,p{rng.random()}\n" for _ in range(20_000))
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(text.encode())[:-5_000])
    with pytest.raises(TraceError, match=r"cut\.csv\.gz is damaged or truncated.*or --skip-unreadable"):
        ingest([tmp_path], spark, tmp_path / "out", **OPTIONS)
    assert left(tmp_path) == ["cut.csv.gz", "good.parquet"]
    done = ingest([tmp_path], spark, tmp_path / "out", skip_unreadable=True, **OPTIONS)
    assert (done.written, done.files, [file.name for file in done.skipped]) == (1, 1, ["cut.csv.gz"])
    with pytest.raises(TraceError, match=r"none of the 1 files can be read.*cut\.csv\.gz"):
        ingest([tmp_path / "cut.csv.gz"], spark, tmp_path / "o", skip_unreadable=True, **OPTIONS)


def test_columns_without_a_header_have_numbers(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text('1700000000\t"a\tb"\n1700000000\t"a\tb"\n')
    options = OPTIONS | {"mapping": {"arrival_ns": "1", "publisher": "2"}, "header": False}
    done = ingest([tmp_path / "x.tsv"], spark, tmp_path / "out", **options)
    assert rows_of(done.out) == {("t", "a\tb", None, 17 * 10**17): 2}  # equal rows are messages too


@pytest.fixture
def one(tmp_path: Path) -> Path:
    (tmp_path / "one.csv").write_text("at,who\n1700000000,p\n")
    return tmp_path / "one.csv"


def test_what_exists_is_kept_unless_told_otherwise(spark: SparkSession, one: Path) -> None:
    out = one.with_name("out")
    ingest([one], spark, out, **OPTIONS)
    with pytest.raises(InputError, match=r"already exists: .* --force"):
        ingest([one], spark, out, **OPTIONS)
    one.write_text("at,who\n1700000000,new\n")
    ingest([one], spark, out, force=True, **OPTIONS)
    assert rows_of(out) == {("t", "new", None, 17 * 10**17): 1}
    (out / "diary.txt").touch()
    with pytest.raises(InputError, match=r"holds more than a trace \(diary\.txt\)"):
        ingest([one], spark, out, force=True, **OPTIONS)
    with pytest.raises(InputError, match="is an existing file, and --force does not"):
        ingest([one], spark, one, force=True, **OPTIONS)
    with pytest.raises(InputError, match=r"folder .* does not exist; create it first"):
        ingest([one], spark, one.with_name("no") / "out", **OPTIONS)
    assert left(one.parent) == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_end_in_the_middle_leaves_nothing(
    spark: SparkSession, one: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | OSError
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(output, "_replace", fail)
    with pytest.raises((KeyboardInterrupt, TraceError)):
        ingest([one], spark, one.with_name("out"), **OPTIONS)
    assert left(one.parent) == []


def test_what_a_repeated_task_left_is_not_in_the_result(
    spark: SparkSession, one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = output.beside

    def littered(out: Path) -> Any:
        manager = beside(out)

        class Littered:
            def __enter__(self) -> Path:
                folder = manager.__enter__()
                (folder / "tasks" / "0.parquet").write_bytes(b"PAR1 and then the worker died")
                return folder

            def __exit__(self, *error: Any) -> bool | None:
                return manager.__exit__(*error)

        return Littered()

    monkeypatch.setattr(importing, "beside", littered)
    done = ingest([one], spark, one.with_name("out"), **OPTIONS)
    assert [file.name for file in done.out.iterdir()] == ["part-00000.parquet"]
    assert left(one.parent) == ["out"]


def test_a_folder_that_may_not_be_written_to(spark: SparkSession, one: Path) -> None:
    """One that not even root may write to."""
    with pytest.raises(TraceError, match=r"cannot write /proc/out: "):
        ingest([one], spark, "/proc/out", **OPTIONS)


def test_errors_of_spark_become_one_line() -> None:
    full = "An error occurred while calling o4.getResult.\n: org.apache.spark.SparkException: Exception thrown in"
    out = Path("out")
    said = translated(f"{full}\nCaused by: java.io.IOException: No space left on device\n\tat java.base", out)
    assert isinstance(said, PipelineError)
    assert "choose another folder with TMPDIR=… or --spark-conf spark.local.dir=…" in str(said)
    said = translated('File "x.py"\nsrtm.errors.TraceError: cannot write /a/.out.1.partial/x.parquet: Read-only\n', out)
    assert str(said) == "cannot write out: Read-only"
    said = translated("[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///a%20b.csv.  SQL", out)
    assert str(said).startswith("/a b.csv is damaged or truncated")
    assert str(translated(f"{full}\nCaused by: A: one\nCaused by: B: two", out)).endswith("failed: B: two")
