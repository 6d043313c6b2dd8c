"""The traffic lights: `python lights.py CONTROLLER SECONDS` follows the signals, and says how old their news was."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import city

from srtm.client import Subscriber


async def main(controller: str, seconds: float) -> None:
    """Take signals for a while; one JSON document at the end."""
    ages, junctions = [], set()
    async with Subscriber(city.SIGNALS, "lights", controller=controller) as signals:
        try:
            async with asyncio.timeout(seconds):
                async for message in signals:
                    signal = json.loads(message.body)
                    ages.append(time.time() - signal["newest_us"] / 1e6)
                    junctions.add(signal["junction"])
                    await message.finish()
        except TimeoutError:
            pass
    ages.sort()
    middle = ages[len(ages) // 2] if ages else None
    print(json.dumps({"signals": len(ages), "junctions": len(junctions), "p50_s": middle}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
