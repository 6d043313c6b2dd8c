"""The source at JetStream, on real servers: with whatever is deleted, killed or lost on the way; then on real Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from srtm.errors import InputError, LogError, LogReplaced, OffsetTrimmed, PipelineError
from srtm.pipeline.streaming import jetstream
from srtm.pipeline.streaming.format import SrtmDataSource
from srtm.pipeline.streaming.link import Link
from srtm.pipeline.streaming.settings import Settings, read_settings
from srtm.pipeline.streaming.source import FREE_ROWS, BatchReader, StreamReader
from srtm.protocol.nats import Msg
from tests.broker.running import Running
from tests.engines import NatsServer, free_port, until
from tests.pipeline.streaming.streams_of_nats import at_nats
from tests.pipeline.streaming.topics import (
    Start,
    between,
    bodies,
    brokers,
    cluster,
    contract,
    numbered,
    on_disk,
    plain,
    publish,
)
from tests.programs import ask

pytestmark = pytest.mark.needs("nats-server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as found:
        yield found


@pytest.fixture(scope="module")
def start(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with brokers(tmp_path_factory.mktemp("brokers"), engine=server.url) as found:
        yield found


@pytest.fixture(scope="module")
def one(start: Start) -> Running:
    return start("one")


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name of this test alone: they share a server."""
    return str(request.node.name).replace("_", "-")[5:69].strip("-")


def of(server: NatsServer, topic: str, **more: Any) -> Settings:
    return Settings(topic, controller="", engine=server.url, **{"timeout_s": 10.0, **more})


def rows(reader: StreamReader | BatchReader, parts: Any) -> list[dict[str, Any]]:
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def test_rows_are_what_was_published_by_whom_and_when(
    server: NatsServer, one: Running, start: Start, topic: str
) -> None:
    publish(one, numbered("x", 30), topic, publisher="ä\r\nSrtm-Broker: no")
    publish(start("two ü"), numbered("y", 20), topic)
    at_nats(server.url, lambda js: js.publish(topic, b"z"))
    reader = BatchReader(of(server, topic, rows_per_partition=12))
    parts = reader.partitions()
    assert [(part.broker, part.begin, part.end) for part in parts] == [  # type: ignore[attr-defined]
        (topic, begin, min(begin + 12, 52)) for begin in range(1, 52, 12)
    ]
    found = rows(reader, parts)
    assert [row["offset"] for row in found] == list(range(1, 52))
    assert [row["body"] for row in found] == [*numbered("x", 30), *numbered("y", 20), b"z"]
    assert [(row["publisher"], row["broker"]) for row in found] == [
        *[("ä\r\nSrtm-Broker: no", "one")] * 30,
        *[("p", "two ü")] * 20,
        ("", None),
    ]
    for row in found:
        assert row["topic"] == topic
        assert one.broker.started_ns < row["arrival_ns"] < one.broker.started_ns + 600 * 10**9
        assert round(row["arrival"].timestamp() * 10**6) == row["arrival_ns"] // 1000


def test_offsets_of_a_stream_and_limits(server: NatsServer, one: Running, topic: str) -> None:
    x = publish(one, numbered("x", 250), topic)
    some = BatchReader(of(server, topic, starting={topic: 26}, ending={topic: 29}))
    assert bodies(some, some.partitions()) == x[25:28]
    with pytest.raises(LogError, match=f"at stream '{topic}' has no offset 252: it ends at 251"):
        BatchReader(of(server, topic, ending={topic: 252})).partitions()
    assert plain(StreamReader(of(server, topic, starting="latest")).initialOffset()) == {topic: 251}
    reader = StreamReader(of(server, topic, max_rows=100, rows_per_partition=30))
    reader.prepareForTriggerAvailableNow()
    publish(one, numbered("later", 5), topic)
    at, found, ends = reader.initialOffset(), list[bytes](), list[int]()
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        found += between(reader, at, end)
        ends.append(plain(end)[topic])
        at = end
    assert ends == [101, 201, 251]
    assert found == x
    assert plain(reader.reportLatestOffset()) == {topic: 256}
    assert StreamReader(of(server, topic)).getDefaultReadLimit() == ReadMaxRows(FREE_ROWS)


