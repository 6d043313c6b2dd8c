"""`/metrics` of the controller: the cluster's statistics in the text format of Prometheus.

Names begin with `srtm_cluster_` to tell them from a broker's own metrics; only `srtm_topic_shares_idle_ratio`, which no
single broker can know, does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.routing import Route

import srtm
from srtm.control import statistics
from srtm.control.clock import now_ns
from srtm.model.advice import KINDS
from srtm.model.lending import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from starlette.requests import Request

    from srtm.control.controller import Controller
    from srtm.control.lent import PairStatistics
    from srtm.control.statistics import MemberStatistics, TopicStatistics

_MS_PER_S = 1000

_BROKERS: list[tuple[str, str, Callable[[MemberStatistics], float]]] = [
    ("up", "1 if the broker answers.", lambda broker: broker.status == "alive"),
    ("draining", "1 if the broker is draining: its publishers are sent elsewhere.", lambda broker: broker.draining),
    ("messages_per_second", "Messages received in the last second.", lambda broker: broker.rate),
    ("capacity_messages_per_second", "mcap: the rate the broker can carry.", lambda broker: broker.mcap),
    (
        "allocated_messages_per_second",
        "Declared rate of the publishers placed there, plus traffic without a contract.",
        lambda broker: broker.allocated,
    ),
    ("residual_messages_per_second", "rcap: the part of mcap that is not allocated.", lambda broker: broker.rcap),
    (
        "loop_lag_seconds",
        "Maximum delay of the broker's event loop in the last second.",
        lambda broker: broker.lag_ms / _MS_PER_S,
    ),
    ("busy_ratio", "Processor seconds per second of the broker, over the last seconds.", lambda broker: broker.busy),
]
_TOPICS: list[tuple[str, str, Callable[[TopicStatistics], float | None]]] = [
    ("slo_met", "1 if the topic met its SLO over the last ten seconds.", lambda topic: topic.slo_met),
    ("slo_seconds", "Latency limit of the SLO.", lambda topic: topic.slo_ms / _MS_PER_S),
    ("brokers", "k: brokers that the topic's publishers are placed on.", lambda topic: topic.k),
    ("publishers", "Registered publishers.", lambda topic: topic.publishers),
    ("moving_publishers", "Publishers on their way to another broker.", lambda topic: topic.moving),
    ("paused", "1 if delivery to the topic's channels is paused.", lambda topic: topic.paused),
    ("messages_per_second", "Messages received in the last second.", lambda topic: topic.rate),
    ("waiting_messages", "Messages waiting for tokens.", lambda topic: topic.waiting),
    ("contract_tokens_per_second", "Contract: r, in tokens per second.", lambda topic: topic.r),
    ("contract_burst_tokens", "Contract: b, in tokens.", lambda topic: topic.b),
    (
        "penalty_seconds",
        "DRL penalty: p99 of the access delay, less the model's value for a single bucket.",
        lambda topic: None if topic.penalty_ms is None else topic.penalty_ms / _MS_PER_S,
    ),
]
_LENDING: list[tuple[str, str, Callable[[PairStatistics], float]]] = [
    ("asks", "Times that the broker asked its peer for tokens.", lambda pair: pair.asked),
    ("unanswered_asks", "Asks without an answer in time.", lambda pair: pair.unanswered),
    ("refused_asks", "Asks that the peer refused because they came too often.", lambda pair: pair.refused),
    ("lent_tokens", "Tokens that the peer lent to the broker.", lambda pair: pair.lent),
    ("borrowed_tokens", "Tokens of the peer that the broker took.", lambda pair: pair.borrowed),
    ("lost_tokens", "Tokens of the peer that came too late, or had no room left.", lambda pair: pair.lost),
]


def route(controller: Controller) -> Route:
    """GET /metrics."""
    found = registry(controller)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(found), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return Route("/metrics", metrics)


def registry(controller: Controller) -> CollectorRegistry:
    """All metrics, collected anew each time."""
    found = CollectorRegistry(auto_describe=False)
    found.register(_Cluster(controller))
    ProcessCollector(registry=found)
    return found


class _Cluster(Collector):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        cluster = self._controller.statistics(now_ns())
        brokers, topics = cluster.brokers, cluster.topics
        yield _gauge("build_info", "Version of the controller.", ["version"], [((srtm.__version__,), 1)])
        leads = self._controller.store.keeper.leads
        yield _gauge("leads", "Whether this controller leads.", [], [((), int(leads))])
        for name, text, of in _BROKERS:
            yield _gauge(f"broker_{name}", text, ["broker"], [((each.name,), of(each)) for each in brokers])
        statuses = [((each.name, one), each.status == one) for each in brokers for one in statistics.STATUSES]
        yield _gauge("broker_status", "1 for the broker's current status.", ["broker", "status"], statuses)
        odd = CounterMetricFamily("srtm_cluster_broker_odd_answers", "Implausible answers.", labels=["broker"])
        for each in brokers:
            odd.add_metric([each.name], each.oddities)
        yield odd
        for name, text, found in _TOPICS:
            values = [((topic.topic,), value) for topic in topics if (value := found(topic)) is not None]
            yield _gauge(f"topic_{name}", text, ["topic"], values)
        states = [((topic.topic, one), topic.state == one) for topic in topics for one in statistics.STATES]
        yield _gauge("topic_state", "1 for the topic's current state.", ["topic", "state"], states)
        given = {topic.topic: {each.kind for each in topic.advice} for topic in topics}
        advised = [((topic, kind), kind in kinds) for topic, kinds in given.items() for kind in KINDS]
        yield _gauge("topic_advice", "1 while srtm advise gives this advice about it.", ["topic", "kind"], advised)
        held = [(topic.topic, part) for topic in topics for part in topic.brokers]
        rates = [((topic, part.broker), part.r) for topic, part in held]
        yield _gauge("topic_share_tokens_per_second", "Share of a broker: r.", ["topic", "broker"], rates)
        bursts = [((topic, part.broker), part.b) for topic, part in held]
        yield _gauge("topic_share_burst_tokens", "Share of a broker: b.", ["topic", "broker"], bursts)
        yield from _lending(topics)
        yield _idle(topics)
        yield _latencies(topics)


def _lending(topics: Iterable[TopicStatistics]) -> Iterator[Metric]:
    rules = [((each.topic, one), each.lending.chosen == one) for each in topics for one in RULES]
    yield _gauge("topic_lending_rule", "1 for the rule that brokers follow now.", ["topic", "rule"], rules)
    pairs = [(each.topic, pair) for each in topics for pair in each.lending.peers]
    labels = ["topic", "broker", "peer"]
    for name, text, of in _LENDING:
        family = CounterMetricFamily(f"srtm_cluster_topic_lending_{name}", text, labels=labels)
        for topic, pair in pairs:
            family.add_metric((topic, pair.borrower, pair.lender), of(pair))
        yield family
    took = [
        ((topic, pair.borrower, pair.lender, quantile), value_ms / _MS_PER_S)
        for topic, pair in pairs
        if pair.rtt_ms
        for quantile, value_ms in (("0.5", pair.rtt_ms.p50), ("0.99", pair.rtt_ms.p99))
    ]
    text = "Time from an ask of the broker to the answer of its peer, over the latest asks."
    yield _gauge("topic_lending_round_trip_seconds", text, [*labels, "quantile"], took)
    accused = [((each.topic, one.broker), 1) for each in topics for one in each.lending.accused]
    text = "1 if the broker is excluded from lending: its books or its spending cannot be explained."
    yield _gauge("topic_lending_accused", text, ["topic", "broker"], accused)


def _idle(topics: Iterable[TopicStatistics]) -> Metric:
    text = "Part of the contract that no broker has in force: of r or of b, whichever is more."
    family = GaugeMetricFamily("srtm_topic_shares_idle_ratio", text, labels=["topic"])
    for topic in topics:
        family.add_metric([topic.topic], max(0.0, 1.0 - topic.shares.in_force_ratio))
    return family


def _latencies(topics: Iterable[TopicStatistics]) -> Metric:
    name = "srtm_cluster_topic_latency_seconds"
    family = Metric(name, "Latency over the last ten seconds, by part.", "summary")
    for topic in topics:
        parts = {"access": topic.access_ms, "processing": topic.processing_ms, "total": topic.total_ms}
        for part, found in parts.items():
            if found:
                for quantile, value_ms in (("0.5", found.p50), ("0.95", found.p95), ("0.99", found.p99)):
                    labels = {"topic": topic.topic, "part": part, "quantile": quantile}
                    family.add_sample(name, labels, value_ms / _MS_PER_S)
    return family


def _gauge(name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(f"srtm_cluster_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family
