"""Paced brokers in virtual time: a real broker, whose messages leave exactly when the model says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from srtm.broker.options import BrokerOptions
from srtm.model import scan
from srtm.model.broker_models import ServiceModel, broker_model
from srtm.model.bucket import TokenBucket
from srtm.model.server import Background
from srtm.model.service import processing_latencies
from srtm.protocol import client as say
from srtm.protocol.names import MAGIC_V2
from srtm.testing.memory import MemoryBroker
from srtm.testing.network import MemorySocket
from srtm.testing.pacing import Pace, PacedTurn
from srtm.units import NS_PER_MS, NS_PER_S

FACTOR = 20
TESTBED = broker_model("paper-testbed").slower(FACTOR).service
BUCKET = TokenBucket.of(500, 40)


def paced(pace: Pace, folder: Path | None = None) -> MemoryBroker:
    options = BrokerOptions(name="broker", trace_folder=str(folder) if folder else None)
    return MemoryBroker(options, turns=partial(PacedTurn, pace=pace))


def publishers(broker: MemoryBroker, number: int) -> list[MemorySocket]:
    sockets = [broker.connect() for _ in range(number)]
    for each in sockets:
        each.sendall(MAGIC_V2)
    return sockets


def consume(broker: MemoryBroker) -> MemorySocket:
    consumer = broker.connect()
    consumer.sendall(MAGIC_V2 + say.sub("t", "c") + say.rdy(2_500))
    broker.sleep(0.01)
    return consumer


@pytest.mark.parametrize(
    "model", [TESTBED, ServiceModel(read_ns=400_000, message_ns=100_000, base_ns=200_000, serial_ns=50_000, cores=1)]
)
@pytest.mark.parametrize("beside", [None, Background(400.0, 10)])
def test_every_message_takes_as_long_as_the_model_says(
    model: ServiceModel, beside: Background | None, tmp_path: Path
) -> None:
    pace, rng = Pace(model, beside, seed=7), np.random.default_rng(3)
    with paced(pace, tmp_path) as broker:
        broker.request("POST", f"/topic/limit?topic=t&r={BUCKET.r:g}&b={BUCKET.b:g}")
        senders = publishers(broker, 12)
        consumer = consume(broker)
        assert broker.request("POST", "/srtm/trace/start?file=run.parquet")[0] == 200
        for _ in range(150):
            for number in rng.permutation(12)[: rng.integers(1, 5)]:  # some send at once
                senders[number].sendall(say.mpub("t", [b"x"] * int(rng.integers(1, 8))))
            broker.sleep(float(rng.exponential(0.02)))
            if rng.random() < 0.2:
                consumer.recv(1 << 20)
        broker.sleep(3)
        assert broker.request("POST", "/srtm/trace/stop")[0] == 200
        (topic,) = broker.broker.statistics().topics
        slowest = max(second.total.p99 for second in topic.seconds if second.total)
    rows = pq.read_table(tmp_path / "run.parquet").sort_by("arrival_ns")
    arrival, release, sent = (rows[name].to_numpy() for name in ("arrival_ns", "release_ns", "sent_ns"))
    assert len(sent) > 1_000
    assert (release == arrival + scan.access_delays(arrival, BUCKET)).all()
    assert (release > arrival).any()
    names = {name: number for number, name in enumerate(dict.fromkeys(rows["publisher"].to_pylist()))}
    codes = np.array([names[name] for name in rows["publisher"].to_pylist()], np.int32)
    reads = pace.reads_ns(int(arrival[0]) - NS_PER_S, int(arrival[-1])) if beside else None
    expected = processing_latencies(arrival, release, codes, model, reads, 10)
    if model.cores > 1:
        assert np.array_equal(np.sort(sent - release), np.sort(expected))
        assert np.array_equal(sent, release + expected)
        assert slowest >= NS_PER_MS
    else:  # the model tells turns of one core apart from single messages
        assert np.percentile(sent - release, 50) == pytest.approx(np.percentile(expected, 50), rel=0.2)


def test_a_message_without_a_wait_takes_the_models_time_and_counts_in_statistics() -> None:
    with paced(Pace(TESTBED)) as broker:
        (sender,) = publishers(broker, 1)
        consume(broker)
        began = broker.now_ns
        sender.sendall(say.pub("t", b"one"))
        broker.run_until(
            lambda b: any(channel.in_flight for each in b.statistics().topics for channel in each.channels)
        )
        assert broker.now_ns - began == FACTOR * (24_000 + 10_000 + 5_000 + 150_000)
        broker.sleep(2)
        (topic,) = broker.broker.statistics().topics
        (total,) = [second.processing for second in topic.seconds if second.processing]
        assert total.p50 == FACTOR * 189_000


def test_messages_before_the_first_channel_wait_for_it() -> None:
    with paced(Pace(TESTBED)) as broker:
        (sender,) = publishers(broker, 1)
        sender.sendall(say.pub("t", b"one"))
        broker.sleep(1)
        assert broker.broker.statistics().topics[0].depth == 1
        consume(broker)
        broker.sleep(0.1)
        assert broker.broker.statistics().topics[0].channels[0].in_flight == 1


def test_a_deleted_topic_takes_what_it_held() -> None:
    with paced(Pace(TESTBED)) as broker:
        (sender,) = publishers(broker, 1)
        sender.sendall(say.pub("t", b"one"))
        broker.sleep(0.001)
        assert broker.request("POST", "/topic/delete?topic=t")[0] == 200
        broker.sleep(1)
        assert not broker.broker.statistics().topics


def test_the_load_besides_is_the_same_however_it_is_asked_for() -> None:
    pace = Pace(TESTBED, Background(4_000.0, 10), seed=1)
    whole = pace.reads_ns(10 * NS_PER_S, 15 * NS_PER_S)
    parts = [pace.reads_ns(10 * NS_PER_S, 12 * NS_PER_S + 5), pace.reads_ns(12 * NS_PER_S + 5, 15 * NS_PER_S)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert 1_500 < len(whole) < 2_500
    assert not len(Pace(TESTBED).reads_ns(0, NS_PER_S))
