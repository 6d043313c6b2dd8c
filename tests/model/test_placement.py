from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from srtm.errors import PlacementError
from srtm.model.placement import (
    POLICIES,
    Broker,
    Publisher,
    Roster,
    fewest,
    level_out,
    pick,
    place,
)

caps_and_loads = st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), min_size=1, max_size=12)


@st.composite
def topics(draw: st.DrawFn, equal_rates: bool = False) -> list[Publisher]:
    """Groups of different sizes, publishers without a group, rates equal or of very different sizes."""
    sizes = draw(st.lists(st.integers(1, 31), min_size=1, max_size=12))
    singles = draw(st.integers(0, 20))
    rate = st.just(10.0) if equal_rates else st.sampled_from([0.5, 1.0, 10.0, 10.0, 250.0])
    groups: list[str | None] = [f"g{g}" for g, size in enumerate(sizes) for _ in range(size)] + [None] * singles
    return [Publisher(f"p{i}", draw(rate), group) for i, group in enumerate(groups)]


@given(caps_and_loads, st.integers(1, 20_000))
def test_quotas_sum_to_the_rate_and_respect_capacity(brokers: list[tuple[int, int]], rate: int) -> None:
    caps, loads = [cap for cap, _ in brokers], [load for _, load in brokers]
    for policy in POLICIES.values():
        quotas = policy.choose(rate, caps, loads)
        if sum(caps) < rate:
            assert quotas is None
        else:
            assert quotas is not None
            assert sum(quotas) == rate
            assert all(0 <= quota <= cap for quota, cap in zip(quotas, caps, strict=True))


@given(caps_and_loads, st.integers(1, 20_000))
def test_concentration_uses_as_few_brokers_as_there_can_be(brokers: list[tuple[int, int]], rate: int) -> None:
    caps = [cap for cap, _ in brokers]
    assume(sum(caps) >= rate)
    used = fewest(rate, caps)
    assert used is not None
    best = next(k for k in range(1, len(caps) + 1) if sum(sorted(caps)[-k:]) >= rate)
    assert len(used) == best


@given(caps_and_loads, st.integers(1, 20_000))
def test_max_min_no_share_can_grow_without_a_smaller_one_shrinking(brokers: list[tuple[int, int]], rate: int) -> None:
    caps = [cap for cap, _ in brokers]
    assume(sum(caps) >= rate)
    quotas = level_out(rate, caps, [0] * len(caps))
    limited = [i for i in range(len(caps)) if quotas[i] == caps[i]]
    free = [quotas[i] for i in range(len(caps)) if i not in limited]
    assert not free or max(free) - min(free) <= 1
    assert all(quotas[i] <= min(free, default=rate) + 1 for i in limited)


@given(caps_and_loads, st.integers(1, 20_000))
def test_conc_equalises_total_loads(brokers: list[tuple[int, int]], rate: int) -> None:
    caps, loads = [cap for cap, _ in brokers], [load for _, load in brokers]
    assume(sum(caps) >= rate)
    quotas = level_out(rate, caps, loads)
    totals = [load + quota for load, quota in zip(loads, quotas, strict=True)]
    rising = [total for total, quota in zip(totals, quotas, strict=True) if quota]
    for i, quota in enumerate(quotas):
        if quota < caps[i]:  # it could have taken more, so nobody who took any stands higher than it
            assert totals[i] >= max(rising) - 1


@given(topics(), st.integers(1, 9), st.integers(0, 5), st.sampled_from(sorted(POLICIES)))
def test_every_publisher_is_placed_exactly_once(
    publishers: list[Publisher], brokers: int, seed: int, policy: str
) -> None:
    cluster = [Broker(f"b{i}", 50_000.0 + i) for i in range(brokers)]
    placed = place(publishers, cluster, policy, seed)
    assert len(placed.broker_of) == len(publishers)
    assert ((placed.broker_of >= 0) & (placed.broker_of < brokers)).all()
    carried = Counter[int]()
    for publisher, broker in zip(publishers, placed.broker_of.tolist(), strict=True):
        carried[broker] += round(publisher.rate_mps * 1_000)
    assert [round(rate * 1_000) for rate in placed.rates_mps] == [carried[broker] for broker in range(brokers)]
    assert place(publishers, cluster, policy, seed).broker_of.tolist() == placed.broker_of.tolist()


