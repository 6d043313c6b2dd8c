"""Lending in virtual time: frames between brokers, over a network that loses, delays, doubles and reorders them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from srtm.broker.lending.lenders import Heard
from srtm.protocol.lending import Answers, Asks, Decoder, encode
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from srtm.broker.control import Control
    from srtm.protocol.lending import Entry
    from srtm.testing.faulty_network import FaultyNetwork

_AGAIN_NS = 100 * NS_PER_MS  # until a message to a broker that stands still is looked at again


class Hearer(Protocol):
    """A broker in virtual time."""

    control: Control
    started_ns: int

    @property
    def mono_ns(self) -> int:
        """Its own monotonic clock."""

    def turn(self) -> None:
        """One turn of its loop."""


class World(Protocol):
    """A cluster in virtual time."""

    network: FaultyNetwork
    paused: set[str]

    @property
    def brokers(self) -> Mapping[str, Hearer]:
        """Its brokers by name."""

    @property
    def now_ns(self) -> int:
        """The virtual time."""

    def at(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Run an action after a delay."""


class VirtualWire:
    """What a broker says to its peers. They may hear it after either of them was started again."""

    def __init__(self, name: str, world: World) -> None:
        self._name = name
        self._world = world

    def meet(self, peers: Mapping[str, str]) -> None:
        """Nothing: everybody can be reached, as far as the network lets them."""

    def post(self, peer: str, asks: bool, entry: Entry, /) -> None:  # noqa: FBT001 - as `broker.lending.lenders.Wire`
        """Put every copy on its way."""
        network = self._world.network
        frame = encode(Asks([entry]) if asks else Answers([entry]))
        incarnation = self._world.brokers[self._name].started_ns
        for _ in range(0 if network.loses_between(self._name, peer) else network.copies()):
            self._world.at(network.delay_ns(), self._arrive, peer, frame, incarnation)

    def _arrive(self, peer: str, frame: bytes, incarnation: int) -> None:
        world = self._world
        broker = world.brokers.get(peer)
        if broker is None:
            return
        if peer in world.paused:
            world.at(_AGAIN_NS, self._arrive, peer, frame, incarnation)
            return
        for message in Decoder().feed(frame):
            assert isinstance(message, Asks | Answers)
            asks = isinstance(message, Asks)
            broker.control.lenders.inbox += [Heard(self._name, asks, entry, incarnation) for entry in message.entries]
        broker.control.hear_peers(world.now_ns, broker.mono_ns)
        broker.turn()

    def close(self) -> None:
        """Nothing is open."""
