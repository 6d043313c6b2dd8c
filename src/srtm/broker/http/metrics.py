"""`/metrics`: a broker's statistics in the text format of Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as MEDIA_TYPE
from prometheus_client.registry import Collector

from srtm.units import NANO_PER_TOKEN, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from srtm.broker.statistics import (
        BrokerStatistics,
        ChannelStatistics,
        EngineStatistics,
        LaneStatistics,
        TopicStatistics,
    )
    from srtm.model.latency import Distribution
    from srtm.protocol.exchange import PeerLent

__all__ = ["MEDIA_TYPE", "page"]

_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]

_BROKER: list[tuple[_Kind, str, str, Callable[[BrokerStatistics], float]]] = [
    (GaugeMetricFamily, "connections", "Open client connections.", lambda broker: broker.connections),
    (
        CounterMetricFamily,
        "unstamped_reads",
        "Reads without a kernel timestamp; the broker's clock stamped them.",
        lambda broker: broker.unstamped_reads,
    ),
    (
        GaugeMetricFamily,
        "loop_lag_seconds",
        "Maximum delay of the event loop in the last second.",
        lambda broker: broker.lag_ns / NS_PER_S,
    ),
    (
        GaugeMetricFamily,
        "busy_ratio",
        "Processor seconds per second of this process, over the last seconds.",
        lambda broker: broker.busy,
    ),
]
_TOPICS: list[tuple[_Kind, str, str, Callable[[TopicStatistics], float]]] = [
    (CounterMetricFamily, "messages", "Messages received.", lambda topic: topic.messages),
    (CounterMetricFamily, "bytes", "Bytes of message bodies received.", lambda topic: topic.bytes),
    (
        GaugeMetricFamily,
        "waiting",
        "Messages waiting for tokens, in memory or spooled to the log.",
        lambda topic: topic.waiting,
    ),
]
_LIMITED: list[tuple[str, str, Callable[[TopicStatistics], float | None]]] = [
    ("rate_limit", "Sub-token bucket: r, in tokens per second.", lambda topic: topic.limit.r if topic.limit else None),
    ("burst_limit", "Sub-token bucket: b, in tokens.", lambda topic: topic.limit.b if topic.limit else None),
    ("log_bytes", "Approximate size of a disk topic's log.", lambda topic: topic.log.bytes if topic.log else None),
]
_ENGINE: list[tuple[_Kind, str, str, Callable[[EngineStatistics], float]]] = [
    (GaugeMetricFamily, "connected", "1 if the delivery engine is connected.", lambda engine: engine.connected),
    (CounterMetricFamily, "acknowledged", "Messages the engine acknowledged.", lambda engine: engine.acknowledged),
    (
        CounterMetricFamily,
        "resent",
        "Messages sent to the engine again after a lost connection.",
        lambda engine: engine.resent,
    ),
    (CounterMetricFamily, "refused", "Messages the engine refused for good.", lambda engine: engine.refused),
    (CounterMetricFamily, "reconnections", "Lost connections to the engine.", lambda engine: engine.reconnections),
]
_LANES: list[tuple[str, str, Callable[[LaneStatistics], float]]] = [
    ("unacknowledged", "Messages the engine has not acknowledged yet.", lambda lane: lane.unacknowledged),
    ("in_log", "Messages spooled to the log until the engine has room for them.", lambda lane: lane.in_log),
    ("engine_open", "1 if the engine accepts messages of the topic.", lambda lane: lane.open),
]
_LENT: list[tuple[str, str, Callable[[PeerLent], float]]] = [
    ("asks", "Asks for tokens of the peer.", lambda peer: peer.asks),
    ("unanswered_asks", "Asks that the peer did not answer in time.", lambda peer: peer.unanswered),
    ("heard_asks", "Asks of the peer.", lambda peer: peer.heard),
    ("refused_asks", "Asks of the peer that came too often.", lambda peer: peer.refused),
    ("lent_tokens", "Tokens lent to the peer.", lambda peer: peer.lent_ntok / NANO_PER_TOKEN),
    ("borrowed_tokens", "Tokens borrowed from the peer.", lambda peer: peer.borrowed_ntok / NANO_PER_TOKEN),
    (
        "lost_tokens",
        "Tokens of the peer that came too late, or had no room.",
        lambda peer: peer.lost_ntok / NANO_PER_TOKEN,
    ),
]
_CHANNELS: list[tuple[_Kind, str, str, Callable[[ChannelStatistics], float]]] = [
    (GaugeMetricFamily, "depth", "Messages waiting for a consumer.", lambda channel: channel.depth),
    (GaugeMetricFamily, "in_flight", "Messages sent to consumers and not finished.", lambda channel: channel.in_flight),
    (CounterMetricFamily, "requeued", "Messages that consumers requeued.", lambda channel: channel.requeued),
    (
        CounterMetricFamily,
        "timed_out",
        "Messages requeued because their consumer took too long.",
        lambda channel: channel.timed_out,
    ),
    (
        CounterMetricFamily,
        "dropped",
        "Messages an ephemeral channel dropped because it was full.",
        lambda channel: channel.dropped,
    ),
    (
        CounterMetricFamily,
        "lost",
        "Messages retention deleted before they were finished.",
        lambda channel: channel.lost,
    ),
]


def page(broker: BrokerStatistics) -> bytes:
    """The text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Broker(broker))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Broker(Collector):
    def __init__(self, broker: BrokerStatistics) -> None:
        self._broker = broker

    def collect(self) -> Iterator[Metric]:
        broker, topics = self._broker, self._broker.topics
        for kind, name, text, of in _BROKER:
            yield _family(kind, name, text, [((), of(broker))])
        for kind, name, text, of_topic in _TOPICS:
            yield _family(kind, f"topic_{name}", text, [((each.name,), of_topic(each)) for each in topics], ("topic",))
        for name, text, of_limited in _LIMITED:
            values = [((each.name,), value) for each in topics if (value := of_limited(each)) is not None]
            yield _family(GaugeMetricFamily, f"topic_{name}", text, values, ("topic",))
        if broker.engine is not None:
            for kind, name, text, of_engine in _ENGINE:
                value = of_engine(broker.engine)
                yield _family(kind, f"engine_{name}", text, [((broker.engine.kind,), value)], ("engine",))
            lanes = [(each.name, each.lane) for each in topics if each.lane is not None]
            for name, text, of_lane in _LANES:
                values = [((topic,), of_lane(lane)) for topic, lane in lanes]
                yield _family(GaugeMetricFamily, f"topic_{name}", text, values, ("topic",))
        yield from _lending(topics)
        yield _latencies(topics)
        channels = [(topic.name, channel) for topic in topics for channel in topic.channels]
        for kind, name, text, of_channel in _CHANNELS:
            counted = [((topic, channel.name), of_channel(channel)) for topic, channel in channels]
            yield _family(kind, f"channel_{name}", text, counted, ("topic", "channel"))


