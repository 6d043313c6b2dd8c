from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srtm.errors import ArrivalsError, InputError
from srtm.model import coincidence, correlation
from srtm.model.broker_models import broker_model
from srtm.model.correlation import Options, find_groups
from srtm.model.drift import adjusted_rand_index
from srtm.model.latency import SLO
from srtm.model.onsets import Onsets, Scanner, StretchOnsets, onsets_of
from srtm.sim import SimulatedBroker, SimulatedTopic, simulate
from srtm.units import NS_PER_MS, NS_PER_S
from srtm.workload.groups import with_groups
from srtm.workload.publishers import Population, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srtm.model.placement import Publisher

    Ints = NDArray[np.int64]

SIZES = (5, 10, 20, 30)


def workload(process: str, spread_ms: int, seconds: int, *, publishers: int = 400, seed: int = 1) -> Workload:
    """Groups of several sizes, one batch a second each; a batch is one onset, so batches of one do."""
    return Workload(
        tuple(
            Population(publishers // len(SIZES), 1.0, 1, process, size, spread_ms * NS_PER_MS, f"p{size}-")  # type: ignore[arg-type]
            for size in SIZES
        ),
        seconds * NS_PER_S,
        seed,
    )


def alone(process: str, publishers: int, rate: float, seconds: int, seed: int) -> Workload:
    return Workload((Population(publishers, rate, 1, process),), seconds * NS_PER_S, seed)  # type: ignore[arg-type]


def onsets_in(load: Workload) -> Onsets:
    arrivals = load.arrivals()
    names = [publisher.id for publisher in load.publishers()]
    return onsets_of(arrivals.times_ns, arrivals.publisher_of, names, Options().silence_ns)


def labels(names: list[str], groups: list[correlation.Group]) -> list[str]:
    """The group of each name, a lone one by itself."""
    found = {name: group.name for group in groups for name in group.publishers}
    return [found.get(name, f"alone {name}") for name in names]


def agreement(load: Workload) -> float:
    publishers = load.publishers()
    found = labels([publisher.id for publisher in publishers], find_groups(onsets_in(load)))
    return adjusted_rand_index([publisher.group or publisher.id for publisher in publishers], found)


def share_grouped(load: Workload) -> float:
    groups = find_groups(onsets_in(load))
    return sum(len(group.publishers) for group in groups) / len(load.publishers())


def poisson(rng: np.random.Generator, rate: float, seconds: float, start_ns: int = 0) -> Ints:
    return np.sort(rng.integers(0, int(seconds * NS_PER_S), rng.poisson(rate * seconds))) + start_ns


def bursts(times: Ints) -> Ints:
    """Onsets of one publisher's messages, from their definition."""
    ordered = np.sort(times)
    return ordered[np.diff(ordered, prepend=ordered[:1] - NS_PER_S) > Options().silence_ns]


def members_of(
    rng: np.random.Generator, events: Ints, count: int, *, part: float = 1.0, own: float = 0.0, seconds: float = 120
) -> list[Ints]:
    """Publishers that take part in a share of the events, a few ms late, and send by themselves as well."""
    return [
        bursts(
            np.concatenate(
                [
                    taken + rng.integers(0, 4 * NS_PER_MS, len(taken)),
                    poisson(rng, own, seconds),
                ]
            )
        )
        for taken in (events[rng.random(len(events)) < part] for _ in range(count))
    ]


def groups_with_strangers(seed: int, groups: int = 8, size: int = 8, strangers: int = 40) -> dict[str, Ints]:
    rng = np.random.default_rng(seed)
    times = {}
    for group in range(groups):
        for member, onsets in enumerate(members_of(rng, poisson(rng, 1.0, 120), size, part=0.8)):
            times[f"g{group}-{member}"] = onsets
    for number in range(strangers):
        times[f"alone{number:02}"] = bursts(poisson(rng, 1.0, 120))
    return times


def as_sets(groups: list[correlation.Group]) -> set[frozenset[str]]:
    return {frozenset(group.publishers) for group in groups}


@pytest.mark.parametrize("spread_ms", [0, 1, 4, 16])
def test_poisson_groups_are_found_whatever_their_spread(spread_ms: int) -> None:
    assert agreement(workload("poisson", spread_ms, 60)) >= 0.98


@pytest.mark.parametrize(("spread_ms", "wanted"), [(0, 0.95), (1, 0.95), (4, 0.95), (16, 0.9)])
def test_periodic_groups_are_found_whatever_their_spread(spread_ms: int, wanted: float) -> None:
    assert agreement(workload("periodic", spread_ms, 60, publishers=1_000)) >= wanted


def test_where_phases_collide_found_groups_place_as_well_as_declared_ones() -> None:
    """The simulator's p99 over several lots: within 10 %, or what the lots themselves differ by."""
    load = Workload((Population(2_000, 10.0, 10, "periodic", 10, 16 * NS_PER_MS),), 30 * NS_PER_S, seed=1)
    topic = SimulatedTopic.of(load)
    group_of = {name: group.name for group in find_groups(onsets_in(load)) for name in group.publishers}
    brokers = [
        SimulatedBroker(f"b{number}", load.total_mps / 2 * 1.02, broker_model("paper-testbed").service)
        for number in range(2)
    ]

    def p99_ns(publishers: list[Publisher]) -> float:
        runs = [
            simulate(replace(topic, publishers=publishers), brokers, "srtm", SLO(NS_PER_S), seed=lot)
            for lot in range(4)
        ]
        return float(np.mean([run.latency.total.p99 for run in runs]))

    declared = p99_ns(load.publishers())
    assert p99_ns(with_groups(load.publishers(), group_of)) <= 1.1 * declared
    assert p99_ns(with_groups(load.publishers(), {})) > 1.1 * declared


@pytest.mark.parametrize(
    ("process", "publishers", "rate"),
    [("poisson", 500, 1.0), ("poisson", 200, 10.0), ("poisson", 150, 100.0), ("periodic", 1_000, 1.0)],
)
def test_independent_publishers_are_not_grouped_however_busy(process: str, publishers: int, rate: float) -> None:
    assert np.mean([share_grouped(alone(process, publishers, rate, 60, seed)) for seed in (1, 2)]) <= 0.01


def test_independent_publishers_by_the_clock_with_jitter_are_not_grouped() -> None:
    rng = np.random.default_rng(3)
    times = {
        f"p{number}": (rng.random() + np.arange(120) + rng.random(120) * 0.016) * NS_PER_S for number in range(800)
    }
    grouped = sum(len(group.publishers) for group in find_groups(Onsets.of(times)))
    assert grouped <= 0.01 * len(times)


@pytest.mark.parametrize(("busy_s", "of_s"), [(1, 10), (20, 100)])
def test_being_busy_at_the_same_time_is_no_burst_together(busy_s: int, of_s: int) -> None:
    """Shifts are short enough to keep slow changes of the rate in place."""
    rng = np.random.default_rng(4)
    begins = range(0, 600, of_s)
    times = {
        f"p{number}": bursts(np.concatenate([poisson(rng, 8.0, busy_s, begin * NS_PER_S) for begin in begins]))
        for number in range(100)
    }
    assert find_groups(Onsets.of(times)) == []


@pytest.mark.parametrize(("part", "own"), [(0.9, 0.0), (0.7, 0.3), (0.5, 0.0)])
def test_groups_hold_although_publishers_miss_events_and_send_by_themselves(part: float, own: float) -> None:
    rng = np.random.default_rng(5)
    times = {
        f"g{group}-{member}": onsets
        for group in range(10)
        for member, onsets in enumerate(members_of(rng, poisson(rng, 1.0, 120), 12, part=part, own=own))
    }
    groups = find_groups(Onsets.of(times))
    assert adjusted_rand_index([name.split("-")[0] for name in times], labels(list(times), groups)) >= 0.98
    # Two such publishers share part² events a second, out of part + own each.
    shared = part**2 / (part + own)
    assert np.mean([group.confidence for group in groups]) == pytest.approx(shared, abs=0.06)


def test_confidence_lies_between_chance_and_always() -> None:
    groups = find_groups(onsets_in(workload("poisson", 0, 60)))
    assert all(0.99 <= group.confidence <= 1 for group in groups)


def test_a_publisher_that_overlaps_everybody_joins_nobody_and_joins_no_groups_together() -> None:
    rng = np.random.default_rng(6)
    events = [poisson(rng, 1.0, 120) for _ in range(10)]
    times = {
        f"g{group}-{member}": onsets
        for group in range(10)
        for member, onsets in enumerate(members_of(rng, events[group], 8))
    }
    alone_ = as_sets(find_groups(Onsets.of(times)))
    assert len(alone_) == 10
    times["chatty"] = bursts(poisson(rng, 30.0, 120))
    times["hub"] = bursts(np.concatenate(events))
    assert as_sets(find_groups(Onsets.of(times))) == alone_
    times["bridge"] = bursts(np.concatenate(events[:2]))
    assert {group - {"bridge"} for group in as_sets(find_groups(Onsets.of(times)))} == alone_


@pytest.mark.parametrize("seed", [7, 8])
def test_publishers_that_come_and_go_leave_the_other_groups_as_they_are(seed: int) -> None:
    times = groups_with_strangers(seed)
    before = as_sets(find_groups(Onsets.of(times)))
    assert len(before) == 8
    rng = np.random.default_rng(seed)
    gone = set(rng.choice(sorted(times), len(times) // 5, replace=False).tolist())
    fewer = {name: onsets for name, onsets in times.items() if name not in gone}
    assert as_sets(find_groups(Onsets.of(fewer))) == {group - gone for group in before if len(group - gone) > 1}
    more = dict(times)
    for number in range(len(times) // 5):
        more[f"new{number}"] = bursts(poisson(rng, 1.0, 60, start_ns=60 * NS_PER_S))
    assert as_sets(find_groups(Onsets.of(more))) == before


def test_a_publisher_that_comes_late_is_judged_by_the_time_it_is_there() -> None:
    rng = np.random.default_rng(9)
    times = dict(enumerate(members_of(rng, poisson(rng, 1.0, 240), 6)))
    named = {f"p{number}": onsets for number, onsets in times.items()}
    named["p5"] = named["p5"][named["p5"] > 180 * NS_PER_S]
    for number in range(30):
        named[f"alone{number}"] = bursts(poisson(rng, 1.0, 240))
    assert as_sets(find_groups(Onsets.of(named))) == {frozenset(f"p{number}" for number in range(6))}


def test_neither_the_seed_nor_the_order_of_publishers_changes_clear_groups() -> None:
    times = groups_with_strangers(10)
    first = find_groups(Onsets.of(times))
    assert find_groups(Onsets.of(dict(reversed(times.items())))) == first
    assert as_sets(find_groups(Onsets.of(times), Options(seed=99))) == as_sets(first)


def test_too_little_evidence_is_no_group() -> None:
    def same(times: list[int], publishers: int) -> list[correlation.Group]:
        return find_groups(Onsets.of({f"p{number}": times for number in range(publishers)}))

    assert find_groups(Onsets.of({})) == []
    assert same([5], 1) == []
    assert same([5], 1_000) == [], "all at the same instant, once"
    apart = [0, 3 * NS_PER_S, 10 * NS_PER_S, 11 * NS_PER_S, 33 * NS_PER_S, 47 * NS_PER_S, 50 * NS_PER_S]
    for bursts_ in (1, 2, 3):
        assert same(apart[:bursts_], 10) == []
    (group,) = same(apart, 10)
    assert len(group.publishers) == 10


def test_gaps_of_days_are_no_agreement() -> None:
    rng = np.random.default_rng(11)
    day = 86_400 * NS_PER_S
    starts = [0, 3 * day, 3 * day + 7_200 * NS_PER_S]
    independent = {
        f"alone{n}": bursts(np.concatenate([poisson(rng, 1.0, 40, start) for start in starts])) for n in range(60)
    }
    assert find_groups(Onsets.of(independent)) == []
    events = np.concatenate([poisson(rng, 1.0, 40, start) for start in starts])
    together = {f"p{n}": onsets for n, onsets in enumerate(members_of(rng, events, 6, own=0.01, seconds=60))}
    assert as_sets(find_groups(Onsets.of({**independent, **together}))) == {frozenset(together)}


def test_periods_of_several_lengths_and_missed_turns() -> None:
    rng = np.random.default_rng(12)
    times, truth = {}, {}
    for group in range(20):
        period = (0.5, 1.0, 5.0)[group % 3]
        turns = (rng.random() * period + np.arange(0, 120, period)) * NS_PER_S
        for member in range(6):
            kept = turns[rng.random(len(turns)) < 0.95]
            name = f"g{group}-{member}"
            times[name], truth[name] = (kept + rng.exponential(NS_PER_MS, len(kept))).astype(np.int64), group
    groups = find_groups(Onsets.of(times))
    assert adjusted_rand_index(truth.values(), labels(list(times), groups)) >= 0.95
    assert {round((group.period_ns or 0) / NS_PER_S, 4) for group in groups} <= {0.5, 1.0, 5.0}


@st.composite
def messages(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Times and senders, with gaps around the silence that ends a burst."""
    silence = Options().silence_ns
    gap = st.sampled_from([0, 0, 1, silence // 2, silence - 1, silence, silence + 1, 3 * silence, 86_400 * NS_PER_S])
    gaps = draw(st.lists(gap, min_size=1, max_size=60))
    start = draw(st.sampled_from([0, -7, 1_800_000_000 * NS_PER_S]))
    senders = draw(st.lists(st.integers(0, 3), min_size=len(gaps), max_size=len(gaps)))
    return (start + np.cumsum(gaps)).tolist(), senders


def naive_onsets(times: list[int], senders: list[int], sender: int) -> list[int]:
    """Every message that no other of its sender precedes by up to the silence."""
    mine = sorted({at for at, who in zip(times, senders, strict=True) if who == sender})
    return [at for at in mine if not any(at - Options().silence_ns <= other < at for other in mine)]


@given(messages(), st.lists(st.integers(0, 60), max_size=4), st.randoms())
def test_onsets_of_stretches_join_to_those_of_the_whole(
    said: tuple[list[int], list[int]], cuts: list[int], order: object
) -> None:
    times, senders = np.array(said[0]), np.array(said[1], np.int32)
    stretches = []
    for part in np.split(np.arange(len(times)), sorted(min(cut, len(times)) for cut in cuts)):
        scanner = Scanner(Options().silence_ns)
        scanner.feed(np.empty(0, np.int64), np.empty(0, np.int32), 4)
        for half in np.array_split(part, 2):
            scanner.feed(times[half], senders[half], 4)
        if len(part):
            stretches.append((np.arange(4), scanner.last_ns, *scanner.in_order()))
    order.shuffle(stretches)  # type: ignore[attr-defined]
    sizes = np.cumsum([0, *(len(found) for _, _, found, _ in stretches)])
    rows = StretchOnsets(
        np.concatenate([who for who, _, _, _ in stretches]),
        np.concatenate([last_ns for _, last_ns, _, _ in stretches]),
        np.concatenate([ends + size for (_, _, _, ends), size in zip(stretches, sizes[:-1], strict=True)]),
        np.concatenate([found for _, _, found, _ in stretches]),
    )
    found, ends = rows.joined(4, Options().silence_ns)
    for sender, its in enumerate(np.split(found, ends[:-1])):
        assert its.tolist() == naive_onsets(*said, sender)


def test_unsorted_messages_are_refused() -> None:
    scanner = Scanner(1)
    scanner.feed(np.array([5, 6]), np.zeros(2, np.int32), 1)
    with pytest.raises(ArrivalsError, match="not sorted"):
        scanner.feed(np.array([4]), np.zeros(1, np.int32), 1)
    with pytest.raises(ArrivalsError, match="not sorted"):
        Scanner(1).feed(np.array([5, 4]), np.zeros(2, np.int32), 1)


def naive_together(one: list[int], other: list[int], tolerance: int) -> int:
    """The most pairs that do not cross, by trying every way."""
    best = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            matched = best[i][j] + (abs(a - b) <= tolerance)
            best[i + 1][j + 1] = max(best[i][j + 1], best[i + 1][j], matched)
    return best[-1][-1]


@given(
    st.lists(st.integers(0, 99), max_size=12).map(sorted),
    st.lists(st.integers(0, 99), max_size=12).map(sorted),
    st.integers(0, 99),
    st.integers(0, 9),
)
def test_onsets_are_paired_as_often_as_can_be(one: list[int], other: list[int], shift: int, tolerance: int) -> None:
    moved = sorted((at + shift) % 100 for at in other)
    begin = 1_000
    counted = coincidence.count_together(
        np.array(one, np.int64) + begin, np.array(other, np.int64) + begin, shift, begin, 100, tolerance
    )
    assert counted == naive_together(one, moved, tolerance)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.randoms())
def test_groups_depend_on_nothing_but_names_and_times(seed: int, order: object) -> None:
    rng = np.random.default_rng(seed)
    times = {f"p{n}": onsets for n, onsets in enumerate(members_of(rng, poisson(rng, 2.0, 20), 5, part=0.9))}
    times |= {f"q{n}": bursts(poisson(rng, 2.0, 20)) for n in range(5)}
    times |= {f"r{n}": np.arange(20) * NS_PER_S + n // 3 for n in range(6)}
    shuffled = list(times.items())
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert find_groups(Onsets.of(dict(shuffled))) == find_groups(Onsets.of(times))


def test_everything_wrong_with_options_is_listed() -> None:
    with pytest.raises(InputError) as caught:
        Options(silence_ns=0, tolerance_ns=2 * NS_PER_S, min_confidence=0, significance=1, seed=-1)
    for word in ("silence", "tolerance", "min confidence", "significance", "seed"):
        assert word in str(caught.value)
