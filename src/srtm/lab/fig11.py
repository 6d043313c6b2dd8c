"""Fig. 11: Max-Min against SRTM when the 25 publishers of a group send within an interval instead of at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab.fig9 import POLICIES, run
from srtm.lab.result import SLO_MS, Claim, Panel, Result, Rows, Series, falls, listed, points

if TYPE_CHECKING:
    from collections.abc import Callable

SPREADS_MS = (0, 1, 2, 4, 8, 16)
SMALL_MS = 4  # a few percent of the 100 ms between a publisher's messages, on average
TINY = (0, 2, 16)


def draw(rows: Rows) -> Panel:
    """Mean and standard deviation of p99, k beside each point."""
    shown = [
        Series.of(name, rows.where(policy=policy), "spread_ms", "p99_ms", label="k")
        for policy, name in POLICIES.items()
    ]
    title = f"{str(rows[0]['process']).capitalize()} topic, groups of 25"
    return Panel(title, "spread of a group (ms)", "p99 latency (ms)", shown, True, SLO_MS)


def _helps_when_small(rows: Rows) -> tuple[bool, str]:
    small = Rows(row for row in rows if float(row["spread_ms"]) <= SMALL_MS)
    blind, aware = (small.where(policy=policy).means("p99_ms", "spread_ms") for policy in POLICIES)
    return all(a >= b for a, b in zip(blind, aware, strict=True)), f"{listed(aware)} against {listed(blind)} ms"


def _falls(column: str, digits: str) -> Callable[[Rows], tuple[bool, str]]:
    def judge(rows: Rows) -> tuple[bool, str]:
        found = [rows.where(policy=policy).means(column, "spread_ms") for policy in POLICIES]
        holds = all(falls(rows.where(policy=policy), column, "spread_ms") for policy in POLICIES)
        ours = "; ".join(
            f"{name} {listed(values, digits)}" for name, values in zip(POLICIES.values(), found, strict=True)
        )
        return holds, ours

    return judge


RESULTS = [
    Result(
        f"fig11{panel}",
        f"Noisy correlation: Max-Min against SRTM, {process}",
        "Knowing the groups still helps while they are nearly synchronous; then bursts dissolve by themselves.",
        points(process=[process], group_size=[25], spread_ms=SPREADS_MS),
        points(process=[process], group_size=[25], spread_ms=TINY),
        run,
        [
            Claim("at small spreads SRTM is no worse than Max-Min (up to 4 ms)", "helps", _helps_when_small),
            Claim("tail latency decreases with the spread, for both", "falls", _falls("p99_ms", ".2f")),
            Claim("so does the number of brokers, for both", "falls", _falls("k", ".2g")),
        ],
        draw,
        weight=5,
    )
    for panel, process in (("a", "poisson"), ("b", "periodic"))
]
