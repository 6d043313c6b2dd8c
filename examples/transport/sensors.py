"""The sensors of all junctions: `python sensors.py CONTROLLER SECONDS`."""

from __future__ import annotations

import asyncio
import random
import sys

import city

from srtm.client import Cluster, Publisher


async def junction(number: int, publishers: list[Publisher], seconds: float) -> None:
    """Let every sensor of a junction report when its light changes."""
    rng = random.Random()
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as reports:
        for at in city.changes(number, seconds):
            await asyncio.sleep(began + at - loop.time())
            for sensor, publisher in enumerate(publishers):
                reports.create_task(publisher.publish_many(city.report(number, sensor, rng)))


async def main(controller: str, seconds: float) -> None:
    """Connect every sensor, then let them report."""
    async with Cluster(controller) as cluster:
        publishers = [Publisher(city.TRAFFIC, controller=cluster, **each) for each in city.sensors()]
        await asyncio.gather(*(publisher.open() for publisher in publishers))
        of = city.SENSORS
        try:
            await asyncio.gather(
                *(junction(n, publishers[n * of : (n + 1) * of], seconds) for n in range(city.JUNCTIONS))
            )
        finally:
            await asyncio.gather(*(publisher.close() for publisher in publishers))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
