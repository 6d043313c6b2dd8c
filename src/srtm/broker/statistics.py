"""What a topic did, second by second: rates, backlog, and latencies as they were.

Values are kept as they come, one append a message, and summed up once a second; percentiles are exact. The history is
ten seconds, which is the TB Adaptor's window.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

import numpy as np

from srtm.model.latency import Distribution

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
    max_backlog: float  # tokens
    access: Distribution | None
    processing: Distribution | None
    total: Distribution | None


class Recent:
    """The second that is running, and those before it."""

    __slots__ = ("access", "bytes", "dropped", "history", "messages", "processing", "released", "sent", "total")

    def __init__(self) -> None:
        self.history: deque[Second] = deque(maxlen=HISTORY_S)
        self._clear()

    def _clear(self) -> None:
        self.messages = self.bytes = self.released = self.sent = self.dropped = 0
        self.access = array("q")
        self.processing = array("q")
        self.total = array("q")

    def close(self, at_ns: int, waiting: int, max_backlog: float) -> Second:
        """End the second."""
        second = Second(
            at_ns,
            self.messages,
            self.bytes,
            self.released,
            self.sent,
            self.dropped,
            waiting,
            max_backlog,
            _distribution(self.access),
            _distribution(self.processing),
            _distribution(self.total),
        )
        self.history.append(second)
        self._clear()
        return second

    @property
    def full(self) -> bool:
        """Whether more values of this second would only cost memory."""
        return len(self.total) >= _MOST


def _distribution(values: array[int]) -> Distribution | None:
    return Distribution.of(np.frombuffer(values, np.int64)) if values else None
