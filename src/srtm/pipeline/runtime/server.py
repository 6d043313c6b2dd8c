"""A standing Spark: a Connect server of the user's own, so that only the first of many commands waits for a start.

`start` runs this module as a process in the background. It keeps a local session with Connect's server in it, on a free
port of the loopback interface, and writes what others need to reach it into a file that only the user can read: it
answers nobody who does not know the token in there. It ends when told to, or when nobody has used it for a while.

A process number can be taken over by another process. The file therefore has the time at which the process started too,
and nothing is used or ended that does not agree with both. `SRTM_SPARK_SERVER=off` has it left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import srtm
from srtm.errors import PipelineError
from srtm.pipeline.runtime.java import cache_folder

SWITCH = "SRTM_SPARK_SERVER"
IDLE_S = 30 * 60
STARTS_WITHIN_S = 120
_HOST = "localhost"  # the one name for which Connect sends a token without TLS
_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"


@dataclass(frozen=True)
class Server:
    """A standing server, as its file describes it."""

    pid: int
    born: int  # when the process started, in the kernel's ticks since boot
    port: int
    token: str
    started_s: float
    idle_s: float
    versions: list[str]

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"sc://{_HOST}:{self.port}"

    @property
    def url(self) -> str:
        """The address with the token in it."""
        return f"{self.address}/;token={self.token}"

    @property
    def fits(self) -> bool:
        """Whether it runs what this process would run."""
        return self.versions == _versions()


def record_file() -> Path:
    """Where the server writes how to reach it."""
    return cache_folder() / "spark-server.json"


def running_server() -> Server | None:
    """The standing server if it is alive and runs the versions of this process, unless it is switched off."""
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
    """The standing server if its process is alive, of whatever versions."""
    try:
        server = Server(**json.loads(record_file().read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return server if _born(server.pid) == server.born else None


def start(idle_s: float = IDLE_S) -> Server:
    """Start a server and wait until it answers; the one that runs already, if it fits."""
    server = recorded_server()
    if server and server.fits:
        return server
    if server:
        stop()  # another version's: nobody could use both
    log = record_file().with_suffix(".log")
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "srtm.pipeline.runtime.server", str(idle_s)],
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
                process.returncode = 0  # it outlives this process, and Python need not warn of it
                return server
            time.sleep(0.1)
    except KeyboardInterrupt:
        process.terminate()
        raise
    process.terminate()
    raise PipelineError(f"the Spark server did not start: {_last_line(log)}", log=str(log))


def stop(within_s: float = 20) -> Server | None:
    """End the standing server and wait for its end; None if there is none."""
    server = recorded_server()
    if server is None:
        return None
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(server.pid, ending)
        deadline = time.monotonic() + within_s
        while _born(server.pid) == server.born:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            break
    record_file().unlink(missing_ok=True)
    return server


def _born(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _versions() -> list[str]:
    """What a server and its clients must agree on: Python, Spark, and this package to the last file."""
    import pyspark

    source = Path(srtm.__file__).parent
    files = [(str(path), path.stat().st_mtime_ns) for path in sorted(source.rglob("*.py"))]
    code = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
    return [sys.executable, sys.version.split()[0], pyspark.__version__, srtm.__version__, code]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"it said nothing ({log})"


def serve(idle_s: float) -> None:
    """Be the server, until told to end or unused for as long as given."""
    from srtm.pipeline.session import spark_session

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    versions, born = _versions(), _born(os.getpid())
    assert born is not None
    token = os.environ[_TOKEN] = secrets.token_urlsafe(32)
    options = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        # Sessions whose client died without a word count as use; they end after this.
        "spark.connect.session.manager.defaultSessionTimeout": f"{max(1, int(idle_s))}s",
        # What lives long is worth compiling well.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4",
    }
    with spark_session(master="local[*]", options=options) as spark:
        spark.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long").toArrow()  # the first job is slow
        machine: Any = spark.sparkContext._jvm
        service = getattr(getattr(machine.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
        sessions = service.sessionManager()
        server = Server(os.getpid(), born, service.localPort(), token, time.time(), idle_s, versions)
        _write(server)
        try:
            used, closed = time.monotonic(), 0
            while time.monotonic() - used < idle_s and recorded_server() == server:
                time.sleep(min(1.0, idle_s))
                before, closed = closed, sessions.listClosedSessions().size()
                if closed != before or not sessions.listActiveSessions().isEmpty():
                    used = time.monotonic()
        finally:
            if recorded_server() == server:
                record_file().unlink(missing_ok=True)


def _write(server: Server) -> None:
    file = record_file()
    draft = file.with_suffix(f".{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        json.dump(asdict(server), out)
    draft.replace(file)


if __name__ == "__main__":
    serve(float(sys.argv[1]))
