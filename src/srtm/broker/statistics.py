"""What a topic did, second by second: rates, backlog, and latencies as they were.

Values are kept as they come, one append a message, and summed up once a second; percentiles are exact. The history is
ten seconds, which is the TB Adaptor's window.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from srtm.model.latency import Distribution, Sketch
from srtm.units import NANO_PER_TOKEN, NS_PER_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

HISTORY_S = 10
_MOST = 200_000  # values of a second that are kept: what one core can carry, and more


@dataclass(frozen=True, slots=True)
class Second:
    """One second of a topic."""

    at_ns: int
    messages: int
    bytes: int
    released: int
    sent: int
    dropped: int
    waiting: int
    max_backlog_ntok: int
    largest_batch: int
    access: Distribution | None
    processing: Distribution | None
    total: Distribution | None
    # For the controller, where the topic is under contract: what adds up over seconds and brokers.
    over: int = 0  # latencies above the SLO's limit
    access_sketch: Sketch = field(default_factory=Sketch)
    total_sketch: Sketch = field(default_factory=Sketch)
    processing_sketch: Sketch = field(default_factory=Sketch)

    @property
    def number(self) -> int:
        """The second, counted by the clock."""
        return self.at_ns // NS_PER_S

    @property
    def max_backlog(self) -> float:
        """The largest backlog in tokens."""
        return self.max_backlog_ntok / NANO_PER_TOKEN


class Recent:
    """The second that is running, and those before it."""

    __slots__ = (
        "access",
        "bytes",
        "dropped",
        "history",
        "largest_batch",
        "messages",
        "processing",
        "released",
        "sent",
        "total",
    )

    def __init__(self) -> None:
        self.history: deque[Second] = deque(maxlen=HISTORY_S)
        self._clear()

    def _clear(self) -> None:
        self.messages = self.bytes = self.released = self.sent = self.dropped = self.largest_batch = 0
        self.access = array("q")
        self.processing = array("q")
        self.total = array("q")

    def close(self, at_ns: int, waiting: int, max_backlog_ntok: int, slo_ns: int | None = None) -> Second:
        """End the second; with an SLO, also sum it up for the controller."""
        access, total = np.frombuffer(self.access, np.int64), np.frombuffer(self.total, np.int64)
        processing = np.frombuffer(self.processing, np.int64)
        sketched: dict[str, Any] = {}
        if slo_ns is not None and len(access):
            over = int(((total if len(total) else access) > slo_ns).sum())
            sketched = {
                "over": over,
                "access_sketch": Sketch.of(access),
                "total_sketch": Sketch.of(total),
                "processing_sketch": Sketch.of(processing),
            }
        second = Second(
            at_ns,
            self.messages,
            self.bytes,
            self.released,
            self.sent,
            self.dropped,
            waiting,
            max_backlog_ntok,
            self.largest_batch,
            _distribution(access),
            _distribution(processing),
            _distribution(total),
            **sketched,
        )
        self.history.append(second)
        self._clear()
        return second

    @property
    def last_messages(self) -> int:
        """Messages of the last whole second."""
        return self.history[-1].messages if self.history else 0

    @property
    def full(self) -> bool:
        """Whether more values of this second would only cost memory."""
        return len(self.total) >= _MOST


def _distribution(values: NDArray[np.int64]) -> Distribution | None:
    return Distribution.of(values) if len(values) else None
