"""Fig. 10: as Fig. 9, with Max-Min also on as many brokers as SRTM chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab.fig9 import GROUP_SIZES, POLICIES, TINY, population
from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import facts, variants

if TYPE_CHECKING:
    from srtm.lab.world import World


def run(world: World, point: Point, seed: int) -> list[Row]:
    """Both policies, and Max-Min forced."""
    rows: list[Row] = []
    for variant, topic in variants(world, population(point), seed):
        runs = {policy: world.fit(topic, policy, seed) for policy in POLICIES}
        runs["forced"] = world.spread(topic, "max_min", runs["srtm"].k, seed)
        rows += [{**point, **variant, **facts(found), "policy": policy} for policy, found in runs.items()]
    return rows


def draw(rows: Rows) -> Panel:
    """Mean and standard deviation of p99, k beside each point."""
    names = {**POLICIES, "forced": "Max-Min, SRTM's k"}
    shown = [
        Series.of(name, rows.where(policy=policy), "group_size", "p99_ms", label="k") for policy, name in names.items()
    ]
    title = f"{str(rows[0]['process']).capitalize()} topic"
    return Panel(title, "publishers in a correlation group", "p99 latency (ms)", shown, True, SLO_MS)


def _forcing_hurts(rows: Rows) -> tuple[bool, str]:
    large = Rows(row for row in rows if float(row["group_size"]) > 10)
    own, forced = (large.where(policy=policy).means("p99_ms", "group_size") for policy in ("max_min", "forced"))
    worse = all(a < b for a, b in zip(own, forced, strict=True))
    return worse, f"{listed(own, '.1f')} become {listed(forced, '.1f')} ms"


RESULTS = [
    Result(
        f"fig10{panel}",
        f"Max-Min on SRTM's number of brokers, {process}",
        "More brokers make a blind assignment worse.",
        points(process=[process], group_size=GROUP_SIZES),
        points(process=[process], group_size=TINY),
        run,
        [Claim("on as many brokers as SRTM, Max-Min is even worse (groups above 10)", "worse", _forcing_hurts)],
        draw,
        weight=6,
    )
    for panel, process in (("a", "poisson"), ("b", "periodic"))
]
