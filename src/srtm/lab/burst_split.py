"""Beyond the paper: b split by each broker's own burst, as everywhere in SRTM, against b in proportion to rates.

A group of 10 on three brokers is cut into 4, 3 and 3. A proportional share is slightly too small for the broker with
four of them. The shares come from one trace, and are judged in it and in another one of the same publishers.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from srtm.lab.fast_fit import EARLIER
from srtm.lab.fig9 import population
from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, points
from srtm.lab.world import WITH_MARGIN
from srtm.model import scan
from srtm.model.split import split
from srtm.units import NS_PER_MS, percentile

if TYPE_CHECKING:
    from srtm.lab.world import World

SIZES = (10, 20, 25, 30)
KS = (2, 3, 4, 5, 6)
_BY_ACCIDENT = (
    "Odd members of many equal groups go to brokers in turn, so brokers differ by an accident of the trace. And b of"
    " one minute is too small for the next by more than any split saves: 125 against 119 ms (docs/adr/0018)."
)
RULES = {"rate": "in proportion to rates", "burst": "by each broker's own burst"}


def run(world: World, point: Point, seed: int) -> list[Row]:
    """p99 access delay at the worst broker, for one placement under both rules."""
    k = int(point["k"])
    topic = world.topic(population(point), seed, WITH_MARGIN)
    placed = world.spread(topic, "srtm", k, seed)
    rates = [share.r_mtps for share in placed.shares.values()]
    shares = {"rate": split(topic.bucket, rates), "burst": list(placed.shares.values())}
    traces = {"same": topic, "another": world.topic(population(point), seed + EARLIER, WITH_MARGIN)}
    rows: list[Row] = []
    for (trace, judged), (rule, held) in product(traces.items(), shares.items()):
        times, senders = judged.arrivals
        broker_of = placed.broker_of[senders].astype(np.int32)
        delays = scan.split_access_delays(times, broker_of, held)
        tail = max(percentile(delays[broker_of == number], "0.99") for number in range(k)) / NS_PER_MS
        rows.append({**point, "trace": trace, "rule": rule, "access_p99_ms": tail})
    return rows


def draw(rows: Rows) -> Panel:
    """p99 access delay by k, for groups of 25."""
    some = rows.where(group_size=25)
    shown = [
        Series.of(f"{name}, {trace} trace", some.where(rule=rule, trace=trace), "k", "access_p99_ms")
        for trace in ("same", "another")
        for rule, name in RULES.items()
    ]
    return Panel("Groups of 25, Poisson", "brokers k", "p99 access delay at the worst broker (ms)", shown)


def _means(rows: Rows, trace: str, *, divided: bool) -> tuple[Rows, Rows, str]:
    """The rows of both rules, and their means, where k does or does not divide the group."""
    some = Rows(row for row in rows if (int(row["group_size"]) % int(row["k"]) == 0) is divided)
    by_rate, by_burst = (some.where(trace=trace, rule=rule) for rule in RULES)
    ours = f"{by_burst.mean('access_p99_ms'):.2f} instead of {by_rate.mean('access_p99_ms'):.2f} ms on average"
    return by_rate, by_burst, ours


def _own_burst_helps(rows: Rows) -> tuple[bool, str]:
    by_rate, by_burst, ours = _means(rows, "same", divided=False)
    return by_burst.mean("access_p99_ms") < by_rate.mean("access_p99_ms"), ours


def _no_harm(rows: Rows) -> tuple[bool, str]:
    by_rate, by_burst, ours = _means(rows, "same", divided=True)
    return by_burst.mean("access_p99_ms") <= by_rate.mean("access_p99_ms"), ours


def _in_another(rows: Rows) -> tuple[bool, str]:
    by_rate, by_burst, ours = _means(rows, "another", divided=False)
    return by_burst.mean("access_p99_ms") < by_rate.mean("access_p99_ms"), ours


RESULTS = [
    Result(
        "burst_split",
        "Splitting b by bursts instead of rates",
        "If k does not divide a group, brokers receive bursts of different sizes.",
        points(group_size=SIZES, k=KS),
        points(group_size=(10, 25), k=(3, 4, 5, 6)),
        run,
        [
            Claim("where k does not divide the group, shares by bursts cost less", "—", _own_burst_helps, kind="ours"),
            Claim("where it does, they cost no more", "—", _no_harm, kind="ours"),
            Claim("they also cost less in another trace", "—", _in_another, kind="ours", why=_BY_ACCIDENT),
        ],
        draw,
        version=2,
    )
]
