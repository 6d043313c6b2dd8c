"""Whole numbers in proportion: one row by largest remainders, a table by controlled rounding."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import SplitError
from srtm.units import Number, exact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]


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


def proportional_table(sizes: Ints, weights: Sequence[int], rng: np.random.Generator) -> Ints:
    """Each row's size shared out by `weights`: every entry is its exact share rounded up or down, rows add up.

    Column sums are their exact shares rounded up or down, too, if possible; which of the two cannot always be
    chosen (controlled rounding). Each row is rounded by itself from a random start; then units that were rounded up are
    moved along rows, from columns that got too many to columns that got too few.
    """
    total = sum(weights)
    if total <= 0:
        raise SplitError(f"weights must add up to more than 0: {list(weights)}")
    products = sizes.astype(object)[:, None] * np.array(weights, object)[None, :]
    floors = (products // total).astype(np.int64)
    starts = np.array([int(rng.integers(0, total)) for _ in sizes], object)
    rounded = ((np.cumsum(products, axis=1) + starts[:, None]) // total).astype(np.int64)
    raised = np.diff(rounded, axis=1, prepend=0) > floors
    fractional = products % total > 0
    surplus = (floors + raised).sum(axis=0) - np.array(apportion(int(sizes.sum()), weights), np.int64)
    for giver in np.flatnonzero(surplus > 0).tolist():
        while surplus[giver] > 0 and (path := _path_to_deficit(giver, surplus, raised, fractional & ~raised)):
            for row, source, target in path:
                raised[row, source], raised[row, target] = False, True
            surplus[giver] -= 1
            surplus[path[-1][2]] += 1
    return np.asarray(floors + raised, np.int64)


def _path_to_deficit(giver: int, surplus: Ints, raised: Flags, raisable: Flags) -> list[tuple[int, int, int]] | None:
    """Moves (row, from column, to column) that take a unit from `giver` to a column that lacks one."""
    came: dict[int, tuple[int, int] | None] = {giver: None}
    queue = deque([giver])
    while queue:
        column = queue.popleft()
        rows = np.flatnonzero(raised[:, column])
        for target in np.flatnonzero(raisable[rows].any(axis=0)).tolist():
            if target in came:
                continue
            came[target] = (int(rows[np.argmax(raisable[rows, target])]), column)
            if surplus[target] < 0:
                return _trace(came, target)
            queue.append(target)
    return None


def _trace(came: dict[int, tuple[int, int] | None], target: int) -> list[tuple[int, int, int]]:
    path = []
    while (step := came[target]) is not None:
        row, source = step
        path.append((row, source, target))
        target = source
    return path[::-1]
