"""Fig. 6: the DRL penalty of Poisson workloads, 10 msg/s per publisher in single messages, on 1 to 6 idle brokers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.lab.world import BROKERS, facts
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from srtm.lab.world import World

KS = range(1, BROKERS + 1)


def run(world: World, point: Point, seed: int) -> list[Row]:
    """Split the publishers evenly over k brokers."""
    topic = world.topic(Population(int(point["publishers"])), seed)
    return [{**point, **facts(world.spread(topic, "lb", int(point["k"]), seed))}]


def draw(rows: Rows) -> Panel:
    """Median, 95th and 99th percentile, as in the paper."""
    count = int(rows.column("publishers")[0])
    shown = [Series.of(name, rows, "k", f"all_{name}_ms") for name in ("p50", "p95", "p99")]
    if count == 1_000:
        shown.append(Series("p99, paper", [6], [14.7], line=False))
    return Panel(f"{count:,} publishers", "brokers k", "end-to-end latency (ms)", shown, log_y=True, slo_ms=SLO_MS)


def _grows(rows: Rows) -> tuple[bool, str]:
    tails = rows.means("all_p99_ms", "k")
    return all(before < after for before, after in pairwise(tails)), listed(tails)


def _order_of(rows: Rows) -> tuple[bool, str]:
    tail = rows.where(k=6).mean("all_p99_ms")
    return 14.7 / 2 <= tail <= 14.7 * 2, f"{tail:.1f} ms"


def _best_on_two(rows: Rows) -> tuple[bool, str]:
    tails = rows.means("all_p99_ms", "k")
    return tails[1] == min(tails), listed(tails)


def _rises_after(rows: Rows) -> tuple[bool, str]:
    tails = rows.means("all_p99_ms", "k")[1:]
    return all(before < after for before, after in pairwise(tails)), listed(tails)


def _overloaded(rows: Rows) -> tuple[bool, str]:
    tail = rows.where(k=1).mean("all_p99_ms")
    return tail > 100 * SLO_MS, f"{tail:,.0f} ms on one broker"


RESULTS = [
    Result(
        "fig6a",
        "DRL penalty, 1,000 publishers",
        "A single broker could carry the topic; every further broker makes its tail longer.",
        points(publishers=[1_000], k=KS),
        points(publishers=[1_000], k=KS),
        run,
        [
            Claim("the 99th percentile increases with the number of brokers", "grows", _grows),
            Claim("it reaches 14.7 ms for k = 6 (within a factor of 2)", "14.7 ms", _order_of),
        ],
        draw,
    ),
    Result(
        "fig6b",
        "DRL penalty, 6,000 publishers",
        "One broker is overloaded; two are better, more than two are not.",
        points(publishers=[6_000], k=KS),
        points(publishers=[6_000], k=KS),
        run,
        [
            Claim("a single broker is overloaded: a large tail latency", "k = 1 overloaded", _overloaded),
            Claim("splitting between two brokers reduces it: the best k is 2", "k = 2", _best_on_two),
            Claim("more brokers are of no benefit: it rises from k = 2 on", "rises", _rises_after),
        ],
        draw,
    ),
]
