"""A recorded run is what the model says: it conforms, and every message waited as long as the law predicts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from srtm.errors import BrokerError, LogError
from srtm.model import scan
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline, access_delays, largest_excess
from srtm.protocol import client as say
from srtm.workload.trace import RECORDED_SCHEMA
from tests.broker.conftest import Start
from tests.broker.running import Client, Running

R, B = 2000, 20


pytestmark = pytest.mark.memory


def record(broker: Running, name: str = "run.parquet") -> None:
    status, answer = broker.post(f"/srtm/trace/start?file={name}")
    assert status == 200, answer


def stop(broker: Running) -> int:
    status, answer = broker.post("/srtm/trace/stop")
    assert status == 200, answer
    return int(json.loads(answer)["messages"])


def bursts(broker: Running, topic: str, sizes: list[int]) -> None:
    """Bursts through one connection, and all of them received."""
    srtm = {"publisher": "sensor-1", "group": "junction-17"}
    with Client(broker.address, srtm=srtm) as publisher, Client(broker.address) as subscriber:
        subscriber.subscribe(topic, "c", ready=2500)
        for size in sizes:
            publisher.send(say.mpub(topic, [b"x"] * size))
            broker.sleep(0.02)
        for _ in range(sum(sizes)):
            subscriber.send(say.fin(subscriber.message().id))
        broker.wait_until(lambda b: b.topics[topic].channels["c"].finished == sum(sizes))


def test_a_run_conforms_and_its_delays_are_the_models(start: Start, tmp_path: Path) -> None:
    broker = start(trace_folder=str(tmp_path), name="b1")
    broker.post(f"/topic/limit?topic=t&r={R}&b={B}")
    record(broker)
    assert not (tmp_path / "run.parquet").exists(), "complete, or not there"
    sizes = [5, 80, 1, 300, 30, 30]
    bursts(broker, "t", sizes)
    assert stop(broker) == sum(sizes)
    trace = pq.read_table(tmp_path / "run.parquet")
    assert trace.schema.equals(RECORDED_SCHEMA)
    assert set(trace["topic"].to_pylist()) == {"t"}
    assert set(trace["publisher"].to_pylist()) == {"sensor-1"}
    assert set(trace["group"].to_pylist()) == {"junction-17"}
    assert set(trace["broker"].to_pylist()) == {"b1"}
    arrival, release = trace["arrival_ns"].to_numpy(), trace["release_ns"].to_numpy()
    sent = trace["sent_ns"].to_numpy()
    bucket = TokenBucket.of(R, B)
    assert np.all(np.diff(arrival) >= 0)
    assert largest_excess(np.sort(release), Timeline(bucket)).conforms
    predicted = access_delays(arrival, Timeline(bucket))
    assert predicted.max() > 0
    assert (release - arrival).tolist() == predicted.tolist()
    assert predicted.tolist() == scan.access_delays(arrival, bucket).tolist()
    assert np.all(sent >= release), "nothing is sent before it has its token"


def test_delays_are_the_models_while_r_and_b_change(start: Start, tmp_path: Path) -> None:
    """(r, b) changes three times while messages wait; each is released when the law says, not when it was noticed."""
    broker = start(trace_folder=str(tmp_path))
    topic = broker.do(lambda: broker.broker.topics.touch("t"))
    shares = [TokenBucket.of(r, b) for r, b in ((500, 10), (2_000, 5), (300.5, 40), (5_000, 2))]
    broker.do(lambda: topic.gate.limit(shares[0], broker.now_ns()))
    record(broker)
    changes = []
    with Client(broker.address) as publisher, Client(broker.address) as subscriber:
        subscriber.subscribe("t", "c", ready=2500)
        for number, share in enumerate(shares[1:], 1):
            publisher.send(say.mpub("t", [b"x"] * 60))
            broker.wait_until(lambda b, number=number: b.topics["t"].messages == 60 * number)  # type: ignore[misc]
            broker.sleep(0.01)  # some of them leave

            def change(share: TokenBucket = share) -> int:
                now_ns = broker.now_ns()
                topic.gate.limit(share, now_ns)
                broker.broker.turn.wake()
                return now_ns

            changes.append((broker.do(change), share))
        for _ in range(180):
            subscriber.send(say.fin(subscriber.message().id))
    stop(broker)
    trace = pq.read_table(tmp_path / "run.parquet")
    arrival, release = trace["arrival_ns"].to_numpy(), trace["release_ns"].to_numpy()
    timeline = Timeline(shares[0], tuple(changes))
    assert topic.limiter is not None
    assert topic.limiter.late == 0
    assert (release - arrival).tolist() == access_delays(arrival, timeline).tolist()
    assert largest_excess(np.sort(release), timeline).conforms
    last_ns = changes[-1][0]
    assert np.any((arrival < changes[0][0]) & (release > last_ns)), "one waited through all of them"


def test_what_no_subscriber_got_has_no_time_of_sending(start: Start, tmp_path: Path) -> None:
    broker = start(trace_folder=str(tmp_path))
    record(broker)
    with Client(broker.address) as client:
        client.publish("a", b"1", b"2")
        client.publish("b", b"3")
        with Client(broker.address) as subscriber:
            subscriber.subscribe("b", "c").message()
            broker.wait_until(lambda b: b.topics["b"].recent.sent == 1 or len(b.topics["b"].recent.history) > 0)
    stop(broker)
    rows = pq.read_table(tmp_path / "run.parquet").to_pylist()
    assert [(row["topic"], row["sent_ns"] is None, row["group"]) for row in rows] == [
        ("a", True, None),
        ("a", True, None),
        ("b", False, None),
    ]


def test_the_first_of_several_subscribers_counts(start: Start, tmp_path: Path) -> None:
    broker = start(trace_folder=str(tmp_path))
    for channel in ("nobody", "somebody"):
        broker.post("/topic/create?topic=t")
        broker.post(f"/channel/create?topic=t&channel={channel}")
    record(broker)
    with Client(broker.address) as client:
        client.subscribe("t", "somebody")
        client.publish("t", b"x")
    broker.sleep(0.05)
    stop(broker)
    (row,) = pq.read_table(tmp_path / "run.parquet").to_pylist()
    assert row["sent_ns"] >= row["arrival_ns"]


def test_rows_go_to_the_file_while_it_runs(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srtm.broker.recorder.CUT_S", 0.02)
    monkeypatch.setattr("srtm.broker.recorder._ROW_GROUP", 10)
    broker = start(trace_folder=str(tmp_path))
    record(broker)
    bursts(broker, "t", [7] * 30)
    stop(broker)
    with pq.ParquetFile(tmp_path / "run.parquet") as file:
        assert file.num_row_groups > 2
        assert file.metadata.num_rows == 210
        for number in range(file.num_row_groups):
            group = file.read_row_group(number)
            assert np.all(np.diff(group["arrival_ns"].to_numpy()) >= 0)
            assert not group["sent_ns"].null_count


@pytest.mark.parametrize("name", ["", "x", "../x.parquet", "/tmp/x.parquet", ".x.parquet", "a/b.parquet"])
def test_files_stay_in_their_folder(name: str, start: Start, tmp_path: Path) -> None:
    assert start(trace_folder=str(tmp_path)).post(f"/srtm/trace/start?file={name}")[0] == 400


def test_when_it_may_not_start_or_stop(start: Start, tmp_path: Path) -> None:
    assert start().post("/srtm/trace/start?file=x.parquet")[0] == 403
    broker = start(trace_folder=str(tmp_path))
    assert broker.post("/srtm/trace/stop")[0] == 409
    record(broker)
    assert broker.post("/srtm/trace/start?file=y.parquet")[0] == 409
    stop(broker)
    assert broker.post("/srtm/trace/start?file=run.parquet")[0] == 409


def test_a_file_that_cannot_be_written_is_told(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "going"
    folder.mkdir()
    broker = start(trace_folder=str(folder))
    folder.rmdir()
    record(broker)
    status, answer = broker.post("/srtm/trace/stop")
    assert status == 500
    assert b"TRACE_FAILED" in answer


def test_a_folder_that_is_missing_or_not_writable_is_told_at_the_start(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        BrokerError, match=r"--trace-folder: .*/missing: No such file or directory; create it or make it"
    ):
        start(trace_folder=str(tmp_path / "missing"))
    with pytest.raises(BrokerError, match=r"--trace-folder: .*/file: Not a directory; create it or make it writable"):
        start(trace_folder=str(tmp_path / "file"))
    with pytest.raises(LogError, match="name a folder that this user may write to"):
        start(data_path=str(tmp_path / "file" / "log"))


def test_a_broker_that_stops_leaves_a_whole_trace(tmp_path: Path) -> None:
    from tests.broker.running import running

    with running(trace_folder=str(tmp_path)) as broker:
        record(broker)
        with Client(broker.address) as client:
            client.publish("t", b"x")
    assert pq.read_table(tmp_path / "run.parquet").num_rows == 1
