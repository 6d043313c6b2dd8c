"""What a load measured: each second, and in the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from srtm.model.latency import Distribution

_CONSIDERABLE = 0.2  # part of the latency that the load may cause itself before the report says so
_NOTICED_NS = 100_000  # lateness too small to be called a bottleneck


@dataclass(frozen=True, slots=True)
class Progress:
    """One second of a load; percentiles in ns, None if nothing came."""

    second: int
    sent: int
    received: int
    waiting: int  # messages not written yet, or without an answer
    p99_ns: int | None
    late_ns: int | None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load sent, and what became of it."""

    topic: str
    publishers: int
    brokers: list[str]
    seconds: float
    sent: int
    acknowledged: int
    received: int
    lost: int  # acknowledged, and never delivered
    doubled: int
    refused: int
    foreign: int  # other publishers' messages on the channel
    rate: float
    total: Distribution | None  # from the scheduled time to the subscriber's socket, or to the answer
    lateness: Distribution | None  # from the scheduled time to the write
    cpu_us: float  # of this process, per message
    cpu_share: float
    migrations: int
    throttles: int
    reconnections: int
    stopped: bool = False  # before its time
    problem: str | None = None  # the first refusal, or the last trouble of a message without an answer

    @property
    def unanswered(self) -> int:
        """Messages whose fate is unknown."""
        return self.sent - self.acknowledged - self.refused

    @property
    def bottleneck(self) -> bool:
        """Whether the load itself caused a considerable part of the latency that it measured."""
        if self.total is None or self.lateness is None:
            return False
        return self.lateness.p99 > max(_NOTICED_NS, _CONSIDERABLE * self.total.p99)

    def facts(self) -> dict[str, Any]:
        """Return the report as JSON, with times in milliseconds."""
        found = asdict(self)
        for name in ("total", "lateness"):
            times = found.pop(name)
            found[f"{name}_ms"] = times and {key: value / NS_PER_MS for key, value in times.items()}
        return {**found, "unanswered": self.unanswered, "bottleneck": self.bottleneck}
