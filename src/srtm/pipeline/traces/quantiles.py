"""Exact quantiles of values that are spread over many tasks, without sorting or collecting them.

Every task sums up its values by a few hundred of them, evenly spaced in order (`Samples`). From all summaries the
driver knows for each quantile two values that it lies between, with less than one message in a hundred between them
(`narrowed`). A second run collects just those, and `selected` takes the right one. Where summaries hold everything, or
both bounds are neighbours, no second run is needed: so with the many equal zeros of messages that did not wait.
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

SAMPLES = 256  # 4 KiB of every million values


class Samples(NamedTuple):
    """Some of a set of sorted values, and their places in the order; the first and the last are among them."""

    values: Ints
    places: Ints
    total: int
    complete: bool

    @classmethod
    def of(cls, values: Ints) -> Samples:
        """The summary of these values, of which there is at least one."""
        step = max(1, len(values) // SAMPLES)
        places = np.append(np.arange(0, len(values) - 1, step), len(values) - 1)
        kept = np.sort(values)[places]
        # Of equal values the first and the last place say everything.
        edge = np.ones(len(kept), np.bool_)
        edge[1:-1] = (kept[1:-1] != kept[:-2]) | (kept[1:-1] != kept[2:])
        return cls(kept[edge], places[edge], len(values), step == 1)

    def at_least(self, value: int) -> int:
        """A number of values that certainly do not exceed this one."""
        found = int(np.searchsorted(self.values, value, side="right"))
        return int(self.places[found - 1]) + 1 if found else 0

    def at_most(self, value: int) -> int:
        """A number that the values which do not exceed this one certainly do not exceed."""
        found = int(np.searchsorted(self.values, value, side="right"))
        return int(self.places[found]) if found < len(self.places) else self.total


class Bounds(NamedTuple):
    """A quantile lies above `above` and does not exceed `upto`."""

    above: int
    upto: int

    @property
    def settled(self) -> bool:
        """There is nothing between."""
        return self.upto == self.above + 1


def narrowed(summaries: Sequence[Samples], quantile: Number) -> Bounds:
    """What the summaries of all parts say about a quantile of the whole."""
    wanted = rank(sum(part.total for part in summaries), quantile)
    values = np.unique(np.concatenate([part.values for part in summaries])).tolist()
    upto = bisect_left(values, True, key=lambda value: sum(part.at_least(value) for part in summaries) >= wanted)
    first = bisect_left(values, True, key=lambda value: sum(part.at_most(value) for part in summaries) >= wanted)
    if all(part.complete for part in summaries) or first == 0 == upto:
        return Bounds(values[upto] - 1, values[upto])
    return Bounds(values[first - 1] if first else values[0] - 1, values[upto])


def selected(between: Sequence[Ints], below: int, total: int, quantile: Number) -> int:
    """The quantile: `between` holds all values within its bounds, `below` is how many lie under them."""
    values = np.sort(np.concatenate(between))
    return int(values[rank(total, quantile) - 1 - below])
