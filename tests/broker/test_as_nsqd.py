"""What the other tests here expect of our broker about upgrades and AUTH, expected of a real nsqd."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from srtm.broker import transport
from srtm.protocol import client as say
from tests.broker.authority import ALL, Authority, answer
from tests.broker.running import Client
from tests.broker.test_auth import ANSWERS, PERMISSIONS
from tests.protocol.test_transcripts import nsqd

needs_snappy = pytest.mark.skipif(not transport.HAS_SNAPPY, reason="needs cramjam: pip install cramjam")


@pytest.mark.needs("nsqd")
@pytest.mark.parametrize(
    "layers",
    [
        ["tls_v1"],
        ["deflate"],
        ["tls_v1", "deflate"],
        pytest.param(["snappy"], marks=needs_snappy),
        pytest.param(["tls_v1", "snappy"], marks=needs_snappy),
    ],
    ids=" ".join,
)
def test_upgrades(layers: list[str], tmp_path: Path) -> None:
    pytest.importorskip("trustme", reason="needs trustme: pip install trustme")
    from tests.broker.test_transport import Certificates

    certificates = Certificates(tmp_path)
    flags = (f"--tls-cert={certificates.cert}", f"--tls-key={certificates.key}")
    with nsqd(tmp_path, flags) as address, Client(address, **dict.fromkeys(layers, True)) as client:
        if "tls_v1" in layers:
            client.begin_tls(certificates.context())
        if "deflate" in layers:
            client.begin_deflate()
        if "snappy" in layers:
            client.begin_snappy()
        bodies = [b"x", b"y" * 100_000, bytes(range(256)) * 400]
        client.publish("t", *bodies)
        client.subscribe("t", "c", ready=10)
        assert {client.message().body for _ in bodies} == set(bodies)


@pytest.mark.needs("nsqd")
def test_plain_http_where_tls_is_required(tmp_path: Path) -> None:
    pytest.importorskip("trustme", reason="needs trustme: pip install trustme")
    from tests.broker.test_https import ask
    from tests.broker.test_transport import Certificates

    certificates = Certificates(tmp_path)
    tls = (f"--tls-cert={certificates.cert}", f"--tls-key={certificates.key}", "--tls-required")
    with nsqd(tmp_path, (*tls, "--https-address=127.0.0.1:0")):
        ports: dict[str, int] = {}
        while len(ports) < 2:
            found = re.findall(r" (HTTPS?): listening on 127.0.0.1:(\d+)", (tmp_path / "log").read_text())
            ports = {kind: int(port) for kind, port in found}
        for path in ("/ping", "/stats?format=json", "/nothing"):
            status, body = ask(ports["HTTP"], path)
            assert (status, json.loads(body)) == (403, {"message": "TLS_REQUIRED", "https_port": ports["HTTPS"]})
        assert ask(ports["HTTPS"], "/ping", certificates.context()) == (200, b"OK")


@pytest.mark.needs("nsqd")
def test_permissions(authority: Authority, tmp_path: Path) -> None:
    with nsqd(tmp_path, (f"--auth-http-address={authority.address}",)) as address:
        for authorization, command, error in PERMISSIONS:
            authority.judge = lambda _, found=authorization: answer({**ALL, **found})  # type: ignore[misc]
            with Client(address) as client:
                client.send(say.auth(b"x"))
                assert json.loads(client.response()) == {
                    "identity": "me",
                    "identity_url": "http://me",
                    "permission_count": 1,
                }
                client.send(command)
                if error is None:
                    assert client.response() == b"OK"
                else:
                    assert client.error() == error
                    assert client.ended()
    assert authority.asked[0] == {"common_name": "", "remote_ip": "127.0.0.1", "secret": "x", "tls": "false"}


@pytest.mark.needs("nsqd")
@pytest.mark.parametrize(("found", "error"), ANSWERS)
def test_answers_that_let_nobody_in(found: Any, error: bytes, authority: Authority, tmp_path: Path) -> None:
    authority.judge = lambda _: found
    with nsqd(tmp_path, (f"--auth-http-address={authority.address}",)) as address, Client(address) as client:
        client.send(say.auth(b"x"))
        assert client.error() == error
        assert client.ended()


@pytest.mark.needs("nsqd")
def test_twice_is_too_often(authority: Authority, tmp_path: Path) -> None:
    with nsqd(tmp_path, (f"--auth-http-address={authority.address}",)) as address, Client(address) as client:
        client.send(say.auth(b"x"))
        client.response()
        client.send(say.auth(b"x"))
        assert client.error() == b"E_INVALID AUTH already set"
