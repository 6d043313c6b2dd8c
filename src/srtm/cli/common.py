"""What verbs have in common: flags from options; for those on Spark, a session with a line of progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from srtm.errors import InputError

if TYPE_CHECKING:
    from rich.status import Status

    from srtm.model.timeline import Timeline
    from srtm.pipeline.session import SparkSession

T = TypeVar("T")
STOPPED = 130  # the exit code that stands for Ctrl-C


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
R = Annotated[str | None, typer.Option("--r", help="Tokens a second of every topic's contract.")]
B = Annotated[str | None, typer.Option("--b", help="Tokens of its full bucket.")]
Contract = Annotated[
    Path | None, typer.Option(help="Instead: a JSON file with (r, b) of each topic, as srtm profile --json writes it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@contextmanager
def spark_for(
    trace: Path | None,
    doing: str,
    master: str | None,
    remote: str | None,
    options: list[str] | None = None,
    *,
    heavy: bool = False,
) -> Iterator[tuple[SparkSession, Status]]:
    """A session, and the line that says what it is doing; that of `srtm spark up` if nothing else is asked for."""
    from srtm.pipeline.session import spark_session
    from srtm.workload.trace import files_of

    given = spark_options(options)
    if trace is not None:
        files_of(trace)  # what is not there need not wait for Spark
    with (
        Console(stderr=True).status("starting Spark") as status,
        spark_session(master=master, remote=remote, options=given, standing=True, heavy=heavy) as spark,
    ):
        status.update(escape(f"{doing} {trace or ''}"))
        yield spark, status


def contracts_from(r: str | None, b: str | None, contract: Path | None) -> dict[str, Timeline] | Timeline:
    """(r, b) of all topics, or of each."""
    from srtm.model.bucket import TokenBucket
    from srtm.model.timeline import Timeline
    from srtm.workload.contract import read_contracts

    if contract is not None and r is None and b is None:
        return read_contracts(contract)
    if contract is not None:
        raise InputError("give --r and --b, or --contract, not both")
    if r is None or b is None:
        raise InputError("say which contract the run had: --r and --b, or --contract with a file")
    return Timeline(TokenBucket.of(r, b))


def report_errors(found: Sequence[tuple[str, str | None]]) -> None:
    """Say what was wrong with topics, and end with 1 if anything was."""
    for topic, error in found:
        if error:
            print(f"srtm: topic {topic!r}: {plain(error)}", file=sys.stderr)
    if any(error for _, error in found):
        raise typer.Exit(1)


def many(count: int, what: str) -> str:
    """`1 broker`, `1,000 brokers`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def plain(text: str) -> str:
    """Text from users for a terminal: what could move a cursor or turn a line around is shown as what it is."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Plain(Table):
    """A table of texts that are what they are: names may hold brackets, which rich would take for its own."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


def new_table(*columns: str, title: str | None = None, caption: str | None = None) -> Table:
    """A table whose first column is names and whose others are numbers."""
    table = _Plain(title=Text(plain(title)) if title else None, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption_justify = "left"
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def print_table(table: Table) -> None:
    """A table on stdout: as wide as the terminal, or as it wants to be where there is none."""
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def check_logs(form: str, level: str) -> None:
    """Refuse what no log can be, by the flag that says it."""
    from srtm.program import LOG_FORMATS, LOG_LEVELS

    for flag, value, known in (("--log-format", form, LOG_FORMATS), ("--log-level", level, LOG_LEVELS)):
        if value not in known:
            raise InputError(f"{flag} is {' or '.join(known)}, not {value!r}", value=value)


def in_ms(value: float) -> str:
    """Milliseconds for a table: three digits that count, and never an exponent of ten."""
    return f"{value:.3g} ms" if abs(value) < 999.5 else f"{value:,.0f} ms"


def spark_options(given: list[str] | None) -> dict[str, str]:
    """The options of `--spark-conf`, by name."""
    options = {}
    for option in given or []:
        name, equals, value = option.partition("=")
        if not equals or not name.startswith("spark."):
            raise InputError(f"--spark-conf {option}: write it as spark.name=value, as in spark.driver.memory=4g")
        options[name] = value
    return options


def flags_of(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command of a function of options: a flag for every field with a help text, of a plain type."""

    def command(run: Callable[[T], None]) -> Callable[..., None]:
        @wraps(run)
        def wrapped(**given: Any) -> None:
            run(options(**given))

        flagged = [each for each in fields(options) if "help" in each.metadata]  # type: ignore[arg-type]
        kinds = get_type_hints(SimpleNamespace(__annotations__={each.name: each.type for each in flagged}))
        parameters = [
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=Annotated[kinds[each.name], typer.Option(**each.metadata)],
            )
            for each in flagged
        ]
        wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapped

    return command


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document))
