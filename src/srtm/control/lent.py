"""Lending in a cluster's numbers: what brokers of a topic asked, lent and borrowed, by broker and by pair.

In tokens and milliseconds, since the brokers started; part of the snapshots of `control.statistics`. Both sides of a
pair report it: the lender says what it lent, and the borrower what it asked for, took and lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtm.control import lending
from srtm.model.latency import Sketch
from srtm.protocol.exchange import ROUND_TRIP_QUANTILES
from srtm.units import NANO_PER_TOKEN, NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from srtm.control.reports import Seen
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic
    from srtm.protocol.exchange import Lent


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Two points of the latest round trips of asks, in milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class LentStatistics:
    """What a broker has asked, lent and borrowed of a topic."""

    asked: int = 0  # asks, not tokens
    unanswered: int = 0
    lent: float = 0.0
    borrowed: float = 0.0
    lost: float = 0.0  # came too late, or had no room left
    rtt_ms: RoundTrips | None = None


@dataclass(frozen=True, slots=True)
class PairStatistics(LentStatistics):
    """What one broker has asked of another, and what that one lent to it."""

    lender: str = ""
    borrower: str = ""
    per_second: float = 0.0  # tokens lent, lately
    refused: int = 0  # asks that came too often


@dataclass(frozen=True, slots=True)
class Accused:
    """A broker that lied about lending, and what speaks against it."""

    broker: str
    evidence: str


@dataclass(frozen=True, slots=True)
class LendingStatistics(LentStatistics):
    """Lending between the brokers of a topic: what the contract says, what brokers do, and their sums."""

    mode: str = "off"  # of the contract
    chosen: str = "off"  # that brokers follow now
    peers: tuple[PairStatistics, ...] = ()
    accused: tuple[Accused, ...] = ()


def of_broker(topic: ManagedTopic, seen: Seen) -> LentStatistics | None:
    """What a broker reports; None if the contract lets nobody lend, or if it never did."""
    lent = seen.lent
    if lent is None or topic.contract.lending == "off":
        return None
    return LentStatistics(
        asked=lent.asks,
        unanswered=lent.unanswered,
        lent=lent.lent_ntok / NANO_PER_TOKEN,
        borrowed=lent.borrowed_ntok / NANO_PER_TOKEN,
        lost=lent.lost_ntok / NANO_PER_TOKEN,
        rtt_ms=_round_trips([lent]),
    )


def of_topic(state: ControllerState, topic: ManagedTopic, parts: list[LentStatistics]) -> LendingStatistics:
    """The sums over a topic's brokers, and every pair that has lent or asked."""
    reports = {name: seen.lent for name, seen in topic.layout.seen.items() if seen.lent}
    return LendingStatistics(
        asked=sum(part.asked for part in parts),
        unanswered=sum(part.unanswered for part in parts),
        lent=sum(part.lent for part in parts),
        borrowed=sum(part.borrowed for part in parts),
        lost=sum(part.lost for part in parts),
        rtt_ms=_round_trips(reports.values()) if parts else None,
        mode=topic.contract.lending,
        chosen=lending.lending(state, topic),
        peers=_pairs(topic, reports) if parts else (),
        accused=tuple(Accused(name, evidence) for name, evidence in sorted(topic.lending.accused.items())),
    )


def _pairs(topic: ManagedTopic, reports: dict[str, Lent]) -> tuple[PairStatistics, ...]:
    told = {(name, peer.name): peer for name, lent in reports.items() for peer in lent.peers}
    pairs = sorted({*told, *((peer, name) for name, peer in told)})
    found = []
    for lender, borrower in pairs:
        given, got = told.get((lender, borrower)), told.get((borrower, lender))
        flow = topic.layout.seen[lender].lent_tps if lender in reports else {}
        pair = PairStatistics(
            lender=lender,
            borrower=borrower,
            asked=got.asks if got else 0,
            unanswered=got.unanswered if got else 0,
            refused=given.refused if given else 0,
            lent=given.lent_ntok / NANO_PER_TOKEN if given else 0.0,
            borrowed=got.borrowed_ntok / NANO_PER_TOKEN if got else 0.0,
            lost=got.lost_ntok / NANO_PER_TOKEN if got else 0.0,
            per_second=flow.get(borrower, 0.0),
            rtt_ms=_points(Sketch.read(got.round_trips)) if got else None,
        )
        if pair.asked or pair.lent or pair.refused:
            found.append(pair)
    return tuple(found)


def _round_trips(reports: Iterable[Lent]) -> RoundTrips | None:
    whole = Sketch()
    for lent in reports:
        for peer in lent.peers:
            whole.add(Sketch.read(peer.round_trips))
    return _points(whole)


def _points(sketch: Sketch) -> RoundTrips | None:
    if not sketch.counts:
        return None
    p50, p99 = sketch.quantiles_ns(ROUND_TRIP_QUANTILES)
    return RoundTrips(p50 / NS_PER_MS, p99 / NS_PER_MS)
