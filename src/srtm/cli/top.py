"""`srtm top`: topics and brokers, live."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

from srtm.cli.common import AsJson, new_table, print_json
from srtm.cli.remote import HERE, Controller, ask
from srtm.cli.topic import table_of


def top(
    controller: Controller = HERE,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show every topic and broker, again and again; Ctrl-C ends it."""
    if as_json:
        print_json(look(controller))
        return
    if once or not sys.stdout.isatty():
        Console(width=None if sys.stdout.isatty() else 200).print(tables(look(controller)))
        return
    with Live(tables(look(controller)), auto_refresh=False, screen=True) as live:
        try:
            while True:
                time.sleep(every)
                live.update(tables(look(controller)), refresh=True)
        except KeyboardInterrupt:
            pass


def look(controller: str) -> dict[str, Any]:
    """What there is to be seen."""
    return {**ask(controller, None, "GET", "/v1/topics"), **ask(controller, None, "GET", "/v1/brokers")}


def tables(seen: dict[str, Any]) -> Group:
    """The same, for a terminal."""
    brokers = new_table("broker", "status", "msg/s", "mcap", "rcap", "loop lag", "address")
    for broker in seen["brokers"]:
        brokers.add_row(
            broker["name"],
            broker["status"] + (", draining" if broker["draining"] else ""),
            f"{broker['rate']:,}",
            f"{broker['mcap']:,.0f}",
            f"{broker['rcap']:,.0f}",
            f"{broker['lag_ms']:.3g} ms",
            broker["address"],
        )
    return Group(table_of(seen["topics"]), brokers)
