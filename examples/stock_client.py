"""pynsq, the official NSQ client, with an SRTM broker: `python examples/stock_client.py HOST:PORT`."""

import asyncio
import sys

import nsq


async def main(broker: str) -> None:
    """Publish a message, and wait for it."""
    done = asyncio.Event()

    def handle(message: nsq.Message) -> bool:
        print(message.body.decode())
        done.set()
        return True  # finished

    nsq.Reader("traffic", "stock", message_handler=handle, nsqd_tcp_addresses=[broker])
    writer = nsq.Writer([broker])
    await asyncio.sleep(0.5)  # pynsq connects in the background
    writer.pub("traffic", b"hello from pynsq")
    await asyncio.wait_for(done.wait(), 10)


asyncio.run(main(sys.argv[1]))
