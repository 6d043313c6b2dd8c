"""Safety and liveness of a topic's shares, as functions for tests and the running system.

Safety: what brokers have in force adds up to no more than the contract, at every instant (`split.within`).
Liveness: all of the contract is in force, and every broker with waiting messages has a share. `short` says what is
missing now. Faults make a topic short, but not for longer than `patience_s` after the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.units import NANO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.model.bucket import TokenBucket

IN_FORCE = 0.99  # of r and of b; integers, floors and rounding cost less than the rest


def in_force_ratio(whole: TokenBucket, in_force: Mapping[str, TokenBucket]) -> float:
    """The part of the contract that brokers have in force: of r or of b, whichever is less."""
    r_mtps = sum(share.r_mtps for share in in_force.values())
    b_ntok = sum(share.b_ntok for share in in_force.values())
    return min(r_mtps / whole.r_mtps, b_ntok / whole.b_ntok)


def short(whole: TokenBucket, in_force: Mapping[str, TokenBucket], waiting: Mapping[str, int]) -> str | None:
    """What a topic is short of, as a sentence; None if nothing is missing. `waiting` maps brokers to messages."""
    ratio = in_force_ratio(whole, in_force)
    if ratio < IN_FORCE:
        return f"only {100 * ratio:.3g} % of (r, b) is in force"
    starved = sorted(name for name, messages in waiting.items() if messages and name not in in_force)
    # If there are fewer tokens than brokers, brokers take turns; that some wait is not a fault.
    if starved and len(in_force) < whole.b_ntok // NANO_PER_TOKEN:
        return f"messages wait at {', '.join(starved)} without a share"
    return None


def patience_s(lease_s: float, exchange_s: float) -> float:
    """How long a topic may be short after the last fault: a lease, for shares still in force, and two exchanges."""
    return lease_s + 2 * exchange_s
