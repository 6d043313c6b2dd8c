"""Beyond the paper: b split by each broker's own burst, as everywhere in SRTM, against b in proportion to rates.

A group of 10 on three brokers is cut into 4, 3 and 3. A proportional share is slightly too small for the broker with
four of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.lab.fig9 import population
from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, points
from srtm.lab.world import WITH_MARGIN
from srtm.model import scan
from srtm.model.burst import needed_b
from srtm.model.split import split
from srtm.units import NANO_PER_TOKEN, NS_PER_MS, percentile

if TYPE_CHECKING:
    from srtm.lab.world import World

SIZES = (10, 20, 25, 30)
KS = (2, 3, 4, 5, 6)
RULES = {"rate": "in proportion to rates", "burst": "by each broker's own burst"}


def run(world: World, point: Point, seed: int) -> list[Row]:
    """p99 access delay at the worst broker, for one placement under both rules."""
    k = int(point["k"])
    topic = world.topic(population(point), seed, WITH_MARGIN)
    placed = world.spread(topic, "srtm", k, seed)
    times, senders = topic.arrivals
    bucket_of = placed.broker_of[senders]
    rates = [share.r_mtps for share in placed.shares.values()]
    parts = [times[bucket_of == number] for number in range(k)]
    bursts = [needed_b(part, r_mtps, WITH_MARGIN) for part, r_mtps in zip(parts, rates, strict=True)]
    shares = {"rate": split(topic.bucket, rates), "burst": list(placed.shares.values())}
    rows: list[Row] = []
    for rule, held in shares.items():
        delays = scan.split_access_delays(times, bucket_of.astype(np.int32), held)
        tails = [percentile(delays[bucket_of == number], "0.99") / NS_PER_MS for number in range(k)]
        needed = sum(bursts) / (topic.bucket.b_ntok / NANO_PER_TOKEN)
        rows.append({**point, "rule": rule, "access_p99_ms": max(tails), "needed": needed})
    return rows


def draw(rows: Rows) -> Panel:
    """p99 access delay by k, for groups of 25."""
    some = rows.where(group_size=25)
    shown = [Series.of(name, some.where(rule=rule), "k", "access_p99_ms") for rule, name in RULES.items()]
    return Panel("Groups of 25, Poisson", "brokers k", "p99 access delay at the worst broker (ms)", shown)


def _divided(row: Row) -> bool:
    return int(row["group_size"]) % int(row["k"]) == 0


def _costs(rows: Rows) -> tuple[bool, str]:
    odd = Rows(row for row in rows if not _divided(row) and row["rule"] == "rate")
    worst = max(odd.column("access_p99_ms"))
    return worst > SLO_MS, f"{worst:.1f} ms at most, {odd.mean('access_p99_ms'):.2f} on average"


def _own_burst_helps(rows: Rows) -> tuple[bool, str]:
    odd = Rows(row for row in rows if not _divided(row))
    by_rate, by_burst = (odd.where(rule=rule).mean("access_p99_ms") for rule in RULES)
    return by_burst < by_rate, f"{by_burst:.2f} instead of {by_rate:.2f} ms on average"


def _no_harm(rows: Rows) -> tuple[bool, str]:
    even = Rows(row for row in rows if _divided(row))
    by_rate, by_burst = (even.where(rule=rule).mean("access_p99_ms") for rule in RULES)
    return by_burst <= by_rate, f"{by_burst:.2f} and {by_rate:.2f} ms on average"


RESULTS = [
    Result(
        "burst_split",
        "Splitting b by bursts instead of rates",
        "If k does not divide a group, brokers receive bursts of different sizes.",
        points(group_size=SIZES, k=KS),
        points(group_size=(10, 25), k=(3, 4, 5, 6)),
        run,
        [
            Claim("shares by rates miss the SLO where k does not divide the group", "—", _costs, kind="ours"),
            Claim("shares by each broker's own burst cost less there", "—", _own_burst_helps, kind="ours"),
            Claim("and no more where k does", "—", _no_harm, kind="ours"),
        ],
        draw,
    )
]
