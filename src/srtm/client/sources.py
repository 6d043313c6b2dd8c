"""Where a subscriber learns which places deliver its topic: a controller, nsqlookupds, or a fixed list.

A controller pushes changes of its own brokers and their engines, and is polled for stock nsqds that registered there;
nsqlookupds are polled.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from srtm.client.cluster import DEFAULT_CONTROLLER, Cluster
from srtm.client.lookup import lookup
from srtm.errors import InputError
from srtm.net.sockets import split_address

Source = AsyncGenerator[set[str], None]


class Sources:
    """The sources of one subscriber; each yields all places that it knows, now and at every change."""

    def __init__(
        self,
        topic: str,
        controller: str | Cluster | None,
        brokers: Iterable[str] | None,
        lookupd: Iterable[str] | None,
        poll_s: float,
        token: str | None,
    ) -> None:
        if sum(given is not None for given in (controller, brokers, lookupd)) > 1:
            raise InputError("controller, brokers and lookupd exclude each other: give one")
        self._topic = topic
        self._controller = controller or DEFAULT_CONTROLLER
        self._fixed = None if brokers is None else list(brokers)
        self._lookupd = None if lookupd is None else list(lookupd)
        self._poll_s = poll_s
        self._token = token
        self._cluster: Cluster | None = None
        for address in self._fixed or ():
            split_address(address)

    def open(self) -> list[Source]:
        """Return the sources; iterating over one begins to ask."""
        if self._fixed is not None:
            return [_always(set(self._fixed))]
        if self._lookupd is not None:
            return [self._polled(self._lookupd)]
        given = self._controller
        self._cluster = cluster = given if isinstance(given, Cluster) else Cluster.shared(given, self._token)
        return [self._watched(cluster), self._polled(cluster.urls, cluster.tls)]

    @property
    def brokers(self) -> Iterable[str]:
        """Addresses that are brokers for sure, because the controller lists them."""
        return () if self._cluster is None else self._cluster.brokers(self._topic).values()

    async def close(self) -> None:
        """Give a shared cluster back."""
        if self._cluster is not None and self._cluster is not self._controller:
            await self._cluster.release()

    def _polled(self, addresses: list[str], tls: ssl.SSLContext | None = None) -> Source:
        return lookup(addresses, self._topic, self._poll_s, tls)

    async def _watched(self, cluster: Cluster) -> Source:
        async with aclosing(cluster.watch(self._topic)) as changes:
            async for _ in changes:
                yield cluster.delivery(self._topic)


async def _always(addresses: set[str]) -> Source:
    yield addresses
