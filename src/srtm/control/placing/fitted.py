"""The result of a fitting, as the store keeps it and the API shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class FittingRound:
    """One measured round: latency at the SLO's quantile by broker, and whether the verdict was certain."""

    k: int
    latency_ns: Mapping[str, int]
    within: bool
    certain: bool
    seconds: float


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
            }
            for each in fitted.rounds
        ],
    }


def read(kept: dict[str, Any]) -> Fitted:
    """A result from its JSON."""
    rounds = tuple(FittingRound(**each) for each in kept["rounds"])
    return Fitted(kept["policy"], kept["met"], kept["k"], kept["rate"], rounds, kept["elapsed_s"], kept["reason"])
