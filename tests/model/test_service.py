from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import ArrivalsError, InputError
from srtm.model.broker_models import BROKER_MODELS, ServiceModel
from srtm.model.server import Background, Server
from srtm.model.service import busy_share, processing_latencies
from srtm.units import NS_PER_MS, NS_PER_S, percentile

WAKES = ServiceModel(15_000, 5_000, 60_000, 1_000, wake_ns=40_000, rest_ns=20_000)
TESTBED = BROKER_MODELS["paper-testbed"].service


TRAFFIC = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 2), st.integers(0, 400)), min_size=1, max_size=40
)  # gap to the message before, sender, delay of its token
COSTS = st.tuples(st.integers(0, 50), st.integers(1, 50), st.just(5), st.integers(0, 30))


def events_of(traffic: list[tuple[int, int, int]]) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Arrivals, releases (in order, as tokens are), senders, and the messages of each read event."""
    arrivals = np.cumsum([gap for gap, _, _ in traffic])
    delayed = [at + delay for at, (_, _, delay) in zip(arrivals.tolist(), traffic, strict=True)]
    releases = np.maximum.accumulate(delayed)
    senders = [sender for _, sender, _ in traffic]
    events: list[list[int]] = []
    for i, at in enumerate(arrivals.tolist()):
        if i and at == arrivals[i - 1] and senders[i] == senders[i - 1]:
            events[-1].append(i)
        else:
            events.append([i])
    return arrivals.tolist(), releases.tolist(), senders, events


def served(
    arrivals: list[int], releases: list[int], senders: list[int], model: ServiceModel, reads: list[int], batch: int = 3
) -> list[int]:
    """When each message is delivered, by the compiled loops."""
    background = np.sort(np.array(reads, np.int64))
    times = (np.array(arrivals), np.array(releases), np.array(senders, np.int32))
    return [
        at + took for at, took in zip(releases, processing_latencies(*times, model, background, batch), strict=True)
    ]


@given(TRAFFIC, st.lists(st.integers(0, 2_000), max_size=20), COSTS, st.integers(0, 60), st.integers(0, 60))
def test_on_one_core_a_turn_reads_and_then_sends_what_has_its_token(
    traffic: list[tuple[int, int, int]], reads: list[int], costs: tuple[int, int, int, int], wake_ns: int, rest_ns: int
) -> None:
    """Against a plain loop over everything that is due; at equal times, background before reads before tokens."""
    model = ServiceModel(*costs, wake_ns=wake_ns, rest_ns=rest_ns)
    arrivals, releases, senders, events = events_of(traffic)
    background, waiting, coming = sorted(reads), list[int](), list(events)
    free_at, delivered = -1, [0] * len(arrivals)
    while coming or waiting:
        due = [(background[0], 0)] if background else []
        due += [(arrivals[coming[0][0]], 1)] if coming else []
        due += [(releases[waiting[0]], 2)] if waiting else []
        at, kind = min(due)
        woken = at > free_at
        free_at = at + wake_ns if woken else free_at
        if kind == 0:
            background.pop(0)
            free_at += model.cost_ns(3)
        elif kind == 1:
            free_at += model.reading_ns(len(coming[0]))
            waiting += coming.pop(0)
        leaving = [i for i in waiting if releases[i] <= free_at]
        waiting = waiting[len(leaving) :]
        free_at += len(leaving) * model.serial_ns
        for i in leaving:
            delivered[i] = free_at + model.base_ns
        free_at += rest_ns if woken else 0
    assert served(arrivals, releases, senders, model, reads) == delivered


@pytest.mark.parametrize("rate_mps", [1_000, 10_000, 25_000, 40_000])
def test_a_busier_loop_wakes_up_less_often(rate_mps: int) -> None:
    times = np.sort(np.random.default_rng(3).integers(0, 10 * NS_PER_S, 10 * rate_mps))
    found = busy_share(times, np.arange(len(times), dtype=np.int32), WAKES)
    assert found == pytest.approx(WAKES.busy([WAKES.stream(rate_mps, 1)]), rel=0.05)
    assert found < rate_mps * (WAKES.wake_ns + WAKES.rest_ns + WAKES.cost_ns(1)) / NS_PER_S


@given(TRAFFIC, st.lists(st.integers(0, 2_000), max_size=20), COSTS, st.integers(2, 4))
def test_cores_share_reads_and_one_thread_sends(
    traffic: list[tuple[int, int, int]], reads: list[int], costs: tuple[int, int, int, int], cores: int
) -> None:
    model = ServiceModel(*costs, cores=cores)
    arrivals, releases, senders, events = events_of(traffic)
    jobs: list[tuple[int, int, list[int]]] = [(at, 0, []) for at in reads]
    jobs += [(arrivals[event[0]], 1, event) for event in events]
    free_at, ready = [0] * cores, list(releases)
    for at, _, messages in sorted(jobs, key=lambda job: job[:2]):
        free_at.sort()
        free_at[0] = max(free_at[0], at) + model.reading_ns(len(messages) or 3)
        for i in messages:
            ready[i] = max(releases[i], free_at[0])
    thread_at, delivered = 0, [0] * len(arrivals)
    for i in sorted(range(len(ready)), key=lambda i: ready[i]):
        thread_at = max(thread_at, ready[i]) + model.serial_ns
        delivered[i] = thread_at + model.base_ns
    assert served(arrivals, releases, senders, model, reads) == delivered


@given(TRAFFIC, COSTS, st.integers(1, 4))
def test_a_server_that_is_told_event_by_event_says_the_same(
    traffic: list[tuple[int, int, int]], costs: tuple[int, int, int, int], cores: int
) -> None:
    """Without waits for tokens, and with tokens that come in an idle moment."""
    model = ServiceModel(*costs, cores=cores)
    arrivals, _, senders, events = events_of(traffic)
    server, told = Server(model), [0] * len(arrivals)
    ready = sorted((server.read(len(event), arrivals[event[0]]), event) for event in events) if cores > 1 else []
    for event in events if cores == 1 else []:
        done = server.read(len(event), arrivals[event[0]])
        for i, at in zip(event, server.release("t", len(event), done), strict=True):
            told[i] = at
    for done, event in ready:
        for i, at in zip(event, server.release("t", len(event), done), strict=True):
            told[i] = at
    assert served(arrivals, arrivals, senders, model, []) == told
    idle = max(told) + 1_000
    late = [idle + 100_000 * i for i in range(len(arrivals))]
    expected = [server.release("t", 1, at)[0] for at in late]
    assert served(arrivals, late, senders, model, []) == expected


def test_topics_share_cores_and_have_a_thread_each() -> None:
    server = Server(ServiceModel(10, 1, 100, serial_ns=20, cores=2))
    assert [server.read(5, 0), server.read(5, 0), server.read(5, 0)] == [15, 15, 30]
    assert server.release("a", 2, 15) == [135, 155]
    assert server.release("b", 1, 15) == [135]
    assert server.release("a", 1, 30) == [175]
    alone = Server(ServiceModel(10, 1, 100, serial_ns=20))
    assert [alone.read(5, 0), *alone.release("a", 2, 15), alone.read(5, 0)] == [15, 155, 155, 70]


def test_a_message_that_waited_does_not_pay_for_its_read_again() -> None:
    model = ServiceModel(1_000, 10, 5)
    times = np.array([0, 0]), np.array([0, 50_000]), np.zeros(2, np.int32)
    assert processing_latencies(*times, model).tolist() == [1_025, 5]


def p99_ms(rate_mps: int, batch: int, model: ServiceModel = TESTBED, background: Background | None = None) -> float:
    seconds, rng = max(1, min(40, 6_000_000 // rate_mps)), np.random.default_rng(5)
    times = np.sort(rng.integers(0, seconds * NS_PER_S, rate_mps // batch * seconds))
    senders = rng.integers(0, max(1, rate_mps // 10), len(times)).astype(np.int32)
    repeated = np.repeat(times, batch)
    reads = background.reads(0, seconds * NS_PER_S, rng) if background else None
    latencies = processing_latencies(
        repeated, repeated, np.repeat(senders, batch), model, reads, background.batch if background else 1
    )
    return percentile(latencies, "0.99") / NS_PER_MS


def test_the_papers_broker_behaves_as_its_text_says() -> None:
    assert p99_ms(10_000, batch=1) < 0.3, "10 kmsg/s of single messages are far inside 1 ms"
    assert p99_ms(60_000, batch=1) > 100, "60 kmsg/s of single messages overload it"
    assert p99_ms(30_000, batch=1) < 0.5, "half of that does not"
    assert p99_ms(60_000, batch=10) < 1, "in batches of 10 it carries as much within the SLO"
    assert p99_ms(80_000, batch=10) < 5, "and does not collapse at the 80 kmsg/s of the loaded broker"


@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.parametrize("slo_ms", [1, 5, 50])
@pytest.mark.parametrize(
    "model",
    [
        ServiceModel(48_000, 23_000, 190_000),
        ServiceModel(40_000, 11_000, 190_000, 12_000),
        ServiceModel(29_000, 500, 150_000, 6_000, 2),
        ServiceModel(20_000, 5_000, 100_000, 2_000, 4),
        ServiceModel(10_000, 5_000, 100_000, 5_500, 2),
        WAKES,
    ],
    ids=str,
)
def test_capacity_under_an_slo_is_where_the_simulated_tail_meets_it(
    model: ServiceModel, slo_ms: int, batch: int
) -> None:
    mcap = model.mcap_mps(slo_ms * NS_PER_MS, batch=batch)
    if mcap:
        assert p99_ms(round(mcap * 0.95), batch, model) < slo_ms < p99_ms(round(mcap * 1.05), batch, model)


@pytest.mark.parametrize("beside", [Background(3_000, 1), Background(10_000, 10)], ids=str)
@pytest.mark.parametrize("batch", [1, 10])
def test_what_others_use_is_not_there_for_a_topic(beside: Background, batch: int) -> None:
    for model, slo_ms in (
        (ServiceModel(48_000, 23_000, 190_000), 5),
        (ServiceModel(90_000, 500, 0, 1_000, 2), 3),
        (WAKES, 1),
    ):
        stream = model.stream(beside.rate_mps, beside.batch)
        mcap = model.mcap_mps(slo_ms * NS_PER_MS, batch=batch, beside=(stream,))
        assert mcap < model.mcap_mps(slo_ms * NS_PER_MS, batch=batch)
        assert (
            p99_ms(round(mcap * 0.93), batch, model, beside) < slo_ms < p99_ms(round(mcap * 1.07), batch, model, beside)
        )


def test_a_stricter_slo_leaves_less_capacity_and_batches_more() -> None:
    assert TESTBED.mcap_mps(NS_PER_MS, batch=1) < TESTBED.mcap_mps(NS_PER_MS, batch=10)
    assert TESTBED.mcap_mps(NS_PER_MS) < TESTBED.mcap_mps(2 * NS_PER_MS)
    assert TESTBED.mcap_mps(100_000) == 0  # less than an idle broker takes
    assert TESTBED.mcap_mps(NS_PER_MS, beside=(TESTBED.stream(1_000_000, 1),)) == 0


def test_background_reads_come_at_its_rate() -> None:
    reads = Background(50_000, batch=10).reads(0, 100 * NS_PER_S, np.random.default_rng(1))
    assert abs(len(reads) - 500_000) < 4 * 500_000**0.5
    assert (np.diff(reads) >= 0).all()


@pytest.mark.parametrize(
    "costs", [(-1, 5, 0), (5, -1, 0), (5, 5, -1), (0, 0, 5), (float("nan"), 5, 0), (1.5, 5, 0), (5, 5, 0, -1)]
)
def test_impossible_costs_are_refused(costs: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="positive whole nanoseconds"):
        ServiceModel(*costs)
    with pytest.raises(InputError, match="cores"):
        ServiceModel(1, 1, cores=0)
    with pytest.raises(InputError, match="wakes up"):
        ServiceModel(1, 1, cores=2, wake_ns=1)


def test_bad_traffic_is_refused() -> None:
    times, senders = np.array([5, 3]), np.zeros(2, np.int32)
    with pytest.raises(ArrivalsError, match="not sorted"):
        processing_latencies(times, np.sort(times), senders, TESTBED)
    with pytest.raises(ArrivalsError, match="not sorted"):
        processing_latencies(np.sort(times), times, senders, TESTBED)
    with pytest.raises(ArrivalsError, match="not sorted"):
        processing_latencies(np.sort(times), np.sort(times), senders, TESTBED, reads=times)
    with pytest.raises(InputError, match="2 arrivals, 2 releases and 1 publishers"):
        processing_latencies(np.sort(times), np.sort(times), senders[:1], TESTBED)
    for rate, batch in ((-5.0, 1), (float("nan"), 1), (5.0, 0)):
        with pytest.raises(InputError, match="background load needs"):
            Background(rate, batch)
