"""`srtm trace import`: traces that others recorded."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srtm.cli.common import Master, Options, Remote, print_json, spark_for
from srtm.errors import InputError

if TYPE_CHECKING:
    from srtm.pipeline.importing.ingest import Imported


class From(StrEnum):
    """What the files are."""

    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"


def import_trace(
    files: Annotated[list[str], typer.Argument(help="Files, folders or patterns such as 'logs/*.csv.gz'.")],
    out: Annotated[
        Path, typer.Option(help="The folder to write, or one file if it ends in .parquet.", show_default=False)
    ],
    form: Annotated[From | None, typer.Option("--from", help="What the files are (by their endings).")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COLUMN",
            help="Which column of the files is topic, publisher, group or arrival_ns; broker, release_ns and sent_ns"
            " make it a recorded run. Columns of these very names are found without.",
        ),
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]UNIT",
            help="What times count in: s, ms, us, ns or iso8601. Parquet's own timestamps need none.",
        ),
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Name of the topic, where no column has it.")] = None,
    publisher: Annotated[str | None, typer.Option(help="Name of the publisher, where no column has it.")] = None,
    relative: Annotated[
        bool, typer.Option("--relative", help="Times count from the start of the recording, not from 1970.")
    ] = False,
    delimiter: Annotated[str | None, typer.Option(help="What stands between columns of CSV (a comma).")] = None,
    no_header: Annotated[
        bool, typer.Option("--no-header", help="The first line of CSV is data; columns are called 1, 2, 3 …")
    ] = False,
    max_rejects: Annotated[
        str, typer.Option(help="Rows that may be left out, as in 100 or 0.5%; with more, nothing is written.")
    ] = "1%",
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Go on without files that are damaged or cut short.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the trace if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document about the import.")] = False,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
) -> None:
    """Turn CSV, JSON lines or Parquet of any origin into a trace, sorted and ready for the other verbs.

    Rows that make no trace are counted by reason and shown, never dropped in silence. Example, a log of two columns in
    seconds with a fraction, all of one topic:

        srtm trace import 'logs/*.csv.gz' --topic cars --column publisher=car --column arrival_ns=at --unit s --out cars
    """
    from srtm.pipeline.importing.foreign import find
    from srtm.pipeline.importing.ingest import ingest
    from srtm.pipeline.importing.output import check_output
    from srtm.pipeline.importing.rejects import lines

    mapping, units = _pairs(column or [], "--column", "publisher=device"), _units(unit or [])
    between = _delimiter(delimiter)
    check_output(out, force=force)
    find(files, form)  # what is not there need not wait for Spark
    began = time.perf_counter()
    with spark_for(None, "importing", master, remote, spark_conf, heavy=True) as (spark, status):
        done = ingest(
            files,
            spark,
            out,
            form=form,
            mapping=mapping,
            unit=units,
            topic=topic,
            publisher=publisher,
            relative=relative,
            delimiter=between,
            header=not no_header,
            max_rejects=max_rejects,
            skip_unreadable=skip_unreadable,
            force=force,
            tell=status.update,
        )
    seconds = time.perf_counter() - began
    for file, why in done.skipped.items():
        print(f"srtm: {file} was left out: {why}", file=sys.stderr)
    if done.rejected:
        print("\n".join([f"srtm: {done.rejects:,} rows were left out:", *lines(done.rejected)]), file=sys.stderr)
    if as_json:
        print_json(_facts(done, seconds))
    else:
        print(_summary(done, seconds))


def _pairs(given: list[str], option: str, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (equals and name and value):
            raise InputError(f"{option} {text}: write it as NAME={option[2:].upper()}, as in {option} {example}")
        if name in pairs:
            raise InputError(f"{option} {name} is given twice, as {pairs[name]} and as {value}")
        pairs[name] = value
    return pairs


def _units(given: list[str]) -> str | dict[str, str] | None:
    if len(given) <= 1 and not any("=" in text for text in given):
        return given[0] if given else None
    return _pairs(given, "--unit", "release_ns=ms")


def _delimiter(given: str | None) -> str | None:
    delimiter = {"tab": "\t", "\\t": "\t"}.get(given or "", given)
    if delimiter is not None and len(delimiter) != 1:
        raise InputError(f"--delimiter {given}: give one character, or the word tab")
    return delimiter


def _facts(done: Imported, seconds: float) -> dict[str, object]:
    from srtm.pipeline.importing.columns import iso

    return {
        "out": str(done.out),
        "files": done.files,
        "rows": done.read,
        "messages": done.written,
        "rejected": [
            {"reason": line.reason, "rows": line.rows, "examples": [example._asdict() for example in line.examples]}
            for line in done.rejected
        ],
        "skipped": {str(file): why for file, why in done.skipped.items()},
        "topics": done.topics,
        "publishers": done.publishers,
        "first_ns": done.first_ns,
        "last_ns": done.last_ns,
        "first": iso(done.first_ns),
        "last": iso(done.last_ns),
        "bytes": done.bytes,
        "seconds": round(seconds, 3),
    }


def _summary(done: Imported, seconds: float) -> str:
    from srtm.pipeline.importing.columns import iso

    return (
        f"{done.out}: {done.written:,} messages of {done.read:,} rows in {done.files:,} files;"
        f" topics {done.topics:,}, publishers {done.publishers:,};"
        f" from {iso(done.first_ns)} to {iso(done.last_ns)}; {done.bytes:,} bytes, in {seconds:.1f} s"
    )
