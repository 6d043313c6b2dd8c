"""`srtm top`: topics and brokers, live."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from srtm.cli.cluster.tables import accusations, lending_table, table_of
from srtm.cli.common import AsJson, in_ms, new_table, print_json
from srtm.cli.remote import HERE, Controller, Token, ask


class Sort(StrEnum):
    """The column that topics are sorted by."""

    NAME = "name"
    RATE = "rate"
    WAITING = "waiting"
    P99 = "p99"
    PENALTY = "penalty"


_KEYS = {Sort.RATE: "rate", Sort.WAITING: "waiting", Sort.PENALTY: "penalty_ms"}


def top(
    controller: Controller = HERE,
    token: Token = None,
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Refresh interval")] = 1.0,
    sort: Annotated[Sort, typer.Option(metavar="COLUMN", help=f"Sort key of topics: {', '.join(Sort)}")] = Sort.NAME,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit")] = False,
    as_json: AsJson = False,
) -> None:
    """Show all topics and brokers, and refresh until Ctrl-C.

    Without a terminal, or with --json, it prints once and exits.
    """
    if as_json:
        print_json(look(controller, token, sort))
        return
    if once or not sys.stdout.isatty():
        Console(width=None if sys.stdout.isatty() else 200).print(tables(look(controller, token, sort)))
        return
    with Live(tables(look(controller, token, sort)), auto_refresh=False, screen=True) as live:
        try:
            while True:
                time.sleep(every)
                live.update(tables(look(controller, token, sort)), refresh=True)
        except KeyboardInterrupt:
            pass


def look(controller: str, token: str | None = None, sort: Sort = Sort.NAME) -> dict[str, Any]:
    """All topics and brokers."""
    seen = {**ask(controller, token, "GET", "/v1/topics"), **ask(controller, token, "GET", "/v1/brokers")}
    seen["topics"].sort(key=lambda topic: (-_weight(topic, sort), topic["topic"]))
    return seen


def _weight(topic: dict[str, Any], sort: Sort) -> float:
    if sort is Sort.NAME:
        return 0.0
    found = (topic["total_ms"] or {}).get("p99") if sort is Sort.P99 else topic[_KEYS[sort]]
    return float(found or 0.0)


def tables(seen: dict[str, Any]) -> Group:
    """Tables of topics and brokers."""
    brokers = new_table("broker", "status", "msg/s", "mcap", "rcap", "loop lag", "address")
    for broker in seen["brokers"]:
        brokers.add_row(
            broker["name"],
            broker["status"] + (", draining" if broker["draining"] else ""),
            f"{broker['rate']:,}",
            f"{broker['mcap']:,.0f}",
            f"{broker['rcap']:,.0f}",
            in_ms(broker["lag_ms"]),
            broker["address"],
        )
    lending = [lending_table(topic) for topic in seen["topics"] if topic.get("lending", {}).get("peers")]
    lies = [Text(line, style="bold red") for topic in seen["topics"] for line in accusations(topic)]
    return Group(table_of(seen["topics"]), brokers, *lending, *lies)
