"""AUTH against an authority that the test plays: what is asked, what is allowed, and what waits meanwhile."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from srtm.broker.clients import auth
from srtm.protocol import client as say
from tests.broker.authority import ALL, Authority, answer
from tests.broker.conftest import Start
from tests.broker.running import PATIENCE_S, Client

PERMISSIONS: list[tuple[dict[str, Any], bytes, bytes | None]] = [
    ({"permissions": ["publish"]}, say.pub("t", b"x"), None),
    ({"permissions": ["publish"]}, say.dpub("t", 0, b"x"), None),
    ({"permissions": ["subscribe"]}, say.pub("t", b"x"), b'E_UNAUTHORIZED AUTH failed for PUB on "t" ""'),
    ({"permissions": ["subscribe"]}, say.mpub("t", [b"x"]), b'E_UNAUTHORIZED AUTH failed for MPUB on "t" ""'),
    ({"permissions": ["subscribe"]}, say.sub("t", "c"), None),
    ({"permissions": ["publish"]}, say.sub("t", "c"), b'E_UNAUTHORIZED AUTH failed for SUB on "t" "c"'),
    ({"topic": "^t$"}, say.sub("t", "c"), None),
    ({"topic": "^u"}, say.sub("t", "c"), b'E_UNAUTHORIZED AUTH failed for SUB on "t" "c"'),
    ({"channels": ["^a", "c$"]}, say.sub("t", "c"), None),
    ({"channels": ["^a"]}, say.sub("t", "c"), b'E_UNAUTHORIZED AUTH failed for SUB on "t" "c"'),
    ({"channels": ["^a"]}, say.pub("t", b"x"), b'E_UNAUTHORIZED AUTH failed for PUB on "t" ""'),
    ({"channels": []}, say.pub("t", b"x"), b'E_UNAUTHORIZED AUTH failed for PUB on "t" ""'),
]

ANSWERS: list[tuple[Any, bytes]] = [
    (None, b"E_AUTH_FAILED AUTH failed"),
    (b"no JSON", b"E_AUTH_FAILED AUTH failed"),
    (b"[1]", b"E_AUTH_FAILED AUTH failed"),
    (answer(ALL, ttl=0), b"E_AUTH_FAILED AUTH failed"),
    (answer({**ALL, "topic": "("}), b"E_AUTH_FAILED AUTH failed"),
    (answer({**ALL, "channels": ["["]}), b"E_AUTH_FAILED AUTH failed"),
    (answer({**ALL, "channels": [7]}), b"E_AUTH_FAILED AUTH failed"),
    (answer({**ALL, "permissions": ["fly"]}), b"E_AUTH_FAILED AUTH failed"),
    (answer(), b"E_UNAUTHORIZED AUTH no authorizations found"),
]


def test_whoever_is_known_may_publish_and_subscribe(start: Start, authority: Authority) -> None:
    broker = start(auth_http_addresses=(authority.address,))
    with Client(broker.address, client_id="x") as client:
        assert client.settled["auth_required"]
        client.send(say.auth(b"s3cr\xc3\xa9t &="))
        assert json.loads(client.response()) == {"identity": "me", "identity_url": "http://me", "permission_count": 1}
        client.publish("t", b"x")
        client.subscribe("t", "c").message()
    assert authority.asked == [
        {"common_name": "", "remote_ip": "127.0.0.1", "secret": "s3cr\u00e9t &=", "tls": "false"}
    ]


def test_commands_wait_in_order_and_others_do_not(start: Start, authority: Authority) -> None:
    """Everything may be sent at once: what follows AUTH waits for the answer, and the loop serves the others."""
    broker = start(auth_http_addresses=(authority.address,))
    let_go = threading.Event()

    def judge(asked: dict[str, str]) -> Any:
        if asked["secret"] == "slow":
            assert let_go.wait(10)
        return answer(ALL)

    authority.judge = judge
    with Client(broker.address) as slow, Client(broker.address) as quick:
        slow.send(say.auth(b"slow"), *(say.pub("t", b"%d" % i) for i in range(5)), say.sub("t", "c"), say.rdy(5))
        slow.send(say.pub("t", b"5"))
        quick.send(say.auth(b"quick"))
        quick.response()
        quick.publish("u", b"x")
        assert slow.silent(0.1)
        assert broker.do(lambda: "t" not in broker.broker.topics)
        let_go.set()
        assert b"permission_count" in slow.response()
        frames = [slow.next() for _ in range(7 + 5)]
        assert [frame.body for frame in frames if isinstance(frame, say.Message)] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_client_that_leaves_before_the_answer_is_forgotten(start: Start, authority: Authority) -> None:
    broker = start(auth_http_addresses=(authority.address,))
    let_go = threading.Event()
    authority.judge = lambda _: let_go.wait(10) and answer(ALL)
    client = Client(broker.address)
    client.send(say.auth(b"x"), say.pub("t", b"x"))
    broker.wait_until(lambda _: bool(authority.asked))
    client.sock.close()
    let_go.set()
    with Client(broker.address) as other:
        other.send(say.auth(b"y"))
        other.response()
    broker.wait_until(lambda b: not b.clients.connections)


@pytest.mark.parametrize(("authorization", "command", "error"), PERMISSIONS)
def test_permissions(
    authorization: dict[str, Any], command: bytes, error: bytes | None, start: Start, authority: Authority
) -> None:
    authority.judge = lambda _: answer({**ALL, **authorization})
    with Client(start(auth_http_addresses=(authority.address,)).address) as client:
        client.send(say.auth(b"x"))
        client.response()
        client.send(command)
        if error is None:
            assert client.response() == b"OK"
        else:
            assert client.error() == error
            assert client.ended()


@pytest.mark.parametrize(("found", "error"), ANSWERS)
def test_answers_that_let_nobody_in(found: Any, error: bytes, start: Start, authority: Authority) -> None:
    authority.judge = lambda _: found
    with Client(start(auth_http_addresses=(authority.address,)).address) as client:
        client.send(say.auth(b"x"), say.pub("t", b"x"))
        assert client.error() == error
        assert client.ended()


def test_another_authority_is_asked_where_one_is_gone(start: Start, authority: Authority) -> None:
    broker = start(auth_http_addresses=("127.0.0.1:1", f"http://{authority.address}/auth"))
    for _ in range(4):
        with Client(broker.address) as client:
            client.send(say.auth(b"x"))
            client.response()


def test_twice_is_too_often(start: Start, authority: Authority) -> None:
    with Client(start(auth_http_addresses=(authority.address,)).address) as client:
        client.send(say.auth(b"x"))
        client.response()
        client.send(say.auth(b"x"))
        assert client.error() == b"E_INVALID AUTH already set"


def test_a_permit_is_asked_for_again_when_it_has_run_out(start: Start, authority: Authority) -> None:
    authority.judge = lambda _: answer(ALL, ttl=1)
    with Client(start(auth_http_addresses=(authority.address,)).address) as client:
        client.send(say.auth(b"x"))
        client.response()
        client.publish("t", b"1", b"2")
        assert len(authority.asked) == 1
        time.sleep(1.1)
        client.publish("t", b"3", b"4")
        assert len(authority.asked) == 2
        time.sleep(1.1)
        authority.judge = lambda _: answer({**ALL, "permissions": ["subscribe"]}, ttl=1)
        client.send(say.pub("t", b"5"), say.pub("t", b"6"))
        assert client.error() == b'E_UNAUTHORIZED AUTH failed for PUB on "t" ""'
        assert client.ended()


def test_the_authority_is_told_who_is_behind_tls(start: Start, authority: Authority, tmp_path: Path) -> None:
    pytest.importorskip("trustme", reason="pip install trustme makes certificates for tests")
    from tests.broker.test_transport import Certificates

    certificates = Certificates(tmp_path)
    broker = start(
        auth_http_addresses=(authority.address,),
        tls_client_auth_policy="require-verify",
        tls_root_ca_file=certificates.ca,
        plain_http=True,
        **certificates.options,
    )
    with Client(broker.address, tls_v1=True) as client:
        client.begin_tls(certificates.context(certificates.client))
        client.send(say.auth(b"x"))
        client.response()
        client.subscribe("t", "c")
        (shown,) = broker.channel("t", "c")["clients"]
        assert (shown["tls"], shown["authed"], shown["auth_identity"]) == (True, True, "me")
        assert shown["tls_version"].startswith("TLS1.")
        assert shown["tls_cipher_suite"].startswith("TLS_")
    assert (authority.asked[0]["tls"], authority.asked[0]["common_name"]) == ("true", "sensor-1")


def test_an_expression_cannot_stop_the_loop(start: Start, authority: Authority) -> None:
    """One that a matcher that goes back and tries again would need years for."""
    authority.judge = lambda _: answer({**ALL, "topic": "(a+)+b$"})
    broker = start(auth_http_addresses=(authority.address,))
    with Client(broker.address) as client:
        client.send(say.auth(b"s"), say.pub("a" * 60, b"x"))
        client.response()
        assert client.error().startswith(b"E_UNAUTHORIZED")


def test_many_at_once_are_all_asked_for(start: Start, authority: Authority) -> None:
    """The authority answers nobody before it has been asked for all of them."""
    asked = threading.Barrier(150)

    def judge(_: Any) -> Any:
        asked.wait(PATIENCE_S)
        return answer(ALL)

    authority.judge = judge
    broker = start(auth_http_addresses=(authority.address,))
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(broker.address)) for _ in range(asked.parties)]
        for client in clients:
            client.send(say.auth(b"s"))
        for client in clients:
            client.response()


def test_why_an_authority_was_of_no_use_is_logged(
    start: Start, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "_TIMES", httpx.Timeout(0.1))
    authority.judge = lambda _: time.sleep(1)
    broker = start(auth_http_addresses=(authority.address,))
    with Client(broker.address) as client:
        client.send(say.auth(b"s"))
        assert client.error() == b"E_AUTH_FAILED AUTH failed"
    assert "ReadTimeout" in caplog.text
