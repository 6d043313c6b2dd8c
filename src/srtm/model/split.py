"""One bucket into exact shares.

Largest remainders, in whole quanta (milli-tokens a second, nano-tokens), so that Σ r_l = r and Σ b_l = b hold as
integers. A share of b is any number of tokens from 1 up, not a whole number: see
docs/adr/0002-fractional-tokens.md for what 4.33 tokens mean.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from srtm.errors import SplitError
from srtm.model.bucket import TokenBucket
from srtm.units import NANO_PER_TOKEN, Number, exact

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def apportion(total: int, weights: Sequence[Number], floors: Sequence[int] | int = 0) -> list[int]:
    """Integers that add up to `total`, in proportion to `weights`, each at least its floor.

    Where the floors bind, the rest is shared by the others in proportion. Equal remainders go to the earlier share.
    """
    wants = [exact(weight, "weight") for weight in weights]
    least = [floors] * len(wants) if isinstance(floors, int) else list(floors)
    if not wants:
        raise SplitError("nothing to split over: there must be at least one share")
    if any(want < 0 for want in wants):
        raise SplitError(f"weights must not be negative: {[float(want) for want in wants]}")
    if sum(least) > total:
        raise SplitError(
            f"{len(wants)} shares of at least {least} need {sum(least)}, but there is only {total}: use fewer shares",
            total=total,
            floors=least,
        )
    if not any(wants):
        wants = [Fraction(1)] * len(wants)
    # Shares that their proportion would leave below the floor get the floor; taking them out only lowers what
    # the others get, so repeat until no more bind.
    free = set(range(len(wants)))
    while True:
        rest = total - sum(least[i] for i in range(len(wants)) if i not in free)
        weight = sum(wants[i] for i in free)
        bound = {i for i in free if wants[i] * rest < least[i] * weight} if weight else set()
        if not bound:
            break
        free -= bound
    shares = list(least)
    ideal = {i: wants[i] * rest / weight if weight else Fraction(rest, len(free)) for i in free}
    for i in free:
        shares[i] = int(ideal[i])
    by_remainder = sorted(free, key=lambda i: (shares[i] - ideal[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def split(
    bucket: TokenBucket,
    r_weights: Sequence[Number],
    b_weights: Sequence[Number] | None = None,
    *,
    min_b: Number | Sequence[Number] = 1,
) -> list[TokenBucket]:
    """Sub-token buckets that add up to `bucket`: r by `r_weights`, b by `b_weights` (the same unless given).

    `min_b` is the least b of each share: at least 1 token, better the largest batch that its publishers send.
    """
    b_weights = r_weights if b_weights is None else b_weights
    if len(b_weights) != len(r_weights):
        raise SplitError(f"{len(r_weights)} weights for r but {len(b_weights)} for b: there must be one each")
    least = [min_b] * len(r_weights) if isinstance(min_b, Number) else list(min_b)
    rates = apportion(bucket.r_mtps, r_weights, 1)
    floors = [max(NANO_PER_TOKEN, round(exact(tokens, "min_b") * NANO_PER_TOKEN)) for tokens in least]
    try:
        bursts = apportion(bucket.b_ntok, b_weights, floors)
    except SplitError as error:
        if sum(floors) <= bucket.b_ntok:
            raise
        raise SplitError(
            f"b = {bucket.b:g} tokens cannot be split {len(floors)} ways with at least"
            f" {min(floors) / NANO_PER_TOKEN:g} tokens each: use fewer brokers or a larger b",
            **error.facts,
        ) from None
    return [TokenBucket(r_mtps, b_ntok) for r_mtps, b_ntok in zip(rates, bursts, strict=True)]


def within(whole: TokenBucket, shares: Iterable[TokenBucket]) -> bool:
    """The invariant of every grant: Σ r_l ≤ r and Σ b_l ≤ b."""
    held = list(shares)
    return sum(share.r_mtps for share in held) <= whole.r_mtps and sum(share.b_ntok for share in held) <= whole.b_ntok
