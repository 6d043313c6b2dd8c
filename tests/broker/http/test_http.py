"""Broker HTTP with misbehaving clients: endless and truncated bodies, invalid numbers, unknown paths, floods."""

from __future__ import annotations

import json
import logging
import socket
import urllib.request
from pathlib import Path

import pytest

from srtm.broker.broker import Broker
from tests.broker.conftest import Start
from tests.broker.running import PATIENCE_S, Client, Running, fetch


def said(broker: Running, *parts: bytes) -> bytes:
    """The answer to a request that has not come to its end."""
    with socket.create_connection(("127.0.0.1", broker.broker.http_port), timeout=PATIENCE_S) as sock:
        for part in parts:
            sock.sendall(part)
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come apart
            answer += sock.recv(65536)
        return answer


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
def test_an_endless_body_is_refused_once_it_is_too_large(path: str, limit: int, answer: bytes, start: Start) -> None:
    broker = start(controller="127.0.0.1:1")
    chunk = b"%x\r\n%s\r\n" % (limit + 1, b"x" * (limit + 1))
    found = said(broker, head(path, "Transfer-Encoding: chunked"), chunk)
    assert b" 413 " in found.splitlines()[0]
    assert answer in found


@pytest.mark.memory
def test_the_broadcast_address_is_the_host_whatever_the_name(start: Start) -> None:
    info = start(name="host-7150").get("/info")
    assert (info["broadcast_address"], info["hostname"]) == (socket.gethostname(), "host-7150")
    assert start(broadcast_address="b.example").get("/info")["broadcast_address"] == "b.example"


def test_a_truncated_body_changes_nothing(broker: Running, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", broker.broker.http_port), timeout=PATIENCE_S) as sock:
        sock.sendall(head("/pub?topic=t", "Content-Length: 100") + b"x")
    assert broker.post("/pub?topic=u", b"x") == (200, b"OK")
    assert broker.do(lambda: list(broker.broker.topics)) == ["u"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_broker_without_a_controller_refuses_an_exchange_before_its_body(broker: Running) -> None:
    found = said(broker, head("/srtm/exchange", "Content-Length: 1000"))
    assert b" 409 " in found.splitlines()[0]
    assert b"NOT_MANAGED" in found


@pytest.mark.memory
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
def test_invalid_numbers_are_refused(path: str, problem: bytes, start: Start, tmp_path: Path) -> None:
    status, text = start(data_path=str(tmp_path)).post(path, b"x")
    assert status == 400
    assert problem in text


@pytest.mark.parametrize(
    ("method", "path", "answer"),
    [("GET", "/nothing", (404, {"message": "NOT_FOUND"})), ("GET", "/pub", (405, {"message": "METHOD_NOT_ALLOWED"}))],
)
def test_unknown_paths_and_methods_are_answered_in_json(
    method: str, path: str, answer: tuple[int, dict[str, str]], broker: Running
) -> None:
    status, text = fetch(urllib.request.Request(broker.url + path, method=method))
    assert (status, json.loads(text)) == answer


@pytest.mark.memory
@pytest.mark.parametrize("body", [b"\0\0\0\1\0\0\0\5x", b"\0\0\0\2\0\0\0\1x", b"\0\0\0\0", b"\0"])
def test_a_binary_body_that_is_malformed_gets_nsqds_status(body: bytes, broker: Running) -> None:
    status, text = broker.post("/mpub?topic=t&binary=true", body)
    assert (status, text[:16]) == (413, b'{"message":"BAD_')


@pytest.mark.memory
def test_a_disk_topic_does_not_become_one_in_memory(start: Start, tmp_path: Path) -> None:
    broker = start(data_path=str(tmp_path))
    assert broker.post("/topic/create?topic=t&durability=disk")[0] == 200
    assert broker.post("/topic/create?topic=t")[0] == 200
    status, text = broker.post("/topic/create?topic=t&durability=memory")
    assert (status, b"INVALID_DURABILITY" in text) == (400, True)


@pytest.mark.memory
def test_a_flood_is_refused_as_early_as_over_tcp(broker: Running) -> None:
    broker.post("/topic/limit?topic=t&r=1&b=1")
    assert broker.post("/mpub?topic=t", b"x\n" * 5000) == (200, b"OK")
    broker.wait_until(lambda b: len(b.topics["t"].waiting) > 1000)
    assert broker.post("/pub?topic=t", b"x") == (503, b'{"message":"TOPIC_FULL"}')


@pytest.mark.memory
def test_stats_as_text(broker: Running) -> None:
    with Client(broker.address) as client:
        client.publish("t", b"x", b"y")
        status, text = broker.page("/stats")
        assert status == 200
        assert "Health: OK" in text.decode()
        (producer,) = [line for line in text.decode().splitlines() if "127.0.0.1" in line]
        assert producer.split()[-6:] == ["msgs:", "2", "topics:", "t=2", "connected:", "0s"]


@pytest.mark.memory
def test_messages_dropped_by_an_ephemeral_channel_are_counted_in_their_second(start: Start) -> None:
    broker = start(max_held_messages=10)
    with Client(broker.address) as dead, Client(broker.address) as publisher:
        dead.subscribe("t", "c#ephemeral", ready=0)
        publisher.publish("t", *[b"x"] * 100)

        def dropped(b: Broker) -> bool:
            recent = b.topics["t"].recent
            return recent.dropped + sum(second.dropped for second in recent.history) == 90

        broker.wait_until(dropped)
