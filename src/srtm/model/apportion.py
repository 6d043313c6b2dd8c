"""Whole numbers in proportion, by largest remainders; `rounding` has tables of them."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from srtm.errors import SplitError
from srtm.units import Number, exact

if TYPE_CHECKING:
    from collections.abc import Sequence


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
            f"{len(wants)} shares need at least {sum(least)} together, but there is only {total}: use fewer shares",
            total=total,
            floors=least,
        )
    if not any(wants):
        wants = [Fraction(1)] * len(wants)
    # A share that its proportion would leave below the floor gets the floor. That lowers the other shares, so repeat
    # until none is below.
    free = set(range(len(wants)))
    while True:
        rest = total - sum(least[i] for i in range(len(wants)) if i not in free)
        weight = sum(wants[i] for i in free)
        bound = {i for i in free if wants[i] * rest < least[i] * weight}
        if not bound:
            break
        free -= bound
    shares = list(least)
    ideal = {i: wants[i] * rest / weight for i in free}
    for i in free:
        shares[i] = int(ideal[i])
    by_remainder = sorted(free, key=lambda i: (shares[i] - ideal[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
