from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ArrivalsError, InputError
from srtm.model.broker_models import BROKER_MODELS, ServiceModel
from srtm.model.service import Background, processing_latencies
from srtm.units import NS_PER_MS, NS_PER_S, percentile

PAPERS = BROKER_MODELS["paper-testbed"]
TESTBED = PAPERS.service


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2)), min_size=1, max_size=40),
    st.lists(st.integers(0, 2_000), max_size=20),
    st.integers(0, 50),
    st.integers(1, 50),
)
def test_it_is_one_server_in_order_of_release(
    gaps: list[tuple[int, int]], reads: list[int], read_ns: int, message_ns: int
) -> None:
    """Against a plain list of jobs: background first where the times are equal, a run of equals is one read."""
    model = ServiceModel(read_ns, message_ns, base_ns=5)
    releases = np.cumsum([gap for gap, _ in gaps])
    senders = [sender for _, sender in gaps]
    jobs: list[tuple[int, int, list[int]]] = [(at, 0, []) for at in sorted(reads)]
    for i, at in enumerate(releases.tolist()):
        if i and at == releases[i - 1] and senders[i] == senders[i - 1]:
            jobs[-1][2].append(i)
        else:
            jobs.append((at, 1, [i]))
    free_at, expected = 0, [0] * len(gaps)
    for at, _, messages in sorted(jobs, key=lambda job: job[:2]):
        free_at = max(free_at, at) + model.cost_ns(len(messages) or 3)
        for i in messages:
            expected[i] = free_at - at + 5
    found = processing_latencies(
        releases, np.array(senders, np.int32), model, np.sort(np.array(reads, np.int64)), batch=3
    )
    assert found.tolist() == expected


def p99_ms(rate_mps: int, batch: int, seconds: int = 20) -> float:
    rng = np.random.default_rng(5)
    times = np.sort(rng.integers(0, seconds * NS_PER_S, rate_mps // batch * seconds))
    senders = rng.integers(0, rate_mps // 10, len(times)).astype(np.int32)
    latencies = processing_latencies(np.repeat(times, batch), np.repeat(senders, batch), TESTBED)
    return percentile(latencies, "0.99") / NS_PER_MS


def test_the_papers_broker_behaves_as_its_text_says() -> None:
    assert p99_ms(10_000, batch=1) < 0.3, "10 kmsg/s of single messages are far inside 1 ms"
    assert p99_ms(60_000, batch=1) > 100, "60 kmsg/s of single messages overload it"
    assert p99_ms(30_000, batch=1) < 0.5, "half of that does not"
    assert p99_ms(60_000, batch=10) < 1, "in batches of 10 it carries as much within the SLO"
    assert p99_ms(80_000, batch=10) < 5, "and does not collapse at the 80 kmsg/s of the loaded broker"


def test_capacity_under_an_slo_is_where_the_simulated_tail_meets_it() -> None:
    for batch in (1, 10):
        mcap = TESTBED.mcap_mps(NS_PER_MS, batch=batch)
        assert p99_ms(round(mcap * 0.9), batch) < 1 < p99_ms(round(mcap * 1.1), batch)
    assert TESTBED.mcap_mps(NS_PER_MS, batch=1) < TESTBED.mcap_mps(NS_PER_MS, batch=10) < PAPERS.mcap_mps
    assert TESTBED.mcap_mps(100_000) == 0  # less than an idle broker takes


def test_background_reads_come_at_its_rate() -> None:
    reads = Background(50_000, batch=10).reads(0, 100 * NS_PER_S, np.random.default_rng(1))
    assert abs(len(reads) - 500_000) < 4 * 500_000**0.5
    assert (np.diff(reads) >= 0).all()


@pytest.mark.parametrize("costs", [(-1, 5, 0), (5, -1, 0), (5, 5, -1), (0, 0, 5), (float("nan"), 5, 0), (1.5, 5, 0)])
def test_impossible_costs_are_refused(costs: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="positive whole nanoseconds"):
        ServiceModel(*costs)


def test_bad_traffic_is_refused() -> None:
    times, senders = np.array([5, 3]), np.zeros(2, np.int32)
    with pytest.raises(ArrivalsError, match="not sorted"):
        processing_latencies(times, senders, TESTBED)
    with pytest.raises(ArrivalsError, match="not sorted"):
        processing_latencies(np.sort(times), senders, TESTBED, reads=times)
    with pytest.raises(InputError, match="2 messages but 1 publishers"):
        processing_latencies(np.sort(times), senders[:1], TESTBED)
    for rate, batch in ((-5.0, 1), (float("nan"), 1), (5.0, 0)):
        with pytest.raises(InputError, match="background load needs"):
            Background(rate, batch)
