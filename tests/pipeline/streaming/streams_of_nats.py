"""What tests do at a JetStream server past SRTM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import nats


def at_nats(url: str, action: Callable[[Any], Any]) -> Any:
    """Do something with NATS' own client."""

    async def go() -> Any:
        client = await nats.connect(url.partition("?")[0].split(","), connect_timeout=10)
        try:
            return await action(client.jetstream(timeout=10))
        finally:
            await client.close()

    return asyncio.run(go())
