"""HTTP of a broker where clients do not do what they should: bodies without end, bodies that are cut short."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from tests.broker.conftest import Start
from tests.broker.running import PATIENCE_S, Running


def said(broker: Running, *parts: bytes) -> bytes:
    """The beginning of what is answered to a request that has not come to its end."""
    with socket.create_connection(("127.0.0.1", broker.broker.http_port), timeout=PATIENCE_S) as sock:
        for part in parts:
            sock.sendall(part)
        return sock.recv(65536)


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: broker", *lines, "", ""]).encode()


BODIES = [
    ("/pub?topic=t", 1024 * 1024, b'{"message":"MSG_TOO_BIG"}'),
    ("/mpub?topic=t", 5 * 1024 * 1024, b'{"message":"BODY_TOO_BIG"}'),
    ("/srtm/exchange", 16 * 1024 * 1024, b'{"message":"INVALID_EXCHANGE: more than 16777216 bytes"}'),
]


@pytest.mark.parametrize(("path", "limit", "answer"), BODIES)
def test_a_body_that_is_too_large_is_refused_by_its_header(path: str, limit: int, answer: bytes, start: Start) -> None:
    broker = start(controller="127.0.0.1:1")
    found = said(broker, head(path, f"Content-Length: {limit + 1}"))
    assert b" 413 " in found.splitlines()[0]
    assert answer in found


@pytest.mark.parametrize(("path", "limit", "answer"), BODIES)
def test_a_body_without_end_is_refused_where_it_grows_too_large(
    path: str, limit: int, answer: bytes, start: Start
) -> None:
    broker = start(controller="127.0.0.1:1")
    chunk = b"%x\r\n%s\r\n" % (limit + 1, b"x" * (limit + 1))
    found = said(broker, head(path, "Transfer-Encoding: chunked"), chunk)
    assert b" 413 " in found.splitlines()[0]
    assert answer in found


def test_where_to_reach_it_is_the_host_whatever_its_name(start: Start) -> None:
    info = start(name="host-7150").get("/info")
    assert (info["broadcast_address"], info["hostname"]) == (socket.gethostname(), "host-7150")
    assert start(broadcast_address="b.example").get("/info")["broadcast_address"] == "b.example"


def test_a_body_that_is_cut_short_is_nothing(broker: Running, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", broker.broker.http_port), timeout=PATIENCE_S) as sock:
        sock.sendall(head("/pub?topic=t", "Content-Length: 100") + b"x")
    assert broker.post("/pub?topic=u", b"x") == (200, b"OK")
    assert broker.do(lambda: list(broker.broker.topics)) == ["u"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_broker_without_a_controller_does_not_read_what_one_would_say(broker: Running) -> None:
    found = said(broker, head("/srtm/exchange", "Content-Length: 1000"))
    assert b" 409 " in found.splitlines()[0]
    assert b"NOT_MANAGED" in found


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/topic/limit?topic=t&r=1e400&b=1", b"INVALID_BUCKET"),
        ("/topic/limit?topic=t&r=1e99&b=1", b"INVALID_BUCKET"),
        ("/topic/limit?topic=t&r=1_0&b=1", b"INVALID_BUCKET"),
        ("/topic/limit?topic=t&r=%D9%A1&b=1", b"INVALID_BUCKET"),
        ("/topic/limit?topic=t&r=1&b=nan", b"INVALID_BUCKET"),
        ("/pub?topic=t&defer=%D9%A1", b"INVALID_DEFER"),
        ("/pub?topic=t&defer=%C2%B2", b"INVALID_DEFER"),
        ("/topic/create?topic=t&durability=disk&retain_age=0s", b"INVALID_RETAIN_AGE"),
        ("/topic/create?topic=t&durability=disk&retain_age=99999999999h", b"INVALID_RETAIN_AGE"),
        ("/topic/create?topic=t&durability=disk&retain_bytes=99999999999999999999", b"INVALID_RETAIN_BYTES"),
        ("/topic/create?topic=t&durability=disk&retain_bytes=%C2%B2", b"INVALID_RETAIN_BYTES"),
    ],
)
def test_numbers_that_are_none(path: str, problem: bytes, start: Start, tmp_path: Path) -> None:
    status, text = start(data_path=str(tmp_path)).post(path, b"x")
    assert status == 400
    assert problem in text
