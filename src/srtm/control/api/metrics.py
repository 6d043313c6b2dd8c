"""The cluster as Prometheus reads it: `/metrics` of the controller.

The numbers are those of `topic_out` and `members_out`, in seconds instead of milliseconds. Names start with
`srtm_cluster_` to tell them from what each broker reports of itself. `srtm_topic_shares_idle_ratio` does not: no single
broker can know it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.routing import Route

import srtm
from srtm.control.api.schema import STATES, STATUSES, members_out, topic_out
from srtm.control.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from starlette.requests import Request

    from srtm.control.controller import Controller

_PARTS = ("access", "processing", "total")
_QUANTILES = {"0.5": "p50", "0.95": "p95", "0.99": "p99"}
Found = dict[str, Any]

_BROKERS: list[tuple[str, str, Callable[[Found], float]]] = [
    ("up", "Whether the broker answers.", lambda broker: broker["status"] == "alive"),
    ("draining", "Whether the broker is draining.", lambda broker: broker["draining"]),
    ("messages_per_second", "Messages of the last second.", lambda broker: broker["rate"]),
    ("capacity_messages_per_second", "mcap: the broker's capacity.", lambda broker: broker["mcap"]),
    (
        "allocated_messages_per_second",
        "Declared rate of the publishers placed there.",
        lambda broker: broker["allocated"],
    ),
    ("residual_messages_per_second", "rcap: capacity that is left.", lambda broker: broker["rcap"]),
    (
        "loop_lag_seconds",
        "Largest delay of the broker's loop in the last second.",
        lambda broker: broker["lag_ms"] / 1000,
    ),
]
_TOPICS: list[tuple[str, str, Callable[[Found], float | None]]] = [
    ("slo_met", "Whether the SLO held over the last ten seconds.", lambda topic: topic["slo_met"]),
    ("slo_seconds", "The SLO's limit.", lambda topic: topic["slo_ms"] / 1000),
    ("brokers", "k: brokers that carry the topic.", lambda topic: topic["k"]),
    ("publishers", "Registered publishers.", lambda topic: topic["publishers"]),
    ("moving_publishers", "Publishers moving to another broker.", lambda topic: topic["moving"]),
    ("paused", "Whether delivery is paused.", lambda topic: topic["paused"]),
    ("messages_per_second", "Messages of the last second.", lambda topic: topic["rate"]),
    ("waiting_messages", "Messages waiting for tokens.", lambda topic: topic["waiting"]),
    ("contract_tokens_per_second", "r of the contract.", lambda topic: topic["r"]),
    ("contract_burst_tokens", "b of the contract.", lambda topic: topic["b"]),
    (
        "penalty_seconds",
        "DRL penalty: measured p99 of access delay, less the model's for one bucket.",
        lambda topic: None if topic["penalty_ms"] is None else topic["penalty_ms"] / 1000,
    ),
]


def route(controller: Controller) -> Route:
    """GET /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Cluster(controller))
    ProcessCollector(registry=registry)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return Route("/metrics", metrics)


class _Cluster(Collector):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        controller, at = self._controller, now_ns()
        brokers = members_out(controller)
        topics = [topic_out(topic, controller, at, events=False) for topic in controller.topics.values()]
        yield _gauge("build_info", "The running version.", ["version"], [((srtm.__version__,), 1)])
        for name, what, of in _BROKERS:
            yield _gauge(f"broker_{name}", what, ["broker"], [((each["name"],), of(each)) for each in brokers])
        statuses = [((each["name"], status), each["status"] == status) for each in brokers for status in STATUSES]
        yield _gauge("broker_status", "1 for the current status.", ["broker", "status"], statuses)
        odd = CounterMetricFamily("srtm_cluster_broker_odd_answers", "Implausible answers.", labels=["broker"])
        for each in brokers:
            odd.add_metric([each["name"]], each["oddities"])
        yield odd
        for name, what, found in _TOPICS:
            values = [((each["topic"],), value) for each in topics if (value := found(each)) is not None]
            yield _gauge(f"topic_{name}", what, ["topic"], values)
        states = [((each["topic"], state), each["state"] == state) for each in topics for state in STATES]
        yield _gauge("topic_state", "1 for the current state.", ["topic", "state"], states)
        held = [(each["topic"], part) for each in topics for part in each["brokers"]]
        rates = [((topic, part["broker"]), part["r"]) for topic, part in held]
        yield _gauge("topic_share_tokens_per_second", "r of a broker's share.", ["topic", "broker"], rates)
        bursts = [((topic, part["broker"]), part["b"]) for topic, part in held]
        yield _gauge("topic_share_burst_tokens", "b of a broker's share.", ["topic", "broker"], bursts)
        yield _idle(topics)
        yield _latencies(topics)


def _idle(topics: list[Found]) -> Metric:
    what = "Part of the contract that no broker has in force: of r or of b, whichever is larger."
    family = GaugeMetricFamily("srtm_topic_shares_idle_ratio", what, labels=["topic"])
    for topic in topics:
        family.add_metric([topic["topic"]], max(0.0, 1.0 - topic["shares"]["in_force_ratio"]))
    return family


def _latencies(topics: list[Found]) -> Metric:
    name = "srtm_cluster_topic_latency_seconds"
    family = Metric(name, "Latency over the last ten seconds, by part.", "summary")
    for topic in topics:
        for part in _PARTS:
            if points := topic[f"{part}_ms"]:
                for quantile, point in _QUANTILES.items():
                    labels = {"topic": topic["topic"], "part": part, "quantile": quantile}
                    family.add_sample(name, labels, points[point] / 1000)
    return family


def _gauge(name: str, what: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(f"srtm_cluster_{name}", what, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family
