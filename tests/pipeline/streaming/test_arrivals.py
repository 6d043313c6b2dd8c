"""The source of live arrivals against real brokers: ranges, restarts, rows that fell out, tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from srtm.broker import arrivals as stream
from srtm.errors import InputError
from srtm.pipeline.streaming.arrivals import SCHEMA, ArrivalReader
from srtm.pipeline.streaming.settings import Settings
from tests.broker.running import Client, Running, running
from tests.control.running import controller
from tests.pipeline.streaming.topics import contract, plain
from tests.programs import ask, wait_for

ALL = ReadAllAvailable()


class Cluster:
    """A controller with a topic under contract, and brokers that can be started again on their ports."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        served = stack.enter_context(controller(**{k: v for k, v in options.items() if k == "control_token"}))
        self.http, self.url = served.http, f"http://127.0.0.1:{served.http}"
        self._options = {"controller": f"127.0.0.1:{served.tcp}", "broadcast_address": "127.0.0.1", **options}
        self._stack = stack

    def start(self, name: str, **ports: Any) -> Running:
        broker = self._stack.enter_context(running(name=name, **self._options, **ports))
        wait_for(lambda: name in {b["name"] for b in self._listed() if b["status"] == "alive"})
        return broker

    def _listed(self) -> list[dict[str, Any]]:
        return list(ask(self.http, "/v1/brokers")["brokers"])

    def reader(self, token: str | None = None) -> ArrivalReader:
        return ArrivalReader(Settings("arrivals", self.url, token=token, timeout_s=5.0, fail_on_data_loss=False))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def publish(broker: Running, *bodies: bytes) -> None:
    with Client(broker.address, srtm={"publisher": "p", "topic": "t"}) as client:
        client.publish("t", *bodies)


def read(reader: ArrivalReader, begin: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    parts = reader.partitions(begin, end)
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def ready(cluster: Cluster, *brokers: Running) -> None:
    """A topic under contract, with a share at each broker."""
    contract(cluster.url, "t", r=1e6, b=1e6, durability="memory")
    for broker in brokers:
        broker.wait_until(lambda b: b.control.holds("t"))


def test_rows_of_all_brokers_each_once_and_brokers_that_come_later(stack: ExitStack) -> None:
    cluster = Cluster(stack)
    one = cluster.start("one")
    ready(cluster, one)
    reader = cluster.reader()
    start = reader.initialOffset()
    assert plain(start) == {"one": 0}
    publish(one, b"1", b"2")
    one.wait_until(lambda b: stream.stream_of(b.turn).extent().end == 2)  # type: ignore[union-attr]
    then = reader.latestOffset(start, ALL)
    assert plain(then) == {"one": 2}
    found = read(reader, start, then)
    assert [column.split()[0].strip("`") for column in SCHEMA.split(", ")] == list(found[0])
    assert [(row["topic"], row["broker"]) for row in found] == [("t", "one")] * 2
    assert read(reader, start, then) == found
    cluster.start("two")
    joined = reader.latestOffset(then, ALL)
    assert plain(joined) == {"one": 2, "two": 0}
    assert read(reader, then, joined) == []


def test_a_restarted_broker_is_not_its_predecessor(stack: ExitStack) -> None:
    cluster = Cluster(stack)
    with ExitStack() as first:
        cluster._stack = first
        one = cluster.start("one")
        ready(cluster, one)
        ports = {"tcp_port": one.broker.tcp_port, "http_port": one.broker.http_port}
        reader = cluster.reader()
        start = reader.initialOffset()
        publish(one, b"1", b"2", b"3")
        one.wait_until(lambda b: stream.stream_of(b.turn).extent().end == 3)  # type: ignore[union-attr]
        planned = reader.latestOffset(start, ALL)
    cluster._stack = stack
    one = cluster.start("one", **ports)
    one.wait_until(lambda b: b.control.holds("t"))
    now = reader.latestOffset(planned, ALL)
    assert plain(now) == {"one": 0}
    assert now["one"]["log"] != planned["one"]["log"]
    assert read(reader, start, planned) == [], "its rows are gone; those of its successor are not taken for them"
    publish(one, b"4")
    one.wait_until(lambda b: stream.stream_of(b.turn).extent().end == 1)  # type: ignore[union-attr]
    assert len(read(reader, now, reader.latestOffset(now, ALL))) == 1


def test_rows_that_fell_out_are_skipped(stack: ExitStack) -> None:
    cluster = Cluster(stack)
    one = cluster.start("one")
    ready(cluster, one)
    one.do(lambda: stream.Arrivals(one.broker.turn, 1, one.broker.control.birth, most_rows=20, chunk_rows=5))
    reader = cluster.reader()
    start = reader.initialOffset()
    for _ in range(10):
        publish(one, *[b"x"] * 10)
    one.wait_until(lambda b: stream.stream_of(b.turn).extent().end == 100)  # type: ignore[union-attr]
    end = reader.latestOffset(start, ALL)
    assert 20 <= len(read(reader, start, end)) <= 30
    assert one.get("/srtm/arrivals")["lost"] >= 70


def test_a_token_that_brokers_refuse(stack: ExitStack) -> None:
    cluster = Cluster(stack, control_token="s3cret")
    cluster.start("one")
    with pytest.raises(InputError, match="--control-token"):
        cluster.reader("wrong").initialOffset()
    assert plain(cluster.reader("s3cret").initialOffset()) == {"one": 0}
