"""The city: junctions with sensors that count vehicles, and the messages between sensors and lights."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

TRAFFIC, SIGNALS = "traffic", "signals"
JUNCTIONS = 20
SENSORS = 2  # per junction, one on each road; they report together when the light changes
LANES = 5  # per sensor
KINDS = ("car", "bus", "lorry", "bicycle", "tram")  # of vehicles; a report has one message per lane and kind
BATCH = LANES * len(KINDS)
CHANGES_S = 1.0  # changes of a light per second
# The profile of ten minutes of reports, 1,000 messages per second on average: 30 % headroom, and b such that one
# message in a thousand waits (`srtm profile --headroom 1.3 --quantile 0.999`; a test computes it). The demo's 20 s need
# b = 362. The rest absorbs bursts that a busy machine holds back for a moment and then sends at once.
CONTRACT = {"r": 1291, "b": 678}
SLO_MS = 50.0  # p99 from a report's arrival at the broker to its subscribers
SIGNALS_CONTRACT = {"r": 1000, "b": 1000}


def sensors() -> list[dict[str, Any]]:
    """All sensors, as declared to the controller; the sensors of a junction burst together and share a group."""
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
    """Seconds at which the light of a junction changes; the same in every run."""
    rng = random.Random(junction)
    at = 0.0
    while (at := at + rng.expovariate(CHANGES_S)) < seconds:
        yield at


def report(junction: int, sensor: int, rng: random.Random) -> list[bytes]:
    """The messages of one report: vehicles by lane and kind."""
    return [
        json.dumps(
            {"junction": junction, "sensor": sensor, "lane": lane, "kind": kind, "vehicles": rng.randrange(5)}
        ).encode()
        for lane in range(LANES)
        for kind in KINDS
    ]
