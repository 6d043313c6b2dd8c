"""A broker as a queue: reads on its cores, tokens, and then one thread for each topic.

1. A read event of m messages of one publisher takes w + m·s on the first free core, when it arrives.
2. Each message waits for its token. The bucket counts from the arrival, so a slow read does not add to that wait.
3. A serial stage sends the messages of a topic one after another, t each.

`base_ns` is the latency of an idle broker: two hops through the network stack. A broker with one core is one process
with one loop (ours): what a turn reads and what has its token by then leaves together at the end of that turn. Waking
an idle loop costs extra, before messages leave and after, so a busy broker is cheaper per message.
In: arrival and release times with each message's publisher. Out: processing latencies, from release to delivery.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.model import scan
from srtm.model._compiled import compiled
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from srtm.model.broker_models import ServiceModel

    Ints = NDArray[np.int64]


_MOST_READS = 100_000_000  # background read events of a broker: 8 bytes each
_NEVER = 2**62


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


def busy_share(arrivals: Ints, publisher_of: NDArray[np.int32], model: ServiceModel) -> float:
    """The part of its time that a broker with one core is busy with messages that need not wait for tokens."""
    costs = (0, model.wake_ns, model.rest_ns, model.read_ns, model.message_ns, model.serial_ns)
    busy = _in_turns(arrivals, arrivals, publisher_of, arrivals[:0], *costs, np.empty(len(arrivals), np.int64))
    return busy / max(1, int(arrivals[-1] - arrivals[0]))


def processing_latencies(
    arrivals: Ints,
    releases: Ints,
    publisher_of: NDArray[np.int32],
    model: ServiceModel,
    reads: Ints | None = None,
    batch: int = 1,
) -> Ints:
    """Latency in ns of each message after its release; `reads` are background read events of `batch` messages each."""
    if not len(publisher_of) == len(releases) == len(arrivals):
        raise InputError(
            f"{len(arrivals)} arrivals, {len(releases)} releases and {len(publisher_of)} publishers: every message has"
            " one of each"
        )
    background = np.empty(0, np.int64) if reads is None else reads
    for times in (arrivals, releases, background):
        scan.check_sorted(times)
    out = np.empty(len(releases), np.int64)
    if model.cores == 1:
        work = (model.wake_ns, model.rest_ns, model.read_ns, model.message_ns, model.serial_ns)
        _in_turns(arrivals, releases, publisher_of, background, model.cost_ns(batch), *work, out)
        return out + model.base_ns
    cores = np.full(model.cores, -_NEVER, np.int64)
    _read(arrivals, publisher_of, background, model.reading_ns(batch), model.read_ns, model.message_ns, cores, out)
    np.maximum(out, releases, out=out)
    if model.serial_ns:
        # A large read may end after a smaller one that began later on another core.
        _send(out, np.argsort(out, kind="stable"), model.serial_ns)
    return out - releases + model.base_ns


@compiled
def _in_turns(
    arrivals: Ints,
    releases: Ints,
    publisher_of: NDArray[np.int32],
    reads: Ints,
    read_cost: int,
    per_wake: int,
    per_rest: int,
    per_read: int,
    per_message: int,
    per_send: int,
    out: Ints,
) -> int:
    """Fill `out` with latencies; returns the processor time that all of this took."""
    free_at = -_NEVER
    nearest = read = sent = busy = 0
    while sent < len(arrivals):
        arrives = arrivals[read] if read < len(arrivals) else _NEVER
        other = reads[nearest] if nearest < len(reads) else _NEVER
        due = releases[sent] if sent < read else _NEVER
        next_at = min(arrives, other, due)
        began = max(free_at, next_at)
        woken = next_at > free_at
        free_at = began + (per_wake if woken else 0)
        if other == next_at:
            free_at += read_cost
            nearest += 1
        elif arrives == next_at:
            first = read
            while read < len(arrivals) and arrivals[read] == arrives and publisher_of[read] == publisher_of[first]:
                read += 1
            free_at += per_read + (read - first) * per_message
        first = sent
        while sent < read and releases[sent] <= free_at:
            sent += 1
        free_at += (sent - first) * per_send
        for message in range(first, sent):
            out[message] = free_at - releases[message]
        if woken:
            free_at += per_rest
        busy += free_at - began
    return busy


@compiled
def _read(
    arrivals: Ints,
    publisher_of: NDArray[np.int32],
    reads: Ints,
    read_cost: int,
    per_read: int,
    per_message: int,
    cores: Ints,
    out: Ints,
) -> None:
    nearest = 0
    start = 0
    while start < len(arrivals):
        at = arrivals[start]
        end = start + 1
        while end < len(arrivals) and arrivals[end] == at and publisher_of[end] == publisher_of[start]:
            end += 1
        while nearest < len(reads) and reads[nearest] <= at:
            core = np.argmin(cores)
            cores[core] = max(cores[core], reads[nearest]) + read_cost
            nearest += 1
        core = np.argmin(cores)
        cores[core] = max(cores[core], at) + per_read + (end - start) * per_message
        for message in range(start, end):
            out[message] = cores[core]
        start = end


@compiled
def _send(times: Ints, order: Ints, per_send: int) -> None:
    """Replace the times at which messages are ready by those at which one thread has sent them."""
    free_at = -_NEVER
    for message in order:
        free_at = max(free_at, times[message]) + per_send
        times[message] = free_at
