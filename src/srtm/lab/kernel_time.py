"""Section 5.2: kernel arrival times against late stamps in user space.

The model of a broker's loop is its turns: a turn reads every waiting message at w each, stamps it when it is read, and
then handles all of them at s each. Now and then the process stalls. With late stamps, the bucket mistakes messages that
waited to be read for a burst. The paper gives no numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.lab.result import Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.model import scan
from srtm.model._compiled import compiled
from srtm.model.broker_models import broker_model
from srtm.units import NS_PER_MS, percentile
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.lab.world import World

    Ints = NDArray[np.int64]

EVERY_MS = 100  # time between stalls
STALLS_MS = (0, 1, 2, 4, 8)


@compiled
def _read_times(arrivals: Ints, stall_ns: int, every_ns: int, read_ns: int, message_ns: int, out: Ints) -> None:
    now = arrivals[0]
    first = 0
    while first < len(arrivals):
        now = max(now, arrivals[first])
        now += max(0, stall_ns - now % every_ns)
        end = first
        while end < len(arrivals) and arrivals[end] <= now:
            end += 1
        for message in range(first, end):
            out[message] = now
            now += read_ns
        now += (end - first) * message_ns
        first = end


def run(world: World, point: Point, seed: int) -> list[Row]:
    """Access delays of the same messages under both kinds of stamps."""
    topic = world.topic(Population(2_000), seed)
    arrivals, model = topic.arrivals.times_ns, broker_model("paper-testbed").service
    read = np.empty_like(arrivals)
    stall_ns = int(float(point["stall_ms"]) * NS_PER_MS)
    _read_times(arrivals, stall_ns, EVERY_MS * NS_PER_MS, model.read_ns, model.message_ns, read)
    by_kernel, by_user = scan.access_delays(arrivals, topic.bucket), scan.access_delays(read, topic.bucket)
    return [
        {
            **point,
            "stamps": name,
            "access_p99_ms": percentile(delays, "0.99") / NS_PER_MS,
            "mistaken": float(((delays > 0) & (by_kernel == 0)).mean()),
            "added_ms": float((released - np.maximum(read, arrivals + by_kernel)).mean()) / NS_PER_MS,
        }
        for name, delays, released in (
            ("kernel", by_kernel, np.maximum(read, arrivals + by_kernel)),
            ("user space", by_user, read + by_user),
        )
    ]


def draw(rows: Rows) -> Panel:
    """p99 access delay by the length of stalls."""
    shown = [Series.of(name, rows.where(stamps=name), "stall_ms", "access_p99_ms") for name in ("user space", "kernel")]
    title = f"2,000 publishers, a stall every {EVERY_MS} ms"
    return Panel(title, "length of a stall (ms)", "p99 access delay (ms)", shown)


def _mistakes(rows: Rows) -> tuple[bool, str]:
    shares = rows.where(stamps="user space").means("mistaken", "stall_ms")
    return max(shares) > 0 and shares[-1] == max(
        shares
    ), f"{listed([100 * share for share in shares])} % of the messages"


def _kernel_is_right(rows: Rows) -> tuple[bool, str]:
    shares = rows.where(stamps="kernel").means("mistaken", "stall_ms")
    tails = rows.where(stamps="kernel").means("access_p99_ms", "stall_ms")
    return max(shares) == 0 and max(tails) == 0, f"p99 {max(tails):.2f} ms, whatever the stall"


RESULTS = [
    Result(
        "kernel_time",
        "Kernel arrival times against late stamps",
        "A late stamp makes the bucket delay messages that were conformant.",
        points(stall_ms=STALLS_MS),
        points(stall_ms=STALLS_MS),
        run,
        [
            Claim("a late stamp causes the bucket to delay conformant messages", "it does", _mistakes),
            Claim("kernel stamps are independent of scheduling", "no effect", _kernel_is_right),
        ],
        draw,
    )
]
