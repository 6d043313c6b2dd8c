"""How late this host wakes a program that asked to be woken: the gaps that live runs have to live with.

A thread sleeps for two milliseconds, over and over, scheduled as brokers are, and notes how late it wakes.
`srtm latency --intrinsic` reads the clock in a tight loop instead, which would disturb cells that run beside it.
"""

from __future__ import annotations

import threading
import time
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.lab.live.paced import ABOVE_GAPS, FACTORS
from srtm.lab.live.priority import hurry
from srtm.lab.result import SLO_MS
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from srtm.lab.result import Row

_STEP_NS = 2 * NS_PER_MS
_NOTICED_NS = NS_PER_MS  # a twentieth of the SLO at a factor of 20
_TRIAL_S = 5.0


class Gaps:
    """Wake-ups of a thread: when each was due, and how late it was."""

    def __init__(self) -> None:
        self._due_ns = array("q")
        self._late_ns = array("q")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="srtm-gaps", daemon=True)

    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[Gaps]:
        """Watch the host for the time of a block."""
        gaps = cls()
        gaps._thread.start()
        try:
            yield gaps
        finally:
            gaps._over.set()
            gaps._thread.join()

    def _watch(self) -> None:
        hurry()
        due_ns = time.time_ns()
        while not self._over.is_set():
            due_ns = max(due_ns + _STEP_NS, time.time_ns() // _STEP_NS * _STEP_NS)
            time.sleep(max(0, due_ns - time.time_ns()) / NS_PER_S)
            self._due_ns.append(due_ns)
            self._late_ns.append(max(0, time.time_ns() - due_ns))

    def late_ns(self, began_ns: int = 0, ended_ns: int = 2**62) -> np.ndarray:
        """How late the host was between two instants."""
        count = len(self._late_ns)  # the thread may append meanwhile
        due_ns, late_ns = (np.array(column[:count], np.int64) for column in (self._due_ns, self._late_ns))
        return late_ns[(due_ns >= began_ns) & (due_ns < ended_ns)]

    def beyond_ns(self, began_ns: int = 0, ended_ns: int = 2**62, part: float = 0.01) -> int:
        """How late the host is for this part of the time, or later: long gaps take more of the time than short ones."""
        late_ns = np.sort(self.late_ns(began_ns, ended_ns))[::-1]
        if not len(late_ns):
            return 0
        # A gap of g delays by more than x for g - x.
        lost_ns = np.cumsum(late_ns) - late_ns * np.arange(1, len(late_ns) + 1)
        whole_ns = len(late_ns) * _STEP_NS + int(late_ns[late_ns > _STEP_NS].sum())
        return int(late_ns[min(len(late_ns) - 1, int(np.searchsorted(lost_ns, part * whole_ns)))])

    def row(self, began_ns: int, ended_ns: int) -> Row:
        """The columns of a cell that ran between two instants."""
        late_ns = self.late_ns(began_ns, ended_ns)
        if not len(late_ns):
            return {"gap_ms": 0.0, "gap_p99_ms": 0.0, "in_gaps": 0.0}
        return {
            "gap_ms": int(late_ns.max()) / NS_PER_MS,
            "gap_p99_ms": self.beyond_ns(began_ns, ended_ns) / NS_PER_MS,
            "in_gaps": float(late_ns[late_ns > _NOTICED_NS].sum()) / max(1, ended_ns - began_ns),
        }


def factor_for(late_p99_ms: float) -> int:
    """The smallest factor that puts the SLO well above the host's gaps."""
    for factor in FACTORS:
        if factor * SLO_MS >= ABOVE_GAPS * late_p99_ms:
            return factor
    raise InputError(
        f"this host wakes programs {late_p99_ms:.3g} ms late (p99), too late even for a factor of {FACTORS[-1]}; give"
        " --pace, or use a quieter host"
    )


def chosen_factor() -> tuple[int, float]:
    """The factor for this host, and its gaps at the 99th percentile in ms, watched for a few seconds."""
    with Gaps.watched() as gaps:
        time.sleep(_TRIAL_S)
    late_p99_ms = gaps.beyond_ns() / NS_PER_MS
    return factor_for(late_p99_ms), late_p99_ms
