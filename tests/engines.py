"""Real engines as processes that can be killed and started again where they were."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import nats
import nats.errors
import numpy as np
import pyarrow.parquet as pq

from srtm.protocol import client as say
from srtm.protocol.client import Response
from tests.broker.running import PATIENCE_S, Client, Running, fetch
from tests.conftest import PARTS


def free_port() -> int:
    """A port that nobody has; whoever is started there has to hurry."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def until(holds: Callable[[], Any], patience_s: float = 3 * PATIENCE_S) -> Any:
    """What is true in the end."""
    ends = time.monotonic() + patience_s
    while not (found := holds()):
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)
    return found


class Server:
    """One process of an engine; `with` stops it."""

    def __init__(self, program: str, log: Path, listening: str, *flags: str) -> None:
        self.command = [PARTS[program].path or "", *flags]
        self.log = log
        self.listening = listening
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, *, wait: bool = True) -> None:
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(self.command, stdout=stderr, stderr=stderr)
        if wait:
            until(lambda: re.search(self.listening, self.log.read_text()) or self.process.poll() is not None)  # type: ignore[union-attr]
            assert self.process.poll() is None, self.log.read_text()

    def kill(self) -> None:
        """As kill -9 does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)


class Nsqd(Server):
    """An nsqd that has on disk what it acknowledges: by default it has not, and its death loses messages."""

    def __init__(self, folder: Path, *more: str, unix: bool = False) -> None:
        self.port, self.http = free_port(), free_port()
        self.folder = folder / f"nsqd-{self.port}"
        self.folder.mkdir()
        place = str(self.folder / "socket") if unix else f"127.0.0.1:{self.port}"
        self.url = f"nsqd://{place}"
        super().__init__(
            "nsqd",
            self.folder / "log",
            "HTTP: listening",
            f"--tcp-address={place}",
            f"--http-address=127.0.0.1:{self.http}",
            "--broadcast-address=127.0.0.1",
            f"--data-path={self.folder}",
            "--mem-queue-size=0",
            "--sync-every=1",
            *more,
        )

    def stats(self, topic: str) -> Any:
        status, body = fetch(urllib.request.Request(f"http://127.0.0.1:{self.http}/stats?format=json&topic={topic}"))
        found = json.loads(body)["topics"] if status == 200 else []
        return found[0] if found else {"message_count": 0, "depth": 0}


class NatsServer(Server):
    """One server of NATS with JetStream, alone or of a cluster."""

    def __init__(self, folder: Path, name: str = "n0", *more: str) -> None:
        self.name, self.port = name, free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        super().__init__(
            "nats-server",
            folder / f"{name}.log",
            "Server is ready",
            *("-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(folder / name), "-n", name),
            *more,
        )


class NatsCluster:
    """Three servers of NATS; `with` stops them."""

    def __init__(self, folder: Path, *more: str) -> None:
        routes = [f"nats://127.0.0.1:{free_port()}" for _ in range(3)]
        cluster = ("--cluster_name", "c", "--routes", ",".join(routes), *more)
        self.servers = [NatsServer(folder, f"n{at}", "--cluster", route, *cluster) for at, route in enumerate(routes)]
        places = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        self.url = f"nats://{places}?replicas=3"

    def __enter__(self) -> NatsCluster:
        for server in self.servers:
            server.start(wait=False)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()


class Load:
    """Publishers that send one message after the other to a broker, and remember what was acknowledged when."""

    def __init__(self, address: tuple[str, int], topic: str, publishers: int = 8, pause_s: float = 0.002) -> None:
        self.acknowledged: dict[bytes, float] = {}
        self._topic, self._pause_s = topic, pause_s
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(address, at)) for at in range(publishers)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(6 * PATIENCE_S)
            assert not thread.is_alive()

    def _send(self, address: tuple[str, int], publisher: int) -> None:
        with Client(address) as client:
            for number in count():
                body = f"{publisher} {number}".encode()
                client.send(say.pub(self._topic, body))
                assert client.next(6 * PATIENCE_S) == Response(b"OK")
                self.acknowledged[body] = time.monotonic()
                if self._stopping.is_set():
                    break
                time.sleep(self._pause_s)

    def flows(self, more: int = 200) -> None:
        """Until so many more messages are acknowledged."""
        wanted = len(self.acknowledged) + more
        until(lambda: len(self.acknowledged) >= wanted, 6 * PATIENCE_S)

    def resumed_s(self, since: float) -> float:
        """How long after a time the first message was acknowledged that was sent after it, about."""
        later = sorted(at for at in self.acknowledged.values() if at > since)
        gaps = [(b - a, b) for a, b in pairwise([since, *later])]
        return max(gaps)[1] - since


async def stored(url: str, stream: str, **login: Any) -> list[tuple[str, bytes]]:
    """Ids and bodies of all messages of a stream, as NATS' own client reads them.

    A server that has just come back may leave questions unanswered; they are asked again.
    """
    for _ in range(5):
        with suppress(nats.errors.Error):
            return await _stored(url, stream, **login)
    return await _stored(url, stream, **login)


async def _stored(url: str, stream: str, **login: Any) -> list[tuple[str, bytes]]:
    client = await nats.connect(url.partition("?")[0].split(","), connect_timeout=10, **login)
    try:
        jetstream = client.jetstream(timeout=10)
        subscription = await jetstream.subscribe("", stream=stream, ordered_consumer=True)
        found: list[tuple[str, bytes]] = []
        for _ in range((await jetstream.stream_info(stream)).state.messages):
            message = await subscription.next_msg(timeout=10)
            found.append(((message.headers or {}).get("Nats-Msg-Id", ""), message.data))
        return found
    finally:
        await client.close()


async def leader_of(url: str, stream: str) -> str:
    """The name of the server that leads a stream."""
    client = await nats.connect(url.partition("?")[0].split(","))
    try:
        found = (await client.jetstream(timeout=10).stream_info(stream)).cluster
        assert found is not None
        return found.leader or ""
    finally:
        await client.close()


def bodies(
    server: Any, topic: str, wanted: int, tls: ssl.SSLContext | None = None, secret: bytes | None = None, **login: Any
) -> list[bytes]:
    """What consumers of the engine get of a topic."""
    if isinstance(server, NatsServer):
        return [body for _, body in asyncio.run(stored(server.url, topic.replace(".", "="), tls=tls, **login))]
    with Client(("127.0.0.1", server.port), **({"tls_v1": True} if tls else {})) as consumer:
        if tls:
            consumer.begin_tls(tls)
        if secret:
            consumer.send(say.auth(secret))
            consumer.response()
        consumer.subscribe(topic, "c", ready=2500)
        found: list[bytes] = []
        while len(found) < wanted or not consumer.silent(0.3):
            message = consumer.message()
            consumer.send(say.fin(message.id))
            found.append(message.body)
        return found


def engine_of(broker: Running, topic: str) -> Any:
    """How a broker says its engine is with a topic."""
    return broker.get(f"/stats?format=json&topic={topic}")["topics"][0]["srtm"]["engine"]


def probed(broker: Running, client: Client, topic: str = "t") -> Any:
    """What a probe of a topic says after it has timed some messages of a client."""
    assert broker.post(f"/srtm/probe?topic={topic}")[0] == 200
    numbers = count()

    def timed() -> bool:
        client.publish(topic, b"%d" % next(numbers))
        return bool(engine_of(broker, topic)["probe"]["messages"] >= 5)

    until(timed)
    return engine_of(broker, topic)["probe"]


def released(path: Path, topic: str) -> Any:
    """When a recorded topic's messages got their tokens, in order."""
    table = pq.read_table(path, columns=["topic", "release_ns", "sent_ns"])
    rows = np.array([name == topic for name in table["topic"].to_pylist()], bool)
    return np.sort(table["release_ns"].to_numpy()[rows])
