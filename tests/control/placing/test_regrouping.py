"""Regrouping: every broker gets its part of every group, with few moves, and keeps its number of publishers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from srtm.control.placing.regrouping import largest_part, regrouped


def test_two_groups_that_sit_on_a_broker_each() -> None:
    place = {f"p{number}": "ab"[number % 2] for number in range(8)}
    groups = {f"p{number}": f"g{number % 2}" for number in range(8)}
    assert largest_part(place, groups) == 1.0
    moves = regrouped(place, groups, seed=0)
    assert len(moves) == 4
    after = place | moves
    assert largest_part(after, groups) == 0.5
    assert Counter(after.values()) == Counter(place.values())
    assert regrouped(after, groups, seed=0) == {}


@given(
    st.dictionaries(st.integers(0, 60), st.tuples(st.sampled_from("abcd"), st.sampled_from("wxyz")), max_size=60),
    st.integers(0, 3),
)
def test_parts_are_proportional_and_brokers_keep_their_numbers(
    publishers: dict[int, tuple[str, str]], seed: int
) -> None:
    place = {f"p{number}": broker for number, (broker, _) in publishers.items()}
    groups = {f"p{number}": group for number, (_, group) in publishers.items() if group != "z"}
    after = place | regrouped(place, groups, seed)
    assert after.keys() == place.keys()
    assert Counter(after.values()) == Counter(place.values())
    assert all(after[name] == broker for name, broker in place.items() if name not in groups)
    sizes, here = Counter(groups.values()), Counter(place[name] for name in groups)
    parts = Counter((groups[name], after[name]) for name in groups)
    for group, size in sizes.items():
        for broker, number in here.items():
            assert abs(parts[group, broker] - size * number / len(groups)) < 1
