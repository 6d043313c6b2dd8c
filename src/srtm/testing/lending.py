"""Lending in virtual time: frames between brokers, over a network that loses, delays, doubles and reorders them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.broker.lending.lenders import Heard
from srtm.protocol.lending import Answers, Asks, Decoder, encode
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.protocol.lending import Entry
    from srtm.testing.virtual import VirtualCluster

_AGAIN_NS = 100 * NS_PER_MS  # until a message to a broker that stands still is looked at again


class VirtualWire:
    """What a broker says to its peers. They may hear it after either of them was started again."""

    def __init__(self, name: str, world: VirtualCluster) -> None:
        self._name = name
        self._world = world

    def meet(self, peers: Mapping[str, str]) -> None:
        """Nothing: everybody can be reached, as far as the network lets them."""

    def post(self, peer: str, asks: bool, entry: Entry, /) -> None:  # noqa: FBT001 - as `broker.lending.lenders.Wire`
        """Put every copy on its way."""
        network = self._world.network
        frame = encode(Asks([entry]) if asks else Answers([entry]))
        for _ in range(0 if network.loses() else network.copies()):
            self._world.at(network.delay_ns(), self._arrive, peer, frame)

    def _arrive(self, peer: str, frame: bytes) -> None:
        world = self._world
        broker = world.brokers.get(peer)
        if broker is None:
            return
        if peer in world.paused:
            world.at(_AGAIN_NS, self._arrive, peer, frame)
            return
        for message in Decoder().feed(frame):
            assert isinstance(message, Asks | Answers)
            asks = isinstance(message, Asks)
            broker.control.lenders.inbox += [Heard(self._name, asks, entry) for entry in message.entries]
        broker.control.hear_peers(world.now_ns, broker.mono_ns)
        broker.turn()

    def close(self) -> None:
        """Nothing is open."""
