"""The traffic lights: `python lights.py CONTROLLER SECONDS` follows the signals, and says how old their news was.

Beside them, the control room watches the sensors themselves.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress

import city

from srtm.client import Subscriber


async def lights(controller: str, ages: list[float], junctions: set[int]) -> None:
    """How old the newest report was when a light heard of it."""
    async with Subscriber(city.SIGNALS, "lights", controller=controller) as signals:
        async for message in signals:
            signal = json.loads(message.body)
            ages.append(time.time() - signal["newest_us"] / 1e6)
            junctions.add(signal["junction"])
            await message.finish()


async def control_room(controller: str) -> None:
    """See every report, at once."""
    async with Subscriber(city.TRAFFIC, "control-room#ephemeral", controller=controller) as reports:
        async for message in reports:
            await message.finish()


async def main(controller: str, seconds: float) -> None:
    """Listen for a while; one JSON document at the end."""
    ages: list[float] = []
    junctions: set[int] = set()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as listening:
            listening.create_task(lights(controller, ages, junctions))
            listening.create_task(control_room(controller))
    ages.sort()
    middle = ages[len(ages) // 2] if ages else None
    print(json.dumps({"signals": len(ages), "junctions": len(junctions), "p50_s": middle}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
