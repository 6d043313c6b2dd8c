"""How a publisher finds its broker: at the addresses of a MIGRATE, then wherever its home says, with back-off.

In: a home, which names brokers; addresses that a broker ordered. Out: an open connection, and problems on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from srtm.client.cluster import Home
from srtm.client.connection import Connection, ConnectionOptions, Listener
from srtm.errors import ClientError, ControllerAway, InputError, ProtocolError, SRTMError
from srtm.net.backoff import Backoff


class Finder:
    """Connects one publisher; `refused` hears of brokers and controllers that reject it."""

    __slots__ = ("_home", "_options", "_refused", "_srtm", "lost", "problem")

    def __init__(
        self,
        home: Home,
        options: ConnectionOptions,
        srtm: dict[str, Any],
        refused: Callable[[SRTMError], None],
    ) -> None:
        self.lost: set[str] = set()  # addresses that failed since the last connection
        self.problem: Exception | None = None  # the most recent
        self._home = home
        self._options = options
        self._srtm = srtm  # what IDENTIFY tells an SRTM broker
        self._refused = refused

    async def find(self, listener: Listener, to: tuple[str, ...] = ()) -> Connection:
        """Connect to one of these addresses, or to a broker that the home names."""
        backoff = Backoff()
        while True:
            try:
                for address in to or await self._home.places(self.lost):
                    try:
                        return await Connection.open(address, listener, self._options, self._srtm)
                    except (ClientError, ProtocolError, InputError) as problem:
                        self.lost.add(address)
                        self._failed(problem, isinstance(problem, ProtocolError))
            except ClientError as problem:
                self._failed(problem, not isinstance(problem, ControllerAway))
            if not to:
                await asyncio.sleep(backoff.next_s())
            to = ()

    def _failed(self, problem: SRTMError, refused: bool) -> None:  # noqa: FBT001 - private to this class
        self.problem = problem
        if refused:
            self._refused(problem)
