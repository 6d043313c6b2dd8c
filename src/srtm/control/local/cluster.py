"""A cluster on this machine: controllers and brokers as processes, started, supervised and stopped.

In: the number of brokers, the delivery engine, and flags. Out: the addresses of all processes. No process outlives the
one that started it, however that one ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from srtm.control.local import certificates
from srtm.control.local.engine import Place, engines
from srtm.errors import ControlError
from srtm.net import certs
from srtm.net.tls import client_context
from srtm.protocol import engine as addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from srtm.control.local.engine import LocalEngine

_STOP_S = 10.0
_YOUNG_S = 2.0  # a process that ends earlier did not start
_MOST_STARTS = 3
_AGAIN_S, _PATIENCE_S = 2.0, 120.0  # between attempts to restart a process, and for how long
_PORTS = (4150, 4152, 4154, 4156, 4158)
_CONTROLLER_PORT = 4160
_HTTPS = 100  # from a broker's TCP port to that of its HTTPS
_PORT_FLAGS = {"--tcp-port": "TCP", "--http-port": "HTTP", "--https-port": "HTTPS", "--web-port": "page"}


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Settings of a local cluster, with further flags for its controller and its brokers."""

    brokers: int = 3
    host: str = "127.0.0.1"
    data_path: Path | None = None
    trace_folder: Path | None = None
    token: str | None = None
    free_ports: bool = False
    controller_flags: Sequence[str] = ()
    broker_flags: Sequence[str] = ()
    web_port: int | None = 4171  # of the page; None serves no page
    engine: str = "local"  # or nsqd or nats to start one, or the address of a running one
    recover: bool = False  # start with a new store
    ready_s: float = 30.0  # limit until all processes are ready
    broker_verb: Sequence[str] = ("broker",)  # of `srtm`, with the flags of a broker
    certificates: Path | None = None  # folder of a CA and certificates, made if missing; None: no TLS
    controllers: int = 1
    store: str | None = None  # that controllers share; several without one get a NATS server

    @property
    def starts_nats(self) -> bool:
        """Whether a NATS server must be started."""
        return self.engine == "nats" or (self.controllers > 1 and self.store is None)


@dataclass
class Child:
    """A process of the cluster."""

    name: str
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None
    began: float = 0.0
    failures: int = 0
    ports: dict[str, int] = field(default_factory=dict)
    program: str | None = None  # None for SRTM itself


