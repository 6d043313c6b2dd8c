"""b profiled on another minute than the one that is measured, as the authors did: correlated Poisson publishers.

The topic is the one of Fig. 9a, on the best of 1 to 6 brokers. In that figure b comes from the topic's own minute; here
it comes from another one, at several quantiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from srtm.lab.fast_fit import EARLIER
from srtm.lab.fig9 import population
from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import best_split, facts

if TYPE_CHECKING:
    from srtm.lab.world import World

GROUP_SIZES = (5, 15, 30)
_WHY = (
    "1 ms is 11 tokens of a b of thousands, and needed b differs by half from minute to minute. A longer profile does"
    " not help: b of 60, 150 and 600 s sufficed in 7, 8 and 8 of 12 following minutes (groups of 30). The odds of the"
    " rule are about one half by construction; only a larger b mends it, and then the rule is another one."
)
QUANTILES = {"99 %": "0.99", "99.5 %": "0.995", "99.9 %": "0.999", "100 %": "1"}


def run(world: World, point: Point, seed: int) -> list[Row]:
    """The same traffic with b of another minute; `needed` is b of its own."""
    topic = world.topic(population(point), seed)
    rows: list[Row] = []
    for name, quantile in QUANTILES.items():
        earlier = world.topic(population(point), seed + EARLIER, quantile)
        found = best_split(world, replace(topic, bucket=earlier.bucket), "srtm", seed)
        part = earlier.bucket.b / topic.bucket.b
        rows.append({**point, "quantile": name, "part": part, **facts(found)})
    return rows


def draw(rows: Rows) -> Panel:
    """In how many runs some split meets the SLO."""
    shown = [
        Series(
            f"b at {name}",
            list(along := rows.where(quantile=name).along("group_size")),
            [at.mean("meets_slo") for at in along.values()],
        )
        for name in QUANTILES
    ]
    return Panel(
        "SRTM on the best of 1 to 6 brokers, b of another minute",
        "publishers in a correlation group",
        "part of the runs within the SLO",
        shown,
    )


def _met(rows: Rows, name: str) -> list[float]:
    return rows.where(quantile=name).means("meets_slo", "group_size")


def _meets(rows: Rows) -> tuple[bool, str]:
    own = rows.where(quantile="99 %")
    met, parts = _met(rows, "99 %"), own.column("part")
    ours = f"in {listed(met, '.0%')} of the runs; b is {min(parts):.2f} to {max(parts):.2f} times what is needed"
    return min(met) == 1, ours


RESULTS = [
    Result(
        "other_minute",
        "b of another minute, correlated publishers",
        "A minute of correlated Poisson bursts says little about the next one.",
        points(group_size=GROUP_SIZES),
        points(group_size=(5, 30)),
        run,
        [
            Claim(
                "with b profiled on an earlier trace, SRTM meets the SLO",
                "all",
                _meets,
                where="6, Workload, ¶ 3",
                why=_WHY,
            ),
        ],
        draw,
        weight=3,
    )
]
