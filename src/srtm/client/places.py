"""Where a topic's messages are delivered, and the login that this client uses there.

In: places as the controller, brokers and nsqlookupds name them, `host:port` or the address of an engine; the user's own
address of the engine, with its login and files (`SRTM_ENGINE`). Out: links.

Brokers never pass secrets on, so the user gives a client its login and files. For NATS, the servers are then those of
the user's address. With NSQ every broker has its own nsqd, so the user's address gives login and TLS for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from srtm.client.connection import ConnectionOptions
from srtm.client.links import BrokerLink, Hub, Link
from srtm.errors import InputError
from srtm.protocol import engine as engines

if TYPE_CHECKING:
    from srtm.protocol.engine import EngineAddress

log = logging.getLogger(__name__)

_NATS = ("nats://", "nats+tls://")  # a broker's host may be called nats, too


class Places:
    """Turns places into links."""

    def __init__(
        self, topic: str, options: ConnectionOptions, engine: str | None, timeout_ms: int | None = None
    ) -> None:
        self._topic = topic
        self._options = options
        self._timeout_ms = timeout_ms  # of a message
        # A kind without an address is for `srtm up`, whose engine needs no login.
        self._given = None if not engine or engine in engines.KINDS else engines.parse(engine)
        self._named: dict[str, EngineAddress] = {}  # nsqds that are engines, by host:port
        self._brokers: set[str] = set()  # addresses known to be brokers
        self._unreachable: set[str] = set()

    def keys(self, places: Iterable[str]) -> dict[str, str]:
        """Return a key for the link of each place; several sources may name one nsqd."""
        found: dict[str, str] = {}
        for place in sorted(places):
            if "://" not in place:
                found.setdefault(place, place)
                continue
            address = self._checked(place)
            if address.kind == "nats":
                found[str(address)] = place
                continue
            host, port = address.servers[0]
            if not port:
                self._cannot_reach(place)
                continue
            key = engines.written(host, port)
            self._named[key] = address
            found[key] = place
        return found

    def is_broker(self, address: str) -> None:
        """Remember that an address is a broker's."""
        self._brokers.add(address)

    def link(self, hub: Hub, key: str, place: str) -> Link:
        """Return a new link to a place."""
        if place.startswith(_NATS):
            try:
                from srtm.client.jetstream import StreamLink
            except ImportError:
                raise InputError(f"{place} needs msgspec: pip install 'srtm[client]'") from None
            return StreamLink(hub, self._checked(place), self._timeout_ms)
        return BrokerLink(hub, key, self.options(key), nsqd=key in self._named)

    def plain(self, key: str, place: str) -> bool:
        """Whether a place speaks NSQ's protocol without TLS or compression."""
        options = self.options(key)
        return not place.startswith(_NATS) and not (options.tls or options.deflate or options.snappy)

    def options(self, key: str) -> ConnectionOptions:
        """Return how to connect to a broker or nsqd."""
        given, named = self._given, self._named.get(key)
        options = self._options
        if given is None or given.kind != "nsqd" or key in self._brokers:
            return replace(options, tls=_context(named)) if named and named.tls and options.tls is None else options
        tls = _context(given) if given.tls or (named is not None and named.tls) else options.tls
        if given.user:
            return replace(options, tls=tls, auth_secret=given.user.encode(), auth_if_asked=True)
        return replace(options, tls=tls)

    def _checked(self, place: str) -> EngineAddress:
        """Return the address of an engine; the user's own, if that is of NATS."""
        address, given = engines.parse(place), self._given
        if address is None:
            raise InputError(f"invalid engine address {place!r}")
        if given is not None and given.kind != address.kind:
            raise InputError(
                f"topic {self._topic!r} is delivered by {address}, but SRTM_ENGINE (--engine) is {given}:"
                f" leave it out, or give an address of the engine {address.kind}"
            )
        return given if given is not None and given.kind == "nats" else address

    def _cannot_reach(self, place: str) -> None:
        if place not in self._unreachable:
            self._unreachable.add(place)
            log.warning(
                "%s: %s is a unix socket on the broker's host: let that nsqd listen on TCP and register with the"
                " controller (--lookupd-tcp-address)",
                self._topic,
                place,
            )


def _context(address: EngineAddress) -> Any:
    """Return the TLS context that an address asks for."""
    from srtm.net.tls import client_context

    return client_context(address.ca, address.cert, address.key)