def test_a_range_is_the_same_each_time_and_leaves_no_consumer(server: NatsServer, one: Running, topic: str) -> None:
    publish(one, numbered("x", 100), topic)
    reads = []
    for turn in range(3):
        reader = StreamReader(of(server, topic, rows_per_partition=20))
        parts = reader.partitions({topic: 11}, {topic: 91})
        assert len(parts) == 4
        reads.append(rows(reader, parts))
        publish(one, numbered(f"later-{turn}", 5), topic)
    assert reads[0] == reads[1] == reads[2]
    assert [row["body"] for row in reads[0]] == numbered("x", 90)[10:]
    next(reader.read(parts[0]))  # one that nobody reads to its end
    until(lambda: not at_nats(server.url, lambda js: js.stream_info(topic)).state.consumer_count)


def test_large_bodies_come_in_several_pulls(server: NatsServer, one: Running, topic: str) -> None:
    large = [bytes([letter]) * 900_000 for letter in range(24)]
    for at in range(0, 24, 4):
        publish(one, large[at : at + 4], topic)
    reader = BatchReader(of(server, topic))
    assert bodies(reader, reader.partitions()) == large


def test_messages_of_other_topics_and_deleted_ones_are_passed_over(server: NatsServer, one: Running) -> None:
    at_nats(server.url, lambda js: js.add_stream(name="all", subjects=["orders.>"]))
    mine = list[bytes]()
    for turn in range(10):
        mine += publish(one, numbered(f"x{turn}", 3), "orders.new")
        publish(one, numbered("y", 2), "orders.old")
    reader = StreamReader(of(server, "orders.new", rows_per_partition=7))
    at = reader.initialOffset()
    end = reader.latestOffset(at, ReadAllAvailable())
    assert (plain(at), plain(end)) == ({"all": 1}, {"all": 51})
    assert between(reader, at, end) == mine
    publish(one, numbered("z", 10), "orders.new")
    assert between(reader, at, end) == mine  # with more behind the end
    assert between(reader, {"all": 49}, {"all": 51}) == []
    at_nats(server.url, lambda js: js.delete_msg("all", 2))
    assert between(reader, at, end) == [mine[0], *mine[2:]]


def test_what_was_discarded_is_an_error_that_names_the_way_on(server: NatsServer, one: Running, topic: str) -> None:
    x = publish(one, numbered("x", 30), topic)
    reader = StreamReader(of(server, topic))
    at_nats(server.url, lambda js: js.purge_stream(topic, seq=13))
    with pytest.raises(OffsetTrimmed, match="no longer holds offset 1: it begins at 13: set option failOnDataLoss to"):
        reader.latestOffset({topic: 1}, ReadAllAvailable())
    with pytest.raises(OffsetTrimmed, match="no longer holds offset 4: it begins at 13: set option failOnDataLoss"):
        between(reader, {topic: 4}, {topic: 31})  # discarded after it was planned
    with pytest.raises(OffsetTrimmed, match="failOnDataLoss"):
        BatchReader(of(server, topic, starting={topic: 3})).partitions()
    tolerant = StreamReader(of(server, topic, fail_on_data_loss=False, rows_per_partition=10))
    assert plain(tolerant.latestOffset({topic: 1}, ReadAllAvailable())) == {topic: 31}
    assert between(tolerant, {topic: 1}, {topic: 31}) == x[12:]
    at_nats(server.url, lambda js: js.purge_stream(topic))
    assert plain(reader.initialOffset()) == {topic: 31}
    with pytest.raises(OffsetTrimmed, match="no longer holds offset 13: it begins at 31"):
        between(reader, {topic: 13}, {topic: 31})
    assert between(tolerant, {topic: 13}, {topic: 31}) == []


