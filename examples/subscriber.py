"""Print messages: `python examples/subscriber.py [HOST:PORT]`; without a broker, ask the local controller."""

import asyncio
import sys

from srtm.client import Subscriber


async def main(*brokers: str) -> None:
    """Print messages until the last one."""
    async with Subscriber("traffic", "console", brokers=brokers or None) as subscriber:
        async for message in subscriber:
            print(message.body.decode())
            await message.finish()
            if message.body == b"red":
                break


asyncio.run(main(*sys.argv[1:]))
