from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srtm.errors import WorkloadError
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload import publishers as module
from srtm.workload.publishers import Population, Workload

populations = st.builds(
    Population,
    publishers=st.integers(1, 60),
    rate_mps=st.sampled_from([1.0, 10.0, 33.3]),
    batch=st.integers(1, 12),
    process=st.sampled_from(["poisson", "periodic"]),
    group_size=st.integers(1, 13),
    spread_ns=st.sampled_from([0, 0, NS_PER_MS, 16 * NS_PER_MS]),
)


@given(populations, st.integers(0, 9), st.integers(1, 5 * NS_PER_S))
def test_arrivals_are_sorted_repeatable_and_the_same_in_any_window(
    population: Population, seed: int, duration: int
) -> None:
    workload = Workload((population,), duration, seed, start_ns=10**18)
    times, senders = workload.arrivals()
    assert (np.diff(times) >= 0).all()
    assert ((senders >= 0) & (senders < population.publishers)).all()
    assert ((times >= 10**18) & (times < 10**18 + duration)).all()
    again = Workload((population,), duration, seed, start_ns=10**18).arrivals()
    assert (again.times_ns == times).all()
    assert (again.publisher_of == senders).all()


@given(populations, st.integers(0, 9))
def test_windows_join_without_a_seam(population: Population, seed: int) -> None:
    """Small windows, so that spread messages cross from one into the next."""
    whole = module._WINDOW_MESSAGES
    workload = Workload((population,), 3 * NS_PER_S, seed)
    try:
        module._WINDOW_MESSAGES = 50
        windows = list(workload.windows())
    finally:
        module._WINDOW_MESSAGES = whole
    ends = [(int(window.times_ns[0]), int(window.times_ns[-1])) for window in windows if len(window.times_ns)]
    assert all(before[1] <= after[0] for before, after in pairwise(ends))
    events = Counter(
        zip(
            np.concatenate([w.times_ns for w in windows]).tolist(),
            np.concatenate([w.publisher_of for w in windows]).tolist(),
            strict=True,
        )
    )
    if population.process == "periodic":
        # Whatever the windows, the same messages: none is lost on the way from one to the next.
        assert set(events.values()) <= {population.batch}
        if population.publishers % population.group_size == 0:  # a smaller last group leaves some places empty
            assert sorted(at for at, _ in events.elements()) == workload.arrivals().times_ns.tolist()


