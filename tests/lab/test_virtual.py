"""The shipped code in virtual time: what it does with known arrivals is what the simulator computes."""

from __future__ import annotations

import pytest

from srtm.lab.result import Claim, Rows
from srtm.lab.shipped import DECLARED, RESULTS, as_placed, at_shares, equal, run_fit, run_split
from srtm.lab.sweep import Settings, cells_of
from srtm.lab.virtual import Virtual, loads
from srtm.lab.world import INITIAL_KMPS, WITH_MARGIN, Simulated, facts
from srtm.workload.publishers import Population

AGREEMENT, SHIPPED = RESULTS
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
    assert (found.broker_of == Simulated(3.0).spread(topic, policy, k, 7).broker_of).all()


def test_other_load_at_brokers_delays_messages_as_in_the_simulator() -> None:
    world = Virtual(2.0, adapt=False)
    topic = world.topic(GROUPED, 2)
    testbed = world.split(topic, "max_min", 3, 2, loads_kmps=INITIAL_KMPS)
    sent = testbed.last_lap()
    found = testbed.summed_up(sent)
    assert equal(sent, at_shares(topic, found, loads(topic, 2, INITIAL_KMPS)))
    assert not equal(sent, at_shares(topic, found))


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
    (row,) = run_split(Simulated(2.0), point, 1)
    assert row.items() >= point.items()
    assert row["equal"]
    assert judged(AGREEMENT.claims[0], Rows([row])) == (True, "1 of 1 splits")
    assert judged(AGREEMENT.claims[0], Rows([{**row, "equal": False}])) == (False, "0 of 1 splits")
    off = Rows([{**row, "p99_ms": 1.06 * float(row["sim_p99_ms"])}])
    assert not judged(AGREEMENT.claims[1], off)[0]
    (fit,) = run_fit(Simulated(2.0, 40_000), SHIPPED.tiny[0], 1)
    assert fit.items() >= SHIPPED.tiny[0].items()
    assert fit.keys() >= SHIPPED.columns.keys()
    rows = Rows([fit, {**fit, "shares": DECLARED}])
    for claim in SHIPPED.claims:
        judged(claim, rows)
    assert not judged(SHIPPED.claims[3], Rows([{**fit, "sim_k": 1 + int(fit["k"])}]))[0]


def test_long_points_run_only_if_asked_for_and_once() -> None:
    usual, thorough = Settings(repetitions=10), Settings(repetitions=10, thorough=True)
    assert len(cells_of(SHIPPED, usual)) == len(SHIPPED.points)
    assert len(cells_of(SHIPPED, thorough)) == len(SHIPPED.points) + len(SHIPPED.more)
    assert {cell.digest for cell in cells_of(SHIPPED, usual)} <= {cell.digest for cell in cells_of(SHIPPED, thorough)}
