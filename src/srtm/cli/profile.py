"""`srtm profile`: what the topics of a trace need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from srtm.cli.common import AsJson, Form, Format, Master, Options, Remote, Trace, print_json, spark_for

if TYPE_CHECKING:
    from srtm.pipeline.profile import TopicProfile


def profile(
    trace: Trace,
    headroom: Annotated[str, typer.Option(help="r is this times the mean rate.")] = "1.1",
    quantile: Annotated[str, typer.Option(help="Share of the messages that must not wait for tokens.")] = "0.99",
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Say what each topic of a trace sent, and the token bucket (r, b) that it needs.

    r is the mean rate with some headroom; b is the smallest bucket for which the given share of the messages does not
    wait. Example:

        srtm profile trace.parquet --quantile 0.995
    """
    from srtm.pipeline.profile import profile as run

    with spark_for(trace, "profiling", master, remote, spark_conf) as (spark, _):
        lines = run(trace, spark, headroom=headroom, quantile=quantile)
    if as_json or form is Format.JSON:
        print_json({"topics": [_facts(line) for line in lines]})
    else:
        Console().print(_table(lines))
    for line in lines:
        if line.error:
            print(f"srtm: topic {line.topic!r}: {line.error}", file=sys.stderr)
    if any(line.error for line in lines):
        raise typer.Exit(1)


def _facts(line: TopicProfile) -> dict[str, object]:
    return {
        "topic": line.topic,
        "messages": line.messages,
        "publishers": line.publishers,
        "rate": line.rate_mps,
        "r": line.bucket.r if line.bucket else None,
        "b": line.bucket.b if line.bucket else None,
        "error": line.error,
    }


def _table(lines: list[TopicProfile]) -> Table:
    table = Table()
    table.add_column("topic")
    for name in ("messages", "publishers", "rate (msg/s)", "r (tokens/s)", "b (tokens)"):
        table.add_column(name, justify="right")
    for line in lines:
        sizes = (f"{line.bucket.r:,g}", f"{line.bucket.b:,g}") if line.bucket else ("—", "—")
        table.add_row(line.topic, f"{line.messages:,}", f"{line.publishers:,}", f"{line.rate_mps:,.6g}", *sizes)
    return table
