from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.model.drift import adjusted_rand_index, drift


def test_drift_names_what_split_merged_and_moved() -> None:
    declared = {"a1": "a", "a2": "a", "a3": "a", "a4": "a", "b1": "b", "b2": "b", "c1": "c", "c2": "c", "new": None}
    found = {"a1": "x", "a2": "x", "a3": "y", "b1": "z", "b2": "z", "c1": "z", "c2": "z", "a4": "x", "new": "x"}
    told = drift(declared, declared, {**found, "a3": "alone"})
    assert told.split == (("a", (("x", 3), (None, 1))),)
    assert told.merged == (("x", (("a", 3), (None, 1))), ("z", (("b", 2), ("c", 2))))
    assert told.moved == (("a3", "a", None), ("new", None, "x"))
    assert told.agreement < 1


def test_the_same_groups_under_other_names_are_no_drift() -> None:
    declared = {"p1": "north", "p2": "north", "p3": "south", "p4": "south", "p5": None, "p6": "only me"}
    told = drift(declared, declared, {"p1": "g-p1", "p2": "g-p1", "p3": "g-p3", "p4": "g-p3"})
    assert (told.agreement, told.split, told.merged, told.moved) == (1.0, (), (), ())


partitions = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=14)


@given(partitions)
def test_the_index_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    """From its definition: pairs that are together in both, against what the sizes of the groups give by chance."""
    every = list(combinations(pairs, 2))
    both = sum(p[0] == q[0] and p[1] == q[1] for p, q in every)
    first, second = (sum(p[side] == q[side] for p, q in every) for side in (0, 1))
    chance, most = first * second / len(every), (first + second) / 2
    known = 1.0 if most == chance else (both - chance) / (most - chance)
    assert adjusted_rand_index(*zip(*pairs, strict=True)) == pytest.approx(known)


def test_known_values_of_the_index() -> None:
    assert adjusted_rand_index([0, 0, 1, 1], [1, 1, 0, 0]) == 1.0
    assert adjusted_rand_index([0, 0, 1, 1], [0, 0, 1, 2]) == pytest.approx(4 / 7)
    assert adjusted_rand_index([0, 0, 0, 0], [0, 1, 2, 3]) == 0.0
    assert adjusted_rand_index([], []) == 1.0
