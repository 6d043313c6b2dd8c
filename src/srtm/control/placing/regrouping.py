"""Regrouping: the fewest moves after which every broker has its part of every correlation group.

In: the broker of each publisher, and the group of those that are in one. Out: publishers that change brokers. Each
broker keeps as many of these publishers as it had, so this is for publishers of about the same rate.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from srtm.model.rounding import proportional_table

if TYPE_CHECKING:
    from collections.abc import Mapping


def regrouped(place: Mapping[str, str], group_of: Mapping[str, str], seed: int) -> dict[str, str]:
    """The new brokers of publishers that move; none if each broker has its part of each group, within a publisher."""
    members = sorted(name for name in place if name in group_of)
    brokers = sorted({place[name] for name in members})
    groups = sorted({group_of[name] for name in members})
    counts = Counter((group_of[name], place[name]) for name in members)
    have = np.array([[counts[group, broker] for broker in brokers] for group in groups], np.int64)
    if len(brokers) < 2 or not _uneven(have):
        return {}
    want = proportional_table(have.sum(axis=1), have.sum(axis=0).tolist(), np.random.default_rng(seed))
    moves: dict[str, str] = {}
    for row, group in enumerate(groups):
        missing = [name for column, name in enumerate(brokers) for _ in range(want[row, column] - have[row, column])]
        for column, broker in enumerate(brokers):
            here = [name for name in members if group_of[name] == group and place[name] == broker]
            surplus = max(0, int(have[row, column] - want[row, column]))
            moves |= {name: missing.pop() for name in here[len(here) - surplus :]}
    return moves


def largest_part(place: Mapping[str, str], group_of: Mapping[str, str]) -> float:
    """The largest part of a group that one broker has, over all groups."""
    sizes = Counter(group_of[name] for name in place if name in group_of)
    parts = Counter((group_of[name], broker) for name, broker in place.items() if name in group_of)
    return max((count / sizes[group] for (group, _), count in parts.items()), default=0.0)


def _uneven(have: np.ndarray) -> bool:
    """Whether a broker has more or less of a group than its exact part, by a publisher or more."""
    exact = have.sum(axis=1)[:, None] * have.sum(axis=0)[None, :]
    return bool((np.abs(have * have.sum() - exact) >= have.sum()).any())
