"""The city: junctions with vehicle-count sensors, and what they and the lights say to each other."""

from __future__ import annotations

import json
from typing import Any

TRAFFIC, SIGNALS = "traffic", "signals"
JUNCTIONS = 50
SENSORS = 4  # at each junction, one a road; they report together when its light changes
LANES = 10  # that a sensor counts; each is a message of its report
CHANGES_S = 0.5  # of a light, a second
CONTRACT = {"r": 1300, "b": 460}  # 1,000 messages a second on average, and what junctions burst
SLO_MS = 50.0  # of the p99, from a sensor's report at its broker to its subscribers
SIGNALS_CONTRACT = {"r": 1000, "b": 1000}


def sensors() -> list[dict[str, Any]]:
    """All sensors, as the controller wants them declared: who bursts together is in `group`."""
    return [
        {
            "id": f"junction-{junction}/sensor-{sensor}",
            "group": f"junction-{junction}",
            "rate": CHANGES_S * LANES,
            "batch": LANES,
        }
        for junction in range(JUNCTIONS)
        for sensor in range(SENSORS)
    ]


def count(junction: int, sensor: int, lane: int, vehicles: int) -> bytes:
    """What a sensor reports of a lane."""
    return json.dumps({"junction": junction, "sensor": sensor, "lane": lane, "vehicles": vehicles}).encode()
