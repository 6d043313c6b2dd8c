from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import InputError, PlacementError
from srtm.model.fitting import Fitting, Measure, NoCapacity, Placed, drive
from srtm.model.one_by_one import one_by_one
from srtm.model.placement import POLICIES, UNPLACED, Broker, Publisher, Roster, policy_named
from srtm.model.trials import Iteration, Trials, resume

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SLO_NS = 1_000_000


def topic(publishers: int = 100, group_size: int = 5, rate: float = 10.0) -> Roster:
    return Roster(Publisher(f"p{i}", rate, f"g{i // group_size}") for i in range(publishers))


def idle(brokers: int, mcap: float = 110_000) -> list[Broker]:
    return [Broker(f"b{i}", mcap) for i in range(brokers)]


def by_count(ns_per_publisher: int) -> Callable[[Measure], dict[int, int]]:
    """Brokers whose latency grows with the number of their publishers."""
    return lambda order: {b: ns_per_publisher * int((order.broker_of == b).sum()) for b in order.brokers}


class Watched:
    """Any measuring function, watched: what was ordered last, and what each broker said of which publishers."""

    def __init__(self, measure: Callable[[Measure], Mapping[int, int]]) -> None:
        self._measure = measure
        self.heard: dict[tuple[int, bytes], int] = {}
        self.rounds = 0

    def __call__(self, order: Measure) -> Mapping[int, int]:
        assert order.brokers, "a round without anything to measure"
        answer = self._measure(order)
        for broker in order.brokers:
            assert (order.broker_of == broker).any()
            self.heard[broker, order.broker_of.tobytes()] = answer[broker]
        self.rounds += 1
        return answer

    def check(self, outcome: Placed | NoCapacity, publishers: int) -> None:
        """Success only with everybody placed and every broker of that very assignment measured within the SLO."""
        if isinstance(outcome, Placed):
            assert len(outcome.broker_of) == publishers
            assert (outcome.broker_of != UNPLACED).all()
            assert set(outcome.latency_ns) == set(outcome.broker_of.tolist())
            for broker, latency_ns in outcome.latency_ns.items():
                assert latency_ns <= SLO_NS
                assert self.heard[broker, outcome.broker_of.tobytes()] == latency_ns


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Roster, list[Broker], Callable[[Measure], dict[int, int]]]:
    """Topics and brokers whose latencies follow load, penalise small shares, jitter, or make no sense at all."""
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    publishers = [
        Publisher(f"g{g}-{i}", draw(st.sampled_from([1.0, 10.0, 40.0])), f"g{g}" if draw(st.booleans()) else None)
        for g, size in enumerate(sizes)
        for i in range(size)
    ]
    roster = Roster(publishers)
    total = roster.rate / 1_000
    brokers = [
        Broker(f"b{i}", draw(st.floats(max(40.0, total / 8), 3 * total + 40))) for i in range(draw(st.integers(1, 6)))
    ]
    seed = draw(st.integers(0, 2**32))
    busy, starved, noise = draw(
        st.tuples(st.floats(0.1, 6), st.sampled_from([0.0, 0.05, 0.5]), st.sampled_from([0.0, 0.3, 2.0]))
    )

    def measure(order: Measure) -> dict[int, int]:
        rates = roster.rates_by_broker(order.broker_of, len(brokers)) / roster.rate
        answer = {}
        for broker in order.brokers:
            jitter = random.Random(f"{seed} {broker} {order.broker_of.tobytes()!r}").uniform(1 - noise / 3, 1 + noise)
            answer[broker] = max(0, round(SLO_NS * (busy * rates[broker] + starved / rates[broker] - starved) * jitter))
        return answer

    return roster, brokers, measure


@given(worlds(), st.sampled_from(list(POLICIES)))
def test_it_ends_and_never_calls_a_violation_a_success(
    world: tuple[Roster, list[Broker], Callable[[Measure], dict[int, int]]], policy: str
) -> None:
    roster, brokers, measure = world
    watched = Watched(measure)
    try:
        fitting = Fitting(roster, brokers, policy, SLO_NS, max_rounds=400)
    except PlacementError:
        return  # a publisher faster than any broker: refused before anything is tried
    outcome = drive(fitting, watched, 60) if isinstance(fitting.order, Measure) else fitting.order
    assert isinstance(outcome, Placed | NoCapacity)
    watched.check(outcome, len(roster))
    assert watched.rounds == fitting.rounds == sum(iteration.rounds for iteration in fitting.iterations)
    assert fitting.elapsed_s == 60 * fitting.rounds