@given(topics(), st.lists(st.integers(1, 1_000), min_size=1, max_size=9), st.integers(0, 5))
def test_each_groups_share_is_proportional_within_one_publisher(
    publishers: list[Publisher], weights: list[int], seed: int
) -> None:
    roster = Roster(publishers)
    quotas = [roster.rate * weight // sum(weights) for weight in weights]
    quotas[0] += roster.rate - sum(quotas)
    broker_of = pick(roster, quotas, by_group=True, seed=seed)
    sizes = Counter(publisher.group for publisher in publishers if publisher.group)
    held = Counter((publisher.group, broker) for publisher, broker in zip(publishers, broker_of.tolist(), strict=True))
    for group, size in sizes.items():
        for broker, quota in enumerate(quotas) if size > 1 else ():  # a group of one goes where there is room
            assert abs(held[group, broker] - size * quota / roster.rate) < 1


@given(topics(equal_rates=True), st.lists(st.integers(1, 1_000), min_size=1, max_size=9), st.booleans())
def test_quotas_are_met_within_a_publisher_or_two(
    publishers: list[Publisher], weights: list[int], by_group: bool
) -> None:
    roster = Roster(publishers)
    quotas = [roster.rate * weight // sum(weights) for weight in weights]
    quotas[0] += roster.rate - sum(quotas)
    rates = roster.rates_by_broker(pick(roster, quotas, by_group=by_group, seed=0), len(quotas))
    slack = 20_000 if by_group else 10_000
    assert all(abs(rate - quota) <= slack for rate, quota in zip(rates.tolist(), quotas, strict=True))


@given(topics(equal_rates=True), st.integers(2, 6), st.booleans())
def test_quotas_that_change_a_little_move_few_publishers(
    publishers: list[Publisher], brokers: int, by_group: bool
) -> None:
    roster = Roster(publishers)
    quotas = level_out(roster.rate, [roster.rate] * brokers, [0] * brokers)
    before = pick(roster, quotas, by_group=by_group, seed=1)
    again = pick(roster, quotas, by_group=by_group, seed=1, current=before)
    assert (again == before).all()
    grown = level_out(roster.rate, [roster.rate] * (brokers + 1), [0] * (brokers + 1))
    after = pick(roster, grown, by_group=by_group, seed=1, current=before)
    needed = (after == brokers).sum()
    moved = (after != before).sum()
    groups = len({publisher.group for publisher in publishers})
    assert moved <= needed + brokers * (groups if by_group else 1)


def test_groups_of_one_are_placed_by_their_rates() -> None:
    publishers = [Publisher(f"p{i}", 1_000.0 if i < 4 else 1.0, f"g{i}") for i in range(1_000)]
    placed = place(publishers, [Broker(f"b{i}", 1_374) for i in range(4)], "srtm", seed=2)
    assert max(placed.rates_mps) <= 1_250


def test_a_worked_max_min() -> None:
    """Brokers with 100, 70 and 60 left; 200 to place: 66.67 each, and the smallest can take only 60."""
    assert level_out(200, [100, 70, 60], [0, 0, 0]) == [70, 70, 60]
    assert level_out(150, [100, 70, 60], [10, 40, 50]) == [74, 43, 33]
    assert fewest(150, [60, 100, 70]) == [1, 2]
    assert fewest(150, [60, 100, 70], in_use={0}) == [0, 1]


def test_the_papers_8k_topic_on_loaded_brokers() -> None:
    """Section 6.4: initial loads of 10 to 80 kmsg/s. Max-min gives the third broker more than Conc does."""
    brokers = [Broker(f"b{i}", 110_000, load * 1_000) for i, load in enumerate([10, 40, 50, 60, 70, 80])]
    publishers = [Publisher(f"p{i}", 10.0) for i in range(17_500)]
    least = {
        policy: min(q for q in place(publishers, brokers, policy).quotas_mps if q) for policy in ("conc", "max_min")
    }
    assert place(publishers, brokers, "max_min").k == 3
    assert least["max_min"] > least["conc"]


@pytest.mark.parametrize(
    ("publishers", "brokers", "said"),
    [
        ([], [Broker("b", 10)], "without publishers"),
        ([Publisher("p", 10)], [], "no broker"),
        ([Publisher("p", -1)], [Broker("b", 10)], "rate must not be negative, but is -1"),
        ([Publisher("p", 0)], [Broker("b", 10)], "publisher 'p' has a rate of 0"),
        ([Publisher("p", float("nan"))], [Broker("b", 10)], "rate must be a finite number, not nan"),
        ([Publisher("p", 11)], [Broker("b", 10)], "publisher 'p' sends 11 msg/s, more than the 10"),
        ([Publisher("p", 6)], [Broker("b", 10, 5)], "more than the 5 msg/s that broker 'b'"),
        ([Publisher("p", 1), Publisher("p", 1)], [Broker("b", 10)], "'p' is listed more than once"),
        ([Publisher("p", 1)], [Broker("b", 10), Broker("b", 10)], "different names"),
        ([Publisher("p", 6), Publisher("q", 6)], [Broker("b", 10)], "12 msg/s, more than the 10 msg/s"),
        ([Publisher("p", 1)], [Broker("b", -10)], "mcap of b must not be negative"),
    ],
)
def test_what_cannot_be_placed_is_named(publishers: list[Publisher], brokers: list[Broker], said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        place(publishers, brokers, "srtm")


def test_unknown_policies_are_named() -> None:
    with pytest.raises(PlacementError, match=f"unknown policy 'best'; known policies: {', '.join(POLICIES)}"):
        place([Publisher("p", 1)], [Broker("b", 10)], "best")
