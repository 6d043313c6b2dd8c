"""Traffic in virtual time: publishers that send at their declared rates, or arrivals that are known beforehand.

Publishers follow orders to other brokers. What one sends while it has no broker is lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from srtm.protocol import identify, orders
from srtm.protocol.frames import FRAME_HEAD
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from srtm.control.members import DeclaredPublisher
    from srtm.protocol.orders import Order
    from srtm.testing.schedule import Schedule
    from srtm.testing.virtual_broker import VirtualBroker
    from srtm.workload.publishers import Arrivals

    Send = Callable[["VirtualPublisher", int], None]


@dataclass(eq=False)
class VirtualPublisher:
    """A publisher that sends at its declared rate, and follows orders to another broker."""

    declared: DeclaredPublisher
    topic: str
    follow: Callable[[VirtualPublisher], None]  # is called when an order has come
    broker: VirtualBroker | None = None
    rng: random.Random = field(default_factory=random.Random)
    sent: int = 0
    moves: int = 0  # orders that it followed
    gone: bool = False

    def __post_init__(self) -> None:
        """Declare the publisher as IDENTIFY does."""
        self.identity = identify.Declared(self.declared.id, self.declared.group, self.topic)
        self.inbox: list[Order] = []

    def send(self, frame: bytes) -> None:
        """Take a frame from the broker."""
        found = orders.decode(frame[FRAME_HEAD.size :])
        if found is not None:
            self.inbox.append(found)
            self.follow(self)

    def bodies(self, messages: int) -> list[bytes]:
        """Its next messages."""
        first, self.sent = self.sent, self.sent + messages
        return [b"%b %d" % (self.declared.id.encode(), number) for number in range(first, self.sent)]

    def next_gap_ns(self) -> int:
        """Time until its next batch."""
        mean_ns = NS_PER_S * self.declared.batch / self.declared.rate_mps
        return max(1, round(self.rng.expovariate(1 / mean_ns)))


class Bursts:
    """Publishers that send together, in Poisson bursts of a batch each."""

    def __init__(self, members: Sequence[VirtualPublisher], schedule: Schedule, send: Send) -> None:
        self._members = members
        self._schedule = schedule
        self._send = send
        schedule.at(members[0].next_gap_ns(), self._burst)

    def _burst(self) -> None:
        for publisher in self._members:
            self._send(publisher, publisher.declared.batch)
        self._schedule.at(self._members[0].next_gap_ns(), self._burst)


class Replay:
    """Known arrivals, sent from now on, over and over, until a lap is the last one."""

    def __init__(
        self,
        publishers: Sequence[VirtualPublisher],
        arrivals: Arrivals,
        lap_ns: int,
        schedule: Schedule,
        send: Send,
    ) -> None:
        """A lap takes `lap_ns`, of which the last arrival may not be later than the end."""
        times, senders = arrivals
        new = np.ones(len(times), np.bool_)
        new[1:] = (np.diff(times) != 0) | (np.diff(senders) != 0)
        first = np.flatnonzero(new)
        self._times: list[int] = times[first].tolist()
        self._senders = [publishers[sender] for sender in senders[first].tolist()]
        self._sizes: list[int] = np.diff(first, append=len(times)).tolist()
        self._next = 0
        self.last_lap = False
        self._lap_ns = lap_ns
        self.began_ns = schedule.now_ns  # the present lap
        self._schedule = schedule
        self._send = send
        self._wait()

    def _wait(self) -> None:
        if self._next == len(self._times):
            if self.last_lap:
                return
            self._next = 0
            self.began_ns += self._lap_ns
        at_ns = self.began_ns + self._times[self._next]
        self._schedule.at(at_ns - self._schedule.now_ns, self._burst)

    def _burst(self) -> None:
        times, at_ns = self._times, self._times[self._next]
        while self._next < len(times) and times[self._next] == at_ns:
            self._send(self._senders[self._next], self._sizes[self._next])
            self._next += 1
        self._wait()
