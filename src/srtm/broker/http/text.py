"""`/stats` as text: nsqd's page, line by line, from the document of `/stats?format=json`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import srtm
from srtm.units import NS_PER_S


def page(document: dict[str, Any], now_ns: int) -> str:
    """The document as nsqd prints it."""
    started_s = document["start_time"]
    began = datetime.fromtimestamp(started_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = [
        f"nsqd v{document['version']} (srtm {srtm.__version__})",
        f"start_time {began}",
        f"uptime {_duration(now_ns // NS_PER_S - started_s)}",
        "",
        f"Health: {document['health']}",
    ]
    if "memory" in document:
        lines += ["", "Memory:", *(f"   {name:<25}\t{value}" for name, value in document["memory"].items())]
    lines += ["", "Topics:" if document["topics"] else "Topics: None"]
    for number, topic in enumerate(document["topics"] or ()):
        lines += [""] if number else []
        lines.append(_topic(topic))
        for channel in topic["channels"]:
            lines.append(_channel(channel))
            lines += [f"        {_client(client, now_ns)}" for client in channel["clients"] or ()]
    lines += ["", "Producers:" if document["producers"] else "Producers: None"]
    lines += [f"   {_client(client, now_ns)}" for client in document["producers"] or ()]
    return "\n".join(lines) + "\n"


def _topic(topic: dict[str, Any]) -> str:
    return (
        f"{'*P ' if topic['paused'] else '   '}[{topic['topic_name']:<15}] depth: {topic['depth']:<5}"
        f" be-depth: {topic['backend_depth']:<5} msgs: {topic['message_count']:<8} e2e%: "
    )


def _channel(channel: dict[str, Any]) -> str:
    return (
        f"{'   *P ' if channel['paused'] else '      '}[{channel['channel_name']:<25}] depth: {channel['depth']:<5}"
        f" be-depth: {channel['backend_depth']:<5} inflt: {channel['in_flight_count']:<4}"
        f" def: {channel['deferred_count']:<4} re-q: {channel['requeue_count']:<5}"
        f" timeout: {channel['timeout_count']:<5} msgs: {channel['message_count']:<8} e2e%: "
    )


def _client(client: dict[str, Any], now_ns: int) -> str:
    port = client["remote_address"].rpartition(":")[2]
    name = f"{client['hostname']}:{port} {client['user_agent']}"
    who = f"[{client['version']} {name:<21}]"
    connected = _duration(now_ns // NS_PER_S - client["connect_ts"])
    if published := client.get("pub_counts"):
        topics = ",".join(f"{each['topic']}={each['count']}" for each in published)
        return f"{who} msgs: {sum(each['count'] for each in published):<8} topics: {topics} connected: {connected}"
    return (
        f"{who} state: {client['state']} inflt: {client['in_flight_count']:<4} rdy: {client['ready_count']:<4}"
        f" fin: {client['finish_count']:<8} re-q: {client['requeue_count']:<8} msgs: {client['message_count']:<8}"
        f" connected: {connected}"
    )


def _duration(seconds: int) -> str:
    """Whole seconds as Go prints them: 5s, 1m5s, 2h0m5s."""
    minutes, seconds = divmod(max(0, seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
