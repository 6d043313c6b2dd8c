"""Fig. 6: the DRL penalty of Poisson workloads, 10 msg/s per publisher in single messages, on 1 to 6 idle brokers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, listed, near, points
from srtm.lab.world import BROKERS, facts
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from srtm.lab.world import World

KS = range(1, BROKERS + 1)
_WHY = (
    "(k − 1) · b/r is 11.4 ms for b = 25. That b follows from the traffic by the paper's rule, and no cost of a broker"
    " changes access delays: 14.7 ms need a b of 32."
)
PAPER_MS = 14.7  # on six brokers


def run(world: World, point: Point, seed: int) -> list[Row]:
    """Split the publishers evenly over k brokers."""
    topic = world.topic(Population(int(point["publishers"])), seed)
    return [{**point, **facts(world.spread(topic, "lb", int(point["k"]), seed))}]


def draw(rows: Rows) -> Panel:
    """Median, 95th and 99th percentile, as in the paper."""
    count = int(rows.column("publishers")[0])
    shown = [Series.of(name, rows, "k", f"all_{name}_ms") for name in ("p50", "p95", "p99")]
    if count == 1_000:
        shown.append(Series("p99, paper", [6], [PAPER_MS], line=False))
    return Panel(f"{count:,} publishers", "brokers k", "end-to-end latency (ms)", shown, log_y=True, slo_ms=SLO_MS)


def _tails(rows: Rows) -> dict[int, float]:
    return {int(k): at.mean("all_p99_ms") for k, at in rows.along("k").items()}


def _enough(rows: Rows) -> tuple[bool, str]:
    tail = _tails(rows)[1]
    return tail <= SLO_MS, f"{tail:.2f} ms on one broker"


def _grows(rows: Rows) -> tuple[bool, str]:
    tails = _tails(rows)
    return all(before < after for before, after in pairwise(tails.values())), f"{listed(tails)} ms"


def _as_large(rows: Rows) -> tuple[bool, str]:
    tail = _tails(rows)[6]
    return near(tail, PAPER_MS), f"{tail:.1f} ms"


def _overloaded(rows: Rows) -> tuple[bool, str]:
    tail = _tails(rows)[1]
    return tail > 100 * SLO_MS, f"{tail:,.0f} ms on one broker"


def _two_help(rows: Rows) -> tuple[bool, str]:
    tails = _tails(rows)
    return tails[2] < tails[1], f"{tails[2]:.2f} instead of {tails[1]:,.0f} ms"


def _no_benefit(rows: Rows) -> tuple[bool, str]:
    tails = _tails(rows)
    return all(tail >= tails[2] for k, tail in tails.items() if k > 2), f"{listed(list(tails.values())[1:])} ms"


RESULTS = [
    Result(
        "fig6a",
        "DRL penalty, 1,000 publishers",
        "A single broker could carry the topic; every further broker makes its tail longer.",
        points(publishers=[1_000], k=KS),
        points(publishers=[1_000], k=KS),
        run,
        [
            Claim("one broker can carry 10,000 msg/s within the SLO", "k = 1 suffices", _enough, where="6.1, ¶ 1"),
            Claim("the 99th percentile increases with the number of brokers", "grows", _grows, where="6.1, ¶ 2"),
            Claim("it reaches 14.7 ms on six brokers", f"{PAPER_MS} ms", _as_large, where="6.1, ¶ 2", why=_WHY),
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
            Claim(
                "60,000 msg/s overload a broker: its tail is long",
                "k = 1 overloaded",
                _overloaded,
                where="6.1, ¶ 3",
                kind="calibration",
            ),
            Claim("on two brokers the tail is shorter", "shorter", _two_help, where="6.1, ¶ 3"),
            Claim("more than two are of no benefit", "no shorter", _no_benefit, where="6.1, ¶ 3"),
        ],
        draw,
    ),
]
