"""The city: junctions with vehicle-count sensors, and what they and the lights say to each other."""

from __future__ import annotations

import json
from typing import Any

TRAFFIC, SIGNALS = "traffic", "signals"
JUNCTIONS = 20
SENSORS = 10  # at each junction; they report together when its light changes
REPORTS_S = 5.0  # of each sensor


def sensors() -> list[dict[str, Any]]:
    """All sensors, as the controller wants them declared: who bursts together is in `group`."""
    return [
        {"id": f"junction-{junction}/sensor-{sensor}", "group": f"junction-{junction}", "rate": REPORTS_S}
        for junction in range(JUNCTIONS)
        for sensor in range(SENSORS)
    ]


def count(junction: int, sensor: int, vehicles: int) -> bytes:
    """What a sensor reports."""
    return json.dumps({"junction": junction, "sensor": sensor, "vehicles": vehicles}).encode()
