"""`srtm up` with each engine it offers: `pub`, `sub` and `load` as README.md has them, with nothing lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import nats.js.errors
import pytest

from tests.conftest import PARTS
from tests.engines import until

COUNT = 200
BODIES = {b"message %d" % number for number in range(COUNT)}
LINES = b"\n".join(sorted(BODIES))
DURABILITIES = ("memory", "disk")


class Cluster:
    """What `srtm up` has started, and who uses it."""

    def __init__(self, kind: str, said: str) -> None:
        self.kind = kind
        self.url = re.search(r"controller: (\S+)", said)[1]  # type: ignore[index]
        self.engines = re.findall(r"127\.0\.0\.1:\d+", said.partition("engine:")[2])

    def run(self, *arguments: str, said: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
        """A command of ours."""
        command, environment = [sys.executable, "-m", "srtm", *arguments], self._environment(more)
        return subprocess.run(command, input=said, capture_output=True, check=False, timeout=60, env=environment)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command of ours that goes on."""
        command, environment = [sys.executable, "-m", "srtm", *arguments], self._environment({})
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        return {**os.environ, "SRTM_CONTROLLER": self.url, **more}

    def create(self, topic: str, durability: str) -> None:
        done = self.run("topic", "create", topic, "--r", "5000", "--b", "500", "--durability", durability)
        assert done.returncode == 0, done.stderr

    def publish(self, topic: str) -> None:
        done = self.run("pub", topic, said=LINES)
        assert (done.returncode, done.stderr) == (0, f"{topic}: {COUNT} messages published\n".encode())

    def delivery(self, topic: str) -> Any:
        return httpx.get(f"{self.url}/v1/topics/{topic}", trust_env=False).json()["delivery"]

    def waited_for(self, topic: str, subscriber: subprocess.Popen[bytes]) -> None:
        """Until a subscriber waits for messages or, as it then says, for somebody to have the topic."""
        assert subscriber.stderr is not None
        os.set_blocking(subscriber.stderr.fileno(), False)
        until(lambda: self._subscribed(topic) or b"; waiting" in (subscriber.stderr.read() or b""))  # type: ignore[union-attr]
        os.set_blocking(subscriber.stderr.fileno(), True)

    def _subscribed(self, topic: str) -> bool:
        if self.kind == "nats":
            return bool(asyncio.run(self._consumers(topic)))
        if self.kind == "nsqd":
            nodes = httpx.get(f"{self.url}/nodes", trust_env=False).json()["producers"]
            ports = [each["http_port"] for each in nodes if f"127.0.0.1:{each['tcp_port']}" in self.engines]
            return all(_has_consumer(f"http://127.0.0.1:{port}", topic) for port in ports)
        found = httpx.get(f"{self.url}/v1/brokers", trust_env=False).json()["brokers"]
        return any(_has_consumer(each["http"], topic) for each in found)

    async def _consumers(self, topic: str) -> list[Any]:
        client = await nats.connect(f"nats://{self.engines[0]}")
        try:
            return await client.jetstream().consumers_info(topic)
        except nats.js.errors.NotFoundError:
            return []
        finally:
            await client.close()


def _has_consumer(url: str, topic: str) -> bool:
    found = httpx.get(f"{url}/stats?format=json&topic={topic}", trust_env=False).json()["topics"] or []
    return any(channel["client_count"] for each in found for channel in each["channels"] or [])


KINDS = [
    "local",
    pytest.param("nsqd", marks=pytest.mark.needs("nsqd")),
    pytest.param("nats", marks=pytest.mark.needs("nats-server")),
]


@pytest.fixture(scope="module", params=KINDS)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    kind, folder = request.param, tmp_path_factory.mktemp("up")
    folders = [str(Path(part.path).parent) for part in (PARTS["nsqd"], PARTS["nats-server"]) if part.path]
    environment = {**os.environ, "PATH": os.pathsep.join([*folders, os.environ["PATH"]])}
    flags = ["--brokers", "2", "--free-ports", "--web-port", "none", "--engine", kind, "--data-path", str(folder)]
    with (folder / "log").open("w") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "srtm", "up", *flags], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    try:
        assert up.stdout is not None
        said = ""
        while "ready after" not in said:
            line = up.stdout.readline()
            assert line, (folder / "log").read_text()
            said += line
        yield Cluster(kind, said)
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=30)


