"""Figs. 7a and 7c on paced brokers: LB on six brokers against Conc on as few as will do, single messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab import fig7
from srtm.lab.live.rows import AS_RECORDED, AS_SCHEDULED, COLUMNS, LOSSLESS, PAPERS, best_k, row
from srtm.lab.result import Claim, Point, Result, Row, points
from srtm.lab.world import BROKERS, PAPERS_RULE

if TYPE_CHECKING:
    from srtm.lab.live.paced import Paced

PUBLISHERS = {"a": (1_000, 4_000), "c": (4_000,)}


def run(world: Paced, point: Point, seed: int) -> list[Row]:
    """One policy."""
    topic, policy = world.topic(fig7.population(point), seed, PAPERS_RULE), str(point["policy"])
    k = BROKERS if policy == "lb" else best_k(topic, policy, seed)
    return [{**point, **row(world.split(topic, policy, k, seed), PAPERS)}]


def _claims(panel: str) -> list[Claim]:
    """Those of the simulated form; a trend takes more than one number of publishers."""
    found = fig7.claims(panel, 1)
    return found if len(PUBLISHERS[panel]) > 1 else [claim for claim in found if claim.paper != "falls"]


RESULTS = [
    Result(
        f"fig7{panel}-live",
        f"Concentration on paced brokers: LB against Conc, {process}, batch 1",
        "Conc meets the SLO on few brokers, LB pays the penalty of six.",
        points(process=[process], batch=[1], publishers=PUBLISHERS[panel], policy=fig7.POLICIES),
        points(process=[process], batch=[1], publishers=PUBLISHERS[panel], policy=fig7.POLICIES),
        run,
        [*_claims(panel), AS_RECORDED, AS_SCHEDULED, LOSSLESS],
        fig7.draw,
        columns={"publishers": "publishers", **COLUMNS},
        paced=True,
    )
    for panel, (process, _) in fig7.PANELS.items()
    if panel in PUBLISHERS
]
