"""A cluster of real processes, and what can go wrong between them."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from srtm.client import Publisher
from srtm.errors import ClientError

PATIENCE_S = 60.0  # a machine that is busy with other things takes long to start a process
PORTS = re.compile(r"TCP \S+:(\d+), HTTP \S+:(\d+)")


def until(holds: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """What is true in the end; a server that does not answer yet says nothing."""
    ends = time.monotonic() + patience_s
    while True:
        with suppress(httpx.HTTPError):
            if found := holds():
                return found
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)


class Program:
    """One process of SRTM."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "srtm", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.said = []
        while not (found := PORTS.search(line := self.process.stdout.readline())):
            self.said.append(line)
            assert line, self.process.communicate()
        self.tcp, self.http = int(found[1]), int(found[2])
        self.arguments = arguments

    def again(self, *more: str) -> Program:
        """The same at the same ports, with more arguments."""
        kept = list(self.arguments)
        for flag, port in (("--tcp-port", self.tcp), ("--http-port", self.http)):
            kept[kept.index(flag) + 1] = str(port)
        return Program(*kept, *more)

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        """In order, or else by force."""
        self.process.terminate()
        try:
            self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()


class Processes:
    """A controller and its brokers, each with a folder of its own."""

    def __init__(self, folder: Path, stack: ExitStack, *controller: str) -> None:
        self.folder = folder
        self.running: list[Program] = []
        self.brokers: dict[str, Program] = {}
        stack.callback(self.stop)
        free = ["--tcp-port", "0", "--http-port", "0", "--web-port", "none"]
        self.controller = self._started(
            Program("controller", *free, "--data-path", str(folder / "controller"), *controller)
        )
        self.url = f"http://127.0.0.1:{self.controller.http}"
        self.client = stack.enter_context(httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False))

    def broker(self, name: str, *more: str, address: str = "127.0.0.1", controller: str | None = None) -> Program:
        """A broker, once the controller has heard of it."""
        flags = ["--name", name, "--tcp-port", "0", "--http-port", "0", "--broadcast-address", address]
        folders = ["--data-path", str(self.folder / name), "--trace-folder", str(self.folder)]
        under = ["--controller", controller or f"127.0.0.1:{self.controller.tcp}"]
        self.brokers[name] = self._started(Program("broker", *flags, *folders, *under, *more))
        return self.brokers[name]

    def all_alive(self) -> None:
        until(lambda: sorted(self.statuses().items()) == [(name, "alive") for name in sorted(self.brokers)])

    def statuses(self) -> dict[str, str]:
        return {each["name"]: each["status"] for each in self.client.get("/v1/brokers").json().get("brokers", ())}

    def restart_controller(self, *more: str) -> None:
        self.controller = self._started(self.controller.again(*more))

    def restart_broker(self, name: str) -> None:
        self.brokers[name] = self._started(self.brokers[name].again())

    def create(self, topic: str, **contract: Any) -> None:
        answer = self.client.put(f"/v1/topics/{topic}", json={"fit": "none", **contract})
        assert answer.status_code == 200, answer.text
        until(lambda: self.topic(topic)["state"] != "opening")

    def topic(self, topic: str) -> Any:
        return self.client.get(f"/v1/topics/{topic}").json()

    def shares(self, topic: str) -> dict[str, float]:
        return {each["broker"]: each["r"] for each in self.topic(topic)["brokers"] if each["r"]}

    def places(self, topic: str) -> dict[str, str]:
        found = self.client.get(f"/v1/topics/{topic}/publishers").json()["publishers"]
        return {each["id"]: each["broker"] for each in found}

    def ask(self, name: str, path: str, method: str = "GET") -> httpx.Response:
        """What a broker says."""
        url = f"http://127.0.0.1:{self.brokers[name].http}{path}"
        answer = httpx.request(method, url, timeout=PATIENCE_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer

    def in_force(self, name: str, topic: str) -> float:
        """The rate that a broker itself says it has."""
        (found,) = self.ask(name, f"/stats?format=json&topic={topic}").json()["topics"]
        return float(found["srtm"]["r"] or 0)

    def record(self, *names: str) -> None:
        for name in names:
            self.ask(name, f"/srtm/trace/start?file={name}.parquet", "POST")

    def recorded(self, *names: str) -> None:
        for name in names:
            self.ask(name, "/srtm/trace/stop", "POST")

    def releases(self, topic: str) -> Any:
        """When messages got their tokens, by all traces."""
        tables = [pq.read_table(path, columns=["topic", "release_ns"]) for path in self.folder.glob("*.parquet")]
        found = pa.concat_tables(tables)
        of_topic = np.array([name == topic for name in found["topic"].to_pylist()], bool)
        return np.sort(found["release_ns"].to_numpy()[of_topic])

    def logged(self, topic: str) -> list[bytes]:
        """Bodies in the logs of all brokers that have the topic."""
        bodies: list[bytes] = []
        for name in self.brokers:
            topics = self.ask(name, f"/stats?format=json&topic={topic}").json()["topics"]
            if topics and topics[0]["srtm"]["log"]:
                begin = topics[0]["srtm"]["log"]["begin"]
                answer = self.ask(name, f"/srtm/log/read?topic={topic}&begin={begin}&limit=100000")
                bodies += pa.ipc.open_stream(answer.content).read_all()["body"].to_pylist()
        return bodies

    def stop(self) -> None:
        for program in reversed(self.running):
            program.stop()

    def _started(self, program: Program) -> Program:
        self.running.append(program)
        return program


@contextmanager
def processes(folder: Path, *controller: str) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(folder, stack, *controller)


class Sender:
    """A publisher that sends at a rate, and remembers what was acknowledged when."""

    def __init__(self, topic: str, url: str, name: str, rate: float, **declared: Any) -> None:
        self.publisher = Publisher(topic, controller=url, id=name, rate=rate, **declared)
        self.rate = rate
        self.acknowledged: dict[bytes, float] = {}
        self.paused = False
        self._number = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.publisher.open()
        self._task = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while True:
            if not self.paused:
                body = f"{self.publisher.id} {self._number}".encode()
                self._number += 1
                await self.publisher.publish(body)
                self.acknowledged[body] = time.monotonic()
            await asyncio.sleep(1 / self.rate)

    async def stop(self) -> None:
        assert self._task
        self._task.cancel()
        with suppress(asyncio.CancelledError, ClientError):
            await self._task
        await self.publisher.abort()


async def started(senders: list[Sender]) -> None:
    await asyncio.gather(*(sender.start() for sender in senders))


async def stopped(senders: list[Sender]) -> None:
    await asyncio.gather(*(sender.stop() for sender in senders))


class Proxy:
    """Somebody between two who can stop passing on what they say, as a network that is cut does."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self.listen, self.target = listen, target
        self.open = asyncio.Event()
        self.open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, *self.listen)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        try:
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        except OSError:
            pass
        finally:
            far_writer.close()
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self.open.wait()
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a program says to the end, after Ctrl-C."""
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=PATIENCE_S)
