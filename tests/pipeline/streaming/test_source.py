"""The source against real brokers and a real controller, without Spark: offsets, limits, loss, who is away."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from srtm.errors import InputError, LogError, PipelineError
from srtm.pipeline.streaming import source
from srtm.pipeline.streaming.settings import Settings
from srtm.pipeline.streaming.source import BatchReader, StreamReader
from tests.broker.running import running
from tests.pipeline.streaming.topics import (
    Start,
    between,
    bodies,
    brokers,
    cluster,
    contract,
    log_id,
    numbered,
    on_disk,
    plain,
    publish,
    settings,
)
from tests.programs import nsqlookupd


def test_rows_are_what_was_published_by_whom_and_when(start: Start) -> None:
    one, two = on_disk(start("one")), on_disk(start("two"))
    publish(one, numbered("x", 30), publisher="somebody")
    publish(two, numbered("y", 20))
    reader = BatchReader(settings(one, two, rows_per_partition=12))
    parts = reader.partitions()
    assert [(part.broker, part.begin, part.end) for part in parts] == [  # type: ignore[attr-defined]
        ("one", 0, 12),
        ("one", 12, 24),
        ("one", 24, 30),
        ("two", 0, 12),
        ("two", 12, 20),
    ]
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row["body"] for row in rows] == numbered("x", 30) + numbered("y", 20)
    assert [row["offset"] for row in rows] == [*range(30), *range(20)]
    assert {(row["topic"], row["publisher"], row["broker"]) for row in rows} == {
        ("t", "somebody", "one"),
        ("t", "p", "two"),
    }
    started_ns = one.broker.started_ns
    for row in rows:
        assert started_ns < row["arrival_ns"] < started_ns + 600 * 10**9
        assert round(row["arrival"].timestamp() * 10**6) == row["arrival_ns"] // 1000


def test_a_batch_reads_what_lies_between_two_offsets(start: Start) -> None:
    one, two = on_disk(start("one")), on_disk(start("two"))
    x, y = publish(one, numbered("x", 30)), publish(two, numbered("y", 20))
    some = BatchReader(settings(one, two, starting={"one": 25}, ending={"one": 28, "two": 5}))
    assert bodies(some, some.partitions()) == x[25:28] + y[:5]
    nothing = BatchReader(settings(one, two, starting="latest"))
    assert bodies(nothing, nothing.partitions()) == []
    assert bodies(nothing, [InputPartition(None)]) == []  # what Spark makes of no partition
    with pytest.raises(LogError, match="'two' has no offset 21: it ends at 20"):
        BatchReader(settings(one, two, ending={"one": 1, "two": 21})).partitions()
    with pytest.raises(LogError, match="'three' no longer exists"):
        BatchReader(settings(one, two, ending={"three": 1})).partitions()


def test_a_body_larger_than_what_is_read_at_once(start: Start) -> None:
    one = on_disk(start("one"))
    large = publish(one, [bytes([letter]) * 700_000 for letter in b"abcd"])
    reader = BatchReader(settings(one))
    assert bodies(reader, reader.partitions()) == large


def test_where_a_stream_begins(start: Start) -> None:
    one, two = on_disk(start("one")), on_disk(start("two"))
    publish(one, numbered("x", 7))
    assert plain(StreamReader(settings(one, two)).initialOffset()) == {"one": 0, "two": 0}
    assert plain(StreamReader(settings(one, two, starting="latest")).initialOffset()) == {"one": 7, "two": 0}
    given = StreamReader(settings(one, two, starting={"two": 0, "one": 3})).initialOffset()
    assert given == {
        name: {"offset": at, "log": log_id(broker)} for name, at, broker in (("one", 3, one), ("two", 0, two))
    }


def test_a_limit_is_kept_and_shared_in_proportion(start: Start) -> None:
    one, two = on_disk(start("one")), on_disk(start("two"))
    x, y = publish(one, numbered("x", 300)), publish(two, numbered("y", 100))
    reader = StreamReader(settings(one, two, max_rows=100))
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(100)
    at, found = reader.initialOffset(), []
    for turn in range(1, 5):
        end = reader.latestOffset(at, limit)
        assert plain(end) == {"one": 75 * turn, "two": 25 * turn}
        found += between(reader, at, end)
        at = end
    assert sorted(found) == sorted(x + y)
    assert reader.latestOffset(at, limit) == at
    assert reader.latestOffset({"one": 0, "two": 0}, ReadAllAvailable()) == at
    assert reader.reportLatestOffset() == at
    with pytest.raises(PipelineError, match="not by ReadMinRows"):
        reader.latestOffset(at, ReadMinRows(1))


def test_without_an_option_the_limit_is_the_contracts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = on_disk(start("one")), on_disk(start("two"))
    reader = StreamReader(settings(one, two))
    assert reader.getDefaultReadLimit() == ReadMaxRows(source.FREE_ROWS)
    for broker, r, b in ((one, 3, 20), (two, 2, 10)):
        assert broker.post(f"/topic/limit?topic=t&r={r}&b={b}")[0] == 200
        broker.post("/topic/limit?topic=other&r=1000&b=1000")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(30 + 10 * 5)
    publish(one, numbered("x", 500))
    now_s = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    at = reader.initialOffset()
    for waited_s, rows in ((0, 80), (9, 80), (60, 80 + 50 * 5)):  # b + r·Δt
        now_s[0] += waited_s
        assert plain(reader.latestOffset(at, limit))["one"] == rows


def test_partitions_depend_on_offsets_alone(start: Start) -> None:
    one, two = on_disk(start("one")), on_disk(start("two"))
    x = publish(one, numbered("x", 50))
    begin, end = {"one": 5, "two": 0}, {"one": 40, "two": 0}
    reads = []
    for turn in range(3):
        reader = StreamReader(settings(one, two, rows_per_partition=10))
        reads.append([(part.begin, part.end, bodies(reader, [part])) for part in reader.partitions(begin, end)])  # type: ignore[attr-defined]
        publish(one, numbered(f"later-{turn}", 5))
    assert reads[0] == reads[1] == reads[2]
    assert [body for *_, found in reads[0] for body in found] == x[5:40]


def test_available_now_ends_where_the_logs_ended(start: Start) -> None:
    one, two = on_disk(start("one")), on_disk(start("two"))
    publish(one, numbered("x", 10))
    reader = StreamReader(settings(one, two, max_rows=8))
    at = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    publish(one, numbered("late", 10))
    publish(two, numbered("late", 10))
    ends = []
    while (end := reader.latestOffset(at, ReadMaxRows(8))) != at:
        ends.append(plain(end))
        at = end
    assert ends == [{"one": 8, "two": 0}, {"one": 10, "two": 0}]


def test_a_controller_says_who_there_is_and_new_brokers_join(tmp_path: Path) -> None:
    with cluster(tmp_path) as (url, start):
        one = on_disk(start("one"))
        contract(url, "t", r=50, b=40)
        x = publish(one, numbered("x", 20))
        reader = StreamReader(Settings("t", controller=url, timeout_s=5.0))
        listed(reader, {"one"})
        begin = reader.initialOffset()
        assert plain(begin) == {"one": 0}
        assert reader.getDefaultReadLimit() == ReadMaxRows(40 + 10 * 50)
        end = reader.latestOffset(begin, ReadAllAvailable())
        assert plain(end) == {"one": 20}
        assert between(reader, begin, end) == x

        two = on_disk(start("two"))
        y = publish(two, numbered("y", 15))
        listed(reader, {"one", "two"})
        joined = reader.latestOffset(end, ReadAllAvailable())
        assert plain(joined) == {"one": 20, "two": 0}
        assert between(reader, end, joined) == []
        end = reader.latestOffset(joined, ReadAllAvailable())
        assert plain(end) == {"one": 20, "two": 15}
        assert between(reader, joined, end) == y


def listed(reader: StreamReader, names: set[str]) -> None:
    """Until the controller lists these brokers; registration takes a moment."""
    done = threading.Event()
    for _ in range(200):
        if set(reader._logs.look()) == names:
            return
        done.wait(0.05)
    raise AssertionError(f"{names} were not listed")


def test_a_topic_that_is_not_there_and_one_in_memory(tmp_path: Path) -> None:
    with cluster(tmp_path) as (url, start):
        one = start("one")
        contract(url, "later", r=50, b=40)
        assert plain(StreamReader(Settings("later", controller=url, timeout_s=1.0)).initialOffset()) in ({}, {"one": 0})
        for missing in (Settings("t", controller=url, timeout_s=1.0), settings(one)):
            with pytest.raises(InputError, match="no broker has topic 't': check the name, or create the topic first"):
                StreamReader(missing).initialOffset()
        one.post("/topic/create?topic=t")
        with pytest.raises(InputError, match=r"topic 't' at broker 'one' is in memory.*durability=disk"):
            StreamReader(settings(one)).initialOffset()
        with pytest.raises(InputError, match=f"{url} is not a broker"):
            StreamReader(Settings("t", brokers=(url,), timeout_s=1.0)).initialOffset()
        with pytest.raises(InputError, match=f"{one.url} is not a controller"):
            StreamReader(Settings("t", controller=one.url, timeout_s=1.0)).initialOffset()


def test_two_brokers_of_one_name(start: Start, tmp_path: Path) -> None:
    one = on_disk(start("one"))
    (tmp_path / "other").mkdir()
    other = start("one", data_path=str(tmp_path / "other"))
    with pytest.raises(InputError, match="two brokers are named 'one'"):
        StreamReader(settings(one, other)).initialOffset()


def test_a_broker_that_is_away_keeps_its_place_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    with brokers(tmp_path) as start:
        one = on_disk(start("one"))
        with running(name="two", data_path=str(tmp_path / "two")) as two:
            on_disk(two)
            y, port = publish(two, numbered("y", 5)), two.broker.http_port
            reader = StreamReader(settings(one, two, timeout_s=0.5))
            at = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        assert plain(at) == {"one": 0, "two": 5}
        x = publish(one, numbered("x", 5))
        end = reader.latestOffset(at, ReadAllAvailable())
        assert plain(end) == {"one": 5, "two": 5}
        assert between(reader, at, end) == x
        with pytest.raises(PipelineError, match=r"does not respond.*, for 0.5 s: start it, or wait longer"):
            between(reader, {"two": 0}, {"two": 5})
        with pytest.raises(PipelineError, match=r"no response from broker 'two' of topic 't' for .*failOnDataLoss"):
            ask_again(reader, end)
        tolerant = StreamReader(settings(one, two, timeout_s=0.0, fail_on_data_loss=False))
        for _ in range(3):
            assert tolerant.latestOffset(end, ReadAllAvailable()) == end

        patient = StreamReader(settings(one, two, timeout_s=20.0))
        begun: list[list[bytes]] = []
        range_ = source.OffsetRange("t", "two", f"http://127.0.0.1:{port}", 0, 5)
        reading = threading.Thread(target=lambda: begun.append(bodies(patient, [range_])))
        reading.start()
        with running(name="two", data_path=str(tmp_path / "two"), http_port=port):
            reading.join(20)
            assert begun == [y]
            assert patient.latestOffset(end, ReadAllAvailable()) == end


def ask_again(reader: StreamReader, at: dict[str, Any]) -> dict[str, Any]:
    """Until there is something new, for some time."""
    for _ in range(100):
        if (end := reader.latestOffset(at, ReadAllAvailable())) != at:
            return end
        threading.Event().wait(0.05)
    raise AssertionError("nothing came")


def test_brokers_go_on_while_their_controller_is_away(tmp_path: Path) -> None:
    with brokers(tmp_path) as start:
        with cluster(tmp_path) as (url, managed):
            one = on_disk(managed("one"))
            reader = StreamReader(Settings("t", controller=url, timeout_s=0.3))
            listed(reader, {"one"})
            at, port = reader.initialOffset(), one.broker.http_port
        one = start("one", http_port=port)
        x = publish(one, numbered("x", 5))
        assert between(reader, at, ask_again(reader, at)) == x


def test_nobody_there_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    nobody = Settings("t", controller=f"http://127.0.0.1:{port}", timeout_s=0.2)
    with pytest.raises(PipelineError, match=rf"127.0.0.1:{port}/lookup does not respond \(.*refused.*, for 0.2 s"):
        StreamReader(nobody).initialOffset()


def test_a_commit_trims_if_it_was_chosen_and_no_further_than_channels_are(start: Start) -> None:
    one, two = on_disk(start("one", retain_acknowledged=True)), on_disk(start("two"))
    publish(one, numbered("x", 10))
    publish(two, numbered("y", 10))
    two.post("/channel/create?topic=t&channel=slow")
    end = {"one": 6, "two": 6}
    StreamReader(settings(one, two)).commit(end)
    begins = [broker.get("/srtm/log?topic=t")["begin"] for broker in (one, two)]
    assert begins == [0, 0]
    trimming = StreamReader(settings(one, two, trim_on_commit=True))
    trimming.commit(end)
    begins = [broker.get("/srtm/log?topic=t")["begin"] for broker in (one, two)]
    assert begins == [6, 0]
    trimming.commit({**end, "gone": 3})  # one that is away is trimmed another time


@pytest.mark.needs("nsqlookupd")
def test_a_stock_nsqlookupd_says_who_there_is_too(tmp_path: Path) -> None:
    with nsqlookupd(tmp_path) as (tcp, http), brokers(tmp_path, lookupd=(f"127.0.0.1:{tcp}",)) as start:
        one = on_disk(start("one"))
        x = publish(one, numbered("x", 5))
        reader = StreamReader(Settings("t", controller=f"http://127.0.0.1:{http}", timeout_s=5.0))
        listed(reader, {"one"})
        assert reader.getDefaultReadLimit() == ReadMaxRows(source.FREE_ROWS)
        begin = reader.initialOffset()
        assert between(reader, begin, reader.latestOffset(begin, ReadAllAvailable())) == x
