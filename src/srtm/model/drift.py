"""Drift: how the groups that publishers declare differ from the groups found.

In: the group of each publisher, declared and found; a publisher without a group counts as alone, as does the
only publisher of a group. Out: one number for the agreement, and the differences by name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Drift:
    """Adjusted Rand index of declared against found groups, and where they differ.

    `split`: declared groups whose publishers are in several found groups or none, with how many in each (None: alone).
    `merged`: found groups that hold publishers of several declared groups or of none, with how many from each.
    `moved`: publishers that were not found where most of their declared group was, as (publisher, declared, found).
    """

    agreement: float
    split: tuple[tuple[str, tuple[tuple[str | None, int], ...]], ...] = ()
    merged: tuple[tuple[str, tuple[tuple[str | None, int], ...]], ...] = ()
    moved: tuple[tuple[str, str | None, str | None], ...] = ()


def drift(publishers: Iterable[str], declared: Mapping[str, str | None], found: Mapping[str, str]) -> Drift:
    """Compare over these publishers."""
    listed = sorted(publishers)
    said, seen = _groups_of(listed, declared), _groups_of(listed, found)
    overlap = Counter((said[name], seen[name]) for name in listed)
    split = _parts(((one, other), count) for (one, other), count in overlap.items())
    merged = _parts(((other, one), count) for (one, other), count in overlap.items())
    home = {group: parts[0][0] for group, parts in split.items()}
    moved = []
    for name in listed:
        one, other = said[name], seen[name]
        if other != home[one] if one is not None else other is not None:
            moved.append((name, one, other))
    return Drift(
        adjusted_rand_index([said[name] or (name,) for name in listed], [seen[name] or (name,) for name in listed]),
        tuple((group, parts) for group, parts in sorted(split.items()) if len(parts) > 1),
        tuple((group, parts) for group, parts in sorted(merged.items()) if len(parts) > 1),
        tuple(moved),
    )


def adjusted_rand_index(one: Iterable[Hashable], other: Iterable[Hashable]) -> float:
    """Agreement of two partitions over all pairs: 1 if equal, about 0 by chance."""
    pairs = list(zip(one, other, strict=True))
    both = _pairs_within(Counter(pairs))
    first, second = (_pairs_within(Counter(pair[side] for pair in pairs)) for side in (0, 1))
    every = len(pairs) * (len(pairs) - 1) / 2
    chance = first * second / every if every else 0.0
    most = (first + second) / 2
    return 1.0 if most == chance else (both - chance) / (most - chance)


def _pairs_within(sizes: Counter[Hashable]) -> float:
    return sum(size * (size - 1) / 2 for size in sizes.values())


def _groups_of(publishers: list[str], group_of: Mapping[str, str | None]) -> dict[str, str | None]:
    sizes = Counter(group_of.get(name) for name in publishers)
    return {name: group if sizes[group := group_of.get(name)] > 1 else None for name in publishers}


def _parts(
    counted: Iterable[tuple[tuple[str | None, str | None], int]],
) -> dict[str, tuple[tuple[str | None, int], ...]]:
    """By group, the groups of the other side that share publishers with it, the largest first."""
    parts: dict[str, list[tuple[str | None, int]]] = {}
    for (group, part), count in counted:
        if group is not None:
            parts.setdefault(group, []).append((part, count))
    return {
        group: tuple(sorted(its, key=lambda entry: (-entry[1], entry[0] is None, entry[0] or "")))
        for group, its in parts.items()
    }
