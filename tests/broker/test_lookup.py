"""Stock nsqlookupd and nsqadmin see the broker, its topics and its channels come and go."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from srtm.broker import lookup
from srtm.errors import BrokerError
from srtm.protocol import client as say
from tests.broker.conftest import Start
from tests.broker.running import Client
from tests.programs import ask, nsqadmin, nsqlookupd, wait_for


@pytest.mark.needs("nsqlookupd")
def test_topics_and_channels_come_and_go(start: Start, tmp_path: Path) -> None:
    with nsqlookupd(tmp_path) as (tcp, http):
        broker = start(lookupd=(f"127.0.0.1:{tcp}",), broadcast_address="127.0.0.1")
        wait_for(lambda: bool(ask(http, "/nodes")["producers"]))
        (node,) = ask(http, "/nodes")["producers"]
        assert (node["broadcast_address"], node["hostname"]) == ("127.0.0.1", "broker")
        assert (node["tcp_port"], node["http_port"]) == (broker.broker.tcp_port, broker.broker.http_port)

        broker.post("/topic/create?topic=by-http")
        broker.post("/channel/create?topic=by-http&channel=c")
        wait_for(lambda: ask(http, "/channels?topic=by-http").get("channels") == ["c"])
        with Client(broker.address) as client:
            client.subscribe("by-sub", "short#ephemeral")
            wait_for(lambda: ask(http, "/lookup?topic=by-sub").get("channels") == ["short#ephemeral"])
        wait_for(lambda: not ask(http, "/channels?topic=by-sub").get("channels"))
        assert set(ask(http, "/topics")["topics"]) == {"by-http", "by-sub"}
        assert ask(http, "/debug")["channel:by-http:c"]
        broker.post("/channel/delete?topic=by-http&channel=c")  # its name stays known, as with nsqd; without a broker
        wait_for(lambda: not ask(http, "/debug").get("channel:by-http:c"))
        broker.post("/topic/delete?topic=by-http")
        wait_for(lambda: not ask(http, "/lookup?topic=by-http").get("producers"))


@pytest.mark.needs("nsqlookupd")
def test_registers_again_after_the_service_was_away(start: Start, tmp_path: Path) -> None:
    with nsqlookupd(tmp_path) as (tcp, http):
        broker = start(lookupd=(f"127.0.0.1:{tcp}",), broadcast_address="127.0.0.1")
        broker.post("/topic/create?topic=t")
        wait_for(lambda: bool(ask(http, "/lookup?topic=t").get("producers")))
    broker.post("/topic/create?topic=u")  # nobody is there to be told, and none to be asked
    with nsqlookupd(tmp_path, tcp=tcp, http=http):
        wait_for(lambda: bool(ask(http, "/lookup?topic=u").get("producers")))
        assert ask(http, "/lookup?topic=t")["producers"]


@pytest.mark.needs("nsqlookupd")
def test_the_first_message_of_a_topic_reaches_channels_that_are_known_elsewhere(start: Start, tmp_path: Path) -> None:
    with nsqlookupd(tmp_path) as (tcp, http):
        options = {"lookupd": (f"127.0.0.1:{tcp}",), "broadcast_address": "127.0.0.1"}
        first, second = start(**options), start(**options)
        wait_for(lambda: len(ask(http, "/nodes")["producers"]) == 2)
        first.post("/topic/create?topic=t")
        for channel in ("a", "b", "x%23ephemeral"):
            first.post(f"/channel/create?topic=t&channel={channel}")
        wait_for(lambda: len(ask(http, "/channels?topic=t").get("channels", [])) == 3)
        with Client(second.address) as client:
            client.publish("t", b"first")
        for channel in ("a", "b"):
            with Client(second.address) as client:
                assert client.subscribe("t", channel).message().body == b"first"
        assert set(second.do(lambda: list(second.broker.topics["t"].channels))) == {"a", "b"}


@pytest.mark.needs("nsqlookupd")
def test_a_ping_keeps_it_registered(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "PING_S", 0.05)
    with nsqlookupd(tmp_path) as (tcp, http):
        start(lookupd=(f"127.0.0.1:{tcp}",), broadcast_address="127.0.0.1")
        wait_for(lambda: bool(ask(http, "/nodes")["producers"]))
        log = tmp_path / "nsqlookupd.log"
        wait_for(lambda: "pinged" in log.read_text())


@pytest.mark.needs("nsqadmin")
@pytest.mark.needs("nsqlookupd")
def test_nsqadmin_shows_it(start: Start, tmp_path: Path) -> None:
    with nsqlookupd(tmp_path) as (tcp, http):
        broker = start(lookupd=(f"127.0.0.1:{tcp}",), broadcast_address="127.0.0.1")
        with Client(broker.address) as publisher, Client(broker.address, client_id="me") as subscriber:
            subscriber.subscribe("t", "c", ready=1)
            publisher.publish("t", b"1", b"2", b"3")
            subscriber.send(say.fin(subscriber.message().id))
            subscriber.message()
            wait_for(lambda: ask(http, "/channels?topic=t").get("channels") == ["c"])
            with nsqadmin(tmp_path, http) as admin:
                (node,) = ask(admin, "/api/nodes")["nodes"]
                assert node["tcp_port"] == broker.broker.tcp_port
                topic = ask(admin, "/api/topics/t")
                assert (topic["message_count"], topic["channels"][0]["channel_name"]) == (3, "c")
                channel = ask(admin, "/api/topics/t/c")
                assert (channel["depth"], channel["in_flight_count"]) == (1, 1)
                assert channel["clients"][0]["client_id"] == "me"


def test_an_address_without_a_port(start: Start) -> None:
    with pytest.raises(BrokerError, match="host:port"):
        start(lookupd=("localhost",))


def test_a_service_that_refuses_or_says_nothing_is_in_the_log(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lookup, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as gone:
        ports = [mute.getsockname()[1], gone.getsockname()[1]]
        gone.close()
        broker = start(lookupd=tuple(f"127.0.0.1:{port}" for port in ports))
        broker.wait_until(lambda _: all(f"LOOKUPD(127.0.0.1:{port}): " in caplog.text for port in ports))
        lines = {record.args[0]: record.getMessage() for record in caplog.records if isinstance(record.args, tuple)}
        assert lines[f"127.0.0.1:{ports[0]}"].endswith(": no answer")
        assert "cannot connect: Connection refused" in lines[f"127.0.0.1:{ports[1]}"]
