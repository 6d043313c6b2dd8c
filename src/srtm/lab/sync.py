"""Section 2.1's example: a bucket cut into equal parts, with publishers that send at once, and with independent ones.

60 publishers send single messages, all at the same Poisson instants or each at its own. If every sub-token bucket gets
an equal part of the publishers, a synchronous burst is cut like the bucket, and the odds of waiting stay the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srtm.lab.result import NEAR, Claim, Panel, Point, Result, Row, Rows, Series, listed, points
from srtm.model import scan
from srtm.model.split import split
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from srtm.lab.world import World

KINDS = {"together": "synchronised publishers", "alone": "independent publishers"}
PUBLISHERS = 60  # every k in KS divides it
RATE_MPS = 20.0
KS = (1, 2, 3, 4, 5, 6)


def run(world: World, point: Point, seed: int) -> list[Row]:
    """The part of the messages that waits, for an even split over k sub-token buckets."""
    k = int(point["k"])
    size = PUBLISHERS if point["publishers_send"] == "together" else 1
    topic = world.topic(Population(PUBLISHERS, RATE_MPS, group_size=size), seed)
    times, senders = topic.arrivals
    delays = scan.split_access_delays(times, (senders % k).astype(np.int32), split(topic.bucket, [1] * k))
    return [{**point, "waiting": float((delays > 0).mean())}]


def draw(rows: Rows) -> Panel:
    """The part of the messages that waits."""
    shown = [Series.of(name, rows.where(publishers_send=kind), "k", "waiting") for kind, name in KINDS.items()]
    return Panel("60 publishers of 20 msg/s", "sub-token buckets k", "part of the messages that waits", shown)


def _odds(rows: Rows, kind: str) -> list[float]:
    found = rows.where(publishers_send=kind).means("waiting", "k")
    return [value / found[0] for value in found]


def _unchanged(rows: Rows) -> tuple[bool, str]:
    found = _odds(rows, "together")
    return abs(found[1] - 1) <= NEAR, f"{found[1]:.2f} times (independent publishers: {_odds(rows, 'alone')[1]:.1f})"


def _for_all(rows: Rows) -> tuple[bool, str]:
    found = _odds(rows, "together")
    return all(abs(odds - 1) <= NEAR for odds in found), f"{listed(found)} times"


RESULTS = [
    Result(
        "sync",
        "Synchronous bursts, cut like the bucket",
        "Whoever splits the burst with the bucket leaves the odds of waiting as they were.",
        points(publishers_send=KINDS, k=KS),
        points(publishers_send=KINDS, k=(1, 2, 6)),
        run,
        [
            Claim(
                "if synchronised publishers are split in two like the bucket, the odds of waiting hardly change",
                "≈ 1",
                _unchanged,
                where="2.1, last ¶ but one",
            ),
            Claim("nor with up to six parts", "—", _for_all, kind="ours"),
        ],
        draw,
    )
]