class LocalCluster:
    """Controllers, brokers and their engine. `async with` starts and stops them."""

    def __init__(self, options: LocalOptions) -> None:
        if options.engine not in addresses.KINDS:
            addresses.parse(options.engine)
        if options.certificates is not None and options.engine == "nsqd":
            raise ControlError("--tls excludes --engine nsqd: nsqd registers with the controller without TLS")
        if options.certificates is not None and (options.controllers > 1 or options.store is not None):
            raise ControlError("--tls excludes --controllers and --store: controllers do not share a store by TLS yet")
        self._options = options
        self._stopping = False
        self._secrets = self._secrets_for()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.engines: list[Child] = []
        self._store = options.store  # None if each controller has a file, or memory
        self.controllers = [self._controller(number) for number in range(options.controllers)]
        self.brokers = [self._broker(number) for number in range(options.brokers)]

    def _controller(self, number: int) -> Child:
        options = self._options
        page = "none" if options.web_port is None else "0" if options.free_ports else str(options.web_port + number)
        flags = ["controller", "--host", options.host, *self._ports(_CONTROLLER_PORT + 2 * number), "--web-port", page]
        flags += options.controller_flags
        if options.data_path is not None and options.store is None and options.controllers == 1:
            flags += ["--data-path", str(options.data_path / "controller")]
        flags += ["--recover"] if options.recover else []
        if options.certificates is not None:
            flags += certificates.flags(options.certificates, certificates.CONTROLLER)
        return Child("controller" if options.controllers == 1 else f"controller-{number + 1}", flags)

    @property
    def controller(self) -> Child:
        """The first controller; each answers for the one that leads."""
        return self.controllers[0]

    def _ports(self, tcp_port: int) -> list[str]:
        tcp, http = (0, 0) if self._options.free_ports else (tcp_port, tcp_port + 1)
        return ["--tcp-port", str(tcp), "--http-port", str(http)]

    def _broker(self, number: int) -> Child:
        options, name = self._options, f"broker-{number + 1}"
        port = _PORTS[number] if number < len(_PORTS) else 4180 + 2 * (number - len(_PORTS))
        broadcast = ["--broadcast-address", options.host] if options.host not in ("0.0.0.0", "::") else []
        arguments = [*options.broker_verb, "--host", options.host, "--name", name, *broadcast, *self._ports(port)]
        if options.data_path is not None:
            arguments += ["--data-path", str(options.data_path / name)]
        if options.trace_folder is not None:
            arguments += ["--trace-folder", str(options.trace_folder)]
        if options.certificates is not None:
            https_port = 0 if options.free_ports else port + _HTTPS
            arguments += [*certificates.flags(options.certificates, name), "--https-port", str(https_port)]
        return Child(name, [*arguments, *options.broker_flags])

    @property
    def page(self) -> str | None:
        """The URL of the page."""
        port = self.controller.ports.get("page")
        return f"{self._scheme}://{self._options.host}:{port}/" if port else None

    @property
    def url(self) -> str:
        """The URL of the controller's API."""
        return f"{self._scheme}://{self._options.host}:{self.controller.ports['HTTP']}"

    @property
    def authority(self) -> Path | None:
        """The file of the CA that verifies the cluster; None without TLS."""
        folder = self._options.certificates
        return None if folder is None else certs.certificate(folder, certs.CA)[0]

    @property
    def _scheme(self) -> str:
        return "http" if self._options.certificates is None else "https"

    def http(self, child: Child) -> str:
        """The base URL of a broker's HTTP."""
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
        if options.certificates is not None:
            certificates.ensured(options.certificates, options.brokers, options.host)
        if options.starts_nats:
            await self._start_nats()
        if options.free_ports:  # brokers need the controllers' ports
            await asyncio.gather(*(self._start(child) for child in self.controllers))
        ports = [child.ports.get("TCP", _CONTROLLER_PORT + 2 * at) for at, child in enumerate(self.controllers)]
        scheme = "" if options.certificates is None else "tls://"
        for child in self.brokers:
            child.arguments += ["--controller", ",".join(f"{scheme}{options.host}:{port}" for port in ports)]
        if options.engine == "nsqd":
            await self._start_engines(engines("nsqd", options.brokers, self._place(ports[0])))
        others = [] if options.free_ports else self.controllers
        await asyncio.gather(*(self._start(child) for child in (*others, *self.brokers)))
        await self._all_alive()
        if options.recover:
            for child in self.controllers:
                child.arguments.remove("--recover")  # once

    async def _start_nats(self) -> None:
        """Start a NATS server, for what asks for one: the engine of brokers, the store of controllers, or both."""
        made = engines("nats", self._options.brokers, self._place(_CONTROLLER_PORT))
        if len(self.controllers) > 1 and self._store is None:
            self._store = made[0].address
        await self._start_engines(made, brokers=self._options.engine == "nats")

    def _place(self, lookupd_port: int) -> Place:
        options = self._options
        if options.data_path is None and self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="srtm-engine-")
        folder = options.data_path or Path(self._scratch.name)  # type: ignore[union-attr]
        return Place(options.host, folder, lookupd_port, free=options.free_ports)

    async def _start_engines(self, made: list[LocalEngine], *, brokers: bool = True) -> None:
        """Start the programs of an engine, and give brokers their addresses."""
        for number, child in enumerate(self.brokers if brokers else ()):
            child.arguments += ["--engine", made[number % len(made)].address]
        self.engines = [
            Child(
                each.name, each.command[1:], ports={"TCP": each.port, "ready": each.ready_port}, program=each.command[0]
            )
            for each in made
        ]
        await asyncio.gather(*(self._start(child) for child in self.engines))

    async def _start(self, child: Child) -> None:
        """Start a process, and read its ports from its first lines."""
        child.began = time.monotonic()
        child.process = await asyncio.create_subprocess_exec(
            *([sys.executable, "-m", "srtm"] if child.program is None else [child.program]),
            *child.arguments,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment(),
            start_new_session=True,  # Ctrl-C at a terminal must reach only us; we stop the others in order
            preexec_fn=partial(die_with, os.getpid()),
        )
        if child.program is not None:
            await self._listens(child)
            return
        assert child.process.stdout is not None
        line = ""
        while "TCP " not in line:  # a line about a store that was set aside may come first
            line = (await child.process.stdout.readline()).decode()
            if not line:
                code = await child.process.wait()
                raise ControlError(f"{child.name} did not start (exit code {code}); see its message above", code=code)
        child.ports = {part.split()[0]: int(part.rpartition(":")[2]) for part in line.partition(": ")[2].split(", ")}

    async def _listens(self, child: Child) -> None:
        """Wait until a program that is not SRTM's accepts connections."""
        until = time.monotonic() + self._options.ready_s
        while time.monotonic() < until:
            assert child.process is not None
            if child.process.returncode is not None:
                raise ControlError(f"{child.name} did not start (exit code {child.process.returncode})")
            with suppress(OSError):
                _, writer = await asyncio.open_connection(self._options.host, child.ports["ready"])
                writer.close()
                return
            await asyncio.sleep(0.02)
        raise ControlError(
            f"{child.name} does not listen on port {child.ports['TCP']} after {self._options.ready_s:g} s"
        )

    def _environment(self) -> dict[str, str]:
        """Pass secrets by environment, as command lines are public: tokens, and an engine's address with its login."""
        options, found = self._options, os.environ | self._secrets
        found["SRTM_ENGINE"] = "local" if options.engine in addresses.KINDS else options.engine
        found.pop("SRTM_STORE", None)
        if self._store is not None:
            found["SRTM_STORE"] = self._store
        return found

    def _secrets_for(self) -> dict[str, str]:
        """Tokens of the processes; brokers may always register, also once the controller needs credentials."""
        token, given = self._options.token, os.environ
        found = {"SRTM_BROKER_TOKEN": given.get("SRTM_BROKER_TOKEN") or secrets.token_urlsafe(32)}
        if token is not None:
            found |= {"SRTM_TOKEN": token, "SRTM_CONTROL_TOKEN": token}
        elif self._options.certificates is not None and not given.get("SRTM_CONTROL_TOKEN"):
            found["SRTM_CONTROL_TOKEN"] = secrets.token_urlsafe(32)
        return found

    async def _all_alive(self) -> None:
        import httpx

        until = time.monotonic() + self._options.ready_s
        tls = False if self.authority is None else client_context(str(self.authority), None, None)
        async with httpx.AsyncClient(trust_env=False, verify=tls) as client:
            while time.monotonic() < until:
                found = (await client.get(f"{self.url}/v1/health")).json()
                if found.get("brokers_alive") == len(self.brokers):  # missing while none leads
                    return
                await asyncio.sleep(0.02)
        raise ControlError(f"not all brokers joined the controller within {self._options.ready_s:g} s")

    async def watch(self, say: Callable[[str], None]) -> None:
        """Restart processes that end; raises ControlError if one ends right after its start, again and again."""
        children = (*self.controllers, *self.brokers, *self.engines)
        await asyncio.gather(*(self._watch(child, say) for child in children))

    async def _watch(self, child: Child, say: Callable[[str], None]) -> None:
        while True:
            assert child.process is not None
            code = await child.process.wait()
            if self._stopping:
                return
            young = time.monotonic() - child.began < _YOUNG_S
            child.failures = child.failures + 1 if young else 0
            say(f"{child.name} ended ({code}); restarting")
            if child.failures >= _MOST_STARTS:
                raise ControlError(
                    f"{child.name} keeps ending right after its start (exit code {code}); see its messages above"
                )
            _fix_ports(child)
            forgets = child in self.controllers and self._options.data_path is None and self._store is None
            if forgets and "--recover" not in child.arguments:
                child.arguments.append("--recover")  # only the brokers know its contracts now
            await self._start_again(child, say)

    async def _start_again(self, child: Child, say: Callable[[str], None]) -> None:
        """Restart a process, with patience: what is in its way, such as a port in use, may go away."""
        until = time.monotonic() + _PATIENCE_S
        while not self._stopping:
            try:
                await self._start(child)
            except ControlError as problem:
                if time.monotonic() > until:
                    raise
                say(f"{problem}; retrying")
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    async def stop(self) -> None:
        """Stop brokers first, which tell their clients, then the controllers and the engines."""
        self._stopping = True
        for group in (self.brokers, self.controllers, self.engines):
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
        if self._scratch is not None:
            self._scratch.cleanup()


def _fix_ports(child: Child) -> None:
    """Restart at the same ports: clients know them."""
    if child.program is not None:  # its ports are in its arguments already
        return
    for flag, kind in _PORT_FLAGS.items():
        if kind in child.ports:
            child.arguments[child.arguments.index(flag) + 1] = str(child.ports[kind])


def die_with(parent: int) -> None:
    """Called in a new process: let Linux end it when its parent ends, however that ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
