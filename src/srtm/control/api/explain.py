"""Why a topic is where it is: what its fitting measured, and what every other k would cost by the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from srtm.control.lending import loans_of
from srtm.control.placing.expected import expected
from srtm.control.placing.fitted import described
from srtm.errors import SRTMError
from srtm.model.latency import SLO, Distribution
from srtm.model.room import usual_batch
from srtm.model.scan import access_delays
from srtm.model.server import Background
from srtm.sim.simulate import SimulatedBroker, SimulatedTopic, assess
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from srtm.control.controller import Controller
    from srtm.control.topic import ManagedTopic

_SEED = 0


def one_bucket_ns(topic: ManagedTopic) -> int:
    """p99 of access delay if the declared traffic went through one unsplit bucket: the zero of the DRL penalty."""
    arrivals = expected(list(topic.layout.publishers.values()), _SEED).times_ns
    return Distribution.of(access_delays(arrivals, topic.contract.bucket)).p99


def explained(topic: ManagedTopic, controller: Controller) -> dict[str, Any]:
    """The explanation as JSON; slow, because it simulates every k."""
    contract, publishers = topic.contract, list(topic.layout.publishers.values())
    rates = topic.layout.rates()
    document: dict[str, Any] = {
        "topic": topic.name,
        "policy": contract.policy,
        "lending": contract.lending,
        "accused": dict(sorted(topic.lending.accused.items())),
        "k": len(topic.layout.place.brokers),
        "quotas": dict(sorted(rates.items())),
        "measured": described(topic.fitting.last) if topic.fitting.last else None,
        "predicted": [],
        "neighbours": {
            broker: {other.name: other.contract.slo_ns / NS_PER_MS for other in beside}
            for broker in sorted(rates)
            if (beside := controller.placing.neighbours.beside(topic, broker))
        },
        "refused": topic.fitting.refusal if topic.layout.refused else None,
    }
    if not publishers:
        document["note"] = "no prediction: no publishers are registered"
        return document
    batch = usual_batch((each.rate_mps, each.batch) for each in publishers)
    brokers = [
        SimulatedBroker(
            broker.name,
            broker.mcap_mps,
            controller.placing.neighbours.service,
            Background(broker.allocated_mps, batch) if broker.allocated_mps else None,
        )
        for broker in controller.placing.brokers_for(topic, publishers)
    ]
    traffic = SimulatedTopic([each.publisher for each in publishers], expected(publishers, _SEED), contract.bucket)
    slo = SLO(contract.slo_ns, contract.quantile)
    loans = loans_of(topic, "auto" if contract.lending == "off" else None)  # what it would bring, if it is off
    for k in range(1, len(brokers) + 1):
        try:
            found = assess(traffic, brokers, contract.policy, k, slo, seed=_SEED)
            lending = assess(traffic, brokers, contract.policy, k, slo, seed=_SEED, loans=loans) if loans else found
        except SRTMError as problem:
            document["predicted"].append({"k": k, "possible": False, "reason": str(problem)})
            continue
        document["predicted"].append(
            {
                "k": k,
                "possible": True,
                "meets_slo": found.meets_slo,
                "access_ms": _points(found.latency.access),
                "processing_ms": _points(found.latency.processing),
                "total_ms": _points(found.latency.total),
                "with_lending": {
                    "rule": lending.rule,
                    "meets_slo": lending.meets_slo,
                    "access_ms": _points(lending.latency.access),
                    "total_ms": _points(lending.latency.total),
                    "asks_per_message": lending.asks,
                },
            }
        )
    return document


def _points(part: Distribution) -> dict[str, float]:
    return {name: getattr(part, name) / NS_PER_MS for name in ("p50", "p95", "p99")}
