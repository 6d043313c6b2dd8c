"""Brokers with disk topics for tests of the source and the sink, and what is in their logs."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from srtm.client.sync import Publisher
from srtm.pipeline.streaming.settings import Settings
from srtm.pipeline.streaming.source import BatchReader, StreamReader
from tests.broker.running import Running, fetch, running
from tests.control.running import controller

Start = Callable[..., Running]


@contextmanager
def brokers(folder: Path, **common: Any) -> Iterator[Start]:
    """Starts brokers by name, each with a log in a folder of its own."""
    with ExitStack() as stack:

        def start(name: str, **options: Any) -> Running:
            home = folder / name
            home.mkdir(exist_ok=True)
            given = {"broadcast_address": "127.0.0.1", "data_path": str(home), **common, **options}
            return stack.enter_context(running(name=name, **given))

        yield start


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, Start]]:
    """The URL of a controller, and what starts brokers under it."""
    with controller() as found, brokers(folder, controller=f"127.0.0.1:{found.tcp}") as start:
        yield f"http://127.0.0.1:{found.http}", start


def contract(url: str, topic: str, r: float, b: float, durability: str = "disk") -> None:
    """Put a topic under contract."""
    body = json.dumps({"r": r, "b": b, "durability": durability, "fit": "none", "slo_ms": 1000}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/topics/{topic}", data=body, method="PUT", headers=headers)
    status, said = fetch(request)
    assert status == 200, said


def on_disk(broker: Running, topic: str = "t") -> Running:
    """A broker, which now has the topic on disk."""
    status, said = broker.post(f"/topic/create?topic={topic}&durability=disk")
    assert status == 200, said
    return broker


def publish(broker: Running, bodies: list[bytes], topic: str = "t", publisher: str = "p") -> list[bytes]:
    """Publish to a broker as somebody; returns the bodies."""
    with Publisher(topic, broker=f"127.0.0.1:{broker.broker.tcp_port}", id=publisher) as client:
        for begin in range(0, len(bodies), 500):
            client.publish_many(bodies[begin : begin + 500])
    return bodies


def plain(offsets: dict[str, Any] | None) -> dict[str, int]:
    """Offsets without the ids of their logs."""
    return {name: at["offset"] if isinstance(at, dict) else at for name, at in (offsets or {}).items()}


def numbered(name: str, count: int) -> list[bytes]:
    """Bodies that can be told apart."""
    return [f"{name}-{number}".encode() for number in range(count)]


def log_of(broker: Running, topic: str) -> list[bytes]:
    """All bodies of a topic at a broker."""
    extent = broker.get(f"/srtm/log?topic={topic}")
    found: list[bytes] = []
    while extent["begin"] + len(found) < extent["end"]:
        at = extent["begin"] + len(found)
        _, data = fetch(urllib.request.Request(f"{broker.url}/srtm/log/read?topic={topic}&begin={at}"))
        with pa.ipc.open_stream(data) as stream:
            found += stream.read_all()["body"].to_pylist()
    return found


def settings(*there: Running, **more: Any) -> Settings:
    """Settings that read topic `t` at these brokers."""
    return Settings("t", brokers=tuple(broker.url for broker in there), **{"timeout_s": 5.0, **more})


def bodies(reader: StreamReader | BatchReader, parts: Any) -> list[bytes]:
    """What a reader reads from partitions."""
    return [body for part in parts for batch in reader.read(part) for body in batch.column("body").to_pylist()]


def between(reader: StreamReader, begin: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
    """What a reader reads between two offsets."""
    return bodies(reader, reader.partitions(begin, end))


def log_id(broker: Running) -> str:
    """The id of a broker's log of topic `t`."""
    return str(broker.get("/srtm/log?topic=t")["log"])
