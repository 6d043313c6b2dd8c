"""What a load writes, and when: PUB or MPUB commands, made a few ahead of their time.

A body is [run 8][publisher 4][number 8] and padding; `number` counts the messages of the whole schedule, so it tells
when a message was due. Commands differ only in their numbers, so numpy makes many at once.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

from srtm.client.cluster import PublisherSpec
from srtm.errors import InputError
from srtm.model.latency import Distribution
from srtm.protocol import client as say
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.client.load.options import LoadOptions
    from srtm.workload.publishers import Workload

    Ints = NDArray[np.int64]

_AHEAD = 128  # commands made at once


class Schedule:
    """The commands of one run in the order of their times; `next` is the first that was not written."""

    def __init__(self, options: LoadOptions) -> None:
        (population,) = options.workload.populations
        self.batch = population.batch
        self.run = secrets.randbits(64)
        arrivals = options.workload.arrivals()
        if not len(arrivals.times_ns):
            raise InputError("the schedule is empty: make it longer, or faster")
        self.messages = len(arrivals.times_ns)
        self.due_ns: Ints = arrivals.times_ns[:: self.batch].copy()
        self.late_ns: Ints = np.zeros(len(self.due_ns), np.int64)
        self.next = 0
        self.made_from = 0  # the commands that are ready, and of each the time and the publisher
        self.made: list[bytes] = []
        self.times: list[int] = []
        self.who: list[int] = []
        self._senders = arrivals.publisher_of[:: self.batch].copy()
        self._commands = _Commands(options, self.batch, self.run)

    def __len__(self) -> int:
        """Commands in all."""
        return len(self.due_ns)

    @property
    def sent(self) -> int:
        """Messages written so far."""
        return self.next * self.batch

    @property
    def written_ns(self) -> Ints:
        """When each message that was sent was written, by the clock that the kernel stamps with."""
        return np.repeat(self.due_ns[: self.next] + self.late_ns[: self.next], self.batch)

    @property
    def lateness(self) -> Distribution | None:
        """How long after the scheduled time the load wrote."""
        return Distribution.of(self.late_ns[: self.next]) if self.next else None

    def make(self, number: int) -> None:
        """Make the commands from this one on, while there is nothing to write."""
        upto = min(number + _AHEAD, len(self.due_ns))
        self.made_from = number
        self.times = self.due_ns[number:upto].tolist()
        self.who = self._senders[number:upto].tolist()
        self.made = self._commands.make(number, self._senders[number:upto])


class _Commands:
    """Makes many commands at once."""

    def __init__(self, options: LoadOptions, batch: int, run: int) -> None:
        body = run.to_bytes(8, "big") + bytes(options.size - 8)
        command = say.pub(options.topic, body) if batch == 1 else say.mpub(options.topic, [body] * batch)
        each = 4 + options.size
        message = np.dtype(
            {"names": ["publisher", "number"], "formats": [">u4", ">u8"], "offsets": [12, 16], "itemsize": each}
        )
        head = len(command) - batch * each
        self._dtype = np.dtype(
            {"names": ["messages"], "formats": [(message, (batch,))], "offsets": [head], "itemsize": len(command)}
        )
        self._command = command
        self._batch = batch

    def make(self, first: int, senders: NDArray[np.int32]) -> list[bytes]:
        """Return a command for each sender, numbered from `first` on."""
        count, batch, size = len(senders), self._batch, len(self._command)
        found = np.frombuffer(bytearray(self._command * count), self._dtype)
        found["messages"]["publisher"] = senders[:, None]
        found["messages"]["number"] = np.arange(first * batch, (first + count) * batch).reshape(count, batch)
        data = found.tobytes()
        return [data[at : at + size] for at in range(0, len(data), size)]


def declared(workload: Workload, *, split: bool = False, silent: bool = False) -> list[PublisherSpec]:
    """Return what the publishers of a load tell the controller about themselves, in order; `silent` ones their name."""
    if silent:
        return [PublisherSpec(publisher.id, split=split) for publisher in workload.publishers()]
    (population,) = workload.populations
    spread_ms = population.spread_ns / NS_PER_MS
    kind = (population.rate_mps, population.process, population.batch, spread_ms, split)
    return [PublisherSpec(publisher.id, publisher.group, *kind) for publisher in workload.publishers()]
