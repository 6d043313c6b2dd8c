"""Section 5.2: kernel arrival times against late stamps in user space.

The model of a broker's loop is its turns: a turn reads every waiting message at w each, stamps it when it is read, and
then handles all of them at s each. Now and then the process stalls. With late stamps, the bucket mistakes messages that
waited to be read for a burst. The paper gives no numbers.

A read has one stamp, of its last segment: `one a read`. Of many connections, few have more than a message in a stall;
four fast ones have dozens each. SRTM's broker reads in steps after a stall (docs/adr/0011-arrival-times.md). In the
model, the kernel keeps the first segment of a stall, and merges all others by seventeens, the most that Linux does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.lab.result import SLO_MS, Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.model import scan
from srtm.model._compiled import compiled
from srtm.model.broker_models import broker_model
from srtm.units import NS_PER_MS, percentile
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.lab.world import World
    from srtm.workload.publishers import Arrivals

    Ints = NDArray[np.int64]

EVERY_MS = 100  # time between stalls
STALLS_MS = (0, 1, 2, 4, 8)
LONG_MS = (0, 10, 20, 40)
POPULATIONS = {"many": Population(2_000), "four": Population(4, 500.0)}
MOST_MISTAKEN = 0.001
_MERGED = 17  # segments that become one, at most
_LATE_NS = 2 * NS_PER_MS  # a turn after which messages are read in steps


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
    """Access delays of the same messages under each kind of stamps."""
    topic = world.topic(POPULATIONS[str(point["connections"])], seed)
    arrivals, model = topic.arrivals.times_ns, broker_model("paper-testbed").service
    read = np.empty_like(arrivals)
    stall_ns = int(float(point["stall_ms"]) * NS_PER_MS)
    _read_times(arrivals, stall_ns, EVERY_MS * NS_PER_MS, model.read_ns, model.message_ns, read)
    deserved = scan.access_delays(arrivals, topic.bucket)
    lumped, stepped = _stamped(topic.arrivals, read, model.read_ns)
    stamps = {"user space": read, "one a read": lumped, "kernel": stepped}
    rows: list[Row] = []
    for name, stamped in stamps.items():
        order = np.argsort(stamped, kind="stable")
        delays = np.empty_like(stamped)
        delays[order] = scan.access_delays(stamped[order], topic.bucket)
        late = np.maximum(read, stamped + delays) - np.maximum(read, arrivals + deserved)
        rows.append(
            {
                **point,
                "stamps": name,
                "access_p99_ms": percentile(delays, "0.99") / NS_PER_MS,
                "deserved_p99_ms": percentile(deserved, "0.99") / NS_PER_MS,
                "mistaken": float(((delays > 0) & (deserved == 0)).mean()),
                "excused": float(((delays == 0) & (deserved > 0)).mean()),
                "added_ms": float(late.mean()) / NS_PER_MS,
            }
        )
    return rows


def _stamped(traffic: Arrivals, read: Ints, read_ns: int) -> tuple[Ints, Ints]:
    """The stamps of messages with one stamp a read, and with steps after a stall."""
    arrivals, publishers = traffic
    lumped, stepped = arrivals.copy(), arrivals.copy()
    turn = np.cumsum(np.r_[0, np.diff(read) != read_ns])
    order = np.lexsort((publishers, turn))  # stable: a publisher's messages of a turn, in their order
    begins = np.flatnonzero(np.r_[True, (np.diff(turn[order]) != 0) | (np.diff(publishers[order]) != 0)])
    ends = np.r_[begins[1:], len(order)]
    turn_begins = np.flatnonzero(np.r_[True, np.diff(turn) != 0])
    several = ends - begins > 1
    for first, end in zip(begins[several], ends[several], strict=True):
        together = order[first:end]
        lumped[together] = stepped[together] = arrivals[together[-1]]
        if read[turn_begins[turn[together[0]]]] - arrivals[together[0]] < _LATE_NS:
            continue
        before_ns = stepped[together[0]] = arrivals[together[0]]
        for at in range(1, len(together), _MERGED):
            merged = together[at : at + _MERGED]
            last_ns = arrivals[merged[-1]]
            stepped[merged] = last_ns - (last_ns - before_ns) // len(merged) * np.arange(len(merged))[::-1]
            before_ns = last_ns
    return lumped, stepped


def draw(rows: Rows) -> Panel:
    """p99 access delay by the length of stalls."""
    many = rows.where(connections="many")
    shown = [Series.of(name, many.where(stamps=name), "stall_ms", "access_p99_ms") for name in ("user space", "kernel")]
    title = f"2,000 publishers, a stall every {EVERY_MS} ms"
    return Panel(title, "length of a stall (ms)", "p99 access delay (ms)", shown)


def _mistakes(rows: Rows) -> tuple[bool, str]:
    shares = rows.where(stamps="user space", connections="many").means("mistaken", "stall_ms")
    return max(shares) > 0 and shares[-1] == max(
        shares
    ), f"{listed([100 * share for share in shares])} % of the messages"


def _kernel_is_right(rows: Rows) -> tuple[bool, str]:
    kernel = rows.where(stamps="kernel", connections="many")
    tails, deserved = (kernel.means(column, "stall_ms") for column in ("access_p99_ms", "deserved_p99_ms"))
    apart = max(abs(ours - right) for ours, right in zip(tails, deserved, strict=True))
    return (
        apart <= SLO_MS / 100,
        f"{1e3 * apart:.1f} µs from what messages deserve, {max(kernel.column('mistaken')):.1e} delayed",
    )


def _four_are_right(rows: Rows) -> tuple[bool, str]:
    four = rows.where(connections="four")
    shares, lumped = (four.where(stamps=name).means("mistaken", "stall_ms") for name in ("kernel", "one a read"))
    mistaken, instead = (listed([100 * share for share in each], ".3f") for each in (shares, lumped))
    return max(shares) < MOST_MISTAKEN, f"{mistaken} %; with one stamp a read {instead} %"


RESULTS = [
    Result(
        "kernel_time",
        "Kernel arrival times against late stamps",
        "A late stamp makes the bucket delay messages that were conformant.",
        points(connections=["many"], stall_ms=STALLS_MS) + points(connections=["four"], stall_ms=LONG_MS),
        points(connections=["many"], stall_ms=STALLS_MS) + points(connections=["four"], stall_ms=(0, 40)),
        run,
        [
            Claim("a late stamp makes the bucket delay conformant messages", "it does", _mistakes, where="5.2, ¶ 2"),
            Claim(
                "with kernel stamps, delays are right whatever the stall (p99 within 1 % of the SLO)",
                "high accuracy",
                _kernel_is_right,
                where="5.2, ¶ 3",
            ),
            Claim("also for four fast connections (below 0.1 % delayed by mistake)", "—", _four_are_right, kind="ours"),
        ],
        draw,
        version=3,
    )
]
