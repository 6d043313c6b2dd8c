"""The current second of a topic, in which it counts latencies, and its recent ones.

A topic keeps every latency of the current second, so percentiles are exact, and the summaries of the last ten seconds,
which is the TB Adaptor's window.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

from srtm.broker.statistics import SecondStatistics
from srtm.model.latency import Distribution, Sketch
from srtm.units import PICO_PER_TOKEN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HISTORY_S = 10
_MOST = 200_000  # latencies kept per second: more messages than one core can handle


class Recent:
    """The current second of a topic, and its recent ones."""

    __slots__ = (
        "access",
        "arrivals",
        "backlogs",
        "dropped",
        "history",
        "largest_batch",
        "messages",
        "processing",
        "released",
        "sent",
        "slo_ns",
        "total",
    )

    def __init__(self) -> None:
        self.slo_ns: int | None = None  # the latency limit that the topic was promised
        self.history: deque[SecondStatistics] = deque(maxlen=HISTORY_S)
        self._clear()

    def _clear(self) -> None:
        self.messages = self.released = self.sent = self.dropped = self.largest_batch = 0
        self.access = array("q")
        self.processing = array("q")
        self.total = array("q")
        # Of each turn that let arrivals through the bucket: the backlog behind the last one, in pico-tokens, which may
        # exceed 64 bits, and how many there were.
        self.backlogs: list[int] = []
        self.arrivals: list[int] = []

    def close(self, at_ns: int, waiting: int, max_backlog_ntok: int) -> SecondStatistics:
        """End the second, and return its summary; with an SLO, sketches for the controller, too."""
        second = SecondStatistics(
            at_ns,
            self.messages,
            self.released,
            self.sent,
            self.dropped,
            waiting,
            max_backlog_ntok,
            self.largest_batch,
            **self._latencies(),
        )
        self.history.append(second)
        self._clear()
        return second

    def _latencies(self) -> dict[str, Any]:
        """Distributions and, with an SLO, sketches. Seconds without messages have none, and do not wait for numpy."""
        if not (self.access or self.total or self.backlogs):
            return {"access": None, "processing": None, "total": None}
        import numpy as np  # here, because a broker that starts must not wait for it

        values = {name: np.frombuffer(getattr(self, name), np.int64) for name in ("access", "processing", "total")}
        found: dict[str, Any] = {name: Distribution.of(each) if len(each) else None for name, each in values.items()}
        if self.slo_ns is not None and len(values["access"]):
            judged = values["total"] if len(values["total"]) else values["access"]
            found["over"] = int((judged > self.slo_ns).sum())
            found |= {f"{name}_sketch": Sketch.of(each) for name, each in values.items()}
        if self.slo_ns is not None and self.backlogs:
            found["backlog_sketch"] = Sketch.of(_found(self.backlogs, self.arrivals))
        return found

    @property
    def last_messages(self) -> int:
        """Messages of the last whole second."""
        return self.history[-1].messages if self.history else 0

    @property
    def full(self) -> bool:
        """Whether this second has as many latencies as are kept."""
        return len(self.total) >= _MOST


def _found(backlogs: list[int], arrivals: list[int]) -> NDArray[np.int64]:
    """The backlog that each message found, itself included, in whole tokens: arrivals of a turn come a token apart."""
    import numpy as np

    last = np.ceil(np.array(backlogs, np.float64) / PICO_PER_TOKEN).astype(np.int64)
    counts = np.array(arrivals, np.int64)
    behind = np.repeat(np.cumsum(counts), counts) - np.arange(1, counts.sum() + 1)
    found: NDArray[np.int64] = np.maximum(1, np.repeat(last, counts) - behind)
    return found
