"""Table 1: rounds and time that the load distribution takes; 1,000 Poisson publishers in groups, batches of 10."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from srtm.lab.fig9 import GROUP_SIZES, population
from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import facts, variants

if TYPE_CHECKING:
    from srtm.lab.world import World

PAPER_ROUNDS = {5: 1, 10: 3, 15: 9, 20: 12, 25: 14, 30: 17}
PAPER_SECONDS = {5: 64, 10: 189, 15: 558, 20: 745, 25: 871, 30: 1058}
PAPER_K = {5: 1, 10: 2, 15: 3, 20: 4, 25: 5, 30: 6}


def run(world: World, point: Point, seed: int) -> list[Row]:
    """Run SRTM's search; `iterations` lists the rounds of each iteration, as in the paper's table."""
    rows: list[Row] = []
    for variant, topic in variants(world, population(point), seed):
        found = world.fit(topic, "srtm", seed)
        steps = " ".join(str(iteration.rounds) for iteration in found.iterations if iteration.rounds)
        rows.append({**point, **variant, **facts(found), "iterations": steps})
    return rows


def draw(rows: Rows) -> Panel:
    """Time of the load distribution by group size, the paper's beside ours."""
    ours = Series.of("SRTM", rows, "group_size", "elapsed_s", label="k")
    labels = [str(PAPER_K[size]) for size in PAPER_K]
    paper = Series("paper", list(PAPER_SECONDS), list(PAPER_SECONDS.values()), labels=labels)
    return Panel("Load distribution", "publishers in a correlation group", "time (s)", [ours, paper])


def _same_order(rows: Rows) -> tuple[bool, str]:
    found = {int(size): at.mean("rounds") for size, at in rows.along("group_size").items()}
    near = all(PAPER_ROUNDS[size] / 2 <= rounds <= PAPER_ROUNDS[size] * 2 for size, rounds in found.items())
    return near, listed(found, ".3g")


def _seconds(rows: Rows) -> tuple[bool, str]:
    found = {int(size): at.mean("elapsed_s") for size, at in rows.along("group_size").items()}
    return all(s / 2 <= found[size] <= s * 2 for size, s in PAPER_SECONDS.items() if size in found), listed(
        found, ".0f"
    )


def _grows(rows: Rows) -> tuple[bool, str]:
    found = rows.means("rounds", "group_size")
    return all(before < after for before, after in pairwise(found)), listed(found, ".3g")


def _brokers(rows: Rows) -> tuple[bool, str]:
    found = {int(size): at.mean("k") for size, at in rows.along("group_size").items()}
    return all(abs(k - PAPER_K[size]) <= 1 for size, k in found.items()), listed(found, ".2g")


RESULTS = [
    Result(
        "table1",
        "Load distribution latency of SRTM",
        "Burstier topics take more brokers, more rounds and more time to be placed.",
        points(group_size=GROUP_SIZES),
        points(group_size=(5, 10, 30)),
        run,
        [
            Claim("rounds, within a factor of 2", listed(PAPER_ROUNDS, "d"), _same_order),
            Claim("seconds, within a factor of 2", listed(PAPER_SECONDS, "d"), _seconds),
            Claim("a larger group takes more rounds", "grows", _grows),
            Claim("brokers needed, within one", listed(PAPER_K, "d"), _brokers),
        ],
        draw,
        weight=4,
    )
]
