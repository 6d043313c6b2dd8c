"""`/stats`: a broker's statistics in nsqd's JSON, with SRTM's own under `srtm`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec import structs

from srtm.protocol.names import VERSION
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.broker.memory import MemoryStatistics
    from srtm.broker.statistics import (
        BrokerStatistics,
        ChannelStatistics,
        ClientStatistics,
        EngineStatistics,
        LaneStatistics,
        SecondStatistics,
        TopicStatistics,
    )
    from srtm.model.latency import Distribution
    from srtm.protocol.exchange import Lent

_NO_LATENCY = {"count": 0, "percentiles": None}  # nsqd's own percentiles; ours are under `srtm`


def as_json(
    broker: BrokerStatistics,
    topic: str | None = None,
    channel: str | None = None,
    memory: MemoryStatistics | None = None,
) -> dict[str, Any]:
    """The document of `/stats?format=json`: all topics or one, all channels or one, and the process's memory.

    Lists that Go would not have made are null, as nsqd's are: the topics if `topic` is unknown, and clients if there
    are none or nobody asked for them. With a channel, topics without it are left out.
    """
    topics = [_topic(each, channel) for each in broker.topics if channel is None or _has(each, channel)]
    return {
        "version": VERSION,
        "health": broker.health,
        "start_time": broker.started_ns // NS_PER_S,
        "topics": topics if broker.topics or topic is None else None,
        **({"memory": asdict(memory)} if memory else {}),
        "producers": [_client(each, topic) for each in broker.publishers or ()] or None,
        "srtm": {
            "unstamped_reads": broker.unstamped_reads,
            "connections": broker.connections,
            "busy": round(broker.busy, 4),
            "engine": _engine(broker.engine) if broker.engine else {"kind": "local"},
        },
    }


def _has(topic: TopicStatistics, channel: str) -> bool:
    return any(each.name == channel for each in topic.channels)


def _engine(engine: EngineStatistics) -> dict[str, Any]:
    return {
        "kind": engine.kind,
        "address": engine.address,
        "state": "connected" if engine.connected else "away",
        "unacknowledged": engine.unacknowledged,
        "in_flight": engine.in_flight,
        "acknowledged": engine.acknowledged,
        "resent": engine.resent,
        "refused": engine.refused,
        "reconnections": engine.reconnections,
        "last_error": engine.last_error,
    }


def _topic(topic: TopicStatistics, channel: str | None) -> dict[str, Any]:
    return {
        "topic_name": topic.name,
        "channels": [_channel(each) for each in topic.channels if channel in (None, each.name)],
        "depth": topic.depth,
        "backend_depth": 0,
        "message_count": topic.messages,
        "message_bytes": topic.bytes,
        "paused": topic.paused,
        "e2e_processing_latency": _NO_LATENCY,
        "srtm": {
            "log": asdict(topic.log) if topic.log else None,
            "engine": _lane(topic.lane) if topic.lane else None,
            "closed": topic.closed,  # r is null for topics without a contract, too
            "r": topic.limit.r if topic.limit else None,
            "b": topic.limit.b if topic.limit else None,
            "tokens": topic.tokens,
            "waiting": topic.waiting,
            "late": topic.late,
            "lent": _lent(topic.lent) if topic.lent else None,
            "seconds": [_second(second) for second in topic.seconds],
        },
    }


def _lent(lent: Lent) -> dict[str, Any]:
    """Tokens lent and borrowed, in sum and by peer, with the latest round trips."""
    peers = [
        {
            "peer": peer.name,
            "asks": peer.asks,
            "unanswered": peer.unanswered,
            "heard": peer.heard,
            "refused": peer.refused,
            "lent_ntok": peer.lent_ntok,
            "borrowed_ntok": peer.borrowed_ntok,
            "lost_ntok": peer.lost_ntok,
            "round_trip_ns": dict(zip(("p50", "p99"), peer.round_trip_ns, strict=True)) if peer.round_trips else None,
        }
        for peer in lent.peers
    ]
    return structs.asdict(lent) | {"peers": peers}


def _lane(lane: LaneStatistics) -> dict[str, Any]:
    probe = lane.probe
    return {
        "kind": lane.kind,
        "state": "open" if lane.open else "shut",
        "reason": lane.reason,
        "unacknowledged": lane.unacknowledged,
        "unacknowledged_bytes": lane.unacknowledged_bytes,
        "in_log": lane.in_log,
        "lost": lane.lost,
        "probe": {"messages": probe.messages, "end_to_end_ns": _points(probe.end_to_end), "problem": probe.problem}
        if probe
        else None,
    }


def _second(second: SecondStatistics) -> dict[str, Any]:
    return {
        "at_ns": second.at_ns,
        "messages": second.messages,
        "released": second.released,
        "sent": second.sent,
        "dropped": second.dropped,
        "waiting": second.waiting,
        "max_backlog": second.max_backlog,
        "access_ns": _points(second.access),
        "processing_ns": _points(second.processing),
        "total_ns": _points(second.total),
    }


def _points(part: Distribution | None) -> dict[str, int] | None:
    return asdict(part) if part else None


def _channel(channel: ChannelStatistics) -> dict[str, Any]:
    return {
        "channel_name": channel.name,
        "depth": channel.depth,
        "backend_depth": 0,
        "in_flight_count": channel.in_flight,
        "deferred_count": channel.deferred,
        "message_count": channel.messages,
        "requeue_count": channel.requeued,
        "timeout_count": channel.timed_out,
        "client_count": channel.consumers,
        "clients": None if channel.clients is None else [_client(each) for each in channel.clients],
        "paused": channel.paused,
        "e2e_processing_latency": _NO_LATENCY,
        "srtm": {"dropped": channel.dropped, "lost": channel.lost},
    }


def _client(client: ClientStatistics, topic: str | None = None) -> dict[str, Any]:
    cipher_suite, version = client.tls or ("", "")
    document = {
        "client_id": client.client_id,
        "hostname": client.hostname,
        "version": "V2",
        "remote_address": client.address,
        "state": client.state,
        "ready_count": client.ready,
        "in_flight_count": client.in_flight,
        "message_count": client.messages,
        "finish_count": client.finished,
        "requeue_count": client.requeued,
        "connect_ts": client.connected_ns // NS_PER_S,
        "sample_rate": client.sample_rate,
        "deflate": client.deflate,
        "snappy": client.snappy,
        "user_agent": client.user_agent,
        "tls": client.tls is not None,
        "tls_cipher_suite": cipher_suite,
        "tls_version": version.replace("v", ""),
        "msg_timeout": client.msg_timeout_ms,
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": client.tls is not None,
    }
    if published := [{"topic": name, "count": count} for name, count in client.published if topic in (None, name)]:
        document["pub_counts"] = published
    if client.permit:
        identity, url = client.permit
        document |= {"authed": True, "auth_identity": identity, "auth_identity_url": url}
    return document