@given(worlds(), st.floats(0.2, 4))
def test_model_first_is_as_safe_whatever_the_model_says(
    world: tuple[Roster, list[Broker], Callable[[Measure], dict[int, int]]], wrong_by: float
) -> None:
    roster, brokers, measure = world
    watched = Watched(measure)
    try:
        fitting = Fitting(
            roster,
            brokers,
            "srtm",
            SLO_NS,
            max_rounds=400,
            predict=lambda order: {b: round(ns * wrong_by) for b, ns in measure(order).items()},
        )
    except PlacementError:
        return
    watched.check(drive(fitting, watched, 60), len(roster))


def test_what_fits_one_broker_stays_on_one_and_takes_one_round() -> None:
    fitting = Fitting(topic(), idle(6), "srtm", SLO_NS)
    outcome = drive(fitting, by_count(10_000), 60)
    assert isinstance(outcome, Placed)
    assert outcome.k == 1
    assert [iteration.rounds for iteration in fitting.iterations] == [1]
    assert fitting.elapsed_s == 60


def test_brokers_fill_one_after_the_other_as_in_table_1() -> None:
    """A broker does with 26 of 100 publishers. Searches that stop early find a little less, so five are filled one
    after the other, the last in one round.
    """
    fitting = Fitting(topic(100), idle(6), "srtm", SLO_NS, as_paper=True)
    outcome = drive(fitting, by_count(SLO_NS // 26), 60)
    assert isinstance(outcome, Placed)
    assert [iteration.k for iteration in fitting.iterations] == [1, 2, 3, 4, 5]
    assert fitting.iterations[-1].rounds == 1
    assert all(iteration.rounds > 1 for iteration in fitting.iterations[:-1])
    # Max-min: they share evenly instead of leaving a rest for the last.
    assert [count for count in np.bincount(outcome.broker_of).tolist() if count] == [20, 20, 20, 20, 20]


def test_beyond_the_paper_fewer_brokers_are_tried_than_were_filled() -> None:
    """As above; then four are tried, and they do; three do not."""
    trials = Trials(topic(100), idle(6), policy_named("srtm"), SLO_NS, 0, None)
    iterations: list[Iteration] = []
    trial = one_by_one(trials, iterations, 0.2)
    order = resume(trial, None)
    while isinstance(order, Measure):
        order = resume(trial, trials.checked(order, by_count(SLO_NS // 26)(order)))
    assert isinstance(order, Placed)
    assert [iteration.k for iteration in iterations] == [1, 2, 3, 4, 5, 4, 3]
    assert [count for count in np.bincount(order.broker_of).tolist() if count] == [25, 25, 25, 25]


def test_what_one_broker_could_not_carry_another_is_not_asked_to() -> None:
    """The whole topic was too much for the first; that the second might do with it alone is not worth a round."""
    fitting = Fitting(topic(100), idle(6), "srtm", SLO_NS, as_paper=True)
    outcome = drive(fitting, by_count(SLO_NS // 60), 60)
    assert outcome.k == 2
    assert [iteration.k for iteration in fitting.iterations] == [1, 2]


def test_the_search_stops_within_20_percent_below_the_slo() -> None:
    """A broker that does with 63 of 100 publishers: 50 is 79 % of the SLO, too low to stop; 62 is good enough."""
    fitting = Fitting(topic(100), idle(2), "srtm", SLO_NS, as_paper=True)
    probes = []
    while isinstance(order := fitting.order, Measure):
        probes.append(int((order.broker_of == 0).sum()))
        fitting.tell(by_count(SLO_NS // 63)(order), 60)
        if len(fitting.iterations) > 1:
            break
    assert probes == [100, 50, 75, 62]


def test_violating_brokers_search_at_the_same_time() -> None:
    loaded = [Broker("a", 600), Broker("b", 600)]
    fitting = Fitting(topic(100), loaded, "srtm", SLO_NS, as_paper=True)
    assert isinstance(fitting.order, Measure)
    assert fitting.order.brokers == (0, 1)
    fitting.tell({0: 2 * SLO_NS, 1: 3 * SLO_NS}, 60)
    assert isinstance(fitting.order, Measure)
    assert fitting.order.brokers == (0, 1)
    assert [(fitting.order.broker_of == broker).sum() for broker in (0, 1)] == [25, 25]
    assert (fitting.order.broker_of == UNPLACED).sum() == 50


def test_shedding_takes_from_every_group_in_proportion() -> None:
    fitting = Fitting(topic(100, group_size=10), idle(2), "srtm", SLO_NS, as_paper=True)
    fitting.tell({0: 2 * SLO_NS}, 60)
    assert isinstance(fitting.order, Measure)
    kept = (fitting.order.broker_of == 0).reshape(10, 10).sum(axis=1)
    assert kept.tolist() == [5] * 10


def test_out_of_brokers_reports_the_best_that_was_measured() -> None:
    fitting = Fitting(topic(100), idle(2), "srtm", SLO_NS)
    outcome = drive(fitting, by_count(SLO_NS // 30), 60)
    assert isinstance(outcome, NoCapacity)
    assert "out of brokers" in outcome.reason
    assert outcome.best is not None
    assert outcome.best.k == 2
    assert max(outcome.best.latency_ns.values()) == 50 * (SLO_NS // 30)


def test_an_even_split_is_found_where_shedding_never_helps() -> None:
    """Fewer publishers wait longer for tokens, except where every group is cut into equal parts: 4 brokers of 25."""

    def measure(order: Measure) -> dict[int, int]:
        counts = {b: int((order.broker_of == b).sum()) for b in order.brokers}
        return {b: SLO_NS // 2 if n == 25 else 5 * SLO_NS - n for b, n in counts.items()}

    outcome = drive(Fitting(topic(100, group_size=20), idle(6), "srtm", SLO_NS), measure, 60)
    assert isinstance(outcome, Placed)
    assert outcome.k == 4


@pytest.mark.parametrize("rates", [[1.0], [1.0, 1.0], [40.0, 1.0, 1.0], [10.0] * 7, [1.0, 3.0, 7.0, 40.0]])
@pytest.mark.parametrize("policy", POLICIES)
def test_brokers_that_are_always_too_slow_are_given_up(rates: list[float], policy: str) -> None:
    """Nothing that is tried helps, and publishers are so few that every share is rounded: it ends all the same."""
    roster = Roster(Publisher(f"p{i}", rate) for i, rate in enumerate(rates))
    for brokers in range(1, 5):
        fitting = Fitting(roster, idle(brokers, mcap=max(42.5, sum(rates))), policy, SLO_NS)
        outcome = drive(fitting, lambda order: dict.fromkeys(order.brokers, 2 * SLO_NS), 60)
        assert isinstance(outcome, NoCapacity)
        assert outcome.best is not None


def test_no_more_brokers_than_the_bucket_can_be_split_into() -> None:
    outcome = drive(Fitting(topic(100), idle(6), "srtm", SLO_NS, max_brokers=3), by_count(SLO_NS // 26), 60)
    assert isinstance(outcome, NoCapacity)


def test_a_search_that_runs_out_of_rounds_has_no_fit() -> None:
    unlimited = Fitting(topic(100), idle(6), "srtm", SLO_NS, as_paper=True)
    drive(unlimited, by_count(SLO_NS // 26), 60)
    for rounds in range(1, unlimited.rounds + 1):
        limited = Fitting(topic(100), idle(6), "srtm", SLO_NS, as_paper=True, max_rounds=rounds)
        outcome = drive(limited, by_count(SLO_NS // 26), 60)
        assert limited.rounds == rounds
        assert isinstance(outcome, Placed if rounds == unlimited.rounds else NoCapacity)


def test_lb_uses_all_brokers_and_does_not_search() -> None:
    fitting = Fitting(topic(100), idle(4), "lb", SLO_NS)
    outcome = drive(fitting, by_count(SLO_NS), 60)
    assert isinstance(outcome, NoCapacity)
    assert outcome.best is not None
    assert outcome.best.k == 4
    assert fitting.rounds == 1


def test_a_true_model_needs_one_round_to_confirm() -> None:
    truth = by_count(SLO_NS // 26)
    measured = Fitting(topic(100), idle(6), "srtm", SLO_NS)
    by_measuring = drive(measured, truth, 60)
    modelled = Fitting(topic(100), idle(6), "srtm", SLO_NS, predict=truth)
    by_model = drive(modelled, truth, 60)
    assert by_model.k == by_measuring.k == 4
    assert modelled.rounds == 1
    assert measured.rounds > 1


@pytest.mark.parametrize("wrong_by", [0.5, 0.8, 1.3, 3.0])
def test_a_model_that_is_off_is_corrected_by_what_it_sees(wrong_by: float) -> None:
    truth = by_count(SLO_NS // 26)
    fitting = Fitting(
        topic(100),
        idle(12),
        "srtm",
        SLO_NS,
        predict=lambda order: {b: round(ns * wrong_by) for b, ns in truth(order).items()},
    )
    outcome = drive(fitting, truth, 60)
    assert isinstance(outcome, Placed)
    assert outcome.k == 4
    assert fitting.rounds <= 3


@pytest.mark.parametrize("latency", [None, -1, math.nan, math.inf])
def test_a_measurement_that_is_none_is_refused_and_loses_nothing(latency: float | None) -> None:
    fitting = Fitting(topic(), idle(2), "srtm", SLO_NS)
    before = fitting.order
    with pytest.raises(InputError, match=r"invalid latency .* of broker 'b0'"):
        fitting.tell({} if latency is None else {0: latency}, 60)  # type: ignore[dict-item]
    assert fitting.order is before
    assert fitting.rounds == 0


@pytest.mark.parametrize(("latency", "fits"), [(SLO_NS, True), (SLO_NS + 1, False)])
def test_the_slo_itself_is_the_limit(latency: int, fits: bool) -> None:
    fitting = Fitting(topic(), idle(1), "srtm", SLO_NS)
    fitting.tell({0: latency}, 60)
    assert isinstance(fitting.order, Placed) == fits


def test_very_different_rates_do_not_make_it_endless() -> None:
    roster = Roster([Publisher("fast", 10.0), Publisher("slow", 0.001, "g")])
    brokers = [Broker(f"b{i}", 12 + i / 2) for i in range(3)]
    fitting = Fitting(roster, brokers, "srtm", SLO_NS)

    def measure(order: Measure) -> dict[int, int]:
        shares = roster.rates_by_broker(order.broker_of, 3) / roster.rate
        return {b: round(4e6 * shares[b]) for b in order.brokers}

    drive(fitting, measure, 60)
    assert fitting.rounds < 100


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_rounds_last_a_finite_time(seconds: float) -> None:
    with pytest.raises(InputError, match="a round must last"):
        Fitting(topic(), idle(1), "srtm", SLO_NS).tell({0: 5}, seconds)


def test_a_latency_just_above_the_slo_is_above_it() -> None:
    fitting = Fitting(topic(), idle(1), "srtm", SLO_NS)
    fitting.tell({0: SLO_NS + 0.9}, 60)  # type: ignore[dict-item]
    assert not isinstance(fitting.order, Placed)


def test_a_prediction_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"invalid latency .* of broker 'b0'"):
        Fitting(topic(), idle(2), "srtm", SLO_NS, predict=lambda _: {})


def test_told_the_same_again_it_stands_where_it_stood() -> None:
    """How a controller that was restarted resumes: the fitting depends on nothing else."""
    truth = by_count(SLO_NS // 26)
    first, told = Fitting(topic(100), idle(6), "srtm", SLO_NS, seed=3), []
    for _ in range(3):
        assert isinstance(first.order, Measure)
        told.append(truth(first.order))
        first.tell(told[-1], 60)
    again = Fitting(topic(100), idle(6), "srtm", SLO_NS, seed=3)
    for latencies in told:
        again.tell(latencies, 60)
    assert isinstance(first.order, Measure)
    assert isinstance(again.order, Measure)
    assert (again.order.broker_of == first.order.broker_of).all()
    assert again.order.brokers == first.order.brokers


def test_it_ends_when_its_time_is_up() -> None:
    fitting = Fitting(topic(100), idle(6), "srtm", SLO_NS, as_paper=True, max_elapsed_s=150)
    outcome = drive(fitting, by_count(SLO_NS // 26), 60)
    assert isinstance(outcome, NoCapacity)
    assert outcome.reason == "no fit after 3 rounds in 180 s"


def test_an_ended_fitting_hears_nothing() -> None:
    fitting = Fitting(topic(), idle(1), "srtm", SLO_NS)
    fitting.tell({0: 5}, 60)
    with pytest.raises(InputError, match="the fitting is over"):
        fitting.tell({0: 5}, 60)


@pytest.mark.parametrize(
    ("slo_ns", "stop_within"), [(0, 0.2), (-5, 0.2), (math.nan, 0.2), (SLO_NS, 1.0), (SLO_NS, -0.1)]
)
def test_impossible_goals_are_refused(slo_ns: int, stop_within: float) -> None:
    with pytest.raises(InputError):
        Fitting(topic(), idle(1), "srtm", slo_ns, stop_within=stop_within)
