"""Publish three messages: `python examples/publisher.py [HOST:PORT]`; without a broker, ask the local controller."""

import asyncio
import sys

from srtm.client import Publisher


async def main(broker: str | None = None) -> None:
    """Publish three messages."""
    async with Publisher("traffic", broker=broker, id="lamp-1", group="junction-17") as publisher:
        await publisher.publish(b"green")
        await publisher.publish_many([b"yellow", b"red"])
    print("3 messages acknowledged")


asyncio.run(main(*sys.argv[1:]))
