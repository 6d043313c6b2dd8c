"""`srtm conformance`: whether a recorded run kept its contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from srtm.cli.common import (
    AsJson,
    B,
    Contract,
    Form,
    Format,
    Master,
    Options,
    R,
    Remote,
    Trace,
    contracts_from,
    new_table,
    print_json,
    print_table,
    report_errors,
    spark_for,
)

if TYPE_CHECKING:
    from rich.table import Table

    from srtm.pipeline.conformance import TopicConformance


def conformance(
    trace: Trace,
    r: R = None,
    b: B = None,
    contract: Contract = None,
    master: Master = None,
    remote: Remote = None,
    spark_conf: Options = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Check that a recorded run kept its contract.

    A run conforms if no window of length Δt released more than b + r·Δt messages of a topic.
    The trace must have the column release_ns. A contract that changed over time comes from --contract
    (see docs/pipeline.md). The exit code is 1 if any topic broke its contract.

    Example:
        srtm conformance run/ --r 11000 --b 6001
    """
    from srtm.pipeline.conformance import conformance as run

    contracts = contracts_from(r, b, contract)
    with spark_for(trace, "checking", master, remote, spark_conf) as (spark, _):
        lines = run(trace, contracts, spark)
    if as_json or form is Format.JSON:
        print_json({"topics": [facts(line) for line in lines]})
    else:
        print_table(_table(lines))
    report_errors([(line.topic, line.error) for line in lines])
    if not all(line.conforms for line in lines):
        raise typer.Exit(1)


def facts(line: TopicConformance) -> dict[str, object]:
    """A topic's part of the JSON document."""
    return {
        "topic": line.topic,
        "messages": line.messages,
        "conforms": line.conforms,
        "excess": float(line.excess.tokens) if line.excess else None,
        "at_ns": line.excess.at_ns if line.excess else None,
        "error": line.error,
    }


def _table(lines: list[TopicConformance]) -> Table:
    caption = "excess: messages beyond b + r·Δt in the worst window; negative if every window conformed"
    table = new_table("topic", "messages", "conforms", "excess", "worst window ends (ns)", caption=caption)
    for line in lines:
        found = (f"{float(line.excess.tokens):,.6g}", str(line.excess.at_ns)) if line.excess else ("—", "—")
        kept = "—" if line.error else "yes" if line.conforms else "NO"
        table.add_row(line.topic, f"{line.messages:,}", kept, *found)
    return table
