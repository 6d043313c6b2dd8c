"""The stream of live arrivals: off until it is read, bounded, by offsets that a restart does not repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from srtm.broker.arrivals import IDLE_S, Arrivals, recording_of, stream_of
from srtm.errors import LogReplaced, OffsetTrimmed
from srtm.protocol.exchange import Grant, Listed
from tests.broker.running import Client, InMemory, in_memory
from tests.broker.test_control import BIRTH, CONTRACT, NOBODY, TOKEN, exchange, said, share


@pytest.fixture
def broker() -> Iterator[InMemory]:
    """A broker under a controller, with topic `t` under contract."""
    with in_memory(controller=NOBODY, name="b1") as found:
        exchange(found, said(grants={"t": Grant(BIRTH, 1, share(1000, 100), 100 * 10**9)}))
        yield found


def rows(broker: InMemory, begin: int = 0, limit: int = 10_000) -> pa.Table:
    status, body = broker.page(f"/srtm/arrivals/read?begin={begin}&limit={limit}")
    assert status == 200, body
    with pa.ipc.open_stream(body) as stream:
        return stream.read_all()


def test_off_until_somebody_asks_and_then_every_message_once(broker: InMemory) -> None:
    identity = {"publisher": "sensor-1", "group": "junction-17"}
    with Client(broker.address, srtm=identity) as client, Client(broker.address) as stranger:
        client.publish("t", b"before")
        assert broker.broker.turn.recorder is None
        held = broker.get("/srtm/arrivals")
        assert (held["begin"], held["end"], held["lost"]) == (0, 0, 0)
        client.publish("t", b"one", b"two")
        client.publish("free", b"of no contract")
        stranger.publish("t", b"three")
        found = rows(broker)
        assert found.schema.names == ["topic", "birth", "publisher", "group", "arrival_ns", "broker", "release_ns"]
        assert found["topic"].to_pylist() == ["t"] * 3
        assert found["birth"].to_pylist() == [BIRTH] * 3
        assert found["publisher"].to_pylist()[:2] == ["sensor-1"] * 2
        assert found["group"].to_pylist() == ["junction-17", "junction-17", None]
        assert set(found["broker"].to_pylist()) == {"b1"}
        assert all(
            a <= r for a, r in zip(found["arrival_ns"].to_pylist(), found["release_ns"].to_pylist(), strict=True)
        )
        assert rows(broker) == found, "the same range gives the same rows"
        client.publish("t", b"four")
        assert rows(broker, 1, 2).num_rows == 2
        assert rows(broker, 3).num_rows == 1
        assert rows(broker, 4).num_rows == 0


def test_it_ends_when_nobody_reads_and_another_one_has_another_id(broker: InMemory) -> None:
    first = broker.get("/srtm/arrivals")["log"]
    assert first.startswith(f"{broker.broker.started_ns}-")
    broker.sleep(IDLE_S - 1)
    assert broker.get("/srtm/arrivals")["log"] == first
    broker.sleep(IDLE_S - 1)
    assert stream_of(broker.broker.turn) is not None
    broker.sleep(2)
    assert broker.broker.turn.recorder is None
    assert broker.get("/srtm/arrivals")["log"] != first
    status, body = broker.page(f"/srtm/arrivals/read?begin=0&log={first}")
    assert (status, b"ARRIVALS_GONE" in body) == (410, True)


def test_bounded_and_what_nobody_read_is_counted(broker: InMemory) -> None:
    stream = Arrivals(broker.broker.turn, 1, broker.broker.control.birth, most_rows=8, chunk_rows=2)
    with Client(broker.address) as client:
        client.publish("t", *[b"x"] * 6)
        assert sum(high - low for _, low, high in stream.read(0, 4)) == 4
        for _ in range(20):
            client.publish("t", b"x")
    begin, end, log, lost = stream.extent()
    assert end == 26
    assert 8 <= end - begin <= 12
    assert lost == begin - 4, "four of them had been read"
    with pytest.raises(OffsetTrimmed, match=f"begins at offset {begin}"):
        stream.read(begin - 1, 1)
    with pytest.raises(LogReplaced):
        stream.read(begin, 1, "another")
    assert sum(high - low for _, low, high in stream.read(begin, 100, log)) == end - begin


def test_beside_a_recording(tmp_path: Path) -> None:
    with in_memory(controller=NOBODY, trace_folder=str(tmp_path)) as broker, Client(broker.address) as client:
        exchange(broker, said(grants={"t": Grant(BIRTH, 1, share(1000, 100), 100 * 10**9)}))
        broker.get("/srtm/arrivals")
        assert broker.post("/srtm/trace/start?file=run.parquet")[0] == 200
        assert broker.post("/srtm/trace/start?file=two.parquet")[0] == 409
        client.publish("t", b"both")
        status, answer = broker.post("/srtm/trace/stop")
        assert (status, json.loads(answer)["messages"]) == (200, 1)
        client.publish("t", b"one of them")
        assert pq.read_table(tmp_path / "run.parquet").num_rows == 1
        assert rows(broker).num_rows == 2
        assert broker.post("/srtm/trace/start?file=two.parquet")[0] == 200
        broker.sleep(2 * IDLE_S)  # the stream ends, and the recording goes on
        assert stream_of(broker.broker.turn) is None
        assert recording_of(broker.broker.turn) is not None


def test_messages_that_are_dropped_are_arrivals_but_not_of_a_recording(tmp_path: Path) -> None:
    contract = structs.replace(CONTRACT, overflow="drop")
    with in_memory(controller=NOBODY, trace_folder=str(tmp_path)) as broker, Client(broker.address) as client:
        grant = Grant(BIRTH, 1, share(1, 3), 3 * TOKEN)
        exchange(broker, said(contracts={"t": Listed(BIRTH, contract)}, grants={"t": grant}))
        broker.get("/srtm/arrivals")
        assert broker.post("/srtm/trace/start?file=run.parquet")[0] == 200
        client.publish("t", *[b"x"] * 5)
        client.publish("t", b"y")
        found = rows(broker)
        assert broker.get("/stats?format=json&topic=t")["topics"][0]["srtm"]["waiting"] == 0
        assert (found["birth"].to_pylist(), found["arrival_ns"]) == ([BIRTH] * 6, found["release_ns"])
        exchange(broker, said(2, grants={"t": Grant(BIRTH, 2, None)}))
        client.publish("t", b"without a share")
        assert rows(broker).num_rows == 7
        assert json.loads(broker.post("/srtm/trace/stop")[1])["messages"] == 3


def test_a_broker_with_a_token_shows_its_arrivals_to_those_who_have_it() -> None:
    with in_memory(controller=NOBODY, control_token="s3cret") as broker:
        for path in ("/srtm/arrivals", "/srtm/arrivals/read?begin=0"):
            status, body = broker.page(path)
            assert (status, b"control token" in body) == (401, True)
        assert broker.broker.turn.recorder is None
