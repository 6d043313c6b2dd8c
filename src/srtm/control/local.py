"""A whole cluster on this machine: a controller and its brokers as processes, started, watched over and stopped.

In: how many brokers, and what to tell them. Out: where everything is. No process outlives the one that started it,
however that one ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from srtm.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Self

_READY_S = 30.0
_STOP_S = 10.0
_YOUNG_S = 2.0  # who ends before that did not start
_MOST_STARTS = 3
_PORTS = (4150, 4152, 4154, 4156, 4158)
_CONTROLLER_PORT = 4160


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What a cluster on this machine is made of; more flags for the controller and for every broker may be given."""

    brokers: int = 3
    host: str = "127.0.0.1"
    data_path: Path | None = None
    trace_folder: Path | None = None
    token: str | None = None
    free_ports: bool = False
    controller_flags: Sequence[str] = ()
    broker_flags: Sequence[str] = ()
    web_port: int | None = 4171  # of the page; none serves none


@dataclass
class Child:
    """A process of the cluster."""

    name: str
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None
    began: float = 0.0
    failures: int = 0
    ports: dict[str, int] = field(default_factory=dict)


class LocalCluster:
    """A controller, its brokers, and who watches over them. `async with` starts and stops them."""

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._stopping = False
        page = "none" if options.web_port is None else "0" if options.free_ports else str(options.web_port)
        flags = ["controller", "--host", options.host, *self._ports(_CONTROLLER_PORT), "--web-port", page]
        flags += options.controller_flags
        if options.data_path is not None:
            flags += ["--data-path", str(options.data_path / "controller")]
        self.controller = Child("controller", flags)
        self.brokers = [self._broker(number) for number in range(options.brokers)]

    def _ports(self, tcp_port: int) -> list[str]:
        tcp, http = (0, 0) if self._options.free_ports else (tcp_port, tcp_port + 1)
        return ["--tcp-port", str(tcp), "--http-port", str(http)]

    def _broker(self, number: int) -> Child:
        options, name = self._options, f"broker-{number + 1}"
        port = _PORTS[number] if number < len(_PORTS) else 4180 + 2 * (number - len(_PORTS))
        broadcast = ["--broadcast-address", options.host] if options.host not in ("0.0.0.0", "::") else []
        arguments = ["broker", "--host", options.host, "--name", name, *broadcast, *self._ports(port)]
        if options.data_path is not None:
            arguments += ["--data-path", str(options.data_path / name)]
        if options.trace_folder is not None:
            arguments += ["--trace-folder", str(options.trace_folder)]
        return Child(name, [*arguments, *options.broker_flags])

    @property
    def page(self) -> str | None:
        """Where the page is."""
        port = self.controller.ports.get("page")
        return f"http://{self._options.host}:{port}/" if port else None

    @property
    def url(self) -> str:
        """Where the controller's HTTP is."""
        return self.http(self.controller)

    def http(self, child: Child) -> str:
        """Where a process's HTTP is."""
        return f"http://{self._options.host}:{child.ports['HTTP']}"

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything, and wait until the controller has heard every broker."""
        options = self._options
        if options.trace_folder is not None:
            options.trace_folder.mkdir(parents=True, exist_ok=True)
        if options.free_ports:  # brokers have to be told where the controller is
            await self._start(self.controller)
        tcp_port = self.controller.ports.get("TCP", _CONTROLLER_PORT)
        for child in self.brokers:
            child.arguments += ["--controller", f"{options.host}:{tcp_port}"]
        others = [] if options.free_ports else [self.controller]
        await asyncio.gather(*(self._start(child) for child in (*others, *self.brokers)))
        await self._all_alive()

    async def _start(self, child: Child) -> None:
        """Start a process, and read where it listens."""
        child.began = time.monotonic()
        child.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "srtm",
            *child.arguments,
            stdout=asyncio.subprocess.PIPE,
            env=_with_token(self._options.token),
            start_new_session=True,  # Ctrl-C at a terminal is ours to pass on
            preexec_fn=partial(die_with, os.getpid()),
        )
        assert child.process.stdout is not None
        line = (await child.process.stdout.readline()).decode()
        if not line:
            code = await child.process.wait()
            raise ControlError(f"{child.name} did not start (exit code {code}): see its message above")
        child.ports = {part.split()[0]: int(part.rpartition(":")[2]) for part in line.partition(": ")[2].split(", ")}

    async def _all_alive(self) -> None:
        import httpx

        until = time.monotonic() + _READY_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while time.monotonic() < until:
                found = (await client.get(f"{self.url}/v1/brokers")).json()["brokers"]
                if sum(broker["status"] == "alive" for broker in found) == len(self.brokers):
                    return
                await asyncio.sleep(0.02)
        raise ControlError(f"brokers did not come to the controller within {_READY_S:g} s")

    async def watch(self, say: Callable[[str], None]) -> None:
        """Start processes again when they end; ends itself when one does not even start."""
        await asyncio.gather(*(self._watch(child, say) for child in (self.controller, *self.brokers)))

    async def _watch(self, child: Child, say: Callable[[str], None]) -> None:
        while True:
            assert child.process is not None
            code = await child.process.wait()
            if self._stopping:
                return
            young = time.monotonic() - child.began < _YOUNG_S
            child.failures = child.failures + 1 if young else 0
            say(f"{child.name} ended ({code}): started again")
            if child.failures >= _MOST_STARTS:
                raise ControlError(f"{child.name} ends as soon as it has started ({code})")
            _fix_ports(child)
            forgets = child is self.controller and self._options.data_path is None
            if forgets and "--recover" not in child.arguments:
                child.arguments.append("--recover")  # what it knew is with the brokers alone
            await self._start(child)

    async def stop(self) -> None:
        """Brokers first, which tell their clients; then the controller."""
        self._stopping = True
        for group in (self.brokers, [self.controller]):
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
    for flag, kind in (("--tcp-port", "TCP"), ("--http-port", "HTTP"), ("--web-port", "page")):
        if kind in child.ports:
            child.arguments[child.arguments.index(flag) + 1] = str(child.ports[kind])


def _with_token(token: str | None) -> dict[str, str] | None:
    return None if token is None else {**os.environ, "SRTM_TOKEN": token, "SRTM_CONTROL_TOKEN": token}


def die_with(parent: int) -> None:
    """In a process that was just made: Linux ends it when the one that made it is gone, however that went."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:  # it was faster
        os._exit(1)