@pytest.mark.parametrize("process", ["poisson", "periodic"])
@pytest.mark.parametrize(("batch", "group_size"), [(1, 1), (10, 1), (10, 25), (10, 30)])
def test_rates_are_what_was_asked_for(process: str, batch: int, group_size: int) -> None:
    workload = Workload((Population(1_000, 10.0, batch, process, group_size),), 60 * NS_PER_S, seed=3)  # type: ignore[arg-type]
    times, senders = workload.arrivals()
    events = 60 * 10 / batch * -(-1_000 // group_size)
    tolerance = 4 * events**0.5 * batch * group_size if process == "poisson" else batch * 1_000
    assert abs(len(times) - 600_000) <= tolerance
    assert len(np.unique(senders)) == 1_000


def test_publishers_of_a_group_send_together() -> None:
    workload = Workload((Population(100, 10.0, 10, "poisson", group_size=25),), 20 * NS_PER_S, seed=3)
    times, senders = workload.arrivals()
    for at in np.unique(times)[:50]:
        here = senders[times == at]
        assert set(Counter(here.tolist()).values()) == {10}
        assert len(np.unique(here)) == 25
        assert len({number // 25 for number in here.tolist()}) == 1
    assert {publisher.group for publisher in workload.publishers()} == {f"p-g{g}" for g in range(4)}


def test_the_last_group_may_be_smaller() -> None:
    workload = Workload((Population(10, 10.0, 1, "periodic", group_size=4),), NS_PER_S, seed=1)
    assert Counter(publisher.group for publisher in workload.publishers()) == {"p-g0": 4, "p-g1": 4, "p-g2": 2}
    assert Counter(workload.arrivals().publisher_of.tolist()) == dict.fromkeys(range(10), 10)


def test_noisy_groups_are_spread_evenly_over_the_interval() -> None:
    spread = 16 * NS_PER_MS
    quiet = Workload((Population(25, 1.0, 1, "periodic", group_size=25),), 30 * NS_PER_S, seed=5).arrivals()
    noisy = Workload(
        (Population(25, 1.0, 1, "periodic", group_size=25, spread_ns=spread),), 30 * NS_PER_S, seed=5
    ).arrivals()
    firsts = np.unique(quiet.times_ns)
    orders = set()
    for event in firsts:
        inside = (noisy.times_ns >= event) & (noisy.times_ns < event + spread)
        assert (noisy.times_ns[inside] - event).tolist() == [place * spread // 25 for place in range(25)]
        orders.add(tuple(noisy.publisher_of[inside].tolist()))
    assert len(orders) == len(firsts)  # drawn anew each time


def test_periodic_publishers_keep_their_phase() -> None:
    times, senders = Workload((Population(20, 10.0, 2, "periodic"),), 10 * NS_PER_S, seed=8).arrivals()
    for sender in range(20):
        own = np.unique(times[senders == sender])
        assert (np.diff(own) == 200 * NS_PER_MS).all()


def test_poisson_gaps_are_exponential() -> None:
    times, _ = Workload((Population(500, 10.0),), 60 * NS_PER_S, seed=8).arrivals()
    gaps = np.diff(times) / 200_000
    assert gaps.mean() == pytest.approx(1, abs=0.02)
    assert gaps.std() == pytest.approx(1, abs=0.02)
    assert (gaps > 3).mean() == pytest.approx(np.exp(-3), rel=0.05)


def test_mixes_hold_every_population() -> None:
    mix = Workload(
        (Population(10, 10.0, prefix="a"), Population(5, 100.0, 5, "periodic", prefix="b")), 20 * NS_PER_S, seed=1
    )
    times, senders = mix.arrivals()
    assert (np.diff(times) >= 0).all()
    assert (senders >= 10).sum() == 5 * 100 * 20
    assert abs((senders < 10).sum() - 2_000) < 4 * 2_000**0.5
    assert [publisher.id for publisher in mix.publishers()][9:12] == ["a9", "b0", "b1"]


@given(populations, st.integers(0, 9), st.integers(1, 5 * NS_PER_S), st.integers(1, 5 * NS_PER_S))
def test_a_longer_workload_starts_with_the_shorter_one(
    population: Population, seed: int, short: int, more: int
) -> None:
    first = Workload((population,), short, seed).arrivals()
    both = Workload((population,), short + more, seed).arrivals()
    cut = int(np.searchsorted(both.times_ns, short))
    assert (both.times_ns[:cut] == first.times_ns).all() if cut else not len(first.times_ns)
    assert both.publisher_of[:cut].tolist() == first.publisher_of.tolist()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Population(0), "publishers = 0"),
        (lambda: Population(5, -1.0), "rate = -1.0 msg/s"),
        (lambda: Population(5, float("nan")), "rate = nan msg/s"),
        (lambda: Population(5, batch=0), "batch = 0"),
        (lambda: Population(5, process="often"), "process = 'often'"),  # type: ignore[arg-type]
        (lambda: Population(5, group_size=0), "group size = 0"),
        (lambda: Population(5, spread_ns=-1), "spread = -1 ns"),
        (lambda: Population(5, 10.0, spread_ns=NS_PER_S), "spread = 1 s: it must not exceed the 100 ms"),
        (lambda: Population(0, -1.0, 0), "publishers = 0.*rate = -1.0.*batch = 0"),
        (lambda: Workload((), 5, 0), "at least one population"),
        (lambda: Workload((Population(1),), 0, 0), "duration = 0 ns"),
        (lambda: Workload((Population(1),), 2**62, 0), "between 0 and 2"),
        (lambda: Workload((Population(1),), 5, -1), "seed = -1"),
        (lambda: Workload((Population(1), Population(2)), 5, 1), "different prefixes"),
    ],
)
def test_impossible_workloads_say_everything_that_is_wrong(make: object, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        make()  # type: ignore[operator]
