"""Times of every unit and type become exact nanoseconds, or are rejected."""

from __future__ import annotations

import json
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from srtm.pipeline.importing.columns import iso
from srtm.pipeline.importing.ingest import ingest, normalise
from srtm.units import NS_PER_S
from srtm.workload.trace import ARRIVAL_SCHEMA
from tests.pipeline.importing.test_ingest import AT, OPTIONS, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMES: dict[str, list[tuple[str | None, int | str]]] = {
    "s": [
        ("1700000000.123456789", AT),
        ("1700000000", 17 * 10**17),
        (" 1.7e9 ", 17 * 10**17),
        ("1700000000.1234567894", AT),
        ("1700000000.1234567896", AT + 1),
        ("1700000000123", "arrival_ns out of range"),
        ("0", "arrival_ns out of range"),
        ("-1700000000", "arrival_ns out of range"),
        ("7258118400", "arrival_ns out of range"),
        ("1e300", "arrival_ns out of range"),
        ("9" * 60, "arrival_ns out of range"),
        ("", "missing arrival_ns"),
        (None, "missing arrival_ns"),
        ("1,700,000,000", "unparsable arrival_ns"),
        ("NaN", "unparsable arrival_ns"),
        ("inf", "unparsable arrival_ns"),
        ("0x65", "unparsable arrival_ns"),
        ("2023-11-14T22:13:20Z", "unparsable arrival_ns"),
    ],
    "ms": [("1700000000123.456789", AT), ("1700000000", "arrival_ns out of range")],
    "us": [("1700000000123456.789", AT), ("1700000000123456", AT - 789)],
    "ns": [(str(AT), AT), (f"{AT}.4", AT), ("1700000000123456", "arrival_ns out of range")],
    "iso8601": [
        ("2023-11-14T22:13:20.123456789Z", AT),
        ("2023-11-14 22:13:20,123456789", AT),
        ("2023-11-15T00:43:20.123456789+02:30", AT),
        ("2023-11-14T20:43:20.123456789-0130", AT),
        ("2023-11-14T23:13:20.12345678+01", AT - 9),
        ("2023-11-14T22:13:20.1234567z", AT - 89),
        ("2023-11-14T22:13:20.123456", AT - 789),
        ("2023-11-14T22:13:20", AT - AT % NS_PER_S),
        ("2023-11-14T22:13Z", "unparsable arrival_ns"),
        ("2023-11-14T22:13:20 CET", "unparsable arrival_ns"),
        ("2024-02-29T00:00:00.1Z", 1_709_164_800_100_000_000),
        ("2023-02-29T00:00:00Z", "unparsable arrival_ns"),
        ("2023-11-14T22:13.5Z", "unparsable arrival_ns"),
        ("2023-11-14T22:13:20.1234567891Z", "unparsable arrival_ns"),
        ("14/11/2023 22:13:20", "unparsable arrival_ns"),
        ("2023-11-14", "unparsable arrival_ns"),
        ("1700000000", "unparsable arrival_ns"),
        ("1970-01-01T00:00:01Z", "arrival_ns out of range"),
        ("9999-12-31T23:59:59.999999999Z", "arrival_ns out of range"),
    ],
}


def test_times_of_every_unit_are_exact_or_rejected(spark: SparkSession) -> None:
    found = []
    for unit, cases in TIMES.items():
        named = [(f"{unit} {text}", text) for text, _ in cases]
        frame = spark.createDataFrame(named, "publisher string, arrival_ns string")
        found.append(normalise(frame, unit=unit, topic="t"))
    rows = reduce(DataFrame.union, [one.rows for one in found]).collect()
    rejects = reduce(DataFrame.union, [one.rejects for one in found]).collect()
    got: dict[str, Any] = {row["publisher"]: row["arrival_ns"] for row in rows}
    got |= {json.loads(row["row"])["publisher"]: row["reason"] for row in rejects}
    assert got == {f"{unit} {text}": known for unit, cases in TIMES.items() for text, known in cases}
    assert len(rows) + len(rejects) == len(got)


def test_a_zone_of_the_session_changes_nothing(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        sql = "select 'p' as publisher, {} as arrival_ns"
        naive = spark.sql(sql.format("timestamp_ntz'2023-03-12 02:30:00.5'"))  # an hour that New York did not have
        aware = spark.sql(sql.format("timestamp'2023-03-12 02:30:00.5Z'"))
        text = spark.sql(sql.format("'2023-03-12 02:30:00.5'"))
        day = spark.sql(sql.format("date'2023-03-12'"))
        found = [normalise(frame, topic="t").rows.first() for frame in (naive, aware, day)]
        found.append(normalise(text, unit="iso8601", topic="t").rows.first())
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert [row and iso(row.arrival_ns) for row in found] == [
        "2023-03-12T02:30:00.500000000Z",
        "2023-03-12T02:30:00.500000000Z",
        "2023-03-12T00:00:00.000000000Z",
        "2023-03-12T02:30:00.500000000Z",
    ]


def test_types_of_parquet_say_their_unit(spark: SparkSession, tmp_path: Path) -> None:
    """Files of every type of time at once, names as text, dictionaries and numbers; none needs a unit."""
    kinds = [("ns", None), ("ns", "UTC"), ("us", None), ("us", "Asia/Kolkata"), ("ms", "Europe/Paris"), ("s", None)]
    size = {"ns": 1, "us": 1_000, "ms": 10**6, "s": 10**9}
    expected: Counter[tuple[Any, ...]] = Counter()
    for number, (unit, zone) in enumerate(kinds):
        who = [pa.array(["é", "b"]).dictionary_encode(), pa.array([7, 8]), pa.array(["x"] * 2, pa.large_string())][
            number if number < 2 else 2
        ]
        stamps = pa.array([AT // size[unit]] * 2, pa.timestamp(unit, zone))
        pq.write_table(pa.table({"who": who, "at": stamps}), tmp_path / f"{number}.parquet")
        expected.update(("t", str(name), None, AT - AT % max(size[unit], 1)) for name in who.to_pylist())
    old = pa.table({"who": ["i"], "at": pa.array([AT], pa.timestamp("ns"))})
    pq.write_table(old, tmp_path / "int96.parquet", use_deprecated_int96_timestamps=True)
    expected[("t", "i", None, AT - AT % 1_000)] += 1  # Spark reads the old type to the microsecond
    done = ingest([tmp_path], spark, tmp_path.with_suffix(".out"), **(OPTIONS | {"unit": None}))
    assert rows_of(done.out) == expected
    assert pq.read_schema(next(done.out.iterdir())).equals(ARRIVAL_SCHEMA)
    numbers = spark.createDataFrame([("p", 1700000000.125)], "publisher string, arrival_ns double")
    row = normalise(numbers, unit="s", topic="t").rows.first()
    assert row is not None
    assert row["arrival_ns"] == 1_700_000_000_125_000_000
