"""What one broker has reported of one topic, and which reports are plausible."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from srtm.errors import InputError
from srtm.model.latency import Sketch
from srtm.model.tb_adaptor import History, Step
from srtm.units import NANO_PER_TOKEN, NS_PER_S, exact

if TYPE_CHECKING:
    from srtm.model.bucket import TokenBucket
    from srtm.protocol.exchange import Contract, Lent, PeerLent, Second

MOST_MESSAGES = 10_000_000  # a second, or waiting: more than any broker can have
KEPT_S = 10  # seconds of history; brokers keep as many
_MOMENT_NS = 40_000_000  # too short an interval to measure a rate over
_FLOW_NS = NS_PER_S  # the same for lent tokens, which come in bursts


@dataclass(slots=True)
class Seen:
    """What one broker has reported of one topic."""

    history: History = field(default_factory=History)
    seconds: deque[Second] = field(default_factory=lambda: deque(maxlen=KEPT_S))
    waiting: int = 0
    carried_mps: float = 0.0  # between its last two reports
    arrived: int | None = None  # messages since the broker started, and when it reported them
    arrived_ns: int = 0
    publishers: int = 0
    roll: frozenset[str] | None = None
    durable: bool = False
    lent: Lent | None = None  # None if it never lent
    lent_tps: dict[str, float] = field(default_factory=dict)  # tokens per second lent to each peer, lately
    flow: tuple[int, dict[str, int]] | None = None  # when that was counted last, and up to where
    heard_ns: int = 0  # when its newest second came, by our clock
    # Latencies over the seconds kept: from arrival to subscriber, waiting for tokens, and the rest.
    total: Sketch = field(default_factory=Sketch)
    access: Sketch = field(default_factory=Sketch)
    processing: Sketch = field(default_factory=Sketch)

    @property
    def last_number(self) -> int:
        """The number of the newest second."""
        return self.seconds[-1].number if self.seconds else 0

    @property
    def rate_mps(self) -> float:
        """Messages of the newest second."""
        return self.seconds[-1].messages if self.seconds else 0.0

    @property
    def mean_mps(self) -> float:
        """Mean rate over the window; before the first second is known, the rate between the last two reports."""
        return float(self.history.mean_messages) if len(self.history) else self.carried_mps

    def count(self, arrived: int, lately_mps: int, now_ns: int) -> None:
        """Update the current rate; the first report counts with its last second, whichever contract that was under."""
        if self.arrived is None or arrived < self.arrived:
            self.carried_mps = min(lately_mps, MOST_MESSAGES)
        elif now_ns - self.arrived_ns < _MOMENT_NS:
            return
        else:
            self.carried_mps = min((arrived - self.arrived) * NS_PER_S / (now_ns - self.arrived_ns), MOST_MESSAGES)
        self.arrived, self.arrived_ns = arrived, now_ns

    def hear_lent(self, lent: Lent | None, now_ns: int) -> None:
        """Take in what it has lent and borrowed, and count how much it lends now."""
        self.lent = with_sound_sketches(lent) if lent else None
        totals = {peer.name: peer.lent_ntok for peer in lent.peers} if lent else {}
        since_ns, before = self.flow or (now_ns, totals)
        if self.flow is None:
            self.flow = now_ns, totals
        elif now_ns - since_ns >= _FLOW_NS:
            seconds = (now_ns - since_ns) / NS_PER_S
            grown = {name: (ntok - before.get(name, 0)) / NANO_PER_TOKEN for name, ntok in totals.items()}
            self.lent_tps = {name: max(0.0, tokens / seconds) for name, tokens in grown.items()}
            self.flow = now_ns, totals

    def forget(self) -> None:
        """Drop all seconds: the broker's clock was set."""
        self.seconds.clear()
        self.history = History()
        self.total, self.access, self.processing = Sketch(), Sketch(), Sketch()

    def hear(self, second: Second, now_ns: int, window_s: int) -> None:
        """Add a second, and drop the oldest; the TB Adaptor's history covers its own window."""
        forgotten = self.seconds[0] if len(self.seconds) == KEPT_S else None
        self.seconds.append(second)
        self.heard_ns = now_ns
        for part in ("total", "access", "processing"):
            window: Sketch = getattr(self, part)
            window.add(Sketch.read(getattr(second, part)))
            if forgotten is not None:
                window.remove(Sketch.read(getattr(forgotten, part)))
        backlogs, batch = Sketch.read(second.backlogs), max(1, second.largest_batch)
        self.history.add(Step(second.number, second.messages, second.max_backlog_ntok, batch, backlogs), window_s)


def too_slow(contract: Contract, second: Second) -> bool:
    """Whether messages were late in a second because the broker was busy."""
    allowed = 1 - exact(contract.quantile, "quantile")
    return second.over > allowed * second.sent and not waits_for_tokens(contract, second)


def waits_for_tokens(contract: Contract, second: Second) -> bool:
    """Whether tokens, not the broker, took much of a topic's SLO in a second."""
    return Sketch.read(second.access).quantile_ns(contract.quantile) >= contract.slo_ns // 2


def with_sound_sketches(lent: Lent) -> Lent:
    """The same report, without round trips that cannot be read."""
    return msgspec.structs.replace(lent, peers=[_with_sound_sketch(peer) for peer in lent.peers])


def _with_sound_sketch(peer: PeerLent) -> PeerLent:
    try:
        Sketch.read(peer.round_trips)
    except InputError:
        return msgspec.structs.replace(peer, round_trips=[])
    return peer


def believable(second: Second, bucket: TokenBucket) -> bool:
    """Whether a broker can have seen such a second of a topic under this bucket."""
    try:
        parts = (second.access, second.total, second.processing, second.backlogs)
        sketches = [Sketch.read(part) for part in parts]
    except InputError:
        return False
    counts = (second.messages, second.largest_batch, second.sent, *(sketch.total for sketch in sketches))
    backlog_ntok = max(second.max_backlog_ntok, sketches[-1].quantile_ns(1) * NANO_PER_TOKEN) - bucket.b_ntok
    return second.over <= second.sent and max(*counts, backlog_ntok // NANO_PER_TOKEN) <= MOST_MESSAGES
