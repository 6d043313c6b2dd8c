"""The process behind the standing Spark: run as `python -m srtm.pipeline.runtime.serving IDLE_S`.

It keeps a local session with Connect's server in it, and publishes its address and token (`server.write_record`).
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from typing import Any

from srtm.pipeline.runtime.server import (
    Server,
    record_file,
    recorded_server,
    started_at,
    versions_here,
    write_record,
)
from srtm.pipeline.session import spark_session

_TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"


def serve(idle_s: float) -> None:
    """Serve until SIGTERM, until the record is gone, or until idle for `idle_s`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    versions, born = versions_here(), started_at(os.getpid())
    assert born is not None
    token = os.environ[_TOKEN] = secrets.token_urlsafe(32)
    options = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        # As Spark's own server. Without them, files that a client sends are every client's: tasks look for them when
        # that client has left, and fail.
        "spark.sql.artifact.isolation.enabled": "true",
        "spark.sql.artifact.isolation.alwaysApplyClassloader": "true",
        # A session whose client died silently counts as use until this timeout.
        "spark.connect.session.manager.defaultSessionTimeout": f"{max(1, int(idle_s))}s",
        # A long-lived JVM repays full compilation.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4",
    }
    with spark_session(master="local[*]", options=options) as spark:
        spark.range(0, 2, 1, 2).mapInArrow(
            lambda batches: batches, "id long"
        ).toArrow()  # warms up: the first job is slow
        machine: Any = spark.sparkContext._jvm
        service = getattr(getattr(machine.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
        sessions = service.sessionManager()
        server = Server(os.getpid(), born, service.localPort(), token, time.time(), idle_s, versions)
        write_record(server)
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


if __name__ == "__main__":
    serve(float(sys.argv[1]))
