"""Time alternatives fairly: one after the other in turns, several turns, the median of each."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def interleaved(alternatives: Mapping[str, Callable[[], Any]], turns: int = 5) -> dict[str, float]:
    """Median seconds of each alternative; a first turn warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(turns + 1):
        for name, run in alternatives.items():
            began = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
