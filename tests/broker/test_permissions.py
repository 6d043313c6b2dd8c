"""Contracts that name who may publish and subscribe: by AUTH identity, by certificate, over TCP and over HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from srtm.net import certs
from srtm.protocol import client as say
from srtm.protocol.exchange import Grant, Listed
from tests.broker.authority import Authority, answer
from tests.broker.running import Client, Running, running
from tests.broker.test_control import BIRTH, CONTRACT, NOBODY, exchange, said, share

ALL = {"topic": ".*", "channels": [".*"], "permissions": ["publish", "subscribe"]}


def named(*publishers: str, subscribers: tuple[str, ...] = ()) -> dict[str, Listed]:
    contract = structs.replace(CONTRACT, may_publish=publishers, may_subscribe=subscribers)
    return {"t": Listed(BIRTH, contract)}


def agree(broker: Running, contracts: dict[str, Listed], number: int = 1) -> None:
    exchange(broker, said(number, version=number, contracts=contracts, grants={"t": Grant(BIRTH, 1, share(100, 10))}))


@pytest.fixture
def authority() -> Iterator[Authority]:
    """Knows clients by their secret."""
    made = Authority()
    made.judge = lambda asked: {**answer(ALL), "identity": asked["secret"]}
    made.thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.thread.join()


def result(client: Client, *commands: bytes) -> bytes:
    client.send(*commands)
    return client.response()


def refused(client: Client, command: bytes) -> bytes:
    client.send(command)
    found = client.error()
    assert client.ended()
    return found


PUBLISHING = [say.pub("t", b"x"), say.mpub("t", [b"x", b"y"]), say.dpub("t", 10, b"x")]


def test_identities_of_auth(authority: Authority) -> None:
    with running(controller=NOBODY, auth_http_addresses=(authority.address,)) as broker:
        agree(broker, named("sensors", subscribers=("cloud",)))
        for command in PUBLISHING:
            with Client(broker.address) as client:
                result(client, say.auth(b"sensors"))
                assert result(client, command) == b"OK"
                assert b"E_UNAUTHORIZED SUB on" in refused(client, say.sub("t", "c"))
            with Client(broker.address) as client:
                result(client, say.auth(b"cloud"))
                assert result(client, say.pub("free", b"x")) == b"OK"  # another topic
                found = refused(client, command)
                assert found.startswith(b"E_UNAUTHORIZED ")
                assert b'on "t" is for identities that its contract names; this client has shown: cloud' in found
        with Client(broker.address) as client:
            result(client, say.auth(b"cloud"))
            assert result(client, say.sub("t", "c")) == b"OK"
        agree(broker, named(), 2)  # anyone again
        with Client(broker.address) as client:
            result(client, say.auth(b"cloud"))
            assert result(client, say.pub("t", b"x")) == b"OK"
        assert broker.broker.topics.permissions.topics == {}


def test_what_came_before_a_refused_command_is_carried_out(authority: Authority) -> None:
    with running(controller=NOBODY, auth_http_addresses=(authority.address,)) as broker:
        agree(broker, named("sensors"))
        with Client(broker.address) as client:
            client.send(say.auth(b"cloud"), say.pub("free", b"1"), say.pub("t", b"2"), say.pub("free", b"3"))
            client.response()
            assert client.response() == b"OK"
            assert client.error().startswith(b"E_UNAUTHORIZED PUB on")
            assert client.ended()
        broker.wait_until(lambda it: it.topics["free"].messages == 1)


def test_without_an_identity_nobody_publishes_where_some_are_named() -> None:
    with running(controller=NOBODY) as broker, Client(broker.address) as client:
        agree(broker, named("sensors"))
        assert b"this client has shown: none" in refused(client, say.pub("t", b"x"))
        status, body = broker.post("/pub?topic=t", b"x")
        assert (status, b"UNAUTHORIZED" in body) == (403, True)
        assert broker.post("/mpub?topic=t", b"x\ny")[0] == 403
        assert broker.post("/pub?topic=free", b"x")[0] == 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    certs.make_authority(made)
    for name in ("broker", "sensors", "cloud"):
        certs.issue(made, name, ["127.0.0.1", "localhost"])
    return made


def context(folder: Path, name: str | None) -> ssl.SSLContext:
    found = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if name is not None:
        found.load_cert_chain(*map(str, certs.certificate(folder, name)))
    return found


@pytest.mark.parametrize(("name", "allowed"), [("sensors", True), ("cloud", False), (None, False)])
def test_certificates(folder: Path, tmp_path: Path, name: str | None, allowed: bool) -> None:
    path, key = certs.certificate(folder, "broker")
    tls: dict[str, Any] = {"tls_cert": str(path), "tls_key": str(key), "tls_root_ca_file": str(folder / "ca.pem")}
    with running(controller=NOBODY, https_port=0, data_path=str(tmp_path), **tls) as broker:
        contracts = named("sensors", subscribers=("sensors",))
        disk = structs.replace(contracts["t"].contract, durability="disk")
        agree(broker, {"t": Listed(BIRTH, disk)})
        with Client(broker.address, tls_v1=True) as client:
            client.begin_tls(context(folder, name))
            client.send(say.pub("t", b"x"))
            if allowed:
                assert client.response() == b"OK"
            else:
                assert client.error().startswith(b"E_UNAUTHORIZED ")
        with httpx.Client(
            base_url=f"https://127.0.0.1:{broker.broker.https_port}", verify=context(folder, name), trust_env=False
        ) as web:
            assert web.post("/pub?topic=t", content=b"x").status_code == (200 if allowed else 403)
            assert web.get("/srtm/log/read?topic=t&begin=0").status_code == (200 if allowed else 403)
