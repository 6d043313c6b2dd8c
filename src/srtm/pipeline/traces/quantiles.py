"""Exact quantiles of values spread over many tasks, of many keys at once, without collecting all values.

Every task sums up its values of a key by a few hundred of them, evenly spaced in order (`sampled`). From all samples
the driver derives two values that a quantile lies between, with less than one value in a hundred between them
(`narrowed`). A second run collects just those, and `selected` picks the right ones. No second run is needed if the
samples are complete or the two bounds are neighbours, as with the many equal zeros of messages that did not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]

SAMPLES = 256  # per task and key: some kilobytes for every million values


class Samples(NamedTuple):
    """Some values of groups, in order of group and value, always with the first and the last of a group.

    Added up to a sample, `least` is a lower bound of how many values of its group do not exceed it, `most` an upper.
    """

    groups: Ints
    values: Ints
    least: Ints
    most: Ints


def sampled(values: Ints, ends: Ints) -> tuple[Samples, Flags]:
    """Samples of groups of sorted values, each of at least one, and whether a group's samples are complete."""
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    counts = ends - begins
    steps = np.maximum(1, counts // SAMPLES)
    samples = -(-(counts - 1) // steps) + 1
    groups = np.repeat(np.arange(len(ends)), samples)
    firsts = np.cumsum(samples) - samples
    places = np.minimum((np.arange(len(groups)) - firsts[groups]) * steps[groups], counts[groups] - 1)
    kept = values[begins[groups] + places]
    # Of equal values, the first and the last place tell everything.
    differs = np.ones(len(kept) + 1, np.bool_)
    differs[1:-1] = (kept[1:] != kept[:-1]) | (groups[1:] != groups[:-1])
    edge = differs[1:] | differs[:-1]
    groups, places, kept = groups[edge], places[edge], kept[edge]
    first, last = np.ones(len(groups), np.bool_), np.ones(len(groups), np.bool_)
    first[1:] = last[:-1] = groups[1:] != groups[:-1]
    before, after = np.roll(places, 1), np.roll(places, -1)
    least = places - np.where(first, -1, before)
    most = np.where(last, counts[groups], after) - places
    return Samples(groups, kept, least, most), steps == 1


class Bounds(NamedTuple):
    """The bounds of quantiles: above < quantile ≤ upto."""

    above: Ints
    upto: Ints

    @property
    def settled(self) -> Flags:
        """Whether only one value is possible."""
        return np.asarray(self.upto == self.above + 1)


def narrowed(samples: Samples, ranks: Ints, complete: Flags) -> Bounds:
    """The bounds of the value of rank `ranks[k]`, from 1, of all values of each key k, from the samples of every task.

    Samples are in order of key (`groups`) and value. A key is complete if the samples of all tasks are.
    """
    keys, values = samples.groups, samples.values
    begins = np.searchsorted(keys, np.arange(len(ranks)))
    new = np.ones(len(keys), np.bool_)
    new[1:] = (keys[1:] != keys[:-1]) | (values[1:] != values[:-1])
    same_from = np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))
    surely = same_from[_reached(samples.least, begins, ranks)]
    perhaps = same_from[_reached(samples.most, begins, ranks)]
    lowest = perhaps == begins
    above = np.where(lowest, values[perhaps] - 1, values[np.maximum(perhaps - 1, 0)])
    alone = complete | (lowest & (surely == begins))
    return Bounds(np.where(alone, values[surely] - 1, above), values[surely])


def _reached(counts: Ints, begins: Ints, ranks: Ints) -> Ints:
    """The first row of each key up to which counts add up to a rank."""
    below = np.cumsum(counts)
    return np.searchsorted(below, np.concatenate([[0], below])[begins] + ranks)


def selected(keys: Ints, values: Ints, places: Ints) -> Ints:
    """The value at `places[k]`, from 0, among the sorted values of each key k; values come in any order."""
    order = np.lexsort((values, keys))
    begins = np.searchsorted(keys[order], np.arange(len(places)))
    found: Ints = values[order][begins + places]
    return found
