"""Fig. 6a, live: publishers split evenly over 1 to 4 brokers with fixed shares, and their traces against the model.

`simulated` runs the recorded arrivals through the shares in force, by the model; it must agree with the brokers.
`scheduled` uses the times at which messages were due, which no host keeps exactly.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from srtm.lab.live.cluster import NOISE
from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.model import scan
from srtm.units import NS_PER_MS, percentile

if TYPE_CHECKING:
    from srtm.lab.live.world import Live, Observed
    from srtm.workload.publishers import Workload

NEAR = 0.15  # tolerated difference between measured and simulated tails
KS = range(1, 5)


def run(world: Live, point: Point, seed: int) -> list[Row]:
    """Run the topic on k brokers; percentiles are over all messages."""
    workload = world.workload(seed)
    seen = world.steady(workload, int(point["k"]))
    access, simulated = (
        np.concatenate(column)
        for column in zip(*((part.access_ns, part.simulated_ns()) for part in seen.parts.values()), strict=True)
    )
    total = np.concatenate([part.total_ns for part in seen.parts.values()])
    return [
        {
            **point,
            "messages": len(access),
            "access_p99_ms": percentile(access, "0.99") / NS_PER_MS,
            "simulated_p99_ms": percentile(simulated, "0.99") / NS_PER_MS,
            "scheduled_p99_ms": percentile(_scheduled(workload, seen), "0.99") / NS_PER_MS,
            "differing": int((access != simulated).sum()),
            "crossed": seen.crossed,
            "unexplained": sum(part.unexplained() for part in seen.parts.values()),
            "total_p99_ms": percentile(total, "0.99") / NS_PER_MS,
            "late_p99_ms": seen.late_p99_ms,
            "lost": seen.lost,
        }
    ]


def _scheduled(workload: Workload, seen: Observed) -> np.ndarray:
    """Access delays if every message had arrived when it was due."""
    times, senders = workload.arrivals()
    names = list(seen.parts)
    bucket_of = np.array([names.index(seen.places[publisher.id]) for publisher in workload.publishers()], np.int32)
    return scan.split_access_delays(times, bucket_of[senders], [part.share for part in seen.parts.values()])


def draw(rows: Rows) -> Panel:
    """p99 access delay by k: recorded, simulated from the recorded arrivals, and by the schedule."""
    names = {"access": "recorded", "simulated": "simulated from the recorded arrivals", "scheduled": "of the schedule"}
    shown = [Series.of(name, rows, "k", f"{column}_p99_ms") for column, name in names.items()]
    return Panel("Live: publishers in equal parts", "brokers k", "p99 access delay (ms)", shown)


def _agrees(rows: Rows) -> tuple[bool, str]:
    pairs = list(zip(rows.column("access_p99_ms"), rows.column("simulated_p99_ms"), strict=True))
    apart = [abs(measured - simulated) / simulated if simulated else measured for measured, simulated in pairs]
    return max(apart) <= NEAR, f"{max(apart):.1%} apart at most"


def _explained(rows: Rows) -> tuple[bool, str]:
    other, crossed, rest = (sum(rows.column(column)) for column in ("differing", "crossed", "unexplained"))
    ours = (
        f"{other:.0f} messages differ, {crossed:.0f} were read out of order; in the order of reading {rest:.0f} differ"
    )
    return rest == 0, ours


def _grows(rows: Rows) -> tuple[bool, str]:
    tails = rows.means("access_p99_ms", "k")
    return all(before < after for before, after in pairwise(tails)), listed(tails)


def _lossless(rows: Rows) -> tuple[bool, str]:
    lost = sum(rows.column("lost"))
    return lost == 0, f"{lost:.0f} of {sum(rows.column('messages')):,.0f}"


RESULTS = [
    Result(
        "fig6a-live",
        "DRL penalty on live brokers",
        "A bucket cut into k equal parts: recorded at the brokers, and by the model from their recordings.",
        points(k=KS),
        points(k=(1, 2)),
        run,
        [
            Claim("the model gives the recorded p99 access delay (within 15 %)", "—", _agrees, kind="ours"),
            Claim("message by message, to the nanosecond, in the order of reading", "—", _explained, kind="ours"),
            Claim(
                "the 99th percentile of the access delay increases with the number of brokers",
                "grows",
                _grows,
                where="6.1, ¶ 2",
            ),
            Claim("no message is lost", "—", _lossless, kind="ours"),
        ],
        draw,
        columns={
            "k": "k",
            "messages": "messages",
            "access_p99_ms": "p99 access ms",
            "simulated_p99_ms": "simulated",
            "scheduled_p99_ms": "of the schedule",
            "differing": "differ",
            "crossed": "out of order",
            "total_p99_ms": "p99 total ms",
            **NOISE,
        },
    )
]
