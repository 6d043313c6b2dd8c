"""Exact quantiles of values spread over many tasks, without sorting or collecting them all.

Every task sums up its values by a few hundred of them, evenly spaced in order (`Samples`). From all samples the driver
derives two values that a quantile lies between, with less than one value in a hundred between them (`narrowed`). A
second run collects just those, and `selected` picks the right one. No second run is needed if the samples are complete
or the two bounds are neighbours, as with the many equal zeros of messages that did not wait.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtm.units import Number, rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

SAMPLES = 256  # per task and key: 4 KiB for every million values


class Samples(NamedTuple):
    """Some of a set of sorted values, always with the first and the last, and their places in the order."""

    values: Ints
    places: Ints
    total: int
    complete: bool

    @classmethod
    def of(cls, values: Ints) -> Samples:
        """Samples of these values; there must be at least one."""
        step = max(1, len(values) // SAMPLES)
        places = np.append(np.arange(0, len(values) - 1, step), len(values) - 1)
        kept = np.sort(values)[places]
        # Of equal values, the first and the last place tell everything.
        edge = np.ones(len(kept), np.bool_)
        edge[1:-1] = (kept[1:-1] != kept[:-2]) | (kept[1:-1] != kept[2:])
        return cls(kept[edge], places[edge], len(values), step == 1)

    def at_least(self, value: int) -> int:
        """A lower bound of how many values do not exceed this one."""
        found = int(np.searchsorted(self.values, value, side="right"))
        return int(self.places[found - 1]) + 1 if found else 0

    def at_most(self, value: int) -> int:
        """An upper bound of how many values do not exceed this one."""
        found = int(np.searchsorted(self.values, value, side="right"))
        return int(self.places[found]) if found < len(self.places) else self.total


class Bounds(NamedTuple):
    """The bounds of a quantile: above < quantile ≤ upto."""

    above: int
    upto: int

    @property
    def settled(self) -> bool:
        """Whether only one value is possible."""
        return self.upto == self.above + 1


def narrowed(samples: Sequence[Samples], quantile: Number) -> Bounds:
    """The bounds of a quantile of all values, from the samples of every task."""
    wanted = rank(sum(each.total for each in samples), quantile)
    values = np.unique(np.concatenate([each.values for each in samples])).tolist()
    upto = bisect_left(values, True, key=lambda value: sum(each.at_least(value) for each in samples) >= wanted)
    first = bisect_left(values, True, key=lambda value: sum(each.at_most(value) for each in samples) >= wanted)
    if all(each.complete for each in samples) or first == 0 == upto:
        return Bounds(values[upto] - 1, values[upto])
    return Bounds(values[first - 1] if first else values[0] - 1, values[upto])


def selected(between: Sequence[Ints], below: int, total: int, quantile: Number) -> int:
    """The quantile: `between` has all values within its bounds, `below` is how many lie below them."""
    values = np.sort(np.concatenate(between))
    return int(values[rank(total, quantile) - 1 - below])
