"""HTTPS on a real socket, and what plain HTTP says where TLS is required."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from srtm.errors import BrokerError
from tests.broker.conftest import Start
from tests.broker.running import PATIENCE_S, Running
from tests.broker.test_transport import Certificates, certificates

__all__ = ["certificates"]


def ask(port: int, path: str, context: ssl.SSLContext | None = None, method: str = "GET") -> tuple[int, bytes]:
    """The answer of 127.0.0.1, with TLS or without."""
    if context:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            "localhost", port, timeout=PATIENCE_S, context=context
        )
    else:
        connection = http.client.HTTPConnection("localhost", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def https(broker: Running, path: str, context: ssl.SSLContext, method: str = "GET") -> tuple[int, bytes]:
    return ask(broker.broker.https_port, path, context, method)


def test_https_is_the_same_as_http(start: Start, certificates: Certificates) -> None:
    broker = start(https_port=0, **certificates.options)
    assert https(broker, "/ping", certificates.context()) == (200, b"OK")
    assert https(broker, "/topic/create?topic=t", certificates.context(), "POST")[0] == 200
    assert [topic["topic_name"] for topic in broker.get("/stats?format=json")["topics"]] == ["t"]
    with pytest.raises(ssl.SSLError):
        https(broker, "/ping", ssl.create_default_context())


@pytest.mark.parametrize("path", ["/ping", "/stats?format=json", "/nothing"])
def test_plain_http_is_refused_where_tls_is_required(start: Start, certificates: Certificates, path: str) -> None:
    broker = start(https_port=0, tls_required=True, **certificates.options)
    status, body = ask(broker.broker.http_port, path)
    assert status == 403
    assert json.loads(body) == {"message": "TLS_REQUIRED", "https_port": broker.broker.https_port}
    assert https(broker, "/ping", certificates.context()) == (200, b"OK")


def test_plain_http_may_be_allowed(start: Start, certificates: Certificates) -> None:
    broker = start(tls_required=True, plain_http=True, **certificates.options)
    assert ask(broker.broker.http_port, "/ping") == (200, b"OK")


def test_clients_show_certificates_over_https_too(start: Start, certificates: Certificates) -> None:
    policy = {"tls_client_auth_policy": "require-verify", "tls_root_ca_file": certificates.ca}
    broker = start(https_port=0, **policy, **certificates.options)
    assert https(broker, "/ping", certificates.context(certificates.client)) == (200, b"OK")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        https(broker, "/ping", certificates.context())


def test_https_needs_a_certificate(start: Start) -> None:
    with pytest.raises(BrokerError, match="--https-port needs --tls-cert and --tls-key"):
        start(https_port=0)


@pytest.mark.processes
def test_the_program_takes_these_flags(tmp_path: Path, certificates: Certificates) -> None:
    retention = ["--retain-bytes", "1000000", "--retain-age", "36h", "--retain-acknowledged"]
    tls = ["--https-port", "0", "--tls-cert", certificates.cert, "--tls-key", certificates.key, "--tls-required"]
    command = [
        sys.executable,
        "-m",
        "srtm",
        "broker",
        "--tcp-port",
        "0",
        "--http-port",
        "0",
        "--data-path",
        str(tmp_path),
    ]
    with subprocess.Popen([*command, *retention, *tls], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = dict(re.findall(r"(TCP|HTTP|HTTPS) 127\.0\.0\.1:(\d+)", process.stdout.readline()))
            assert ask(int(found["HTTP"]), "/ping")[0] == 403
            https_port, context = int(found["HTTPS"]), certificates.context()
            assert ask(https_port, "/topic/create?topic=t&durability=disk", context, "POST")[0] == 200
            extent = json.loads(ask(https_port, "/srtm/log?topic=t", context)[1])
            assert len(extent.pop("log")) == 16
            assert extent == {
                "begin": 0,
                "end": 0,
                "bytes": 0,
                "retention": {"max_bytes": 1_000_000, "max_age_ns": 36 * 3600 * 10**9, "retain_acknowledged": True},
            }
        finally:
            process.terminate()
