"""The city: junctions with vehicle-count sensors, and what they and the lights say to each other."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

TRAFFIC, SIGNALS = "traffic", "signals"
JUNCTIONS = 20
SENSORS = 2  # at each junction, one a road; they report together when its light changes
LANES = 5  # that a sensor watches
KINDS = ("car", "bus", "lorry", "bicycle", "tram")  # that it tells apart; each lane and kind is a message of its report
BATCH = LANES * len(KINDS)
CHANGES_S = 1.0  # of a light, a second
# The profile of ten minutes of these reports, 1,000 messages a second on average: 30 % of headroom, and b such that one
# in a thousand waits (`srtm profile --headroom 1.3 --quantile 0.999`; a test computes it). The 20 s that the demo plays
# need b = 362. The rest absorbs what a busy machine holds back for a moment and then sends at once.
CONTRACT = {"r": 1291, "b": 678}
SLO_MS = 50.0  # of the p99, from a sensor's report at its broker to its subscribers
SIGNALS_CONTRACT = {"r": 1000, "b": 1000}


def sensors() -> list[dict[str, Any]]:
    """All sensors, as the controller wants them declared: who bursts together is in `group`."""
    return [
        {
            "id": f"junction-{junction}/sensor-{sensor}",
            "group": f"junction-{junction}",
            "rate": CHANGES_S * BATCH,
            "batch": BATCH,
        }
        for junction in range(JUNCTIONS)
        for sensor in range(SENSORS)
    ]


def changes(junction: int, seconds: float) -> Iterator[float]:
    """When the light of a junction changes, in seconds from the beginning: the same whenever it is asked."""
    rng = random.Random(junction)
    at = 0.0
    while (at := at + rng.expovariate(CHANGES_S)) < seconds:
        yield at


def report(junction: int, sensor: int, rng: random.Random) -> list[bytes]:
    """The messages of a sensor's report: what it counted, by lane and kind."""
    return [
        json.dumps(
            {"junction": junction, "sensor": sensor, "lane": lane, "kind": kind, "vehicles": rng.randrange(5)}
        ).encode()
        for lane in range(LANES)
        for kind in KINDS
    ]
