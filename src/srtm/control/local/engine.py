"""Engines of a local cluster: the programs to start, and their addresses for brokers.

In: `--engine nsqd` or `nats`, folders, ports. Out: commands, and the address of the engine for each broker. Each broker
gets an nsqd beside it, as NSQ is meant to run, which registers with the controller's discovery. NATS is one server with
JetStream, which writes what it acknowledges to files. nsqd writes messages to files when it stops, and those that do
not fit into its memory. Without memory, its ephemeral channels would drop messages that no consumer waits for.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from srtm.errors import ControlError

_NSQD_PORT, _NATS_PORT = 4250, 4222
_IN_MEMORY = 100_000  # messages of a topic or channel of nsqd; as many as a broker holds
_REMEDIES = {
    "nsqd": "put NSQ's programs on the PATH, or give the address of a running nsqd: --engine nsqd://host:4150",
    "nats-server": "run pip install 'srtm[nats]', or give the address of running servers: --engine nats://host:4222",
}


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """One program of an engine."""

    name: str
    command: list[str]
    port: int
    ready_port: int  # accepts connections once it is ready, even silent ones
    address: str  # for brokers


@dataclass(frozen=True, slots=True)
class Place:
    """Where programs of an engine run."""

    host: str
    folder: Path
    lookupd_port: int  # of the controller
    free: bool = False  # pick free ports


def engines(kind: str, brokers: int, at: Place) -> list[LocalEngine]:
    """The programs of an engine for this number of brokers: one for each, or one for all."""
    if kind == "nats":
        port = _free_port(at.host) if at.free else _NATS_PORT
        place = at.folder / "nats"
        place.mkdir(parents=True, exist_ok=True)
        flags = ["-a", at.host, "-p", str(port), "-js", "-sd", str(place), "-l", str(place / "log")]
        return [LocalEngine("nats", [_program("nats-server"), *flags], port, port, f"nats://{at.host}:{port}")]
    return [_nsqd(number, at) for number in range(brokers)]


def _nsqd(number: int, at: Place) -> LocalEngine:
    host = at.host
    port, http = (
        (_free_port(host), _free_port(host)) if at.free else (_NSQD_PORT + 2 * number, _NSQD_PORT + 2 * number + 1)
    )
    place = at.folder / f"nsqd-{number + 1}"
    place.mkdir(parents=True, exist_ok=True)
    flags = [
        f"--tcp-address={host}:{port}",
        f"--http-address={host}:{http}",
        f"--broadcast-address={host}",
        f"--data-path={place}",
        f"--lookupd-tcp-address={host}:{at.lookupd_port}",
        f"--mem-queue-size={_IN_MEMORY}",
        "--log-level=error",
    ]
    return LocalEngine(f"nsqd-{number + 1}", [_program("nsqd"), *flags], port, http, f"nsqd://{host}:{port}")


def _program(name: str) -> str:
    """The path of a program: on the PATH, or beside Python, where pip puts it."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise ControlError(f"cannot find {name}; {_REMEDIES[name]}")
    return found


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
