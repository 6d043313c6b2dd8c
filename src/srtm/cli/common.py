"""What the verbs that run on Spark have in common: their options, and a session with a line of progress."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from srtm.errors import InputError

if TYPE_CHECKING:
    from rich.status import Status

    from srtm.pipeline.session import SparkSession


class Format(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


Trace = Annotated[Path, typer.Argument(help="A trace: a Parquet file, or a folder of them.", show_default=False)]
Master = Annotated[str | None, typer.Option(help="A Spark cluster, as in spark://host:7077 (this machine).")]
Remote = Annotated[str | None, typer.Option(help="A Spark Connect server, as in sc://host.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--spark-conf", metavar="KEY=VALUE", help="An option of Spark's, such as spark.driver.memory=4g."),
]
Form = Annotated[Format, typer.Option("--format", help="How to print the result.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same as --format json.")]


@contextmanager
def spark_for(
    trace: Path, doing: str, master: str | None, remote: str | None, options: list[str] | None = None
) -> Iterator[tuple[SparkSession, Status]]:
    """A session, and the line that says what it is doing; that of `srtm spark up` if nothing else is asked for."""
    from srtm.pipeline.session import spark_session
    from srtm.workload.trace import files_of

    given = spark_options(options)
    files_of(trace)  # what is not there need not wait for Spark
    with (
        Console(stderr=True).status("starting Spark") as status,
        spark_session(master=master, remote=remote, options=given, standing=True) as spark,
    ):
        status.update(f"{doing} {trace}")
        yield spark, status


def spark_options(given: list[str] | None) -> dict[str, str]:
    """The options of `--spark-conf`, by name."""
    options = {}
    for option in given or []:
        name, equals, value = option.partition("=")
        if not equals or not name.startswith("spark."):
            raise InputError(f"--spark-conf {option}: write it as spark.name=value, as in spark.driver.memory=4g")
        options[name] = value
    return options


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document))
