"""What clients and operators may set, as at nsqd: output buffers, consumers of a channel, unix sockets, options."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from srtm.protocol import client as say
from srtm.protocol.client import ClientProtocol, Message
from srtm.protocol.names import MAGIC_V2
from tests.broker.conftest import Start
from tests.broker.running import PATIENCE_S, Client, fetch, running
from tests.programs import ask, nsqlookupd, wait_for


@pytest.mark.memory
def test_a_client_that_asks_for_it_gets_its_messages_together(start: Start) -> None:
    broker = start()
    with Client(broker.address, output_buffer_timeout=500) as patient:
        patient.subscribe("t", "c", ready=10)
        patient.publish("t", b"1")
        broker.sleep(0.3)
        patient.publish("t", b"2")
        assert patient.silent(0.15)
        begin = broker.monotonic()
        assert [patient.message().body for _ in range(2)] == [b"1", b"2"]
        assert broker.monotonic() - begin < 0.1


@pytest.mark.memory
def test_a_buffer_that_is_full_is_written_at_once(start: Start) -> None:
    broker = start()
    with Client(broker.address, output_buffer_timeout=30_000, output_buffer_size=1000) as patient:
        patient.subscribe("t", "c", ready=10)
        patient.publish("t", b"small")
        assert patient.silent(1)
        patient.publish("t", bytes(1000))
        assert [len(patient.message(1).body) for _ in range(2)] == [5, 1000]


@pytest.mark.memory
def test_a_buffer_is_written_when_the_client_may_get_no_more(start: Start) -> None:
    with Client(start().address, output_buffer_timeout=30_000) as patient:
        patient.subscribe("t", "c", ready=2)
        patient.publish("t", b"1")
        assert patient.silent(1)
        patient.publish("t", b"2")
        assert [patient.message(1).body for _ in range(2)] == [b"1", b"2"]


@pytest.mark.memory
def test_buffered_messages_of_a_lost_consumer_go_to_others(start: Start) -> None:
    broker = start()
    with Client(broker.address) as other:
        with Client(broker.address, output_buffer_timeout=30_000) as patient:
            patient.subscribe("t", "c", ready=5)
            patient.publish("t", b"1")
            assert patient.silent(0.5)
        other.subscribe("t", "c", ready=5)
        assert other.message().body == b"1"


@pytest.mark.memory
def test_the_default_timeout_holds_nothing_back(start: Start) -> None:
    with Client(start().address, output_buffer_timeout=250) as client:
        client.subscribe("t", "c", ready=10)
        client.publish("t", b"1")
        assert client.message(0.01).body == b"1"


@pytest.mark.memory
def test_a_channel_has_no_more_consumers_than_it_may(start: Start) -> None:
    broker = start(max_channel_consumers=1)
    with Client(broker.address) as one, Client(broker.address) as other:
        one.subscribe("t", "c")
        other.send(say.sub("t", "c"))
        assert other.error() == b"E_SUB_FAILED SUB failed consumers for t:c exceeds limit of 1"
    with Client(broker.address) as third:
        broker.wait_until(lambda b: not b.topics["t"].channels["c"].consumers)
        third.subscribe("t", "c")


@pytest.mark.memory
@pytest.mark.parametrize(
    ("option", "value", "asked", "answer"),
    [
        ("max_heartbeat_interval_ms", 90_000, {"heartbeat_interval": 90_001}, b"heartbeat interval (90001)"),
        ("max_output_buffer_size", 1000, {"output_buffer_size": 1001}, b"output buffer size (1001)"),
        ("max_output_buffer_timeout_ms", 500, {"output_buffer_timeout": 501}, b"output buffer timeout (501)"),
        ("min_output_buffer_timeout_ms", 100, {"output_buffer_timeout": 99}, b"output buffer timeout (99)"),
        ("max_msg_timeout_ms", 70_000, {"msg_timeout": 70_001}, b"msg timeout (70001)"),
    ],
)
def test_limits_of_identify(option: str, value: int, asked: dict[str, int], answer: bytes, start: Start) -> None:
    broker = start(**{option: value})
    (name,) = asked
    with Client(broker.address, **{name: value}):
        pass
    with Client(broker.address) as greedy:
        greedy.send(say.identify(asked))
        assert answer in greedy.error()


@pytest.mark.memory
def test_limits_of_commands(start: Start) -> None:
    broker = start(max_rdy_count=5, max_req_timeout_ms=1000)
    with Client(broker.address, feature_negotiation=True) as consumer, Client(broker.address) as publisher:
        assert consumer.settled["max_rdy_count"] == 5
        consumer.subscribe("t", "c", ready=6)
        assert consumer.error() == b"E_INVALID RDY count 6 out of range 0-5"
        publisher.send(say.dpub("t", 1001, b"x"))
        assert publisher.error() == b"E_INVALID DPUB timeout 1001 out of range 0-1000"
    assert broker.post("/pub?topic=t&defer=1001", b"x")[0] == 400


@pytest.mark.memory
def test_a_silent_client_is_disconnected_after_the_timeout(start: Start) -> None:
    broker = start(client_timeout_ms=200)
    with Client(broker.address) as client:
        client.publish("t", b"x")
        begin = broker.monotonic()
        silent: Any = client.sock
        while silent.recv(65536):  # heartbeats, which it does not answer
            pass
        assert 0.2 <= broker.monotonic() - begin < 1


@pytest.mark.memory
def test_compression_can_be_turned_off(start: Start) -> None:
    broker = start(deflate=False, snappy=False)
    for layer in ("deflate", "snappy"):
        with Client(broker.address, **{layer: True}) as client:
            assert client.settled[layer] is False


def test_unix_sockets_beside_the_ports(tmp_path: Path) -> None:
    tcp, web = tmp_path / "tcp.sock", tmp_path / "http.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tcp))
    stale.close()  # its file stays, as after a kill
    with running(tcp_socket=str(tcp), http_socket=str(web)) as broker:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(web))
            connection = http.client.HTTPConnection("broker")
            connection.sock = sock
            connection.request("POST", "/pub?topic=t", b"hello")
            assert connection.getresponse().read() == b"OK"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(str(tcp))
            sock.sendall(MAGIC_V2 + say.sub("t", "c") + say.rdy(1))
            protocol, found = ClientProtocol(), list[Any]()
            while not any(isinstance(event, Message) for event in found):
                found += protocol.feed(sock.recv(65536))
            (client,) = broker.channel("t", "c")["clients"]
            assert client["remote_address"] == "unix:1"
        with Client(broker.address) as over_tcp:
            over_tcp.publish("t", b"x")
    assert not tcp.exists()
    assert not web.exists()


@pytest.mark.memory
def test_the_log_says_why_publishers_wait(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    broker = start(max_held_messages=10)
    with Client(broker.address) as client:
        client.send(*(say.pub("t", b"x") for _ in range(20)))
        broker.sleep(1)
    (told,) = [record.getMessage() for record in caplog.records if "publishers" in record.getMessage()]
    assert told.startswith("TOPIC(t): publishers must wait: it holds ")
    assert told.endswith(" messages, and --max-held-messages is 10")


@pytest.mark.memory
def test_a_disk_topic_that_may_hold_one_message_goes_on(start: Start, tmp_path: Path) -> None:
    broker = start(data_path=str(tmp_path), max_held_messages=1)
    assert broker.post("/topic/create?topic=t&durability=disk")[0] == 200
    with Client(broker.address) as publisher, Client(broker.address) as consumer:
        publisher.publish("t", *(b"%d" % number for number in range(3)))
        consumer.subscribe("t", "c", ready=1)  # the first channel reads all of it from the log
        for number in range(3):
            message = consumer.message()
            assert message.body == b"%d" % number
            consumer.send(say.fin(message.id))


@pytest.mark.needs("nsqlookupd")
def test_lookup_services_change_while_the_broker_runs(tmp_path: Path, start_on_sockets: Start) -> None:
    broker = start_on_sockets(name="b", broadcast_address="127.0.0.1")
    broker.post("/topic/create?topic=t")

    def put(value: str) -> tuple[int, bytes]:
        url = f"{broker.url}/config/nsqlookupd_tcp_addresses"
        return fetch(http_request(url, value))

    with nsqlookupd(tmp_path) as (tcp, web):
        address = f"127.0.0.1:{tcp}"
        assert put(json.dumps([address])) == (200, json.dumps([address]).encode())
        wait_for(lambda: ask(web, "/lookup?topic=t").get("producers"))
        assert put("[]") == (200, b"[]")
        wait_for(lambda: not ask(web, "/lookup?topic=t").get("producers"))
        assert put('["nowhere"]') == (400, b'{"message":"INVALID_VALUE"}')
        assert broker.get("/config/nsqlookupd_tcp_addresses") == []


def http_request(url: str, body: str) -> urllib.request.Request:
    return urllib.request.Request(url, data=body.encode(), method="PUT")


def test_the_log_level_changes_while_the_broker_runs(start_on_sockets: Start) -> None:
    broker = start_on_sockets()
    root = logging.getLogger()
    before = root.level
    try:
        assert fetch(http_request(f"{broker.url}/config/log_level", "error")) == (200, b"4")
        assert root.level == logging.ERROR
    finally:
        root.setLevel(before)


@pytest.mark.memory
def test_a_client_is_asked_before_it_is_disconnected_however_late_the_broker_is(start: Start) -> None:
    broker = start(client_timeout_ms=200)
    with Client(broker.address) as client:
        client.publish("t", b"x")
        with broker.stalled():
            broker.sleep(1)
        assert client.silent(0.3)
        assert client.heartbeats
