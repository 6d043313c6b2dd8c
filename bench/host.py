"""What this host is, and how much of a second it takes away by itself."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

from srtm.cli.latency import jitter


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def commit() -> str:
    try:
        named = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return named.stdout.strip()


def jitter_us(seconds: float = 1.0) -> tuple[float, float]:
    """The longest gap, and the share of time lost in gaps over 50 µs (in %)."""
    longest_ns, lost = jitter(round(seconds * 1e9))
    return longest_ns / 1_000, 100 * lost


def round_trip_us(exchanges: int = 5_000) -> tuple[float, float]:
    """Median and p99 of a byte to another process and back over TCP on loopback, in µs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if not child:
            _echo(server.getsockname())
        peer, _ = server.accept()
    took = []
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(exchanges):
            began = time.perf_counter_ns()
            peer.sendall(b"x")
            peer.recv(1)
            took.append(time.perf_counter_ns() - began)
    os.waitpid(child, 0)
    return statistics.median(took) / 1_000, statistics.quantiles(took, n=100)[98] / 1_000


def _echo(address: tuple[str, int]) -> None:
    """Send back what comes, in a process of its own, until the other side closes."""
    try:
        with socket.create_connection(address) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while said := peer.recv(1):
                peer.sendall(said)
    finally:
        os._exit(0)


def jitter_line() -> str:
    longest, lost = jitter_us()
    return f"host jitter: longest gap {longest:.0f} µs, {lost:.2f} % of a second lost in gaps over 50 µs"


def describe(seed: int) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba", "pyarrow"))
    return (
        f"{cpu()}, {len(os.sched_getaffinity(0))} cores; Python {platform.python_version()}, {versions};"
        f" commit {commit()}; seed {seed}\n"
        f"{jitter_line()}"
    )
