"""Memory and garbage collection of this process, under the names that nsqd reports them by.

Python has no counterpart to some of nsqd's figures; those are zero.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srtm.units import percentiles

if TYPE_CHECKING:
    from collections.abc import Iterator

_NS_PER_US = 1_000
_pauses_ns: deque[int] = deque(maxlen=256)  # of the last collections, as many as Go keeps


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """The `memory` object of nsqd's `/stats`."""

    heap_objects: int  # blocks that Python's allocator has handed out
    heap_idle_bytes: int
    heap_in_use_bytes: int  # resident memory of the process
    heap_released_bytes: int
    gc_pause_usec_100: int
    gc_pause_usec_99: int
    gc_pause_usec_95: int
    next_gc_bytes: int
    gc_total_runs: int


def statistics() -> MemoryStatistics:
    """A snapshot of this process."""
    import numpy as np  # here, because a broker that starts must not wait for it

    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    pauses_ns = np.array(_pauses_ns or [0], dtype=np.int64)
    longest, p99, p95 = (pause_ns // _NS_PER_US for pause_ns in percentiles(pauses_ns, ("1", "0.99", "0.95")))
    runs = sum(generation["collections"] for generation in gc.get_stats())
    return MemoryStatistics(sys.getallocatedblocks(), 0, resident, 0, longest, p99, p95, 0, runs)


@contextmanager
def timed_collections() -> Iterator[None]:
    """Time every garbage collection for the time of a block."""
    began_ns = 0

    def note(phase: str, _info: dict[str, Any]) -> None:
        nonlocal began_ns
        if phase == "start":
            began_ns = time.monotonic_ns()
        else:
            _pauses_ns.append(time.monotonic_ns() - began_ns)

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)
