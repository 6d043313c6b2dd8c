"""What the other tests here expect of our broker about upgrades and AUTH, expected of a real nsqd."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from srtm.net import compression
from srtm.protocol import client as say
from tests.broker.authority import ALL, Authority, answer
from tests.broker.http.test_https import ask
from tests.broker.running import Client, Running
from tests.broker.test_auth import ANSWERS, PERMISSIONS
from tests.protocol.test_transcripts import nsqd

needs_snappy = pytest.mark.skipif(not compression.HAS_SNAPPY, reason="needs cramjam: pip install cramjam")


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


def worked(address: tuple[str, int], http_port: int) -> Any:
    """`/stats` of a server where one client published six messages, and another had one given back and two finished."""
    publisher, consumer = (Client(address, client_id=name, hostname="h") for name in "pc")
    with publisher, consumer:
        consumer.publish("u", b"x", b"y")
        consumer.subscribe("t", "c", ready=1)
        publisher.publish("t", b"1", b"2")
        publisher.send(say.mpub("t", [b"3", b"4", b"5"]), say.dpub("t", 60_000, b"later"))
        assert (publisher.response(), publisher.response()) == (b"OK", b"OK")
        consumer.send(say.req(consumer.message().id, 60_000))
        for _ in range(2):
            consumer.send(say.fin(consumer.message().id))
        consumer.message()
        for _ in range(100):
            document = json.loads(ask(http_port, "/stats?format=json")[1])
            (channel,) = document["topics"][0]["channels"]
            if (channel["depth"], channel["deferred_count"]) == (1, 2):  # nsqd hands messages on in its own time
                break
            time.sleep(0.05)
        return document


@pytest.mark.needs("nsqd")
def test_stats(tmp_path: Path, broker: Running) -> None:
    """All of nsqd's fields are in ours; what was counted is the same."""
    ours = worked(broker.address, broker.broker.http_port)
    with nsqd(tmp_path, ()) as address:
        log = tmp_path / "log"
        while not (found := re.search(r" HTTP: listening on 127.0.0.1:(\d+)", log.read_text())):
            pass
        theirs = worked(address, int(found[1]))
    timed = {"start_time", "connect_ts", "remote_address", "memory", "user_agent", "message_bytes"}

    def check(ours: Any, theirs: Any, path: str) -> None:
        if isinstance(theirs, dict):
            for key in theirs.keys() - timed:
                check(ours[key], theirs[key], f"{path}/{key}")
        elif isinstance(theirs, list):
            for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                check(one, other, f"{path}/{index}")
        else:
            assert (path, ours) == (path, theirs)

    for document in (ours, theirs):
        document["producers"].sort(key=lambda client: client["client_id"])
    check(ours, theirs, "")
    (client,) = ours["topics"][0]["channels"][0]["clients"]
    assert (client["finish_count"], client["requeue_count"], client["message_count"]) == (2, 1, 4)
    assert [producer["pub_counts"] for producer in ours["producers"]] == [
        [{"topic": "u", "count": 2}],
        [{"topic": "t", "count": 6}],
    ]


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
