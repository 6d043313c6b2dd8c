"""Shared by verbs: options, tables, JSON; for verbs on Spark, a session with a line of progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from srtm.errors import InputError
from srtm.model.broker_models import BROKER_MODELS
from srtm.model.latency import SLO
from srtm.model.lending import TERMS, known_term
from srtm.model.placement import POLICIES, policy_named
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from rich.status import Status

    from srtm.model.timeline import Timeline
    from srtm.pipeline.session import SparkSession

SLO_P99 = f"{SLO().limit_ns / NS_PER_MS:g}ms"  # the default of every verb that takes an SLO
LENDING = f"When brokers of the topic lend each other tokens: {', '.join(TERMS)}"
WORKLOAD, SPARK, BROKERS = "Workload", "Spark", "Brokers"  # headings of --help


class Format(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


def known_policy(name: str | None) -> str | None:
    """The same name; InputError if there is no such policy."""
    return name if name is None else policy_named(name).name


def lending_term(text: str | None) -> str | None:
    """The same text; InputError if a contract cannot say that of lending."""
    return text if text is None else known_term(text)


TRACE = "Parquet file or folder of them: a path, or a URI such as s3://bucket/run"
Trace = Annotated[str, typer.Argument(metavar="TRACE", help=TRACE, show_default=False)]
Master = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Spark cluster, as in spark://host:7077",
        rich_help_panel=SPARK,
        show_default="this machine",
    ),
]
Remote = Annotated[
    str | None, typer.Option(metavar="URL", help="Spark Connect server, as in sc://host", rich_help_panel=SPARK)
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--spark-conf",
        metavar="KEY=VALUE",
        help="Spark option, as in spark.driver.memory=4g; repeatable",
        rich_help_panel=SPARK,
    ),
]
Form = Annotated[Format, typer.Option("--format", metavar="FORMAT", help="Output format: table or json")]
R = Annotated[str | None, typer.Option("--r", metavar="RATE", help="Tokens per second of every topic's contract")]
B = Annotated[str | None, typer.Option("--b", metavar="TOKENS", help="Bucket size of every topic's contract")]
Contract = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON file with (r, b) of each topic, as srtm profile --json prints it"),
]
Slo = Annotated[
    str,
    typer.Option("--slo-p99", metavar="DURATION", help="p99 end-to-end latency to hold; a bare number is in ms"),
]
PolicyName = Annotated[
    str,
    typer.Option("--policy", metavar="POLICY", help=f"Placement policy: {', '.join(POLICIES)}", callback=known_policy),
]
Lending = Annotated[str, typer.Option("--lending", metavar="RULE", help=LENDING, callback=lending_term)]
BrokerModel = Annotated[
    str,
    typer.Option(
        "--broker-model",
        metavar="MODEL",
        help=f"Broker model: {' or '.join(BROKER_MODELS)}",
        rich_help_panel=BROKERS,
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Broker model measured by srtm calibrate --out", rich_help_panel=BROKERS),
]
Mcap = Annotated[
    float | None,
    typer.Option(
        metavar="RATE",
        help="Messages per second that a broker can carry",
        rich_help_panel=BROKERS,
        show_default="from the model",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing output")]
Seed = Annotated[int, typer.Option(metavar="N", help="Random seed; the same seed gives the same result")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON")]

Publishers = Annotated[int, typer.Option(metavar="N", help="Number of publishers", rich_help_panel=WORKLOAD)]
Rate = Annotated[
    float, typer.Option(metavar="RATE", help="Mean messages per second of a publisher", rich_help_panel=WORKLOAD)
]
Batch = Annotated[
    int, typer.Option(metavar="N", help="Messages that a publisher sends at once", rich_help_panel=WORKLOAD)
]
Process = Annotated[
    str, typer.Option(metavar="PROCESS", help="Send times: poisson or periodic", rich_help_panel=WORKLOAD)
]
GroupSize = Annotated[
    int, typer.Option(metavar="N", help="Publishers that send at the same moment", rich_help_panel=WORKLOAD)
]
Jitter = Annotated[str, typer.Option(metavar="DURATION", help="Spread of a group's messages", rich_help_panel=WORKLOAD)]
Duration = Annotated[str, typer.Option(metavar="DURATION", help="Length of the traffic", rich_help_panel=WORKLOAD)]


@contextmanager
def spark_for(
    trace: str | None,
    doing: str,
    master: str | None,
    remote: str | None,
    options: list[str] | None = None,
    *,
    heavy: bool = False,
) -> Iterator[tuple[SparkSession, Status]]:
    """A Spark session and its line of progress; by default the session of `srtm spark up`.

    That server has the environment in which it was started, so it does not open traces that need credentials.
    """
    from srtm.pipeline.session import spark_session
    from srtm.workload.uris import files_of, is_remote, only_spark_opens

    given = spark_options(options)
    if trace is not None and not only_spark_opens(trace):
        files_of(trace)  # a missing file is an error before Spark starts
    standing = trace is None or not is_remote(trace)
    with (
        Console(stderr=True).status("starting Spark") as status,
        spark_session(master=master, remote=remote, options=given, standing=standing, heavy=heavy) as spark,
    ):
        status.update(escape(f"{doing} {trace or ''}"))
        yield spark, status


def contracts_from(r: str | None, b: str | None, contract: Path | None) -> dict[str, Timeline] | Timeline:
    """(r, b) of all topics, or of each topic."""
    from srtm.model.bucket import TokenBucket
    from srtm.model.timeline import Timeline
    from srtm.workload.contract import read_contracts

    if contract is not None and r is None and b is None:
        return read_contracts(contract)
    if contract is not None:
        raise InputError("--contract replaces --r and --b; give one or the other")
    if r is None or b is None:
        raise InputError("the contract of the run is missing; give --r and --b, or --contract FILE")
    return Timeline(TokenBucket.of(r, b))


def report_errors(found: Sequence[tuple[str, str | None]]) -> None:
    """Print the errors of topics; exit with 1 if there are any."""
    for topic, error in found:
        if error:
            print(f"srtm: topic {topic!r}: {plain(error)}", file=sys.stderr)
    if any(error for _, error in found):
        raise typer.Exit(1)


def many(count: int, what: str) -> str:
    """`1 broker`, `1,000 brokers`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def plain(text: str) -> str:
    """Users' text, safe for a terminal: control characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Plain(Table):
    """A table of literal text: rich would read brackets in names as markup."""

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
    """Print a table on stdout, as wide as the terminal; without a terminal, as wide as it needs."""
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def in_ms(value: float) -> str:
    """Milliseconds for a table: three significant digits, never an exponent."""
    return f"{value:.3g} ms" if abs(value) < 999.5 else f"{value:,.0f} ms"


def spark_options(given: list[str] | None) -> dict[str, str]:
    """The options of `--spark-conf`, by name."""
    options = {}
    for option in given or []:
        name, equals, value = option.partition("=")
        if not equals or not name.startswith("spark."):
            raise InputError(f"invalid --spark-conf {option!r}; write spark.name=value, as in spark.driver.memory=4g")
        options[name] = value
    return options


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document))
