"""The table at the end of the demo: both placements side by side, as seen by the controller, the lights and Spark."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import city
import numpy as np
from fairness import Stretch, causes, stall

from srtm.cli.common import new_table, print_table
from srtm.units import format_ns, percentiles

if TYPE_CHECKING:
    from srtm.pipeline.report import Findings

_UNKNOWN = "—"
_NOTABLE_MS = city.SLO_MS / 5


@dataclass
class Run:
    """One policy: the controller's report, the ages of signals at the lights, Spark's findings, and its validity."""

    policy: str
    seen: dict[str, Any]
    first: Stretch
    recorded: Stretch
    ages_s: list[float] = field(default_factory=list)
    found: Findings | None = None

    def p99(self, which: str) -> str:
        """The p99 over the last ten seconds, by the controller."""
        return format_ns(self.seen[which]["p99"] * 1e6) if self.seen[which] else _UNKNOWN

    def figures(self) -> dict[str, Any]:
        """The figures of the run, for programs."""
        return {
            "policy": self.policy,
            "k": self.seen["k"],
            **{f"p99_{which}": self.seen[which] and self.seen[which]["p99"] for which in ("access_ms", "total_ms")},
            "slo_met": self.seen["slo_met"],
            "first": asdict(self.first),
            "recorded": asdict(self.recorded),
            "causes": causes(self.policy, self.seen, self.recorded),
        }


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


def _in_force(run: Run) -> str:
    return " / ".join(_percent(stretch.in_force) for stretch in (run.first, run.recorded))


def _percent(part: float | None) -> str:
    return _UNKNOWN if part is None else f"{part:.0%}"


def _first_access(run: Run) -> str:
    return _UNKNOWN if run.first.access_ms is None else format_ns(run.first.access_ms * 1e6)


_ROWS: list[tuple[str, Callable[[Run], str]]] = [
    ("brokers used", lambda run: str(run.seen["k"])),
    ("p99 access: waiting for tokens", lambda run: run.p99("access_ms")),
    ("p99 access in the seconds before recording", _first_access),
    ("p99 total: end to end through the broker", lambda run: run.p99("total_ms")),
    (f"SLO: p99 total ≤ {city.SLO_MS:g} ms", _slo),
    ("minimum of r in force: before / while recording", _in_force),
    ("host: longest stall / time lost in stalls", lambda run: f"{stall(run.recorded)} / {run.recorded.stalled:.1%}"),
    ("sensor to traffic light: p50 / p99", _ages),
    ("Spark, profile: messages recorded, rate", _profile),
    (f"Spark, groups: found ({city.JUNCTIONS} junctions)", _groups),
    ("Spark, penalty: mean wait due to the split", _penalty),
    ("Spark, conformance: contract kept", _conformance),
]


def show(runs: list[Run]) -> None:
    """Print the table, the reason for the SLO, and whether both runs are valid."""
    title = (
        f"{len(city.sensors())} sensors, one contract ({city.CONTRACT['r']}/s, {city.CONTRACT['b']}), two placements"
    )
    table = new_table("policy", *(run.policy for run in runs), title=title)
    for name, cell in _ROWS:
        table.add_row(name, *map(cell, runs))
    print_table(table)
    print(
        f"The SLO is {city.SLO_MS:g} ms because the topic is on disk, every OK waits for an fsync, and everything"
        f" shares {os.cpu_count()} cores."
    )
    for line in _fairness(runs):
        print(line)


def _fairness(runs: list[Run]) -> list[str]:
    """What made a run invalid, and whether the seconds before recording were worse."""
    lines = [cause for run in runs for cause in causes(run.policy, run.seen, run.recorded)]
    if not lines:
        lines.append(
            "Both runs are valid: all of r was in force, and stalls of the host did not decide whether the SLO was met."
        )
    for run in runs:
        first, access = run.first, run.seen["access_ms"]
        if first.access_ms is not None and access and first.access_ms > max(2 * access["p99"], _NOTABLE_MS):
            lines.append(
                f"The {first.seconds:.0f} s before recording under {run.policy} were worse: p99 access"
                f" {_first_access(run)}, with at least {_percent(first.in_force)} of r in force."
            )
        if run.seen["slo_met"] is False and not run.recorded.stalls and access and access["p99"] < _NOTABLE_MS:
            lines.append(
                f"Policy {run.policy} missed the SLO, but not because of the split: messages waited for the disk or a"
                f" broker, not for tokens (p99 access {run.p99('access_ms')})."
            )
    return lines
