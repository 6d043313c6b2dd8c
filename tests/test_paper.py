"""Worked numbers from the paper, section by section."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from srtm.model import md1, scan
from srtm.model.bucket import TokenBucket
from srtm.model.latency import SLO
from srtm.model.profile import profile
from srtm.model.split import split
from srtm.sim import SimulatedBroker, SimulatedTopic, simulate
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Population, Workload

BROKERS = [SimulatedBroker.like("paper-testbed", f"broker-{i}") for i in range(1, 7)]


def topic(publishers: int, seconds: int = 60, seed: int = 1, **kind: object) -> SimulatedTopic:
    workload = Workload((Population(publishers, 10.0, **kind),), seconds * NS_PER_S, seed)  # type: ignore[arg-type]
    return SimulatedTopic.of(workload, profile(workload.arrivals().times_ns, quantile="0.99").bucket)


def test_section_6_r_is_ten_percent_above_the_message_rate() -> None:
    case = topic(1_000)
    rate = len(case.arrivals.times_ns) / 60
    assert case.bucket.r == pytest.approx(1.1 * rate, rel=1e-3)


def test_section_2_1_both_factors_of_the_penalty() -> None:
    """(i) a smaller bucket is found empty more often; (ii) at a lower rate, who waits waits longer."""
    one = md1.exceeds(26 - 1, 10 / 11)
    for k in range(2, 7):
        assert md1.exceeds(26 / k - 1, 10 / 11) > one
        halves = split(TokenBucket.of(11_000, 26), [1] * k)
        mean = md1.split_mean_delay([(10_000 / k, share) for share in halves])
        assert mean > k * md1.mean_delay(10_000, TokenBucket.of(11_000, 26))


def test_section_2_1_a_split_burst_leaves_the_odds_of_waiting_nearly_unchanged() -> None:
    """Batch Poisson: publishers that burst together, cut in half together with the bucket."""
    rng = np.random.default_rng(7)
    events = np.sort(rng.integers(0, 600 * NS_PER_S, 600 * 100))
    whole = profile(np.repeat(events, 100), quantile="0.99").bucket
    half = split(whole, [1, 1])[0]
    together = (scan.access_delays(np.repeat(events, 100), whole) > 0).mean()
    apart = (scan.access_delays(np.repeat(events, 50), half) > 0).mean()
    assert apart == pytest.approx(together, rel=0.02)
    assert md1.exceeds((whole.b / 2 - 1) / 50, 1 / 1.1) == pytest.approx(
        md1.exceeds((whole.b - 1) / 100, 1 / 1.1), rel=0.02
    )
    # Publishers dealt out blindly instead: whole bursts go one way or the other, and waiting becomes common.
    blind = rng.random(len(events)) < 0.5
    assert (scan.access_delays(np.repeat(events[blind], 100), half) > 0).mean() > 3 * together


def test_section_6_2_the_penalty_of_1000_poisson_publishers() -> None:
    """p99 access delay: zero on one broker, more with every broker, the order of 14.7 ms on six."""
    case = topic(1_000)
    p99 = [simulate(case, BROKERS[:k], "lb", SLO(NS_PER_S)).latency.access.p99 / NS_PER_MS for k in range(1, 7)]
    assert p99[0] == 0
    assert all(before < after for before, after in pairwise(p99))
    assert 7 < p99[5] < 25


def test_section_6_2_6000_publishers_overload_one_broker_and_do_best_on_two() -> None:
    case = topic(6_000, seconds=20)
    p99 = [simulate(case, BROKERS[:k], "lb", SLO(60 * NS_PER_S)).latency.total.p99 / NS_PER_MS for k in range(1, 7)]
    assert p99[0] > 100
    assert p99[1] < 1
    assert all(before < after for before, after in pairwise(p99[1:]))


@pytest.mark.parametrize(("group_size", "brokers"), [(5, 1), (10, 2)])
def test_section_6_6_burstier_topics_need_more_brokers(group_size: int, brokers: int) -> None:
    """Table 1: 1,000 Poisson publishers in batches of 10; larger groups are in the lab's `table1`."""
    workload = Workload((Population(1_000, 10.0, 10, "poisson", group_size),), 60 * NS_PER_S, seed=1)
    bucket = profile(workload.arrivals().times_ns, quantile="0.99").bucket
    result = simulate(SimulatedTopic.of(workload, bucket), BROKERS, "srtm", as_paper=True)
    assert result.meets_slo
    assert result.k == brokers
    assert len([iteration for iteration in result.iterations if iteration.rounds > 1]) == brokers - 1
    fast = simulate(SimulatedTopic.of(workload, bucket), BROKERS, "srtm")
    assert fast.meets_slo
    assert fast.k == brokers
    assert fast.rounds <= result.rounds
