"""Fig. 9: Max-Min against SRTM, 1,000 publishers in exactly correlated groups, batches of 10."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import facts, variants
from srtm.units import NS_PER_MS
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from srtm.lab.world import World

GROUP_SIZES = (5, 10, 15, 20, 25, 30)
TINY = (5, 15, 30)
POLICIES = {"max_min": "Max-Min", "srtm": "SRTM"}


def population(point: Point) -> Population:
    """1,000 publishers in groups, each group within `spread_ms`."""
    process: Literal["poisson", "periodic"] = "periodic" if point.get("process") == "periodic" else "poisson"
    spread_ns = int(float(point.get("spread_ms", 0)) * NS_PER_MS)
    return Population(1_000, batch=10, process=process, group_size=int(point["group_size"]), spread_ns=spread_ns)


def run(world: World, point: Point, seed: int) -> list[Row]:
    """Both policies on the same traffic."""
    return [
        {**point, **variant, **facts(world.fit(topic, policy, seed))}
        for variant, topic in variants(world, population(point), seed)
        for policy in POLICIES
    ]


def draw(rows: Rows) -> Panel:
    """Mean and standard deviation of p99, k beside each point."""
    shown = [
        Series.of(name, rows.where(policy=policy), "group_size", "p99_ms", label="k")
        for policy, name in POLICIES.items()
    ]
    title = f"{str(rows[0]['process']).capitalize()} topic"
    return Panel(title, "publishers in a correlation group", "p99 latency (ms)", shown, True, SLO_MS)


def _srtm_meets(rows: Rows) -> tuple[bool, str]:
    tails = {x: at.mean("p99_ms") for x, at in rows.where(policy="srtm").along("group_size").items()}
    missed = [f"{x:g}: {tail:.2f}" for x, tail in tails.items() if tail > SLO_MS]
    return not missed, f"missed at {', '.join(missed)} ms" if missed else f"at most {max(tails.values()):.2f} ms"


def _max_min_fails(rows: Rows) -> tuple[bool, str]:
    tail = rows.where(policy="max_min", group_size=30).mean("p99_ms")
    return tail > SLO_MS, f"{tail:.2f} ms at 30"


def _fewer_brokers(rows: Rows) -> tuple[bool, str]:
    large = Rows(row for row in rows if float(row["group_size"]) > 10)
    blind, aware = (large.where(policy=policy).means("k", "group_size") for policy in POLICIES)
    return all(
        a < b for a, b in zip(blind, aware, strict=True)
    ), f"{listed(blind, '.2g')} against {listed(aware, '.2g')}"


RESULTS = [
    Result(
        f"fig9{panel}",
        f"Correlation-awareness: Max-Min against SRTM, {process}",
        "SRTM cuts the bursts that Max-Min leaves whole.",
        points(process=[process], group_size=GROUP_SIZES),
        points(process=[process], group_size=TINY),
        run,
        [
            Claim("SRTM meets the SLO, even for groups of size 30", "all", _srtm_meets),
            Claim("Max-Min does not", "above 1 ms", _max_min_fails),
            Claim("Max-Min is forced to use fewer brokers (groups above 10)", "fewer", _fewer_brokers),
        ],
        draw,
        weight=5,
    )
    for panel, process in (("a", "poisson"), ("b", "periodic"))
]
