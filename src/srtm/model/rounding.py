"""A table of whole numbers in proportion, by controlled rounding: rows, columns and entries keep their shares."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import SplitError
from srtm.model.apportion import apportion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]


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
