"""`python -m bench.ingest [MESSAGES …]`: what an import costs, and after how many profiles it has paid for itself."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from bench import host
from bench.measure import show
from srtm.pipeline.importing.ingest import ingest, normalise
from srtm.pipeline.profile import COLUMNS as TRACE_COLUMNS
from srtm.pipeline.profile import profile
from srtm.pipeline.session import spark_session
from srtm.pipeline.traces.stretches import row_groups_of
from srtm.units import NS_PER_S
from srtm.workload.publishers import Population, Workload
from srtm.workload.uris import footers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

SEED = 1
BEGAN_NS = 1_700_000_000 * NS_PER_S
FORMS = ("csv", "iso8601.csv", "jsonl", "parquet")
COLUMNS = {"arrival_ns": "at", "publisher": "who"}


def write_foreign(folder: Path, messages: int, seed: int, forms: Sequence[str] = FORMS) -> dict[str, Path]:
    """The same log in several forms: 1,000 publishers in bursts, in the order in which eight collectors saw them."""
    population = Population(1_000, 10.0, 10, "poisson", 25, 4_000_000)
    workload = Workload((population,), round(messages / population.total_mps * NS_PER_S), seed, BEGAN_NS)
    arrivals = workload.arrivals()
    collector = arrivals.publisher_of % 8
    order = np.argsort(collector, kind="stable")
    times = pa.array(arrivals.times_ns[order])
    names = pa.array([publisher.id for publisher in workload.publishers()]).take(pa.array(arrivals.publisher_of[order]))
    files = {form: folder / f"{messages}.{form}" for form in forms}
    digits = times.cast(pa.string())
    whole, fraction = pc.utf8_slice_codeunits(digits, 0, 10), pc.utf8_slice_codeunits(digits, 10, 19)
    decimal = pc.binary_join_element_wise(whole, fraction, ".")
    unquoted = pa.csv.WriteOptions(quoting_style="none")
    for form, path in files.items():
        if form == "parquet":
            pq.write_table(pa.table({"at": times.cast(pa.timestamp("ns")), "who": names}), path)
        elif form == "jsonl":
            lines = pc.binary_join_element_wise('{"at":', decimal, ',"who":"', names, '"}\n', "")
            path.write_bytes(lines.buffers()[2])  # the texts lie there one after the other
        else:
            at = decimal if form == "csv" else times.cast(pa.timestamp("ns")).cast(pa.string())
            pa.csv.write_csv(pa.table({"at": at, "who": names}), path, unquoted)
    return files


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def measure(spark: SparkSession, folder: Path, messages: int, seed: int, forms: Sequence[str]) -> None:
    files = write_foreign(folder, messages, seed, forms)
    rows = []
    for form, path in files.items():
        unit = "iso8601" if form.startswith("iso") else None if form == "parquet" else "s"
        out = folder / f"{messages}-{form}-imported"
        importing, done = timed(lambda: ingest([path], spark, out, mapping=COLUMNS, unit=unit, topic="t"))  # noqa: B023
        assert row_groups_of(footers_of(out), TRACE_COLUMNS, "arrival_ns") is not None
        fast, lines = min((timed(lambda: profile(out, spark)) for _ in range(3)), key=lambda run: run[0])  # noqa: B023
        slow: float | None = None
        if form == "csv":
            reader = spark.read.schema("at string, who string").option("header", True)

            def general() -> Any:
                return profile(normalise(reader.csv(str(path)), COLUMNS, "s", topic="t").rows)  # noqa: B023

            slow, again = min((timed(general) for _ in range(2)), key=lambda run: run[0])
            assert again == lines
        elif form == "parquet":
            frame = spark.read.schema("at bigint, who string").parquet(str(path))
            frame = frame.selectExpr("'t' as topic", "who as publisher", "at as arrival_ns")
            slow, again = min((timed(lambda: profile(frame)) for _ in range(2)), key=lambda run: run[0])  # noqa: B023
            assert again == lines
        rows.append(
            [
                form,
                f"{path.stat().st_size / 1e6:,.0f}",
                f"{done.bytes / 1e6:,.1f}",
                f"{importing:,.1f}",
                f"{done.read / importing / 1e3:,.0f}",
                f"{slow:,.2f}" if slow else "—",
                f"{fast:,.2f}",
                f"{importing / (slow - fast):,.1f}" if slow else "—",
            ]
        )
    show(
        f"Import of {messages:,} rows",
        ["from", "MB", "imported MB", "import s", "k rows/s", "profile as it is, s", "imported, s", "pays after"],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.ingest", description=__doc__)
    parser.add_argument("messages", nargs="*", type=float, default=[1e6, 1e7], help="rows to import (1e6 and 1e7)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--forms", default=",".join(FORMS), help=f"which: {', '.join(FORMS)} (all)")
    options = parser.parse_args()
    print(host.describe(options.seed))
    with tempfile.TemporaryDirectory() as folder, spark_session() as spark:
        small = Path(folder, "warm-up")
        small.mkdir()
        files = write_foreign(small, 10_000, options.seed, ["csv"])
        ingest([files["csv"]], spark, small / "out", mapping=COLUMNS, unit="s", topic="t")
        profile(small / "out", spark)
        for messages in options.messages:
            measure(spark, Path(folder), int(messages), options.seed, options.forms.split(","))


if __name__ == "__main__":
    main()
