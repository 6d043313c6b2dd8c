"""A broker's statistics: frozen snapshots, taken on demand.

`Broker`, `Topic`, `Channel`, `Connection`, `Engine`, `Lane` and `Probe` each have a `statistics()` that returns one of
these snapshots. `/stats`, `/metrics`, the controller's exchange and the tests read nothing else, so they agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srtm.model.latency import Distribution, Sketch
from srtm.units import NANO_PER_TOKEN, NS_PER_S

if TYPE_CHECKING:
    from srtm.model.bucket import TokenBucket
    from srtm.protocol.exchange import Lent


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