def test_what_is_discarded_in_the_middle_of_a_read(
    server: NatsServer, one: Running, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(one, numbered("x", 30), topic)
    monkeypatch.setattr(jetstream, "_ROWS", 10)
    reader = StreamReader(of(server, topic))
    begun = reader.read(reader.partitions({topic: 1}, {topic: 31})[0])
    assert next(begun).num_rows == 10
    at_nats(server.url, lambda js: js.purge_stream(topic, seq=16))
    with pytest.raises(OffsetTrimmed, match="no longer holds offset 11: it begins at 16"):
        next(begun)


def test_a_stream_that_was_removed(server: NatsServer, one: Running, topic: str) -> None:
    publish(one, numbered("x", 30), topic)
    reader = StreamReader(of(server, topic))
    tolerant = StreamReader(of(server, topic, fail_on_data_loss=False))
    for each in (reader, tolerant):
        assert plain(each.initialOffset()) == {topic: 1}
    at_nats(server.url, lambda js: js.delete_stream(topic))
    with pytest.raises(LogError, match=f"stream '{topic}' no longer exists; messages after offset 31 are lost"):
        reader.latestOffset({topic: 31}, ReadAllAvailable())
    with pytest.raises(
        LogError, match=f"stream '{topic}' of topic '{topic}' no longer exists: set option failOnDataLoss"
    ):
        between(reader, {topic: 1}, {topic: 31})
    assert tolerant.latestOffset({topic: 31}, ReadAllAvailable()) == {topic: 31}
    assert between(tolerant, {topic: 1}, {topic: 31}) == []
    with pytest.raises(LogError, match="'no name of a stream' no longer exists"):
        reader.latestOffset({"no name of a stream": 5}, ReadAllAvailable())
    at_nats(server.url, lambda js: js.add_stream(name=topic, subjects=[topic]))
    with pytest.raises(LogError, match="has no offset 31: it ends at 1; was its log deleted"):
        reader.latestOffset({topic: 31}, ReadAllAvailable())


def test_a_stream_that_was_deleted_and_created_again_is_not_taken_for_the_old_one(
    server: NatsServer, one: Running, topic: str
) -> None:
    """It has more messages than the old one had, so that sequence numbers alone say nothing."""
    publish(one, numbered("x", 30), topic)
    reader = StreamReader(of(server, topic))
    tolerant = StreamReader(of(server, topic, fail_on_data_loss=False))
    begin = reader.initialOffset()
    at = reader.latestOffset(begin, ReadAllAvailable())
    planned = reader.partitions(begin, at)
    assert len(bodies(reader, planned)) == 30
    again(server, topic)
    fresh = publish(one, numbered("fresh", 50), topic)
    lost = rf"topic '{topic}' at stream '{topic}' was deleted and created again; messages after offset 31 are lost: set"
    with pytest.raises(LogReplaced, match=lost):
        reader.latestOffset(at, ReadAllAvailable())
    with pytest.raises(LogReplaced, match=f"stream '{topic}' of topic '{topic}' was deleted and created again"):
        bodies(reader, planned)
    assert bodies(tolerant, planned) == []
    end = tolerant.latestOffset(at, ReadAllAvailable())
    assert plain(end) == {topic: 1}
    assert between(tolerant, at, end) == []
    assert between(tolerant, end, tolerant.latestOffset(end, ReadAllAvailable())) == fresh


def test_a_stream_that_is_created_again_in_the_middle_of_a_read(
    server: NatsServer, one: Running, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(one, numbered("x", 30), topic)
    monkeypatch.setattr(jetstream, "_ROWS", 10)
    reader = StreamReader(of(server, topic))
    begin = reader.initialOffset()
    begun = reader.read(reader.partitions(begin, reader.latestOffset(begin, ReadAllAvailable()))[0])
    assert next(begun).num_rows == 10
    again(server, topic)
    publish(one, numbered("fresh", 50), topic)
    with pytest.raises(LogReplaced, match="offset 11 is lost: set option failOnDataLoss"):
        next(begun)


def again(server: NatsServer, topic: str) -> None:
    """Delete a topic's stream, and create it again at once."""
    at_nats(server.url, lambda js: js.delete_stream(topic))
    at_nats(server.url, lambda js: js.add_stream(name=topic, subjects=[topic]))


def test_brokers_say_where_their_engine_is(server: NatsServer, tmp_path: Path) -> None:
    with cluster(tmp_path) as (url, start):
        contract(url, "known", r=50, b=40, durability="memory")
        one, two = (start(name, engine=server.url) for name in ("three", "four"))
        x = publish(one, numbered("x", 5), "known") + publish(two, numbered("y", 5), "known")
        named = Settings("known", brokers=(one.url, two.url), timeout_s=5.0)
        assert plain(StreamReader(named).initialOffset()) == {"known": 1}
        reader = StreamReader(Settings("known", controller=url, timeout_s=5.0))
        until(lambda: plain(reader.initialOffset()) == {"known": 1})  # when the controller has heard of them
        assert reader.getDefaultReadLimit() == ReadMaxRows(40 + 10 * 50)
        assert between(reader, {"known": 1}, reader.latestOffset({"known": 1}, ReadAllAvailable())) == x
        with pytest.raises(
            InputError, match="no stream has topic 'unknown': check the name, or create the topic first"
        ):
            StreamReader(Settings("unknown", controller=url, timeout_s=5.0)).initialOffset()
        local = on_disk(start("five"), "known.too")
        mixed = Settings("known", brokers=(one.url, local.url), timeout_s=5.0)
        with pytest.raises(InputError, match=r"has several delivery engines \(local, nats://.*\): select brokers"):
            StreamReader(mixed).initialOffset()
        until(lambda: ask(int(url.rpartition(":")[2]), "/lookup?topic=known.too").get("producers"))
        with pytest.raises(InputError, match=r"'known.too' has several delivery engines \(local, nats://"):
            StreamReader(Settings("known.too", controller=url, timeout_s=5.0)).initialOffset()
        there = Settings("known.too", brokers=(local.url,), timeout_s=5.0)
        assert plain(StreamReader(there).initialOffset()) == {"five": 0}
        nsqd = start("six", engine=f"nsqd://127.0.0.1:{free_port()}")
        mixed = Settings("known", brokers=(one.url, nsqd.url), timeout_s=5.0)
        with pytest.raises(InputError, match=r"has several delivery engines \(nats://.*, nsqd://.*\)"):
            StreamReader(mixed).initialOffset()


def test_what_cannot_be_read(server: NatsServer, topic: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no stream has topic"):
        StreamReader(of(server, topic)).initialOffset()
    with pytest.raises(
        InputError, match=r"trimOnCommit: the stream .* may have other readers; .*set limits on the stream itself"
    ):
        StreamReader(of(server, topic, trim_on_commit=True)).initialOffset()
    at_nats(server.url, lambda js: js.add_stream(name=topic, subjects=[topic], retention="workqueue"))
    with pytest.raises(InputError, match=r"\(retention workqueue\): only a stream with retention limits can be"):
        StreamReader(of(server, topic)).initialOffset()
    at_nats(server.url, lambda js: js.add_stream(name="crowded", subjects=["crowded"], max_consumers=1))
    at_nats(server.url, lambda js: js.add_consumer("crowded", durable_name="c"))
    with pytest.raises(PipelineError, match="'crowded' cannot be read: maximum consumers limit reached"):
        between(StreamReader(of(server, "crowded", fail_on_data_loss=False)), {"crowded": 1}, {"crowded": 2})
    with NatsServer(tmp_path, "n1", "--user", "u", "--pass", "secret") as guarded:
        with pytest.raises(InputError, match="refuses the connection: Authorization Violation; give valid credentials"):
            StreamReader(of(guarded, topic)).initialOffset()
        login = guarded.url.replace("//", "//u:secret@")
        at_nats(login, lambda js: js.add_stream(name="t", subjects=[topic]))
        allowed = StreamReader(Settings(topic, controller="", engine=login, timeout_s=5.0))
        assert plain(allowed.initialOffset()) == {"t": 1}
    with pytest.raises(PipelineError, match=r"nats://127.0.0.1:\d+ does not respond \(.*refused.*, for 0.3 s") as away:
        StreamReader(Settings(topic, controller="", engine=login, timeout_s=0.3)).initialOffset()
    assert "secret" not in str(away.value)


def test_servers_that_want_tls_and_a_login(topic: str, tmp_path: Path) -> None:
    """Brokers say where their engine is, and neither a login nor files of theirs: these are Spark's own to know."""
    pytest.importorskip("trustme", reason="pip install trustme makes certificates for tests")
    from tests.broker.test_transport import Certificates

    certificates = Certificates(tmp_path)
    flags = (
        "--tls",
        f"--tlscert={certificates.cert}",
        f"--tlskey={certificates.key}",
        "--user",
        "u",
        "--pass",
        "secret",
    )
    with NatsServer(tmp_path, "n1", *flags) as guarded:
        place = f"127.0.0.1:{guarded.port}"
        engine = f"nats+tls://u:secret@{place}?ca={certificates.ca}"
        with brokers(tmp_path, engine=engine) as start:
            broker = start("one")
            x = publish(broker, numbered("x", 30), topic)
            untold = Settings(topic, controller="", brokers=(broker.url,), timeout_s=5.0)
            with pytest.raises(InputError, match=rf"^nats\+tls://{place}: invalid server certificate.*option engine"):
                BatchReader(untold).partitions()
        with pytest.raises(InputError, match="the server requires TLS: write nats\\+tls://"):
            BatchReader(Settings(topic, controller="", engine=f"nats://u:secret@{place}", timeout_s=5.0)).partitions()
        options = {"topic": topic, "engine": engine, "maxRowsPerPartition": "12", "timeout": "5s"}
        reader = BatchReader(read_settings(options))
        parts = reader.partitions()
        assert len(parts) == 3
        assert [row["body"] for row in rows(reader, parts)] == x


def test_servers_that_want_tls_before_anything_is_said(topic: str, tmp_path: Path) -> None:
    """A broker says so with the engine's address; the CA file is Spark's own to know."""
    pytest.importorskip("trustme", reason="pip install trustme makes certificates for tests")
    from tests.broker.test_transport import Certificates

    certificates = Certificates(tmp_path)
    configuration = tmp_path / "first.conf"
    pair = f'cert_file: "{certificates.cert}", key_file: "{certificates.key}"'
    configuration.write_text(f"tls {{ {pair}, handshake_first: true }}")
    with NatsServer(tmp_path, "n1", "-c", str(configuration)) as guarded:
        engine = f"nats+tls://127.0.0.1:{guarded.port}?handshake_first=true"
        with brokers(tmp_path, engine=f"{engine}&ca={certificates.ca}") as start:
            broker = start("one")
            x = publish(broker, numbered("x", 30), topic)
            untold = Settings(topic, controller="", brokers=(broker.url,), timeout_s=5.0)
            with pytest.raises(InputError, match="invalid server certificate"):
                BatchReader(untold).partitions()
        reader = BatchReader(Settings(topic, controller="", engine=f"{engine}&ca={certificates.ca}", timeout_s=5.0))
        assert [row["body"] for row in rows(reader, reader.partitions())] == x


def test_what_is_lost_on_the_way_is_read_again(
    server: NatsServer, one: Running, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between servers a message can be lost with a route; then the numbers of a consumer have a gap."""
    x, lose = publish(one, numbered("x", 30), topic), [12]
    real = Link.next

    def lossy(self: Link) -> Msg:
        message = real(self)
        if lose and message.body == x[lose[0]]:
            lose.pop()
            return real(self)
        return message

    monkeypatch.setattr(Link, "next", lossy)
    monkeypatch.setattr(jetstream, "_ROWS", 10)
    reader = StreamReader(of(server, topic))
    assert between(reader, {topic: 1}, {topic: 31}) == x
    assert not lose


def test_the_leader_has_the_last_word_on_the_end_of_a_range(
    server: NatsServer, one: Running, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that lags says that there is no more; so does a consumer here, once."""
    x, lagging = publish(one, numbered("x", 30), topic), [True]
    real = Link.ask

    def late(self: Link, subject: str, /, **wanted: Any) -> dict[str, Any]:
        answer = real(self, subject, **wanted)
        return {**answer, "num_pending": 0} if "CONSUMER.CREATE" in subject and lagging and lagging.pop() else answer

    monkeypatch.setattr(Link, "ask", late)
    reader = StreamReader(of(server, topic))
    assert between(reader, {topic: 1}, {topic: 31}) == x
    assert not lagging


def test_a_sink_is_given_brokers_and_no_engine() -> None:
    source = SrtmDataSource({"topic": "t", "engine": "nats://a"})
    with pytest.raises(InputError, match="a sink publishes through brokers; remove the option"):
        source.writer(StructType(), overwrite=False)
