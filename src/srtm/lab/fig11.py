"""Fig. 11: Max-Min against SRTM when the 25 publishers of a group send within an interval instead of at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab.fig9 import PANELS, POLICIES, drawn, run
from srtm.lab.result import Claim, Panel, Result, Rows, falls, listed, points

if TYPE_CHECKING:
    from collections.abc import Callable

SPREADS_MS = (0, 1, 2, 4, 8, 16)
SMALL_MS = 4  # a few percent of the 100 ms between a publisher's messages, on average
TINY = (0, 2, 16)
_STEPS = {
    "99.5 %": (
        "SRTM takes as few brokers as meet the SLO. Where less burstiness saves a broker, the tail on the rest is"
        " longer: 0.42 ms on two at 2 ms, 0.53 on one at 4 ms. The two can only fall together if the SLO chooses"
        " neither."
    )
}
_ON_ONE = {
    "99 %": (
        "Max-Min is best on one broker at every spread, and that cannot fall. By the paper's rule b has nothing to"
        " spare, so a blind split over two brokers costs more than it saves: 12 ms instead of 1.5 for groups of 10."
    )
}


def draw(rows: Rows) -> Panel:
    """Mean and standard deviation of p99, k beside each point."""
    return drawn(rows, POLICIES, "spread_ms", "spread of a group of 25 (ms)")


def _helps_when_small(rows: Rows) -> tuple[bool, str]:
    small = Rows(row for row in rows if float(row["spread_ms"]) <= SMALL_MS)
    blind, aware = (small.where(policy=policy).means("p99_ms", "spread_ms") for policy in POLICIES)
    # Where Max-Min, too, is on one broker, there is nothing to mitigate.
    apart = [
        a - b for a, b, k in zip(blind, aware, small.where(policy="srtm").means("k", "spread_ms"), strict=True) if k > 1
    ]
    return bool(apart) and min(apart) > 0, f"{listed(aware)} against {listed(blind)} ms"


def _falls(policy: str, column: str, digits: str) -> Callable[[Rows], tuple[bool, str]]:
    def judge(rows: Rows) -> tuple[bool, str]:
        own = rows.where(policy=policy)
        return falls(own, column, "spread_ms"), listed(own.means(column, "spread_ms"), digits)

    return judge


def claims(process: str) -> list[Claim]:
    """The claims on a panel."""
    found = [
        Claim(
            "while the spread is a few percent of the time between messages, SRTM is faster than Max-Min",
            "helps",
            _helps_when_small,
            where="6.4.2, ¶ 2",
        )
    ]
    for policy, name in POLICIES.items():
        tail, brokers = _falls(policy, "p99_ms", ".2f"), _falls(policy, "k", ".2g")
        found += [
            Claim(
                f"tail latency falls with the spread, {name}",
                "falls",
                tail,
                where="6.4.2, ¶ 2",
                why=_STEPS if (policy, process) == ("srtm", "poisson") else "",
            ),
            Claim(
                f"so does the number of brokers, {name}",
                "falls",
                brokers,
                where="6.4.2, ¶ 2",
                why=_ON_ONE if (policy, process) == ("max_min", "poisson") else "",
            ),
        ]
    return found


RESULTS = [
    Result(
        f"fig11{panel}",
        f"Noisy correlation: Max-Min against SRTM, {process}",
        "Knowing the groups still helps while they are nearly synchronous; then bursts dissolve by themselves.",
        points(process=[process], group_size=[25], spread_ms=SPREADS_MS),
        points(process=[process], group_size=[25], spread_ms=TINY),
        run,
        claims(process),
        draw,
        weight=5,
        version=2,
    )
    for panel, process in PANELS.items()
]
