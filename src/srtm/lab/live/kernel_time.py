"""Section 5.2, live: a broker that stalls now and then, with arrival times from the kernel and from the read.

A stalled process later reads all waiting messages at once. `truth` are the access delays by the times at which the load
wrote the messages, which do not depend on who reads them when. The rate is a tenth of the simulated form's, so stalls
are ten times as long to let as many messages pile up. `four` are four connections with the load of all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from srtm.lab.kernel_time import MOST_MISTAKEN
from srtm.lab.live.cluster import NOISE
from srtm.lab.live.world import Stalls
from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.model import scan
from srtm.units import NS_PER_MS, percentile

if TYPE_CHECKING:
    from srtm.lab.live.world import Live

EVERY_MS = 200
STALLS_MS = (0, 10, 20, 40)
STAMPS = {"kernel": True, "user space": False}
_MANY = points(connections=["many"], stall_ms=STALLS_MS, stamps=STAMPS)
_FOUR = points(connections=["four"], stall_ms=(0, 40), stamps=["kernel"])
_NEAR_MS = 1.0


def run(world: Live, point: Point, seed: int) -> list[Row]:
    """Run one broker with one kind of stamps."""
    kernel_time = STAMPS[str(point["stamps"])]
    stalls = Stalls(float(point["stall_ms"]), EVERY_MS)
    if point["connections"] == "four":
        world = replace(world, publishers=4, rate_mps=world.publishers * world.rate_mps / 4)
    seen = world.steady(world.workload(seed), 1, kernel_time=kernel_time, stalls=stalls)
    (part,) = seen.parts.values()
    truth = scan.access_delays(seen.written_ns, part.share)
    delayed, truly = float((part.access_ns > 0).mean()), float((truth > 0).mean())
    return [
        {
            **point,
            "messages": len(part.arrival_ns),
            "access_p99_ms": percentile(part.access_ns, "0.99") / NS_PER_MS,
            "true_p99_ms": percentile(truth, "0.99") / NS_PER_MS,
            "delayed": delayed,
            "truly_delayed": truly,
            "mistaken": delayed - truly,
            "crossed": seen.crossed,
            "late_p99_ms": seen.late_p99_ms,
        }
    ]


def draw(rows: Rows) -> Panel:
    """p99 access delay by the length of stalls."""
    many = rows.where(connections="many")
    shown = [Series.of(name, many.where(stamps=name), "stall_ms", "access_p99_ms") for name in ("user space", "kernel")]
    title = f"Live: a stall every {EVERY_MS} ms"
    return Panel(title, "length of a stall (ms)", "p99 access delay (ms)", shown)


def _mistakes(rows: Rows) -> tuple[bool, str]:
    many = rows.where(connections="many")
    late, right = (many.where(stamps=stamps).means("mistaken", "stall_ms") for stamps in ("user space", "kernel"))
    ours = f"{listed([100 * share for share in late])} % of the messages"
    return late[-1] == max(late) and late[-1] > max(0.01, *right), ours


def _kernel_is_right(rows: Rows) -> tuple[bool, str]:
    own = rows.where(stamps="kernel", connections="many")
    apart = [abs(a - b) for a, b in zip(own.column("access_p99_ms"), own.column("true_p99_ms"), strict=True)]
    return max(
        apart
    ) <= _NEAR_MS, f"p99 {listed(own.means('access_p99_ms', 'stall_ms'))}, {max(apart):.2f} ms apart at most"


def _four_are_right(rows: Rows) -> tuple[bool, str]:
    shares = rows.where(stamps="kernel", connections="four").means("mistaken", "stall_ms")
    return max(shares) < MOST_MISTAKEN, f"{listed([100 * share for share in shares], '.3f')} % of the messages"


RESULTS = [
    Result(
        "kernel_time-live",
        "Kernel arrival times against late stamps, on a broker that stalls",
        "A late stamp makes the bucket delay messages that were conformant.",
        [*_MANY, *_FOUR],
        [point for point in [*_MANY, *_FOUR] if point["stall_ms"] in (0, 40)],
        run,
        [
            Claim(
                "a late stamp causes the bucket to delay conformant messages", "it does", _mistakes, where="5.2, ¶ 2"
            ),
            Claim(
                "kernel stamps are independent of scheduling (p99 within 1 ms of that by the times of writing)",
                "no effect",
                _kernel_is_right,
                where="5.2, ¶ 3",
            ),
            Claim("also of four fast connections (mistaken below 0.1 %)", "—", _four_are_right, kind="ours"),
        ],
        draw,
        version=2,
        columns={
            "connections": "connections",
            "stall_ms": "stall ms",
            "stamps": "stamps",
            "messages": "messages",
            "access_p99_ms": "p99 access ms",
            "true_p99_ms": "p99 by writing ms",
            "delayed": "delayed",
            "truly_delayed": "delayed by writing",
            "crossed": "out of order",
            **NOISE,
        },
    )
]
