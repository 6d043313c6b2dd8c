from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.model.fitting import Fitting, Measure, NoCapacity, Placed, drive
from srtm.model.growth import Ladder, most_rounds
from srtm.model.placement import Broker, Publisher, Roster

SLO_NS = 1_000_000


def climbed(ladder: Ladder, latency: dict[int, float]) -> list[int]:
    """The numbers of brokers that are tried, in order."""
    tried = []
    while (k := ladder.next()) is not None:
        ladder.tell(k, latency[k], latency[k])
        tried.append(k)
    return tried


def test_a_worked_ladder() -> None:
    """A topic that takes 23 brokers: latency falls as 22.5 / k."""
    assert climbed(Ladder(1, 1, 100), {k: 22.5 / k for k in range(1, 101)}) == [1, 4, 16, 32, 24, 20, 22, 23]


@given(st.integers(1, 1_000), st.data())
def test_the_least_number_that_holds_is_found_if_more_brokers_help(most: int, data: st.DataObject) -> None:
    needed = data.draw(st.integers(1, most))
    ladder = Ladder(1, 1, most)
    tried = climbed(ladder, {k: 1.0 if k >= needed else needed / k for k in range(1, most + 1)})
    assert min(k for k in tried if k >= needed) == needed
    assert len(tried) <= most_rounds(most)


@given(st.integers(2, 300), st.data())
def test_a_number_between_too_busy_and_too_few_tokens_is_found(most: int, data: st.DataObject) -> None:
    """Latency falls to a minimum and rises again; only some numbers around the minimum hold."""
    first = data.draw(st.integers(1, most))
    last = data.draw(st.integers(first, min(most, 2 * first)))
    steep = data.draw(st.floats(0.2, 3))
    middle = math.sqrt(first * last)
    limit = max(middle / first, last / middle) ** steep
    latency = {k: max(middle / k, k / middle) ** steep / limit for k in range(1, most + 1)}
    latency[first] = latency[last] = 1.0  # not more, by rounding
    tried = climbed(Ladder(1, 1, most), latency)
    held = [k for k in tried if latency[k] <= 1]
    assert held
    assert min(held) == first
    assert len(tried) <= 2 * most_rounds(most)


def test_every_number_is_tried_before_the_ladder_ends() -> None:
    assert sorted(climbed(Ladder(5, 2, 9), dict.fromkeys(range(2, 10), 3.0))) == list(range(2, 10))


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 100])
def test_100_brokers_take_at_most_12_rounds(needed: int) -> None:
    roster = Roster(Publisher(f"p{i}", 10.0, f"g{i // 50}") for i in range(2_000))
    brokers = [Broker(f"b{i}", 110_000) for i in range(100)]
    enough = math.ceil(len(roster) / needed)

    def measure(order: Measure) -> dict[int, int]:
        return {b: SLO_NS * int((order.broker_of == b).sum()) // enough for b in order.brokers}

    fitting = Fitting(roster, brokers, "srtm", SLO_NS)
    outcome = drive(fitting, measure, 60)
    assert isinstance(outcome, Placed)
    assert abs(outcome.k - math.ceil(len(roster) / enough)) <= 1  # groups of 50 are not divided exactly
    assert fitting.rounds <= 12


def test_brokers_that_are_slower_than_their_peers_do_not_decide() -> None:
    """A tenth of the brokers carry a fifth of what the others do: they get less, or are not used."""
    roster = Roster(Publisher(f"p{i}", 10.0) for i in range(1_000))
    brokers = [Broker(f"b{i}", 110_000) for i in range(100)]

    def measure(order: Measure) -> dict[int, int]:
        return {b: SLO_NS * int((order.broker_of == b).sum()) // (10 if b % 10 == 0 else 50) for b in order.brokers}

    fitting = Fitting(roster, brokers, "srtm", SLO_NS)
    outcome = drive(fitting, measure, 60)
    assert isinstance(outcome, Placed)
    assert 20 <= outcome.k <= 22  # an even split over all would need 100
    assert fitting.rounds <= 12


def test_if_nothing_helps_it_ends_soon() -> None:
    roster = Roster(Publisher(f"p{i}", 10.0) for i in range(1_000))
    brokers = [Broker(f"b{i}", 110_000) for i in range(100)]
    fitting = Fitting(roster, brokers, "srtm", SLO_NS)
    outcome = drive(fitting, lambda order: dict.fromkeys(order.brokers, 2 * SLO_NS), 60)
    assert isinstance(outcome, NoCapacity)
    assert fitting.rounds <= 12
