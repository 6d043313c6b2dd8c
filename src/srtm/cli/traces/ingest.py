"""`srtm trace import`: traces recorded by other programs."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srtm.cli.common import AsJson, Force, Master, Options, Remote, many, print_json, spark_for
from srtm.errors import InputError

if TYPE_CHECKING:
    from srtm.pipeline.importing.ingest import Imported


class From(StrEnum):
    """Formats of files to import."""

    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"


_COLUMNS, _CSV, _REJECTS = "Columns", "CSV", "Bad input"


def import_trace(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="Files, folders or patterns such as 'logs/*.csv.gz'", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option(metavar="PATH", help="Folder to write, or a single .parquet file", show_default=False)
    ],
    form: Annotated[
        From | None,
        typer.Option(
            "--from", metavar="FORMAT", help="Input format: csv, jsonl or parquet", show_default="by file extension"
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="Column of the files that holds NAME", rich_help_panel=_COLUMNS),
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]UNIT", help="Unit of times: s, ms, us, ns or iso8601", rich_help_panel=_COLUMNS),
    ] = None,
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Topic, if no column holds it", rich_help_panel=_COLUMNS)
    ] = None,
    publisher: Annotated[
        str | None, typer.Option(metavar="ID", help="Publisher, if no column holds it", rich_help_panel=_COLUMNS)
    ] = None,
    relative: Annotated[
        bool,
        typer.Option(
            "--relative", help="Times count from the start of the recording, not from 1970", rich_help_panel=_COLUMNS
        ),
    ] = False,
    delimiter: Annotated[
        str | None,
        typer.Option(metavar="CHARACTER", help="Column separator, or tab", show_default="comma", rich_help_panel=_CSV),
    ] = None,
    no_header: Annotated[
        bool,
        typer.Option("--no-header", help="The first line is data; columns are named 1, 2, …", rich_help_panel=_CSV),
    ] = False,
    max_rejects: Annotated[
        str,
        typer.Option(metavar="LIMIT", help="Bad rows to tolerate, as in 100 or 0.5%", rich_help_panel=_REJECTS),
    ] = "1%",
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip damaged or truncated files", rich_help_panel=_REJECTS)
    ] = False,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
) -> None:
    """Convert CSV, JSON lines or Parquet into a sorted trace.

    A trace has the columns topic, publisher, group (optional) and arrival_ns; a recorded run also has broker,
    release_ns and sent_ns. --column maps columns of the files to these names, and columns that already have them need
    no mapping. --unit sets the unit of all times, or with NAME= of one column; Parquet timestamps need none.

    Bad rows are counted by reason and shown. If there are more than --max-rejects, nothing is written.

    Example: a log with two columns, times in seconds, and one topic:

        srtm trace import 'logs/*.csv.gz' --topic cars --column publisher=car --column arrival_ns=at \\
            --unit s --out cars
    """
    from srtm.pipeline.importing.foreign import find
    from srtm.pipeline.importing.ingest import ingest
    from srtm.pipeline.importing.output import check_output
    from srtm.pipeline.importing.rejects import lines

    mapping, units = _pairs(column or [], "--column", "publisher=device"), _units(unit or [])
    between = _delimiter(delimiter)
    check_output(out, force=force)
    find(files, form)  # a missing file is an error before Spark starts
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
        print(f"srtm: skipped {file}: {why}", file=sys.stderr)
    if done.rejected:
        print("\n".join([f"srtm: rejected {many(done.rejects, 'row')}:", *lines(done.rejected)]), file=sys.stderr)
    if as_json:
        print_json(_facts(done, seconds))
    else:
        print(_summary(done, seconds))


def _pairs(given: list[str], option: str, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (equals and name and value):
            raise InputError(f"invalid {option} {text!r}; write NAME={option[2:].upper()}, as in {option} {example}")
        if name in pairs:
            raise InputError(f"{option} {name} is given twice: {pairs[name]} and {value}")
        pairs[name] = value
    return pairs


def _units(given: list[str]) -> str | dict[str, str] | None:
    if len(given) <= 1 and not any("=" in text for text in given):
        return given[0] if given else None
    return _pairs(given, "--unit", "release_ns=ms")


def _delimiter(given: str | None) -> str | None:
    delimiter = {"tab": "\t", "\\t": "\t"}.get(given or "", given)
    if delimiter is not None and len(delimiter) != 1:
        raise InputError(f"--delimiter must be one character or the word tab, not {given!r}")
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
        f"{done.out}: {done.written:,} messages from {done.read:,} rows in {many(done.files, 'file')};"
        f" {many(done.topics, 'topic')}, {many(done.publishers, 'publisher')};"
        f" from {iso(done.first_ns)} to {iso(done.last_ns)}; {done.bytes:,} bytes, in {seconds:.1f} s"
    )
