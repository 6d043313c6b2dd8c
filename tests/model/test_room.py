"""Room for a topic: processor time that others leave, in its own messages, under its own SLO."""

from __future__ import annotations

import pytest

from srtm.model.broker_models import ServiceModel
from srtm.model.latency import SLO
from srtm.model.placement import Publisher, place, rcap
from srtm.model.room import Demand, Others, broker_with_room, others_of, usual_batch
from srtm.units import NS_PER_MS

OURS = ServiceModel(48_000, 23_000, 190_000)  # 71 µs for a single message, 27.8 µs for each of ten
STRICT, LAX = SLO(NS_PER_MS), SLO(50 * NS_PER_MS)
NOBODY = Others({})


def room_mps(demand: Demand, others: Others = NOBODY, limit_mps: float | None = None) -> float:
    return rcap(broker_with_room("b", OURS, demand, others, limit_mps)) / 1_000


def test_an_idle_broker_has_what_the_model_keeps_of_the_slo() -> None:
    for slo in (STRICT, LAX):
        for batch in (1, 10):
            assert room_mps(Demand(slo, batch)) == pytest.approx(OURS.mcap_mps(slo.limit_ns, batch=batch), abs=0.001)
    assert room_mps(Demand(STRICT)) < room_mps(Demand(LAX)) < room_mps(Demand(LAX, 10))


def test_the_same_messages_leave_less_room_if_they_come_one_by_one() -> None:
    singles, tens = (room_mps(Demand(STRICT), Others({batch: 6_000.0})) for batch in (1, 10))
    assert singles < tens
    assert broker_with_room("b", OURS, Demand(STRICT), Others({1: 6_000.0})).allocated_mps == pytest.approx(6_000)
    # 6,000 in batches of ten are 600 reads of 278 µs: as much processor time as 2,349 single messages.
    as_singles = broker_with_room("b", OURS, Demand(STRICT), Others({10: 6_000.0})).allocated_mps
    assert as_singles == pytest.approx(600 * 278 / 71)


def test_equal_loads_are_equal_processor_time() -> None:
    """One broker carries single messages, one as many in batches; conc fills both to the same share."""
    loads = {"singles": Others({1: 4_000.0}), "tens": Others({10: 4_000.0})}
    brokers = [broker_with_room(name, OURS, Demand(LAX), others) for name, others in loads.items()]
    publishers = [Publisher(f"p{n}", 1.0) for n in range(14_000)]
    placed = place(publishers, brokers, "conc")
    shares = [
        OURS.share(rate_mps, 1) + sum(OURS.share(there, batch) for batch, there in others.rates_mps.items())
        for rate_mps, others in zip(placed.rates_mps, loads.values(), strict=True)
    ]
    assert shares[0] == pytest.approx(shares[1], rel=0.001)
    assert placed.rates_mps[1] > 1.3 * placed.rates_mps[0]


def test_what_a_broker_measures_beyond_the_model_counts() -> None:
    assert room_mps(Demand(STRICT), Others({10: 4_000.0}, excess=0.3)) < room_mps(Demand(STRICT), Others({10: 4_000.0}))
    assert room_mps(Demand(STRICT), Others({}, excess=1.0)) == 0


def test_others_answer_for_their_part_of_what_the_model_does_not_explain() -> None:
    others, own = {1: 3_000.0}, {1: 1_000.0}
    expected = OURS.share(4_000.0, 1)
    assert others_of(OURS, others, own, expected / 2).excess == 0
    assert others_of(OURS, others, own, 2 * expected).excess == pytest.approx(OURS.share(3_000.0, 1))
    assert others_of(OURS, {}, {}, 0.02).excess == 0  # a broker without topics ticks


def test_a_limit_caps_messages_of_all_topics() -> None:
    assert room_mps(Demand(LAX), NOBODY, limit_mps=500) == pytest.approx(500)
    assert room_mps(Demand(LAX), Others({10: 400.0}), limit_mps=500) == pytest.approx(100)
    assert room_mps(Demand(LAX), Others({10: 800.0}), limit_mps=500) == 0
    assert room_mps(Demand(LAX), NOBODY, limit_mps=1e9) == room_mps(Demand(LAX))


def test_an_slo_beyond_the_model_is_for_measuring_to_decide() -> None:
    assert room_mps(Demand(SLO(100_000))) == pytest.approx(0.5 / 71e-6, rel=1e-6)
    assert room_mps(Demand(SLO(100_000)), Others({1: 10_000.0})) == 0


def test_the_usual_batch_is_by_reads() -> None:
    assert usual_batch([]) == 1
    assert usual_batch([(10.0, 1), (10.0, 10)]) == 2  # 20 messages in 11 reads
    assert usual_batch([(1.0, 1), (1_000.0, 10)]) == 10
