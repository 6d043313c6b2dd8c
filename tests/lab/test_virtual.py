"""The shipped code in virtual time: what it does with known arrivals is what the simulator computes."""

from __future__ import annotations

import pytest

from srtm.lab import agreement, shipped, virtual
from srtm.lab.agreement import at_shares, equal
from srtm.lab.result import Claim, Rows
from srtm.lab.shipped import DECLARED, as_placed
from srtm.lab.sweep import Settings, cells_of
from srtm.lab.virtual import Virtual, loads
from srtm.lab.world import INITIAL_KMPS, WITH_MARGIN, Simulated, brokers, facts
from srtm.sim.simulate import assess
from srtm.workload.publishers import Population

(AGREEMENT,), (SHIPPED,) = agreement.RESULTS, shipped.RESULTS
SINGLE, GROUPED = Population(200), Population(200, batch=10, group_size=10)
NOISY = Population(200, batch=10, process="periodic", group_size=10, spread_ns=4_000_000)


def judged(claim: Claim, rows: Rows) -> tuple[bool, str]:
    assert claim.judge
    return claim.judge(rows)


@pytest.mark.parametrize(
    ("kind", "policy", "k"),
    [(SINGLE, "lb", 6), (SINGLE, "lb", 1), (GROUPED, "srtm", 3), (GROUPED, "max_min", 2), (NOISY, "srtm", 4)],
)
def test_a_fixed_split_is_the_simulators_to_the_nanosecond(kind: Population, policy: str, k: int) -> None:
    world = Virtual(3.0, adapt=False)
    topic = world.topic(kind, 7)
    testbed = world.split(topic, policy, k, 7)
    sent = testbed.last_lap()
    found = testbed.summed_up(sent)
    assert found.k == k
    assert sum(share.b_ntok for share in found.shares.values()) == topic.bucket.b_ntok
    assert equal(sent, at_shares(topic, found))
    assert sum(len(part.sent_ns) for part in sent.values()) == len(topic.arrivals.times_ns)
    simulated = assess(topic, brokers(), policy, k, seed=7, declared=topic.declared())
    assert (found.broker_of == simulated.broker_of).all()
    assert found.shares == simulated.shares
    assert found.by_broker == simulated.by_broker


def test_other_load_at_brokers_delays_messages_as_in_the_simulator() -> None:
    world = Virtual(2.0, adapt=False)
    topic = world.topic(GROUPED, 2)
    testbed = world.split(topic, "max_min", 3, 2, loads_kmps=INITIAL_KMPS)
    sent = testbed.last_lap()
    found = testbed.summed_up(sent)
    assert equal(sent, at_shares(topic, found, loads(topic, 2, INITIAL_KMPS)))
    assert not equal(sent, at_shares(topic, found))


def test_the_controller_knows_of_other_load_before_it_fits() -> None:
    topic = Virtual(2.0).topic(GROUPED, 2)
    testbed = virtual.Testbed(topic, "max_min", 2, fit="none", loads_kmps=INITIAL_KMPS)
    assert testbed.controller is not None
    houses = testbed.controller.placing.brokers_for(testbed.topic, topic.declared())
    room_kmps = [(each.mcap_mps - each.allocated_mps) / 1_000 for each in houses]
    assert room_kmps == sorted(room_kmps, reverse=True)
    assert room_kmps[-1] < room_kmps[0]
    assert testbed.topic.layout.place.brokers <= {"broker-1", "broker-2"}  # where there is most room


def test_other_load_goes_on_lap_after_lap() -> None:
    topic, found = Virtual(2.0).topic(GROUPED, 2), []
    for again in (True, False):
        testbed = virtual.Testbed(topic, "max_min", 2, fit="none", adapt=False, loads_kmps=INITIAL_KMPS)
        testbed.start()
        testbed.carry(loads(topic, 2, INITIAL_KMPS), again=again)
        testbed.finish_lap()
        found.append(testbed.last_lap()["broker-1"].processing_ns.mean())
    assert found[0] > found[1]


def test_the_controller_fits_a_small_topic_as_the_simulator_does() -> None:
    world = Virtual(5.0)
    topic = world.topic(GROUPED, 3, WITH_MARGIN)
    found = world.fit(topic, "srtm", 3)
    assert (found.k, found.meets_slo) == (1, True)
    assert found.rounds >= 1
    assert found.elapsed_s > 4
    # On one broker there is nothing to share; only the state in which the lap begins differs.
    expected = as_placed(topic, found)["broker-1"]
    assert found.by_broker["broker-1"].total.p99 == pytest.approx(expected.total.p99, rel=0.01)


def test_the_same_seed_gives_the_same_facts() -> None:
    first, second = (facts(Virtual(2.0).fit(Virtual(2.0).topic(GROUPED, 5), "srtm", 5)) for _ in range(2))
    assert first == second


def test_rows_repeat_their_point_and_say_what_claims_need() -> None:
    point = {**AGREEMENT.tiny[2], "publishers": 100}
    (row,) = agreement.run(Simulated(2.0), point, 1)
    assert row.items() >= point.items()
    assert row.keys() >= AGREEMENT.columns.keys()
    for number, column in enumerate(("equal", "same_shares")):
        assert judged(AGREEMENT.claims[number], Rows([row])) == (True, "1 of 1 splits")
        assert judged(AGREEMENT.claims[number], Rows([{**row, column: False}])) == (False, "0 of 1 splits")
    assert row["p99_ms"] == row["sim_p99_ms"] != row["hindsight_p99_ms"]
    assert judged(AGREEMENT.claims[2], Rows([row]))[0]
    assert not judged(AGREEMENT.claims[2], Rows([{**row, "p99_ms": 1.06 * float(row["sim_p99_ms"])}]))[0]
    (fit,) = shipped.run(Simulated(2.0, 40_000), SHIPPED.tiny[0], 1)
    assert fit.items() >= SHIPPED.tiny[0].items()
    assert fit.keys() >= SHIPPED.columns.keys()
    rows = Rows([fit, {**fit, "shares": DECLARED}])
    for claim in SHIPPED.claims:
        judged(claim, rows)
    assert not judged(SHIPPED.claims[3], Rows([{**fit, "sim_k": 1 + int(fit["k"])}]))[0]
    assert not judged(SHIPPED.claims[4], Rows([{**fit, "placed_p99_ms": 0.9 * float(fit["p99_ms"])}]))[0]


def test_every_figure_has_a_split() -> None:
    figures = {str(point["figure"]) for point in AGREEMENT.points}
    assert figures == {
        *(f"fig{n}{panel}" for n in (6, 9, 10, 11) for panel in "ab"),
        *(f"fig{n}{p}" for n in (7, 8) for p in "abcd"),
    }


def test_long_points_run_only_if_asked_for_and_once() -> None:
    usual, thorough = Settings(repetitions=10), Settings(repetitions=10, thorough=True)
    assert len(cells_of(SHIPPED, usual)) == len(SHIPPED.points)
    assert len(cells_of(SHIPPED, thorough)) == len(SHIPPED.points) + len(SHIPPED.more)
    assert {cell.digest for cell in cells_of(SHIPPED, usual)} <= {cell.digest for cell in cells_of(SHIPPED, thorough)}
