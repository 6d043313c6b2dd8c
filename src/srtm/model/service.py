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

from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.model import scan
from srtm.model._compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.model.broker_models import ServiceModel

    Ints = NDArray[np.int64]


_NEVER = 2**62


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
        out += model.base_ns
        return out
    cores = np.full(model.cores, -_NEVER, np.int64)
    _read(arrivals, publisher_of, background, model.reading_ns(batch), model.read_ns, model.message_ns, cores, out)
    np.maximum(out, releases, out=out)
    if model.serial_ns:
        # A large read may end after a smaller one that began later on another core.
        _send(out, np.argsort(out, kind="stable"), model.serial_ns)
    out -= releases
    out += model.base_ns
    return out


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
