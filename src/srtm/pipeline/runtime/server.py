"""The standing Spark: a Connect server of the user's own, so only the first of many commands waits for Spark to start.

`start` runs `serving` in the background. The server listens on a free port of the loopback interface and accepts only
clients that know its token. It writes its address and token to a file that only the user can read. It stops when told
to, or when it has been idle for a while.

The kernel reuses process ids. The file therefore also records when the process started, and nothing is used or
terminated unless both agree. `SRTM_SPARK_SERVER=off` makes commands ignore the server.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import srtm
from srtm.errors import PipelineError
from srtm.pipeline.runtime.java import cache_folder

SWITCH = "SRTM_SPARK_SERVER"
IDLE_S = 30 * 60
STARTS_WITHIN_S = 120
_HOST = "localhost"  # the one name for which Connect sends a token without TLS


@dataclass(frozen=True)
class Server:
    """The standing server, as its record describes it."""

    pid: int
    born: int  # when the process started, in clock ticks since boot
    port: int
    token: str
    started_s: float
    idle_s: float
    versions: list[str]

    @property
    def address(self) -> str:
        """Its address, without the token."""
        return f"sc://{_HOST}:{self.port}"

    @property
    def url(self) -> str:
        """Its address with the token, as clients pass it to Spark."""
        return f"{self.address}/;token={self.token}"

    @property
    def fits(self) -> bool:
        """Whether it runs the same Python, Spark and SRTM as this process."""
        return self.versions == versions_here()


def record_file() -> Path:
    """The path of the server's record."""
    return cache_folder() / "spark-server.json"


def running_server() -> Server | None:
    """The standing server if it answers and fits this process; None otherwise, or if SRTM_SPARK_SERVER=off."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no"):
        return None
    server = recorded_server()
    if server is None or not server.fits:
        return None
    try:
        socket.create_connection((_HOST, server.port), timeout=1).close()
    except OSError:
        return None
    return server


def recorded_server() -> Server | None:
    """The standing server if its process is alive, whatever its versions."""
    try:
        server = Server(**json.loads(record_file().read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return server if started_at(server.pid) == server.born else None


def write_record(server: Server) -> None:
    """Publish how to reach the server, in a file only its owner can read."""
    file = record_file()
    draft = file.with_suffix(f".{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        json.dump(asdict(server), out)
    draft.replace(file)


def start(idle_s: float = IDLE_S) -> Server:
    """Start a server and wait until it answers; returns a running one if it fits."""
    server = recorded_server()
    if server and server.fits:
        return server
    if server:
        stop()  # of another version; the record has room for one
    log = record_file().with_suffix(".log")
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "srtm.pipeline.runtime.serving", str(idle_s)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    deadline = time.monotonic() + STARTS_WITHIN_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            server = recorded_server()
            if server and server.pid == process.pid:
                process.returncode = 0  # it outlives this process: no ResourceWarning
                return server
            time.sleep(0.1)
    except KeyboardInterrupt:
        process.terminate()
        raise
    process.terminate()
    raise PipelineError(f"the Spark server did not start: {_last_line(log)}", log=str(log))


def stop(within_s: float = 20) -> Server | None:
    """Stop the standing server and wait until it has exited; None if none was running."""
    server = recorded_server()
    if server is None:
        return None
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(server.pid, ending)
        deadline = time.monotonic() + within_s
        while started_at(server.pid) == server.born:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            break
    record_file().unlink(missing_ok=True)
    return server


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is not running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def versions_here() -> list[str]:
    """The versions that a server and its clients must share: Python, Spark, and every file of this package."""
    import pyspark

    source = Path(srtm.__file__).parent
    files = [(str(path), path.stat().st_mtime_ns) for path in sorted(source.rglob("*.py"))]
    code = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
    return [sys.executable, sys.version.split()[0], pyspark.__version__, srtm.__version__, code]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"it printed nothing ({log})"
