"""Fig. 8a on paced brokers: Conc against Max-Min on brokers whose model carries other load, single messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab import fig7, fig8
from srtm.lab.live.rows import AS_RECORDED, AS_SCHEDULED, COLUMNS, LOSSLESS, PAPERS, best_k, row
from srtm.lab.result import Point, Result, Row, points
from srtm.lab.world import INITIAL_KMPS, PAPERS_RULE
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from srtm.lab.live.paced import Paced

PUBLISHERS = (fig8.LOW, fig8.EXAMPLE)
_THIRD = 3


def run(world: Paced, point: Point, seed: int) -> list[Row]:
    """One policy; of the paper's example, also what happens at broker 3 if there are three."""
    topic, policy = world.topic(fig7.population(point), seed, PAPERS_RULE), str(point["policy"])
    k = best_k(topic, policy, seed, INITIAL_KMPS)
    seen = world.split(topic, policy, k, seed, loads_kmps=INITIAL_KMPS)
    found = {**point, **row(seen, PAPERS)}
    if point["publishers"] == fig8.EXAMPLE:
        three = seen if k == _THIRD else world.split(topic, policy, _THIRD, seed, loads_kmps=INITIAL_KMPS)
        third = three.found.by_broker["broker-3"]
        found |= {"third_ms": third.total.p99 / NS_PER_MS, "third_access_ms": third.access.p99 / NS_PER_MS}
    return [found]


_POINTS = points(process=["poisson"], batch=[1], publishers=PUBLISHERS, policy=fig8.POLICIES)
RESULTS = [
    Result(
        "fig8a-live",
        "Max-Min against Conc on loaded, paced brokers, poisson, batch 1",
        "Small topics fit on one broker; larger ones do better with equal parts than with equal loads.",
        _POINTS,
        _POINTS,
        run,
        [*fig8.claims("a"), AS_RECORDED, AS_SCHEDULED, LOSSLESS],
        fig8.draw,
        columns={"publishers": "publishers", **COLUMNS},
        paced=True,
    )
]
