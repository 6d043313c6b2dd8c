"""A network between controller and brokers, and among brokers, that loses, delays and doubles messages, from a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    import random


class FaultyNetwork:
    """What happens to messages on their way."""

    def __init__(self, rng: random.Random) -> None:
        self.cut: set[str] = set()  # brokers that the controller cannot reach, nor they it
        self.parted: set[tuple[str, str]] = set()  # brokers of which the first does not get through to the second
        self.loss = 0.0  # probability that a message is lost
        self.doubling = 0.0  # probability that an exchange arrives twice
        self.longest_delay_ns = 5 * NS_PER_MS
        self._rng = rng

    def loses(self, broker: str = "") -> bool:
        """Whether a message is lost; one between the controller and a `broker` also if that is cut off."""
        return broker in self.cut or self._rng.random() < self.loss

    def loses_between(self, sender: str, receiver: str) -> bool:
        """Whether a message from one broker to another is lost."""
        return (sender, receiver) in self.parted or self.loses()

    def copies(self) -> int:
        """How often a message arrives."""
        return 2 if self._rng.random() < self.doubling else 1

    def delay_ns(self) -> int:
        """How long a message is under way."""
        return self._rng.randrange(100_000, max(100_001, self.longest_delay_ns))
