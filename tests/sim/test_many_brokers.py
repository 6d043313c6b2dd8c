"""Measured fits on 100 brokers against exhaustive search: every k in turn, by even splits."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import pytest

from srtm.errors import PlacementError
from srtm.model.latency import SLO
from srtm.model.profile import profile
from srtm.model.server import Background
from srtm.sim import SimulatedBroker, SimulatedTopic, assess, simulate
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.publishers import Population, Workload

IDLE = (0,)
MIXED = (0, 20, 60)  # thousands of messages a second, in batches of 10


def world(
    seed: int, rate_mps: int, batch: int, group_size: int, loads_kmps: tuple[int, ...]
) -> tuple[SimulatedTopic, list[SimulatedBroker]]:
    population = Population(1_000, rate_mps / 1_000, batch, "poisson", group_size)
    workload = Workload((population,), 150_000 * NS_PER_S // rate_mps, seed)
    topic = SimulatedTopic.of(workload, profile(workload.arrivals().times_ns, quantile="0.999").bucket)
    loads = [loads_kmps[number % len(loads_kmps)] for number in range(100)]
    brokers = [
        SimulatedBroker.like("paper-testbed", f"b{number}", Background(1_000.0 * load, 10) if load else None)
        for number, load in enumerate(loads)
    ]
    return topic, brokers


def exhaustive(topic: SimulatedTopic, brokers: list[SimulatedBroker], slo: SLO, seed: int) -> int:
    """The least number of brokers whose even split meets the SLO."""
    for k in count(1):
        with suppress(PlacementError):  # k brokers cannot carry the rate
            if assess(topic, brokers, "srtm", k, slo, seed=seed).meets_slo:
                return k
    raise AssertionError


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("rate_mps", "batch", "group_size", "slo_ms", "loads_kmps"),
    [
        (10_000, 10, 5, 1.0, IDLE),
        (10_000, 10, 30, 1.0, IDLE),
        (10_000, 10, 100, 1.0, IDLE),
        (10_000, 10, 200, 1.0, IDLE),
        (100_000, 1, 1, 1.0, IDLE),
        (300_000, 1, 10, 0.3, IDLE),
        (500_000, 10, 20, 0.5, IDLE),
        (500_000, 10, 20, 0.5, MIXED),
        (100_000, 10, 500, 5.0, MIXED),
    ],
)
def test_a_fit_on_100_brokers_takes_12_rounds_and_as_many_brokers_as_exhaustive_search(
    seed: int, rate_mps: int, batch: int, group_size: int, slo_ms: float, loads_kmps: tuple[int, ...]
) -> None:
    topic, brokers = world(seed, rate_mps, batch, group_size, loads_kmps)
    slo = SLO(round(slo_ms * NS_PER_MS))
    found = simulate(topic, brokers, "srtm", slo, seed=seed)
    assert found.meets_slo
    assert found.rounds <= 12
    assert abs(found.k - exhaustive(topic, brokers, slo, seed)) <= 1
