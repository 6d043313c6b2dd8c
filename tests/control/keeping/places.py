"""Places for stores, of every kind, as tests open them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from srtm.control.keeping.address import keeping, parse
from srtm.control.keeping.keeper import Keeper, Keeping, Leader
from tests.engines import NatsServer

LEASE_S = 1.0
ME, OTHER = Leader("me", "http://me:1"), Leader("other", "http://other:1")
_numbers = count()


class Place:
    """One place for a store; every `open` is what another process would have."""

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def shared(self) -> bool:
        return parse(self.address).shared

    def open(self, lease_s: float = LEASE_S) -> Keeping:
        return keeping(parse(self.address), lease_s=lease_s)

    @contextlib.asynccontextmanager
    async def led(self, me: Leader = ME, lease_s: float = LEASE_S) -> AsyncIterator[Keeper]:
        """A keeper for the time of a block, after which anybody may lead."""
        keeper = await asyncio.wait_for(self.open(lease_s).lead(me), 30)
        try:
            yield keeper
        finally:
            await keeper.release()


def new_place(kind: str, folder: Path, server: NatsServer | None) -> Place:
    """A place that nobody has used yet."""
    if server is None:
        return Place(f"{kind}:{folder / str(next(_numbers))}")
    return Place(f"{server.url}/bucket-{next(_numbers)}")


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run a story, which must end."""
    asyncio.run(asyncio.wait_for(story, 60))


@contextlib.contextmanager
def nats(folder: Path) -> Iterator[NatsServer]:
    """A server of NATS."""
    with NatsServer(folder) as server:
        yield server