def _lending(topics: Iterable[TopicStatistics]) -> Iterator[Metric]:
    pairs = [(each.name, peer) for each in topics if each.lent is not None for peer in each.lent.peers]
    for name, text, of in _LENT if pairs else ():
        values = [((topic, peer.name), of(peer)) for topic, peer in pairs]
        yield _family(CounterMetricFamily, f"topic_{name}", text, values, ("topic", "peer"))
    took = [
        ((topic, peer.name, quantile), value_ns / NS_PER_S)
        for topic, peer in pairs
        if peer.round_trips
        for quantile, value_ns in zip(("0.5", "0.99"), peer.round_trip_ns, strict=True)
    ]
    text = "From an ask to the answer of the peer, over the latest asks."
    if took:
        yield _family(GaugeMetricFamily, "topic_ask_round_trip_seconds", text, took, ("topic", "peer", "quantile"))


def _latencies(topics: Iterable[TopicStatistics]) -> Metric:
    name = "srtm_topic_latency_seconds"
    family = Metric(name, "Latency over the last second; end_to_end, measured by a probe, over ten.", "summary")
    for topic in topics:
        parts: dict[str, Distribution | None] = {}
        if topic.lane and topic.lane.probe:
            parts["end_to_end"] = topic.lane.probe.end_to_end
        if topic.seconds:
            last = topic.seconds[-1]
            parts |= {"access": last.access, "processing": last.processing, "total": last.total}
        for part, found in parts.items():
            if found:
                for quantile, value_ns in (("0.5", found.p50), ("0.95", found.p95), ("0.99", found.p99)):
                    labels = {"topic": topic.name, "part": part, "quantile": quantile}
                    family.add_sample(name, labels, value_ns / NS_PER_S)
    return family


def _family(
    kind: _Kind, name: str, text: str, values: Iterable[tuple[tuple[str, ...], float]], labels: tuple[str, ...] = ()
) -> Metric:
    family = kind(f"srtm_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
