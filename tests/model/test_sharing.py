from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from srtm.model.broker_models import ServiceModel
from srtm.model.latency import SLO
from srtm.model.server import Background
from srtm.model.service import processing_latencies
from srtm.model.sharing import Host, Part, Shared, Work
from srtm.units import NS_PER_MS, NS_PER_S, percentile

Ints = NDArray[np.int64]
Indices = NDArray[np.int32]

SERVICE = ServiceModel(read_ns=50_000, message_ns=20_000, base_ns=200_000)
SLO_2MS = SLO(2 * NS_PER_MS)
SECONDS = 20


def traffic(rate_mps: float, seed: int, batch: int = 1) -> tuple[Ints, Indices]:
    """Poisson batches of different publishers."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate_mps / batch * SECONDS)
    times = np.repeat(np.sort(rng.integers(0, SECONDS * NS_PER_S, count)), batch)
    return times, np.repeat(rng.integers(0, 1000, count, np.int32), batch)


def latencies(times: Ints, senders: Indices, background: Background | None = None) -> Ints:
    reads = background.reads(0, SECONDS * NS_PER_S, np.random.default_rng(1)) if background else None
    return processing_latencies(times, times, senders, SERVICE, reads, background.batch if background else 1)


def part(rate_mps: float, seed: int = 0, host: str = "a", batch: int = 1) -> Part:
    times, senders = traffic(rate_mps, seed, batch)
    alone_ns = percentile(latencies(times, senders), "0.99")
    return Part(host, rate_mps, Work.of(times, senders, SERVICE), alone_ns)


def hosts(count: int, **more: object) -> list[Host]:
    return [Host(chr(ord("a") + number), SERVICE, **more) for number in range(count)]  # type: ignore[arg-type]


def test_work_is_the_processor_time_of_reads_and_messages() -> None:
    times = np.array([0, 0, 0, 5, NS_PER_S])
    work = Work.of(times, np.array([1, 1, 2, 1, 1], np.int32), SERVICE)
    # Two reads with three messages at once, and two of one message each.
    assert work.load == pytest.approx((2 * 50_000 + 3 * 20_000 + 2 * 70_000) / NS_PER_S)
    assert sorted((work.per_ns * NS_PER_S).tolist()) == pytest.approx([1, 2])
    of_two_cores = Work.of(times, np.array([1, 1, 2, 1, 1], np.int32), ServiceModel(50_000, 20_000, cores=2))
    assert of_two_cores.load == pytest.approx(work.load / 2)


def test_a_topic_alone_keeps_its_broker_and_its_latency() -> None:
    shared, slow = Shared(hosts(3), SLO_2MS), part(9_000, host="b")
    assert shared.place([slow], holds=True) == ["b"]
    assert shared.added_ns("b", slow, ["0.5", "0.99"]) == [0, 0]
    assert {name: found[0] for name, found in shared.loads().items()} == {"b": 1}


def test_small_topics_share_the_brokers_that_are_in_use_and_large_ones_get_their_own() -> None:
    shared = Shared(hosts(3), SLO_2MS)
    assert shared.place([part(6_000)], holds=True) == ["a"]
    assert shared.place([part(500, seed=1)], holds=True) == ["a"]
    assert shared.place([part(9_000, seed=2)], holds=True) == ["b"]
    assert shared.place([part(500, seed=3)], holds=True) is not None
    assert shared.loads().keys() == {"a", "b"}


def test_without_room_a_topic_is_not_placed_and_changes_nothing() -> None:
    shared = Shared(hosts(2), SLO_2MS)
    assert shared.place([part(9_000), part(9_000, seed=1, host="b")], holds=True) == ["a", "b"]
    before = shared.loads()
    assert shared.place([part(9_000, seed=2)], holds=True) is None
    assert shared.place([part(100, seed=3), part(9_000, seed=4)], holds=True) is None
    assert shared.loads() == before


def test_the_parts_of_a_topic_are_on_different_brokers() -> None:
    shared = Shared(hosts(3), SLO_2MS)
    small = [part(100, seed=seed) for seed in range(3)]
    assert sorted(shared.place(small, holds=True) or []) == ["a", "b", "c"]
    assert shared.place([*small, part(100)], holds=True) is None


def test_promises_that_cannot_be_kept_alone_bind_nobody() -> None:
    strict = SLO(100_000)  # less than the latency of an idle broker
    shared = Shared(hosts(2), strict)
    assert shared.place([part(3_000)], holds=False) == ["a"]
    assert shared.place([part(3_000, seed=1)], holds=False) == ["a"]
    assert shared.place([part(13_000, seed=2)], holds=False) == ["b"]


def test_a_limit_of_messages_and_load_of_its_own_count() -> None:
    shared = Shared(hosts(2, limit_mps=1_000), SLO_2MS)
    assert [shared.place([part(600, seed=seed)], holds=True) for seed in range(3)] == [["a"], ["b"], None]
    busy = Shared(hosts(1, background=Background(9_000)), SLO_2MS)
    assert busy.place([part(500)], holds=True) == ["a"]  # it was simulated beside that load
    assert busy.place([part(6_000, seed=1)], holds=True) is None


def test_parts_stay_with_brokers_of_the_kind_that_they_were_simulated_on() -> None:
    fast = Host("fast", ServiceModel(read_ns=5_000, message_ns=2_000, base_ns=200_000))
    shared = Shared([fast, *hosts(1)], SLO_2MS)
    assert shared.place([part(1_000, host="a")], holds=True) == ["a"]
    assert shared.place([part(14_000, seed=1, host="a")], holds=True) is None


@pytest.mark.parametrize("batch", [1, 10])
def test_neighbours_add_about_as_much_as_in_the_simulation(batch: int) -> None:
    """The prediction for a topic beside load, against the queue that the simulator and `srtm plan --load` run."""
    one, other = part(2_000 * batch**0.5, batch=batch), part(2_500, seed=1, batch=batch)
    shared = Shared(hosts(1), SLO(1_000 * NS_PER_MS))
    assert shared.place([one], holds=True) == ["a"]
    assert shared.place([other], holds=True) == ["a"]
    (added_ns,) = shared.added_ns("a", one, ["0.99"])
    times, senders = traffic(2_000 * batch**0.5, 0, batch)
    simulated = percentile(latencies(times, senders, Background(2_500, batch)), "0.99") - one.alone_ns
    assert added_ns == pytest.approx(simulated, rel=0.35, abs=50_000)
