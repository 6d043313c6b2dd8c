"""`/metrics` as Prometheus itself reads it."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from srtm.protocol import client as say
from tests.broker.running import Client, Running


def metrics(broker: Running) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every sample by its name and the values of its labels, in their names' order."""
    status, text = broker.page("/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@pytest.mark.memory
def test_metrics_count_what_happened(broker: Running) -> None:
    broker.post("/topic/limit?topic=t&r=1000.5&b=20")
    with Client(broker.address) as client:
        client.subscribe("t", "c", 1)
        client.publish("t", b"one", b"three")
        client.send(say.req(client.message().id, 0))
        client.message()
        broker.wait_until(lambda b: bool(b.topics["t"].recent.history) and b.topics["t"].channels["c"].depth == 1)
        found = metrics(broker)
    assert found["srtm_connections", ()] == 1
    assert found["srtm_topic_messages_total", ("t",)] == 2
    assert found["srtm_topic_bytes_total", ("t",)] == 8
    assert found["srtm_topic_rate_limit", ("t",)] == 1000.5
    assert found["srtm_topic_burst_limit", ("t",)] == 20
    assert found["srtm_channel_requeued_total", ("c", "t")] == 1
    assert found["srtm_channel_in_flight", ("c", "t")] == 1
    assert found["srtm_channel_depth", ("c", "t")] == 1
