"""The room that a broker has for a topic, in messages of that topic.

A broker's load is processor time. What other topics take of it follows from their rates and batches, or from what the
broker measured, if that is more. `rcap` for a topic is the rate at which the rest keeps this topic's SLO, with its own
batches; `allocated_mps` is the processor time of the others, as messages of this topic would use it. So policies that
compare brokers' loads compare processor time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtm.model.placement import Broker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.model.broker_models import ServiceModel
    from srtm.model.latency import SLO

MARGIN = 0.8  # of an SLO, by prediction: the model may be a quarter too low
_UNKNOWN = 0.5  # the share of a broker to fill with a topic whose SLO the model cannot keep: measuring decides


@dataclass(frozen=True, slots=True)
class Demand:
    """What a topic asks of a broker: its SLO, and how many messages a read of its traffic carries."""

    slo: SLO
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Others:
    """What other topics use of a broker: messages per second by their batch, and a share measured beyond that."""

    rates_mps: Mapping[int, float]
    excess: float = 0.0


def others_of(
    service: ServiceModel, others_mps: Mapping[int, float], own_mps: Mapping[int, float], measured: float
) -> Others:
    """What others use of a broker that measures itself (`measured` processor seconds a second), by declared rates.

    If the broker is busier than the model expects, the others answer for their part of the difference.
    """
    streams = [service.stream(rate_mps, batch) for rates in (others_mps, own_mps) for batch, rate_mps in rates.items()]
    expected = service.busy(streams)
    declared = sum(service.share(rate_mps, batch) for batch, rate_mps in others_mps.items())
    beyond = measured / service.cores / expected - 1 if expected else 0.0
    return Others(others_mps, max(0.0, beyond) * declared)


def usual_batch(traffic: Iterable[tuple[float, int]]) -> int:
    """The mean batch of reads, of pairs of a rate and its batch; 1 without traffic."""
    messages = reads = 0.0
    for rate_mps, batch in traffic:
        messages += rate_mps
        reads += rate_mps / batch
    return max(1, round(messages / reads)) if reads else 1


def fewest_parts(rate_mps: float, rooms_mps: Iterable[float]) -> int:
    """The fewest equal parts of a rate that brokers with this room can carry, one each; else those that carry most."""
    roomiest = sorted(rooms_mps, reverse=True)
    carried = {number: min(rate_mps, number * room) for number, room in enumerate(roomiest, 1)}
    return max(carried, key=carried.__getitem__, default=1)


def broker_with_room(
    name: str, service: ServiceModel, demand: Demand, others: Others, limit_mps: float | None = None
) -> Broker:
    """The broker as placement sees it; `limit_mps` caps its messages, whatever the model says."""
    batch = demand.batch
    carried = {size: rate_mps for size, rate_mps in others.rates_mps.items() if rate_mps > 0}
    share = sum(service.share(rate_mps, size) for size, rate_mps in carried.items()) + others.excess
    beside = [service.stream(rate_mps, size) for size, rate_mps in sorted(carried.items())]
    if others.excess > 0:
        beside.append(service.stream(others.excess / service.share(1.0, 1), 1))
    whole_mps = 1 / service.share(1.0, batch)
    left_mps = service.mcap_mps(demand.slo.limit_ns, demand.slo.quantile, batch, tuple(beside))
    if not left_mps and not service.mcap_mps(demand.slo.limit_ns, demand.slo.quantile, batch):
        left_mps = max(0.0, _UNKNOWN - share) * whole_mps
    if limit_mps is not None:
        left_mps = min(left_mps, max(0.0, limit_mps - sum(carried.values())))
    allocated_mps = share * whole_mps
    return Broker(name, allocated_mps + left_mps, allocated_mps)
