"""The delivery engines that a broker can use, by the kind in their address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.protocol import engine as addresses

if TYPE_CHECKING:
    from srtm.broker.engines.engine import Engine
    from srtm.broker.options import BrokerOptions
    from srtm.broker.poller import Poller
    from srtm.broker.turn import Turn


def engine_of(options: BrokerOptions, turn: Turn, poller: Poller) -> Engine | None:
    """Return the engine that the options name; None if the broker's own channels deliver."""
    address = addresses.parse(options.engine)
    if address is None:
        return None
    if address.kind == "nats":
        from srtm.broker.engines.nats import Nats

        return Nats(address, options, turn, poller)
    from srtm.broker.engines.nsqd import Nsqd

    return Nsqd(address, options, turn, poller)
