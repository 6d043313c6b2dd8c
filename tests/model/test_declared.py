from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.model.bucket import TokenBucket
from srtm.model.burst import Source, expected_b
from srtm.model.declared import batches, expected_bursts, rates_mps, share_out, shares, sources

WHOLE = TokenBucket.of(330, 600)


@dataclass(frozen=True)
class Declaration:
    id: str
    rate_mps: float = 10.0
    group: str | None = None
    batch: int = 1
    jitter_ns: int = 0


# A group of three with batches of 10, two of them at the first broker, and a publisher alone.
PLACED = [
    (Declaration("a", group="g", batch=10), "one"),
    (Declaration("b", group="g", batch=10), "one"),
    (Declaration("c", group="g", batch=10), "two"),
    (Declaration("d", 70.0, batch=2), "two"),
]


def test_a_broker_has_the_rates_batches_and_sources_of_its_publishers() -> None:
    assert rates_mps(PLACED) == {"one": 20.0, "two": 80.0}
    assert batches(PLACED) == {"one": 10, "two": 10}
    found = sources(PLACED)
    assert {broker: [[each.id for each in members] for members in here] for broker, here in found.items()} == {
        "one": [["a", "b"]],
        "two": [["c"], ["d"]],
    }


def test_members_of_a_group_come_together() -> None:
    bursts = expected_bursts(PLACED, WHOLE, "0.99")
    assert bursts["one"] == expected_b([Source(20.0, 20)], 66.0, "0.99")
    assert bursts["two"] == expected_b([Source(10.0, 10), Source(70.0, 2)], 264.0, "0.99")


def test_a_publisher_without_a_group_is_not_in_one_of_its_name() -> None:
    alone = [(Declaration("g"), "one"), (Declaration("x", group="g"), "one"), (Declaration("y"), "one")]
    assert [len(members) for members in sources(alone)["one"]] == [1, 1, 1]


def test_shares_are_by_rates_and_bursts() -> None:
    found = shares(PLACED, WHOLE, "0.99")
    bursts = expected_bursts(PLACED, WHOLE, "0.99")
    assert {name: share.r for name, share in found.items()} == {"one": 66, "two": 264}
    assert found["one"].b / found["two"].b == pytest.approx(bursts["one"] / bursts["two"])
    assert sum(share.b for share in found.values()) == WHOLE.b


def test_what_waits_counts_as_a_burst() -> None:
    rates, even, largest = {"one": 1.0, "two": 1.0}, {"one": 5.0, "two": 5.0}, {"one": 1, "two": 1}
    found = share_out(WHOLE, rates, even, largest, {"one": 300})
    assert {name: share.b for name, share in found.items()} == {"one": 400, "two": 200}  # 300 + 300 against 300
    assert share_out(WHOLE, {}, {}, {}) == {}


@given(st.lists(st.tuples(st.integers(1, 1_000), st.integers(1, 20), st.sampled_from("abc"), st.sampled_from("xyz"))))
def test_shares_add_up_and_hold_the_largest_batch(kinds: list[tuple[int, int, str, str]]) -> None:
    placed = [
        (Declaration(str(number), float(rate), group, batch), broker)
        for number, (rate, batch, group, broker) in enumerate(kinds)
    ]
    found = shares(placed, WHOLE, "0.99")
    assert found.keys() == {broker for _, broker in placed}
    if found:
        assert sum(share.r_mtps for share in found.values()) == WHOLE.r_mtps
        assert sum(share.b_ntok for share in found.values()) == WHOLE.b_ntok
        assert all(share.b >= batches(placed)[broker] for broker, share in found.items())
