"""Who is there: brokers as the controller knows them, publishers as they declared themselves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from srtm.errors import InputError
from srtm.model.latency import Sketch
from srtm.model.placement import Publisher
from srtm.model.tb_adaptor import History, Step
from srtm.units import NANO_PER_TOKEN, NS_PER_S

if TYPE_CHECKING:
    from srtm.model.bucket import TokenBucket
    from srtm.protocol.exchange import Contract, Second

MOST_MESSAGES = 10_000_000  # in a second, or waiting: more than any broker can have
KEPT_S = 10  # seconds of a topic at a broker that are remembered, as brokers do
_MOMENT_NS = 40_000_000  # in less, nobody can tell how much comes
Status = Literal["joining", "alive", "silent", "lapsed", "dead"]


@dataclass(frozen=True, slots=True)
class Declared:
    """A publisher: how much it sends, how, and whom it bursts with."""

    id: str
    rate_mps: float = 1.0
    group: str | None = None
    process: Literal["poisson", "periodic"] = "poisson"
    batch: int = 1
    jitter_ns: int = 0

    @property
    def publisher(self) -> Publisher:
        """What placing needs of it."""
        return Publisher(self.id, self.rate_mps, self.group)


@dataclass(slots=True)
class Member:
    """A broker. Times are the controller's own, by its monotonic clock."""

    name: str
    host: str
    tcp_port: int
    http_port: int
    mcap_mps: float
    status: Status = "joining"
    draining: bool = False
    incarnation: int = 0
    stamp: int | None = None  # of its last answer, to be echoed
    stamp_heard_ns: int = 0  # when that answer came: no lease by it can last beyond this and the lease
    lease_ends_ns: int | None = None  # the latest time at which its lease may end
    void: int = 0  # answers to exchanges up to this one say nothing: it died or started anew since
    strangers: int = 0  # answers in a row, of another program than this broker
    version: int = 0  # of the list of contracts that it has acknowledged
    rate_mps: int = 0
    free_mps: int = 0
    lag_ns: int = 0
    engine: str = "local"  # that delivers its topics
    engine_problem: str | None = None
    engine_address: str | None = None  # where subscribers find its messages, if not at the broker
    stores: bool = True  # it can keep topics on disk, as far as is known
    oddities: int = 0  # answers that could not be true
    since_ns: int = 0  # when its status last changed

    @property
    def address(self) -> str:
        """Where clients reach it."""
        return f"[{self.host}]:{self.tcp_port}" if ":" in self.host else f"{self.host}:{self.tcp_port}"

    @property
    def url(self) -> str:
        """Where its HTTP is."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.http_port}"

    @property
    def usable(self) -> bool:
        """Whether publishers may be sent to it."""
        return self.status == "alive" and not self.draining

    def can_have(self, contract: Contract) -> bool:
        """Whether it can keep what a topic was promised."""
        return self.stores or contract.durability != "disk"


@dataclass(slots=True)
class Seen:
    """What one broker reported of one topic."""

    history: History = field(default_factory=History)
    seconds: deque[Second] = field(default_factory=lambda: deque(maxlen=KEPT_S))
    waiting: int = 0
    carried_mps: float = 0.0  # messages a second, since its last report
    arrived: int | None = None  # messages ever, and when it said so
    arrived_ns: int = 0
    publishers: int = 0
    roll: frozenset[str] | None = None
    durable: bool = False
    heard_ns: int = 0  # when its newest second came, by our clock
    # Over the seconds that are remembered: from arrival to subscriber, waiting for tokens, and the rest of it.
    total: Sketch = field(default_factory=Sketch)
    access: Sketch = field(default_factory=Sketch)
    processing: Sketch = field(default_factory=Sketch)

    @property
    def last_number(self) -> int:
        """The newest second that was heard of."""
        return self.seconds[-1].number if self.seconds else 0

    @property
    def rate_mps(self) -> float:
        """Messages of the last second."""
        return self.seconds[-1].messages if self.seconds else 0.0

    @property
    def mean_mps(self) -> float:
        """Messages a second over the window; what came lately, until there is one."""
        return float(self.history.mean_messages) if len(self.history) else self.carried_mps

    def count(self, arrived: int, lately_mps: int, now_ns: int) -> None:
        """See how much comes now; at first it is what came in the last second, under whichever contract."""
        if self.arrived is None or arrived < self.arrived:
            self.carried_mps = min(lately_mps, MOST_MESSAGES)
        elif now_ns - self.arrived_ns < _MOMENT_NS:
            return
        else:
            self.carried_mps = min((arrived - self.arrived) * NS_PER_S / (now_ns - self.arrived_ns), MOST_MESSAGES)
        self.arrived, self.arrived_ns = arrived, now_ns

    def forget(self) -> None:
        """Begin anew: the broker's clock was set."""
        self.seconds.clear()
        self.history = History()
        self.total, self.access, self.processing = Sketch(), Sketch(), Sketch()

    def hear(self, second: Second, now_ns: int) -> None:
        """Remember a second, and forget the oldest."""
        forgotten = self.seconds[0] if len(self.seconds) == KEPT_S else None
        self.seconds.append(second)
        self.heard_ns = now_ns
        for part in ("total", "access", "processing"):
            window: Sketch = getattr(self, part)
            window.add(Sketch.read(getattr(second, part)))
            if forgotten is not None:
                window.remove(Sketch.read(getattr(forgotten, part)))
        self.history.add(Step(second.number, second.messages, second.max_backlog_ntok, max(1, second.largest_batch)))


def believable(second: Second, bucket: TokenBucket) -> bool:
    """Whether a broker can have seen such a second of a topic that is under this bucket."""
    try:
        sketches = Sketch.read(second.access), Sketch.read(second.total), Sketch.read(second.processing)
    except InputError:
        return False
    counts = (second.messages, second.largest_batch, second.sent, *(sketch.total for sketch in sketches))
    backlog_ntok = second.max_backlog_ntok - bucket.b_ntok
    return second.over <= second.sent and max(*counts, backlog_ntok // NANO_PER_TOKEN) <= MOST_MESSAGES
