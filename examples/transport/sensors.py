"""Sensors of all junctions, for a while: `python sensors.py CONTROLLER SECONDS`."""

from __future__ import annotations

import asyncio
import random
import sys

import city

from srtm.client import Cluster, Publisher


async def junction(number: int, publishers: list[Publisher], seconds: float) -> None:
    """Whenever the light changes, every sensor here reports what it counted."""
    rng = random.Random(number)
    loop = asyncio.get_running_loop()
    at, end = loop.time(), loop.time() + seconds
    while (at := at + rng.expovariate(city.REPORTS_S)) < end:
        await asyncio.sleep(at - loop.time())
        for sensor, publisher in enumerate(publishers):
            publisher.publish_nowait(city.count(number, sensor, rng.randrange(20))).add_done_callback(_look)


def _look(answer: asyncio.Future[None]) -> None:
    if not answer.cancelled() and (problem := answer.exception()):
        print(f"sensors: {problem}", file=sys.stderr)


async def main(controller: str, seconds: float) -> None:
    """Connect every sensor, then let them report."""
    async with Cluster(controller) as cluster:
        publishers = [
            Publisher(city.TRAFFIC, controller=cluster, id=each["id"], group=each["group"], rate=each["rate"])
            for each in city.sensors()
        ]
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
