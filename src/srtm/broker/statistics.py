"""A broker's statistics: frozen snapshots, taken on demand, and the seconds in which a topic counts latencies.

`Broker`, `Topic`, `Channel`, `Connection`, `Engine`, `Lane` and `Probe` each have a `statistics()` that returns one of
these snapshots. `/stats`, `/metrics`, the controller's exchange and the tests read nothing else, so they agree.

A topic keeps every latency of the current second, so percentiles are exact, and the summaries of the last ten seconds,
which is the TB Adaptor's window.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from srtm.model.latency import Distribution, Sketch
from srtm.units import NANO_PER_TOKEN, NS_PER_S, PICO_PER_TOKEN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from srtm.model.bucket import TokenBucket
    from srtm.protocol.exchange import Lent

HISTORY_S = 10
_MOST = 200_000  # latencies kept per second: more messages than one core can handle


@dataclass(frozen=True, slots=True)
class SecondStatistics:
    """One second of a topic."""

    at_ns: int  # when it ended
    messages: int
    released: int
    sent: int
    dropped: int
    waiting: int  # at its end
    max_backlog_ntok: int
    largest_batch: int
    access: Distribution | None
    processing: Distribution | None
    total: Distribution | None
    # Only for a topic under contract: counts that add up over seconds and brokers.
    over: int = 0  # latencies above the SLO's limit
    access_sketch: Sketch = field(default_factory=Sketch)
    total_sketch: Sketch = field(default_factory=Sketch)
    processing_sketch: Sketch = field(default_factory=Sketch)
    backlog_sketch: Sketch = field(default_factory=Sketch)  # that messages found, in whole tokens

    @property
    def number(self) -> int:
        """The number of the second on the broker's wall clock."""
        return self.at_ns // NS_PER_S

    @property
    def max_backlog(self) -> float:
        """The largest backlog in tokens."""
        return self.max_backlog_ntok / NANO_PER_TOKEN


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """One connection: a publisher, a consumer, or both."""

    client_id: str
    hostname: str
    address: str
    state: int  # nsqd's number
    ready: int
    in_flight: int
    messages: int  # sent to it
    finished: int
    requeued: int
    published: tuple[tuple[str, int], ...]  # messages by topic
    connected_ns: int
    msg_timeout_ms: int
    sample_rate: int
    deflate: bool
    snappy: bool
    tls: tuple[str, str] | None  # cipher suite and version
    user_agent: str
    permit: tuple[str, str] | None  # identity, and its URL, as the auth server named them


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """One channel of a topic."""

    name: str
    depth: int  # messages waiting for a consumer
    in_flight: int
    deferred: int
    messages: int
    requeued: int
    timed_out: int
    finished: int
    dropped: int  # by an ephemeral channel that was full
    lost: int  # deleted by retention before the channel finished them
    paused: bool
    consumers: int
    clients: tuple[ClientStatistics, ...] | None  # None unless asked for


@dataclass(frozen=True, slots=True)
class LogExtent:
    """The log of a disk topic: its identity, the oldest offset it keeps, the next one, and its size."""

    log: str | None
    begin: int
    end: int
    bytes: int  # approximately


@dataclass(frozen=True, slots=True)
class ProbeStatistics:
    """Messages that a probe timed from publisher to consumer, over the last ten seconds."""

    messages: int
    end_to_end: Distribution | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """A topic on its way to a delivery engine."""

    kind: str
    open: bool
    reason: str | None  # why the lane is shut
    unacknowledged: int
    unacknowledged_bytes: int
    in_log: int  # spooled messages: accepted, and not yet read back from the log
    lost: int  # deleted by retention before the engine acknowledged them
    probe: ProbeStatistics | None


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A delivery engine, and the connection to it."""

    kind: str
    address: str
    delivery: str  # where subscribers find it
    connected: bool
    unacknowledged: int
    in_flight: int
    acknowledged: int
    resent: int
    refused: int
    reconnections: int
    last_error: str | None
    trouble: str | None  # why it accepts no messages of any topic, or of one


@dataclass(frozen=True, slots=True)
class TopicStatistics:
    """One topic at one broker."""

    name: str
    messages: int  # received, counted at the end of a turn
    arrived: int  # received, including the current turn
    bytes: int
    waiting: int  # for tokens, in memory or spooled
    depth: int  # waiting, or released and held for a first channel
    paused: bool
    closed: bool  # under contract, and without a share here
    limit: TokenBucket | None
    tokens: float | None
    late: int  # messages with an earlier arrival time than their predecessor
    log: LogExtent | None
    lane: LaneStatistics | None
    channels: tuple[ChannelStatistics, ...]
    seconds: tuple[SecondStatistics, ...]  # the oldest first
    lent: Lent | None  # None if its brokers do not lend

    @property
    def rate_mps(self) -> int:
        """Messages of the last whole second."""
        return self.seconds[-1].messages if self.seconds else 0


@dataclass(frozen=True, slots=True)
class BrokerStatistics:
    """A broker and its topics."""

    started_ns: int
    connections: int
    unstamped_reads: int  # reads without a kernel time
    lag_ns: int  # maximum lag of the loop in the last second
    busy: float  # processor seconds per second, over the last seconds
    engine: EngineStatistics | None
    topics: tuple[TopicStatistics, ...]  # by name
    publishers: tuple[ClientStatistics, ...] | None  # None unless asked for
    problem: str | None = None  # why messages of disk topics cannot be stored

    @property
    def health(self) -> str:
        """The broker's condition in nsqd's words."""
        return "OK" if self.problem is None else f"NOK - {self.problem}"


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
