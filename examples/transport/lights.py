"""The traffic lights: `python lights.py CONTROLLER` follows the signals until SIGTERM, and prints their ages.

A control room also watches the sensors directly. The output is lines of JSON: the first report that the control room
received, and at the end, for every signal, the time of its newest report and its age in seconds at the light.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress

import city

from srtm.client import Subscriber
from srtm.program import stop_signal


async def lights(controller: str, heard: list[tuple[float, float]]) -> None:
    """Note the time of each signal's newest report, and its age at the light."""
    async with Subscriber(city.SIGNALS, "lights", controller=controller) as signals:
        async for message in signals:
            reported_s = json.loads(message.body)["newest_us"] / 1e6
            heard.append((reported_s, time.time() - reported_s))
            await message.finish()


async def control_room(controller: str) -> None:
    """Receive every report, and print the first."""
    first = True
    async with Subscriber(city.TRAFFIC, "control-room#ephemeral", controller=controller) as reports:
        async for message in reports:
            if first:
                print(json.dumps({"first": json.loads(message.body)}), flush=True)
            first = False
            await message.finish()


async def main(controller: str) -> None:
    """Listen until told to stop."""
    stopped = stop_signal()
    heard: list[tuple[float, float]] = []
    async with asyncio.TaskGroup() as listening:
        tasks = [listening.create_task(lights(controller, heard)), listening.create_task(control_room(controller))]
        await stopped.wait()
        for task in tasks:
            task.cancel()
    with suppress(BrokenPipeError):  # the reader may be gone
        print(json.dumps({"heard": heard}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
