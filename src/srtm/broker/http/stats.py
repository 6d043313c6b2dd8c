"""What a broker does, as nsqd says it: the JSON of `/stats`, and its text; ours stands under `srtm`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from srtm.protocol.names import VERSION
from srtm.protocol.server import CLOSING, INIT, SUBSCRIBED
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.broker.broker import Broker
    from srtm.broker.channel import Channel
    from srtm.broker.clients.verbs import Verbs
    from srtm.broker.statistics import Second
    from srtm.broker.topic import Topic
    from srtm.model.latency import Distribution

_STATES = {INIT: 0, SUBSCRIBED: 3, CLOSING: 4}  # nsqd's numbers


def of(broker: Broker, topic: str | None, channel: str | None, *, with_clients: bool) -> dict[str, Any]:
    """The document of `/stats`, of one topic and channel or of all."""
    topics = [each for _, each in sorted(broker.topics.items()) if topic in (None, "", each.name)]
    producers = [each for each in broker.clients.connections.values() if each.published] if with_clients else []
    return {
        "version": VERSION,
        "health": "OK",
        "start_time": broker.started_ns // NS_PER_S,
        "topics": [_topic(each, channel, with_clients=with_clients) for each in topics],
        "memory": None,
        "producers": [_client(each, topic) for each in producers],
        "srtm": {
            "unstamped_reads": broker.clients.buffers.unstamped,
            "connections": len(broker.clients.connections),
            "engine": broker.topics.engine.statistics() if broker.topics.engine else {"kind": "local"},
        },
    }


def _topic(topic: Topic, channel: str | None, *, with_clients: bool) -> dict[str, Any]:
    channels = [each for _, each in sorted(topic.channels.items()) if channel in (None, "", each.name)]
    limiter = topic.limiter
    return {
        "topic_name": topic.name,
        "channels": [_channel(each, with_clients=with_clients) for each in channels],
        "depth": topic.depth,
        "backend_depth": 0,
        "message_count": topic.messages,
        "message_bytes": topic.bytes,
        "paused": topic.paused,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
        "srtm": {
            "log": topic.durable.extent(topic) if topic.durable else None,
            "engine": topic.lane.statistics() if topic.lane else None,
            "closed": topic.closed,  # under contract, and without a share here; r is null for free topics, too
            "r": limiter.bucket.r if limiter else None,
            "b": limiter.bucket.b if limiter else None,
            "tokens": float(limiter.tokens(time.time_ns())) if limiter else None,
            "waiting": len(topic.waiting) + topic.spooled,
            "late": limiter.late if limiter else 0,
            "seconds": [_second(second) for second in topic.recent.history],
        },
    }


def _second(second: Second) -> dict[str, Any]:
    parts = {"access": second.access, "processing": second.processing, "total": second.total}
    return {
        "at_ns": second.at_ns,
        "messages": second.messages,
        "released": second.released,
        "sent": second.sent,
        "dropped": second.dropped,
        "waiting": second.waiting,
        "max_backlog": second.max_backlog,
        **{f"{name}_ns": _points(part) for name, part in parts.items()},
    }


def _points(part: Distribution | None) -> dict[str, int] | None:
    return {"p50": part.p50, "p95": part.p95, "p99": part.p99} if part else None


def _channel(channel: Channel, *, with_clients: bool) -> dict[str, Any]:
    clients = [_client(each.client) for each in channel.consumers] if with_clients else []  # type: ignore[attr-defined]
    return {
        "channel_name": channel.name,
        "depth": channel.depth,
        "backend_depth": 0,
        "in_flight_count": channel.flying,
        "deferred_count": len(channel.deferred),
        "message_count": channel.messages,
        "requeue_count": channel.requeued,
        "timeout_count": channel.timed_out,
        "client_count": len(channel.consumers),
        "clients": clients,
        "paused": channel.paused,
        "e2e_processing_latency": {"count": 0, "percentiles": None},
        "srtm": {"dropped": channel.dropped, "lost": channel.lost},
    }


def _client(client: Verbs, topic: str | None = None) -> dict[str, Any]:
    connection, subscription = client.connection, client.subscription
    identity, host = connection.protocol.identity, connection.address.rpartition(":")[0]
    published = [
        {"topic": name, "count": count} for name, count in client.published.items() if topic in (None, "", name)
    ]
    tls = connection.transport.tls if connection.transport else None
    permit = client.guard.permit if client.guard else None
    return {
        "client_id": identity.client_id or host,
        "hostname": identity.hostname or host,
        "version": "V2",
        "remote_address": connection.address,
        "state": _STATES[connection.protocol.state],
        "ready_count": subscription.ready if subscription else 0,
        "in_flight_count": len(subscription.flights) if subscription else 0,
        "message_count": subscription.messages if subscription else 0,
        "finish_count": subscription.finished if subscription else 0,
        "requeue_count": subscription.requeued if subscription else 0,
        "connect_ts": client.connected_ns // NS_PER_S,
        "sample_rate": identity.sample_rate,
        "deflate": identity.deflate,
        "snappy": identity.snappy,
        "user_agent": identity.user_agent,
        "tls": tls is not None,
        "tls_cipher_suite": (tls.ssl.cipher() or ("",))[0] if tls else "",
        "tls_version": (tls.ssl.version() or "").replace("v", "") if tls else "",
        "msg_timeout": identity.msg_timeout_ms,
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": tls is not None,
        **({"pub_counts": published} if published else {}),
        **(
            {"authed": True, "auth_identity": permit.identity, "auth_identity_url": permit.identity_url}
            if permit
            else {}
        ),
    }


def as_text(document: dict[str, Any]) -> str:
    """The document for people."""
    lines = [f"srtm broker, as nsqd v{document['version']}", f"Health: {document['health']}", ""]
    lines.append("Topics:" if document["topics"] else "Topics: None")
    for topic in document["topics"]:
        lines.append(f"   [{topic['topic_name']:<15}] depth: {topic['depth']:<5} msgs: {topic['message_count']:<8}")
        for channel in topic["channels"]:
            numbers = f"depth: {channel['depth']:<5} inflt: {channel['in_flight_count']:<4}"
            numbers += f" def: {channel['deferred_count']:<4} re-q: {channel['requeue_count']:<5}"
            lines.append(f"      [{channel['channel_name']:<15}] {numbers} timeout: {channel['timeout_count']:<5}")
    lines += ["", "Producers:" if document["producers"] else "Producers: None"]
    for client in document["producers"]:
        for published in client.get("pub_counts", ()):
            lines.append(f"   [{client['remote_address']:<21}] {published['topic']:<15} msgs: {published['count']:<8}")
    return "\n".join(lines) + "\n"