@pytest.mark.processes
@pytest.mark.parametrize("durability", DURABILITIES)
def test_what_was_published_before_is_received(cluster: Cluster, durability: str) -> None:
    topic = f"before-{durability}"
    cluster.create(topic, durability)
    cluster.publish(topic)
    done = cluster.run("sub", topic, "--count", str(COUNT), "--timeout", "20s")
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(done.stdout.splitlines()) == sorted(BODIES)
    assert {each["engine"] for each in cluster.delivery(topic)} == {cluster.kind}
    assert "secret" not in json.dumps(cluster.delivery(topic))


@pytest.mark.processes
@pytest.mark.parametrize("durability", DURABILITIES)
def test_who_subscribed_before_receives_what_is_published(cluster: Cluster, durability: str) -> None:
    topic = f"after-{durability}"
    cluster.create(topic, durability)
    with cluster.start("sub", topic, "--count", str(COUNT), "--timeout", "30s") as subscriber:
        try:
            cluster.waited_for(topic, subscriber)
            cluster.publish(topic)
            received, problem = subscriber.communicate(timeout=60)
        finally:
            subscriber.kill()
    assert subscriber.returncode == 0, problem
    assert sorted(received.splitlines()) == sorted(BODIES)


@pytest.mark.processes
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_load_hears_all_of_its_messages_and_leaves_later_ones_to_others(cluster: Cluster, durability: str) -> None:
    topic = f"load-{durability}"
    cluster.create(topic, durability)
    sizes = ("--publishers", "10", "--rate", "40", "--batch", "2", "--group-size", "1", "--duration", "1.5s")
    done = cluster.run("load", topic, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["received"] == report["sent"] > 100
    assert (report["lost"], report["doubled"], report["foreign"]) == (0, 0, 0)
    assert report["total_ms"]["p99"] > 0
    assert cluster.run("pub", topic, "--body", "hello").returncode == 0
    done = cluster.run("sub", topic, "--count", "1", "--timeout", "20s")
    assert (done.returncode, done.stdout) == (0, b"hello\n")


@pytest.mark.processes
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_subscriber_that_cannot_work_says_why_and_costs_nothing(cluster: Cluster, durability: str) -> None:
    topic = f"refused-{durability}"
    cluster.create(topic, durability)
    cluster.publish(topic)
    other, why = {
        "local": ("redis", "invalid engine 'redis://…@127.0.0.1': write"),
        "nsqd": ("nats", f"topic '{topic}' is delivered by nsqd://"),
        "nats": ("nsqd", f"topic '{topic}' is delivered by nats://"),
    }[cluster.kind]
    done = cluster.run("sub", topic, "--count", "1", "--timeout", "20s", SRTM_ENGINE=f"{other}://me:secret@127.0.0.1")
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert why in line
    assert "secret" not in line
    done = cluster.run("sub", topic, "--count", str(COUNT), "--timeout", "20s")
    assert sorted(done.stdout.splitlines()) == sorted(BODIES)


@pytest.mark.processes
def test_a_named_broker_says_where_its_messages_are(cluster: Cluster) -> None:
    topic = "signpost"
    cluster.create(topic, "memory")
    found = httpx.get(f"{cluster.url}/v1/brokers", trust_env=False).json()["brokers"]
    named = [flag for each in found for flag in ("--broker", each["address"])]
    cluster.publish(topic)
    done = cluster.run("sub", topic, "--count", str(COUNT), "--timeout", "20s", *named)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(done.stdout.splitlines()) == sorted(BODIES)
    sizes = ("--publishers", "4", "--rate", "40", "--batch", "1", "--group-size", "1", "--duration", "1s")
    done = cluster.run("load", topic, *sizes, *named, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["received"] == report["sent"] > 0
