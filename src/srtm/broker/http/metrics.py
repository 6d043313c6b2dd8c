"""What a broker does, as Prometheus reads it: `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as MEDIA_TYPE
from prometheus_client.registry import Collector

from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from srtm.broker.broker import Broker
    from srtm.broker.channel import Channel
    from srtm.broker.topic import Topic

__all__ = ["MEDIA_TYPE", "page"]

_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]

_TOPICS: list[tuple[_Kind, str, str, Callable[[Topic], float]]] = [
    (CounterMetricFamily, "messages", "Messages received.", lambda topic: topic.messages),
    (CounterMetricFamily, "bytes", "Bytes of their bodies.", lambda topic: topic.bytes),
    (GaugeMetricFamily, "waiting", "Messages that wait for tokens.", lambda topic: len(topic.waiting)),
]
_CHANNELS: list[tuple[_Kind, str, str, Callable[[Channel], float]]] = [
    (GaugeMetricFamily, "depth", "Messages that wait for a consumer.", lambda channel: channel.depth),
    (GaugeMetricFamily, "in_flight", "Messages that consumers have.", lambda channel: channel.flying),
    (CounterMetricFamily, "requeued", "Messages that came back.", lambda channel: channel.requeued),
    (CounterMetricFamily, "timed_out", "Messages whose consumer took too long.", lambda channel: channel.timed_out),
    (
        CounterMetricFamily,
        "dropped",
        "Messages that an ephemeral channel could not hold.",
        lambda channel: channel.dropped,
    ),
    (
        CounterMetricFamily,
        "lost",
        "Messages that retention took before they were finished.",
        lambda channel: channel.lost,
    ),
]


def page(broker: Broker) -> bytes:
    """All of it as it is now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Broker(broker))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Broker(Collector):
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        broker = self._broker
        topics = list(broker.topics.values())
        yield _family(
            GaugeMetricFamily, "connections", "Clients that are connected.", [((), len(broker.clients.connections))]
        )
        yield _family(
            CounterMetricFamily,
            "unstamped_reads",
            "Reads without a kernel time.",
            [((), broker.clients.buffers.unstamped)],
        )
        lag = [((), broker.turn.lag_ns / NS_PER_S)]
        yield _family(GaugeMetricFamily, "loop_lag_seconds", "How late the loop was at most, in the last second.", lag)
        for kind, name, what, of in _TOPICS:
            values = [((topic.name,), of(topic)) for topic in topics]
            yield _family(kind, f"topic_{name}", what, values, ("topic",))
        limits = [((topic.name,), topic.limiter.bucket) for topic in topics if topic.limiter]
        rates, bursts = [(name, bucket.r) for name, bucket in limits], [(name, bucket.b) for name, bucket in limits]
        yield _family(GaugeMetricFamily, "topic_rate_limit", "r, in tokens per second.", rates, ("topic",))
        yield _family(GaugeMetricFamily, "topic_burst_limit", "b, in tokens.", bursts, ("topic",))
        logs = [((topic.name,), topic.durable.extent(topic)["bytes"]) for topic in topics if topic.durable]
        yield _family(GaugeMetricFamily, "topic_log_bytes", "Bytes that a disk topic keeps.", logs, ("topic",))
        yield from _engine(broker)
        yield _latencies(topics)
        channels = [(topic.name, channel) for topic in topics for channel in topic.channels.values()]
        for channel_kind, name, what, count in _CHANNELS:
            counted = [((topic, channel.name), count(channel)) for topic, channel in channels]
            yield _family(channel_kind, f"channel_{name}", what, counted, ("topic", "channel"))


def _engine(broker: Broker) -> Iterator[Metric]:
    """How the engine is; nothing where there is none."""
    engine = broker.topics.engine
    if engine is None:
        return
    label = (engine.kind,)
    counted: list[tuple[_Kind, str, str, float]] = [
        (GaugeMetricFamily, "connected", "Whether the delivery engine is there.", engine.connected),
        (CounterMetricFamily, "acknowledged", "Messages that it has acknowledged.", engine.acknowledged),
        (CounterMetricFamily, "resent", "Messages that were sent to it again.", engine.resent),
        (CounterMetricFamily, "refused", "Messages that it will never take.", engine.refused),
        (CounterMetricFamily, "reconnections", "Connections to it that were lost.", engine.reconnections),
    ]
    for kind, name, what, value in counted:
        yield _family(kind, f"engine_{name}", what, [(label, value)], ("engine",))
    held = [((topic,), lane.held) for topic, lane in engine.lanes.items()]
    yield _family(
        GaugeMetricFamily, "topic_unacknowledged", "Messages that its engine has yet to acknowledge.", held, ("topic",)
    )
    left = [((topic,), lane.topic.spooled) for topic, lane in engine.lanes.items()]
    yield _family(
        GaugeMetricFamily, "topic_in_log", "Messages of it that are in the log alone, for its engine.", left, ("topic",)
    )
    open_ = [((topic,), lane.ready) for topic, lane in engine.lanes.items()]
    yield _family(GaugeMetricFamily, "topic_engine_open", "Whether its engine takes its messages.", open_, ("topic",))


def _latencies(topics: Iterable[Topic]) -> Metric:
    name = "srtm_topic_latency_seconds"
    family = Metric(name, "Latency over the last second; end_to_end, by a probe, over ten.", "summary")
    for topic in topics:
        probed = (topic.lane.statistics()["probe"] or {}).get("end_to_end_ns") if topic.lane else None
        for point, taken_ns in (probed or {}).items():
            labels = {"topic": topic.name, "part": "end_to_end", "quantile": f"0.{point[1:]}".removesuffix("0")}
            family.add_sample(name, labels, taken_ns / NS_PER_S)
        for second in list(topic.recent.history)[-1:]:
            parts = {"access": second.access, "processing": second.processing, "total": second.total}
            for part, found in parts.items():
                if found:
                    for quantile, value in (("0.5", found.p50), ("0.95", found.p95), ("0.99", found.p99)):
                        labels = {"topic": topic.name, "part": part, "quantile": quantile}
                        family.add_sample(name, labels, value / NS_PER_S)
    return family


def _family(
    kind: _Kind, name: str, what: str, values: Iterable[tuple[tuple[str, ...], float]], labels: tuple[str, ...] = ()
) -> Metric:
    family = kind(f"srtm_{name}", what, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
