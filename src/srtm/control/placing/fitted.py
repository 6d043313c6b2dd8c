"""The result of a fitting, as the store keeps it and the API shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.control.placing.layout import Layout


@dataclass(frozen=True, slots=True)
class FittingRound:
    """One measured round: latency at the SLO's quantile by broker, and whether the verdict was certain."""

    k: int
    latency_ns: Mapping[str, int]
    within: bool
    certain: bool
    seconds: float
    broken: Mapping[str, str] = field(default_factory=dict)  # the neighbour that missed its SLO, by broker


@dataclass(frozen=True, slots=True)
class Fitted:
    """How a fitting ended."""

    policy: str
    met: bool
    k: int
    rate_mps: float  # that was placed
    rounds: tuple[FittingRound, ...]
    elapsed_s: float
    reason: str = ""


def unmet(policy: str, layout: Layout, reason: str, rounds: Iterable[FittingRound] = ()) -> Fitted:
    """A result without a fit; what is placed stays where it is."""
    rate_mps = sum(layout.rates().values())
    return Fitted(policy, False, len(layout.place.brokers), rate_mps, tuple(rounds), 0.0, reason)


def described(fitted: Fitted) -> dict[str, Any]:
    """A result as JSON."""
    return {
        "policy": fitted.policy,
        "met": fitted.met,
        "k": fitted.k,
        "rate": fitted.rate_mps,
        "elapsed_s": fitted.elapsed_s,
        "reason": fitted.reason,
        "rounds": [
            {
                "k": each.k,
                "latency_ns": dict(each.latency_ns),
                "within": each.within,
                "certain": each.certain,
                "seconds": each.seconds,
                "broken": dict(each.broken),
            }
            for each in fitted.rounds
        ],
    }


def read(kept: dict[str, Any]) -> Fitted:
    """A result from its JSON."""
    rounds = tuple(FittingRound(**each) for each in kept["rounds"])
    return Fitted(kept["policy"], kept["met"], kept["k"], kept["rate"], rounds, kept["elapsed_s"], kept["reason"])
