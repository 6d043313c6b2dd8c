"""Rows of results on paced brokers, and the claims that all of them have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.lab.live.cluster import NOISE
from srtm.lab.result import VARIANT, Claim, Row, Rows
from srtm.lab.world import QUANTILES, best_split, facts
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from srtm.lab.live.paced import Seen
    from srtm.lab.virtual import DeclaredTopic
    from srtm.model.latency import Latency

NEAR = 0.15  # tolerated difference between measured and simulated tails
PAPERS, MARGIN = QUANTILES
COLUMNS = {
    "policy": "policy",
    "k": "k",
    "p99_ms": "p99 ms",
    "simulated_p99_ms": "simulated",
    "scheduled_p99_ms": "of the schedule",
    "access_p99_ms": "p99 access ms",
    "meets_slo": "SLO met",
    "late_p99_ms": NOISE["late_p99_ms"],
    "gap_p99_ms": "gaps p99 ms",
    "gap_ms": NOISE["gap_ms"],
    "in_gaps": NOISE["in_gaps"],
}


def row(seen: Seen, b_at: str) -> Row:
    """A run in the paper's time; `load late` and gaps are by this host's clock."""
    return {
        VARIANT: b_at,
        **facts(seen.found),
        "simulated_p99_ms": _worst_ms(seen.simulated),
        "scheduled_p99_ms": _worst_ms(seen.scheduled.by_broker),
        "late_p99_ms": seen.late_p99_ms,
        "lost": seen.lost,
    }


def best_k(topic: DeclaredTopic, policy: str, seed: int, loads_kmps: Sequence[int] = ()) -> int:
    """The number of brokers of a baseline, as the simulator chooses it."""
    from srtm.lab.world import Simulated

    return best_split(Simulated(), topic, policy, seed, loads_kmps=loads_kmps).k


def _worst_ms(by_broker: Mapping[str, Latency]) -> float:
    return max(seen.total.p99 for seen in by_broker.values()) / NS_PER_MS


def _near(rows: Rows, column: str) -> tuple[bool, str]:
    apart = [abs(live / model - 1) for live, model in zip(rows.column("p99_ms"), rows.column(column), strict=True)]
    within = sum(each <= NEAR for each in apart)
    return within == len(apart), f"{within} of {len(apart)} runs; {max(apart):.1%} apart at most"


def _as_recorded(rows: Rows) -> tuple[bool, str]:
    return _near(rows, "simulated_p99_ms")


def _as_scheduled(rows: Rows) -> tuple[bool, str]:
    return _near(rows, "scheduled_p99_ms")


def _lossless(rows: Rows) -> tuple[bool, str]:
    lost = sum(rows.column("lost"))
    return lost == 0, f"{lost:.0f} lost"


AS_RECORDED = Claim(
    "the model gives the recorded p99, from the recorded arrivals (within 15 %)", "—", _as_recorded, kind="ours"
)
AS_SCHEDULED = Claim("so does the simulator, from the schedule", "—", _as_scheduled, kind="ours")
LOSSLESS = Claim("no message is lost", "—", _lossless, kind="ours")
