"""`srtm up`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from srtm.errors import ControlError

_READY_S = 30.0
_STOP_S = 10.0
_YOUNG_S = 2.0  # who ends before that did not start
_MOST_STARTS = 3
_PORTS = (4150, 4152, 4154, 4156, 4158)  # the controller's come next


def up(
    brokers: Annotated[int, typer.Option(min=1, max=64, help="How many brokers, one process each.")] = 3,
    host: Annotated[str, typer.Option(help="Address to listen on; this machine alone unless given.")] = "127.0.0.1",
    data_path: Annotated[
        Path | None,
        typer.Option(help="A folder for disk topics and the controller's store (nothing is kept, without)."),
    ] = None,
    trace_folder: Annotated[Path | None, typer.Option(help="A folder that runs may be recorded into.")] = None,
    token: Annotated[str | None, typer.Option(envvar="SRTM_TOKEN", help="What changes have to show.")] = None,
    mcap_mps: Annotated[float | None, typer.Option(help="Messages a second that a broker can take.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Instead: what srtm calibrate --out wrote.")] = None,
    lease_s: Annotated[float, typer.Option(help="Seconds that shares last without the controller.")] = 30.0,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Take any free ports.")] = False,
) -> None:
    """Start a controller and brokers, and stop them all with Ctrl-C. A broker that ends is started again.

    srtm up --brokers 4

    srtm topic create traffic --r 11000 --b 600
    """
    from srtm import program

    told = ["--lease-s", str(lease_s)]
    told += ["--mcap-mps", str(mcap_mps)] if mcap_mps is not None else []
    told += ["--calibration", str(calibration)] if calibration is not None else []
    cluster = Cluster(brokers, host, data_path, trace_folder, token, told, free_ports=free_ports)
    program.run(cluster.run())


@dataclass
class Child:
    """A process of the cluster."""

    name: str
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None
    began: float = 0.0
    failures: int = 0
    ports: dict[str, int] = field(default_factory=dict)


class Cluster:
    """A controller, its brokers, and who watches over them."""

    def __init__(
        self,
        brokers: int,
        host: str,
        data_path: Path | None,
        trace_folder: Path | None,
        token: str | None,
        told: list[str],
        *,
        free_ports: bool,
    ) -> None:
        self._host = host
        self._free = free_ports
        self._token = token
        self._kept = data_path
        self._traces = trace_folder
        self._stopping = False
        self._controller = Child("controller", ["controller", "--host", host, *self._ports(4160), *told])
        if data_path is not None:
            self._controller.arguments += ["--data-path", str(data_path / "controller")]
        self._brokers = [self._broker(number) for number in range(brokers)]

    def _ports(self, tcp_port: int) -> list[str]:
        tcp, http = (0, 0) if self._free else (tcp_port, tcp_port + 1)
        return ["--tcp-port", str(tcp), "--http-port", str(http)]

    def _broker(self, number: int) -> Child:
        name = f"broker-{number + 1}"
        port = _PORTS[number] if number < len(_PORTS) else 4180 + 2 * (number - len(_PORTS))
        broadcast = ["--broadcast-address", self._host] if self._host not in ("0.0.0.0", "::") else []
        arguments = ["broker", "--host", self._host, "--name", name, *broadcast, *self._ports(port)]
        if self._kept is not None:
            arguments += ["--data-path", str(self._kept / name)]
        if self._traces is not None:
            arguments += ["--trace-folder", str(self._traces)]
        return Child(name, arguments)

    async def run(self) -> None:
        """Start, say where everything is, and stop when told to."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        began = time.monotonic()
        if self._traces is not None:
            self._traces.mkdir(parents=True, exist_ok=True)
        watchers: list[asyncio.Task[None]] = []
        try:
            await self._start(self._controller)
            for child in self._brokers:
                child.arguments += ["--controller", f"{self._host}:{self._controller.ports['TCP']}"]
            await asyncio.gather(*(self._start(child) for child in self._brokers))
            url = f"http://{self._host}:{self._controller.ports['HTTP']}"
            await self._all_alive(url, stopped)
            if not stopped.is_set():
                self._say(url, time.monotonic() - began)
            watchers = [
                asyncio.create_task(self._watch(child, stopped)) for child in (self._controller, *self._brokers)
            ]
            await stopped.wait()
        finally:
            self._stopping = True
            for watcher in watchers:
                watcher.cancel()
            await self._stop()
        for watcher in watchers:
            if watcher.done() and not watcher.cancelled() and (problem := watcher.exception()):
                raise problem
        print("cluster stopped", flush=True)

    async def _start(self, child: Child) -> None:
        """Start a process, and read where it listens."""
        environment = None if self._token is None else _with_token(self._token)
        child.began = time.monotonic()
        child.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "srtm",
            *child.arguments,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C at a terminal is ours to pass on
            preexec_fn=_die_with_parent,
        )
        assert child.process.stdout is not None
        line = (await child.process.stdout.readline()).decode()
        if not line:
            code = await child.process.wait()
            raise ControlError(f"{child.name} did not start (exit code {code}): see its message above")
        child.ports = {part.split()[0]: int(part.rpartition(":")[2]) for part in line.partition(": ")[2].split(", ")}

    async def _watch(self, child: Child, stopped: asyncio.Event) -> None:
        """Start a process again when it ends; give up when it does not even start."""
        while True:
            assert child.process is not None
            code = await child.process.wait()
            if self._stopping:
                return
            young = time.monotonic() - child.began < _YOUNG_S
            child.failures = child.failures + 1 if young else 0
            print(f"{child.name} ended ({code}): started again", flush=True)
            try:
                if child.failures >= _MOST_STARTS:
                    raise ControlError(f"{child.name} ends as soon as it has started ({code})")
                _fix_ports(child)
                if child is self._controller and self._kept is None and "--recover" not in child.arguments:
                    child.arguments.append("--recover")  # what it knew is with the brokers alone
                await self._start(child)
            except ControlError:
                stopped.set()
                raise

    async def _all_alive(self, url: str, stopped: asyncio.Event) -> None:
        import httpx

        until = time.monotonic() + _READY_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while time.monotonic() < until and not stopped.is_set():
                found = (await client.get(f"{url}/v1/brokers")).json()["brokers"]
                if sum(broker["status"] == "alive" for broker in found) == len(self._brokers):
                    return
                await asyncio.sleep(0.02)
        if not stopped.is_set():
            raise ControlError(f"brokers did not come to the controller within {_READY_S:g} s")

    def _say(self, url: str, seconds: float) -> None:
        addresses = ", ".join(f"{self._host}:{child.ports['TCP']}" for child in self._brokers)
        print(f"controller: {url} (API: {url}/docs)")
        print(f"brokers:    {addresses}")
        print(f"ready after {seconds:.1f} s; Ctrl-C stops it", flush=True)

    async def _stop(self) -> None:
        """Brokers first, which tell their clients; then the controller."""
        for group in (self._brokers, [self._controller]):
            running = [child.process for child in group if child.process and child.process.returncode is None]
            for process in running:
                with suppress(ProcessLookupError):
                    process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await asyncio.gather(*(process.wait() for process in running))
            except TimeoutError:
                for process in running:
                    with suppress(ProcessLookupError):
                        process.kill()
                await asyncio.gather(*(process.wait() for process in running))


def _fix_ports(child: Child) -> None:
    """Clients know where it was."""
    for flag, kind in (("--tcp-port", "TCP"), ("--http-port", "HTTP")):
        child.arguments[child.arguments.index(flag) + 1] = str(child.ports[kind])


def _with_token(token: str) -> dict[str, str]:
    import os

    return {**os.environ, "SRTM_TOKEN": token, "SRTM_CONTROL_TOKEN": token}


def _die_with_parent() -> None:
    """Linux ends this process when the one that started it is gone, however it went."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
