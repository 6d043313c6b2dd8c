"""Compiled passes over a topic's arrivals: dealing messages to brokers, publishers' batches, and read events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.model._compiled import compiled

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Indices = NDArray[np.int32]


@compiled
def deal(
    times: Ints, senders: Indices, broker_of: Indices, places: Ints, out_times: Ints, out_senders: Indices
) -> None:
    """Sort messages by the broker of their publisher, in order; `places` says where each broker's begin."""
    for i in range(len(times)):
        broker = broker_of[senders[i]]
        place = places[broker]
        places[broker] = place + 1
        out_times[place] = times[i]
        out_senders[place] = senders[i]


@compiled
def find_batches(times: Ints, senders: Indices, largest: Ints) -> None:
    """Raise `largest`, by publisher, to the messages that it sent at once."""
    size = 0
    for i in range(len(times)):
        together = i > 0 and times[i] == times[i - 1] and senders[i] == senders[i - 1]
        size = size + 1 if together else 1
        largest[senders[i]] = max(largest[senders[i]], size)


@compiled
def count_reads(times: Ints, senders: Indices) -> int:
    """How many read events messages make: those that one publisher sent at once are one."""
    reads = min(1, len(times))
    for i in range(1, len(times)):
        if times[i] != times[i - 1] or senders[i] != senders[i - 1]:
            reads += 1
    return reads
