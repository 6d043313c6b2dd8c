"""The table at the end of the demo: both placements side by side, as the controller, the lights and Spark saw them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import city
import numpy as np

from srtm.cli.common import new_table, print_table
from srtm.cli.latency import jitter
from srtm.units import format_ns, percentiles

if TYPE_CHECKING:
    from srtm.pipeline.report import Findings

_UNKNOWN = "—"


@dataclass
class Run:
    """One policy: what the controller saw, how old the news of the lights were, what Spark found."""

    policy: str
    seen: dict[str, Any]
    ages_s: list[float] = field(default_factory=list)
    found: Findings | None = None

    def p99(self, which: str) -> str:
        """Of the controller's last ten seconds."""
        return format_ns(self.seen[which]["p99"] * 1e6) if self.seen[which] else _UNKNOWN


def _slo(run: Run) -> str:
    return {True: "met", False: "not met"}.get(run.seen["slo_met"], _UNKNOWN)


def _ages(run: Run) -> str:
    if not run.ages_s:
        return _UNKNOWN
    ages_ns = (np.array(run.ages_s) * 1e9).astype(np.int64)
    return " / ".join(format_ns(age) for age in percentiles(ages_ns, ("0.5", "0.99")))


def _of_traffic(lines: list[Any] | None) -> Any:
    return next((line for line in lines or () if line.topic == city.TRAFFIC and not line.error), None)


def _profile(run: Run) -> str:
    line = run.found and _of_traffic(run.found.profiles)
    return f"{line.messages:,}, {line.rate_mps:,.0f}/s" if line else _UNKNOWN


def _groups(run: Run) -> str:
    line = run.found and _of_traffic(run.found.groups)
    return str(len(line.groups)) if line else _UNKNOWN


def _penalty(run: Run) -> str:
    line = run.found and _of_traffic(run.found.penalties)
    return format_ns(line.whole.penalty_ns / line.messages) if line else _UNKNOWN


def _conformance(run: Run) -> str:
    line = run.found and _of_traffic(run.found.verdicts)
    return ("yes" if line.conforms else "NO") if line else _UNKNOWN


_ROWS: list[tuple[str, Callable[[Run], str]]] = [
    ("brokers used", lambda run: str(run.seen["k"])),
    ("p99 access: waiting for tokens", lambda run: run.p99("access_ms")),
    ("p99 total: into the broker and out again", lambda run: run.p99("total_ms")),
    (f"SLO: p99 total ≤ {city.SLO_MS:g} ms", _slo),
    ("sensor to traffic light: p50 / p99", _ages),
    ("Spark, profile: messages recorded, rate", _profile),
    (f"Spark, groups: found ({city.JUNCTIONS} junctions)", _groups),
    ("Spark, penalty: mean wait due to the split", _penalty),
    ("Spark, conformance: contract kept", _conformance),
]


def show(runs: list[Run]) -> None:
    """Print it, and why the objective is what it is."""
    title = (
        f"{len(city.sensors())} sensors, one contract ({city.CONTRACT['r']}/s, {city.CONTRACT['b']}), two placements"
    )
    table = new_table("policy", *(run.policy for run in runs), title=title)
    for name, cell in _ROWS:
        table.add_row(name, *map(cell, runs))
    print_table(table)
    longest_ns, lost = jitter()
    print(
        f"Why {city.SLO_MS:g} ms: the topic is on disk, every OK waits for an fsync, and all of this shares"
        f" {os.cpu_count()} cores,\nwhich this host took away for up to {format_ns(longest_ns)} at a time just now"
        f" ({lost:.0%} of a second in all)."
    )
    for run in runs:
        access = run.seen["access_ms"]
        if run.seen["slo_met"] is False and access and access["p99"] < city.SLO_MS / 10:
            print(
                f"Under {run.policy} it was not met for another reason than the split: messages did not wait for tokens"
                f" (p99 {run.p99('access_ms')}),\nbut for this machine. On one that does less beside it, it is."
            )
