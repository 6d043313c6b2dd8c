"""Every claim in its tiny form: what holds must go on holding, and what does not has a reason beside it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from srtm.lab.claims import FAILED, HELD, NOT_REPRODUCIBLE, Verdict, judge, rules, tally
from srtm.lab.result import Claim, Rows, falls, near, risen
from srtm.lab.results import RESULTS, live, named
from srtm.lab.sweep import Settings, all_cells, cells_of
from srtm.lab.world import Simulated, best_split, facts
from srtm.workload.publishers import Population

if TYPE_CHECKING:
    from srtm.lab.result import Result, Row

# Two short runs say otherwise than ten long ones about these: (result, b at, beginning of the claim).
OTHERWISE = {
    ("prop1", "", "so is our exact form"),
    ("fig7b", "99 %", "Conc meets the SLO"),
    ("fig8b", "99 %", "up to 4k publishers"),
    ("fig8d", "99 %", "periodic publishers do"),
    ("fig8c", "99 %", "periodic publishers do"),
    ("fig9b", "99.5 %", "Max-Min uses fewer brokers"),
    ("table1", "99.5 %", "larger groups take longer"),
    ("fig9a", "99.5 %", "Max-Min uses fewer brokers"),
    ("fig10a", "99.5 %", "on as many brokers as SRTM"),
    ("fig11a", "99.5 %", "tail latency falls with the spread, SRTM"),
    ("burst_split", "", "they also cost less"),
    ("lending", "", "lending is never worse"),
    ("shipped", "99.5 %", "brokers needed"),
}


def _claims() -> list[tuple[Result, Claim]]:
    return [(result, claim) for result in (*RESULTS.values(), *live().values()) for claim in result.claims]


@pytest.mark.parametrize("name", RESULTS)
def test_claims_hold_but_for_those_with_a_reason(name: str, found: dict[str, Rows]) -> None:
    verdicts = judge([RESULTS[name]], found)
    assert verdicts
    reasons = {claim.says: claim for claim in RESULTS[name].claims}
    for verdict in verdicts:
        expected = not reasons[verdict.claim].reason(verdict.b_at)
        if any(
            (result, b_at) == (name, verdict.b_at) and verdict.claim.startswith(begins)
            for result, b_at, begins in OTHERWISE
        ):
            expected = not expected
        if verdict.word != NOT_REPRODUCIBLE:
            assert verdict.holds is expected, verdict


def test_every_exception_is_about_a_claim_that_exists() -> None:
    for result, _, begins in OTHERWISE:
        assert any(claim.says.startswith(begins) for claim in RESULTS[result].claims), (result, begins)


def test_what_the_paper_says_has_a_place_in_it_and_what_we_say_has_none() -> None:
    for result, claim in _claims():
        assert bool(claim.where) is (claim.kind != "ours"), (result.name, claim.says)


def test_a_result_says_nothing_twice() -> None:
    assert not [said for said, times in Counter((r.name, c.says) for r, c in _claims()).items() if times > 1]


def test_what_cannot_be_reproduced_says_why() -> None:
    verdicts = judge([RESULTS["gc"]], {"gc": Rows()})
    assert {verdict.word for verdict in verdicts} == {NOT_REPRODUCIBLE}
    assert all(verdict.why and verdict.holds is None for verdict in verdicts)


def test_rules_for_b_are_counted_apart() -> None:
    def verdict(b_at: str, holds: bool) -> Verdict:
        return Verdict("fig", b_at, "claim", "", "", holds, "paper")

    counted = {
        rule: tally(some)["paper"]
        for rule, some in rules([verdict("99 %", True), verdict("99.5 %", False), verdict("", True)]).items()
    }
    assert counted == {"99 %": {HELD: 2}, "99.5 %": {FAILED: 1}}


def test_a_reason_is_told_of_a_claim_that_fails_and_only_then() -> None:
    result = RESULTS["fig6a"]
    for holds in (True, False):
        claim = Claim("says", "paper", lambda _, holds=holds: (holds, "ours"), why={"99 %": "because"})
        changed = type(result)(**{**{n: getattr(result, n) for n in result.__slots__}, "claims": [claim]})
        rows: list[Row] = [{"b_at": "99 %"}, {"b_at": "99.5 %"}]
        told = [verdict.why for verdict in judge([changed], {"fig6a": Rows(rows)})]
        assert told == ["" if holds else "because", ""]


def test_a_trend_may_not_step_back_by_more_than_noise() -> None:
    def table(*columns: tuple[float, float]) -> Rows:
        return Rows({"x": x, "y": y} for x, pair in enumerate(columns) for y in pair)

    assert falls(table((3, 3.2), (2, 2.2), (1, 1.2)), "y", "x")
    assert falls(table((3, 3.2), (1.0, 1.4), (1.1, 1.3), (0.5, 0.7)), "y", "x")
    assert not falls(table((3, 3.2), (1, 1.01), (2, 2.01), (0.5, 0.7)), "y", "x")
    assert not falls(table((1, 1.1), (1, 1.1)), "y", "x")
    assert risen(table((1, 1.1)), table((2, 2.1)), "y")
    assert near(1.19, 1.0)
    assert not near(0.79, 1.0)


def test_results_that_share_rows_run_once() -> None:
    settings = Settings(repetitions=1)
    assert cells_of(RESULTS["table1"], settings) == cells_of(RESULTS["fig9a"], settings)
    assert len(all_cells(named(["fig9", "fig10", "table1"]), settings)) == len(all_cells(named(["fig9"]), settings))


def test_independent_publishers_are_profiled_on_the_time_before_and_groups_on_their_own() -> None:
    world = Simulated(seconds=5)
    alone = world.topic(Population(200, process="periodic"), 3)
    assert alone.bucket == world.topic(Population(200, process="periodic"), 3).bucket
    assert 0 <= alone.arrivals.times_ns[0] < alone.arrivals.times_ns[-1] < world.length_s(Population(200)) * 10**9
    assert world.topic(Population(200), 3).bucket != world.topic(Population(200), 4).bucket
    grouped = world.topic(Population(200, group_size=10), 3)
    assert facts(world.spread(grouped, "max_min", 1, 3))["access_p99_ms"] == 0


def test_slow_topics_in_batches_run_longer() -> None:
    world = Simulated(seconds=60, most_messages=1_000_000)
    assert world.length_s(Population(1_000)) == 60
    assert world.length_s(Population(10_000)) == 10
    assert world.length_s(Population(1_000, batch=10)) == 300
    assert world.length_s(Population(2_000, batch=10)) == pytest.approx(153.125)
    assert world.length_s(Population(4_000, batch=10)) == 25


def test_a_baseline_is_the_smallest_split_that_will_do_or_else_the_fastest() -> None:
    world = Simulated(seconds=2)
    small = world.topic(Population(500), 1)
    assert best_split(world, small, "max_min", 1).k == 1
    large = world.topic(Population(6_000), 1)
    assert best_split(world, large, "max_min", 1).k == 2
    bursty = world.topic(Population(1_000, batch=10, group_size=50), 1)
    tails = [facts(world.spread(bursty, "max_min", k, 1))["p99_ms"] for k in range(1, 7)]
    assert facts(best_split(world, bursty, "max_min", 1))["p99_ms"] == min(tails) > 1  # type: ignore[operator]


def test_a_claim_that_compares_says_what_it_lacks(found: dict[str, Rows]) -> None:
    alone = judge(named(["fig7b"]), {"fig7b": found["fig7b"]})
    assert {verdict.ours for verdict in alone if verdict.holds is None} == {"also needs fig7a"}
    assert any(verdict.holds is not None for verdict in alone)


def test_a_wrong_row_changes_the_verdict(found: dict[str, Rows]) -> None:
    """Claims are predicates: turn the figure round and they fail."""
    rows = type(found["fig6a"])({**row, "all_p99_ms": 1 / float(row["all_p99_ms"])} for row in found["fig6a"])
    assert not any(verdict.holds for verdict in judge(named(["fig6a"]), {"fig6a": rows}))
