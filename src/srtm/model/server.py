"""A broker as a queue, told one event at a time (`model/service.py` has the queue), and load that it already carries.

In: read events and releases in order of time. Out: when messages are read, and when they are delivered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from srtm.model.broker_models import ServiceModel

    Ints = NDArray[np.int64]


_MOST_READS = 100_000_000  # background read events of a broker: 8 bytes each


@dataclass(frozen=True, slots=True)
class Background:
    """Load that a broker already carries: `rate_mps` in Poisson batches of `batch`, each one read event."""

    rate_mps: float
    batch: int = 1

    def __post_init__(self) -> None:
        """Refuse a negative rate or an empty batch."""
        if not 0 <= self.rate_mps < math.inf or self.batch < 1:
            raise InputError(f"background load needs a rate of at least 0 and a batch of at least 1: {self}")

    def reads(self, first_ns: int, last_ns: int, rng: np.random.Generator) -> Ints:
        """Times of its read events between two instants."""
        mean = self.rate_mps / self.batch * (last_ns - first_ns) / NS_PER_S
        if mean > _MOST_READS:
            raise InputError(
                f"background load of {self.rate_mps:g} msg/s is {mean:.3g} read events over this traffic, which is more"
                f" than can be simulated ({_MOST_READS:,}): give a lower rate, or shorter traffic"
            )
        return np.sort(rng.integers(first_ns, last_ns + 1, rng.poisson(mean)))


class Server:
    """The same broker, told one event at a time: for clusters in virtual time.

    Tell it events in order of time, and releases right after a read if its messages have their tokens.
    """

    def __init__(self, model: ServiceModel) -> None:
        self.model = model
        self._cores = [0] * model.cores
        self._threads: defaultdict[Hashable, int] = defaultdict(int)

    def read(self, messages: int, at_ns: int) -> int:
        """A read event arrives: the time at which its messages are in the broker."""
        core = self._cores.index(min(self._cores))
        self._cores[core] = self._awake(core, at_ns) + self.model.reading_ns(messages)
        return self._cores[core]

    def send(self, topic: Hashable, ready_ns: Ints) -> Ints:
        """Messages of a topic are ready for its serial stage at these times: the time at which each is delivered."""
        serial_ns, place = self.model.serial_ns, np.arange(len(ready_ns))
        begun_ns = np.maximum(ready_ns - place * serial_ns, self._threads[topic])
        sent_ns: Ints = np.maximum.accumulate(begun_ns) + (place + 1) * serial_ns
        if len(sent_ns):
            self._threads[topic] = int(sent_ns[-1])
        return sent_ns + self.model.base_ns

    def release(self, topic: Hashable, messages: int, at_ns: int) -> list[int]:
        """Messages of a topic that were read have their tokens: the time at which each is delivered."""
        serial_ns, base_ns = self.model.serial_ns, self.model.base_ns
        if self.model.cores == 1:
            self._cores[0] = self._awake(0, at_ns) + messages * serial_ns
            return [self._cores[0] + base_ns] * messages
        begins = max(self._threads[topic], at_ns)
        self._threads[topic] = begins + messages * serial_ns
        return [begins + n * serial_ns + base_ns for n in range(1, messages + 1)]

    def _awake(self, core: int, at_ns: int) -> int:
        free_ns = self._cores[core]
        return at_ns + self.model.wake_ns if at_ns > free_ns else free_ns
