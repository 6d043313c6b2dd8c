"""NSQ's own programs and clients, and our broker, find each other through our discovery."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request

import pytest

from srtm.protocol import client as say
from tests.broker.conftest import Start
from tests.broker.running import Client, fetch
from tests.control.running import controller
from tests.programs import ask, nsqadmin, nsqd, post, wait_for

pytestmark = pytest.mark.processes

needs_pynsq = pytest.mark.skipif(find_spec("nsq") is None, reason="needs pynsq: pip install pynsq")

READER = """
import asyncio, json, sys
import nsq

async def main(lookupd, wanted):
    bodies, done = set(), asyncio.Event()
    def handle(message):
        bodies.add(message.body.decode())
        if len(bodies) == wanted:
            done.set()
        return True
    reader = nsq.Reader(topic="t", channel="c", lookupd_http_addresses=[lookupd], lookupd_poll_interval=1,
                        lookupd_poll_jitter=0.01, max_in_flight=10, message_handler=handle)
    await asyncio.wait_for(done.wait(), 20)
    print(json.dumps(sorted(bodies)))
    reader.close()
    await asyncio.sleep(0.2)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.needs("nsqd")
def test_nsqd_registers(tmp_path: Path) -> None:
    with controller() as service:
        with nsqd(tmp_path, f"--lookupd-tcp-address=127.0.0.1:{service.tcp}") as (tcp, http):
            wait_for(lambda: ask(service.http, "/nodes")["producers"])
            (node,) = ask(service.http, "/nodes")["producers"]
            assert (node["broadcast_address"], node["tcp_port"], node["http_port"]) == ("127.0.0.1", tcp, http)
            post(http, "/topic/create?topic=t")
            post(http, "/channel/create?topic=t&channel=c")
            wait_for(lambda: ask(service.http, "/lookup?topic=t").get("channels") == ["c"])
            (producer,) = ask(service.http, "/lookup?topic=t")["producers"]
            assert (producer["tcp_port"], producer["version"]) == (tcp, "1.3.0")
            with Client(("127.0.0.1", tcp)) as client:
                client.subscribe("u", "x#ephemeral")
                wait_for(lambda: ask(service.http, "/channels?topic=u")["channels"] == ["x#ephemeral"])
            wait_for(lambda: ask(service.http, "/channels?topic=u")["channels"] == [])
            post(http, "/topic/delete?topic=t")
            wait_for(lambda: ask(service.http, "/lookup?topic=t")["producers"] == [])
        wait_for(lambda: ask(service.http, "/nodes")["producers"] == [])


@pytest.mark.needs("nsqd")
def test_a_new_topic_of_nsqds_gets_the_channels_that_are_known_here(tmp_path: Path) -> None:
    with controller() as service:
        post(service.http, "/channel/create?topic=t&channel=known")
        with nsqd(tmp_path, f"--lookupd-tcp-address=127.0.0.1:{service.tcp}") as (_, http):
            wait_for(lambda: ask(service.http, "/nodes")["producers"])
            post(http, "/pub?topic=t", b"first")
            (topic,) = ask(http, "/stats?format=json&topic=t")["topics"]
            assert [each["channel_name"] for each in topic["channels"]] == ["known"]


@pytest.mark.needs("nsqd")
@pytest.mark.needs("nsqadmin")
def test_nsqadmin_sees_and_orders(tmp_path: Path) -> None:
    with (
        controller() as service,
        nsqd(tmp_path, f"--lookupd-tcp-address=127.0.0.1:{service.tcp}") as (tcp, http),
        nsqadmin(tmp_path, service.http) as admin,
    ):
        post(http, "/topic/create?topic=t")
        post(http, "/channel/create?topic=t&channel=c")
        wait_for(lambda: ask(service.http, "/channels?topic=t")["channels"] == ["c"])
        post(http, "/pub?topic=t", b"x")
        (node,) = ask(admin, "/api/nodes")["nodes"]
        assert (node["tcp_port"], [each["topic"] for each in node["topics"]]) == (tcp, ["t"])
        assert ask(admin, "/api/topics")["topics"] == ["t"]
        topic = ask(admin, "/api/topics/t")
        assert (topic["message_count"], topic["channels"][0]["channel_name"]) == (1, "c")

        made = json.dumps({"topic": "u", "channel": "d"}).encode()
        assert post(admin, "/api/topics", made) == 200
        assert ask(service.http, "/lookup?topic=u")["channels"] == ["d"]
        url = f"http://127.0.0.1:{admin}/api/nodes/127.0.0.1:{http}"
        tombstone = Request(url, data=json.dumps({"topic": "t"}).encode(), method="DELETE")
        assert fetch(tombstone)[0] == 200
        assert ask(service.http, "/lookup?topic=t")["producers"] == []
        assert fetch(Request(f"http://127.0.0.1:{admin}/api/topics/u/d", method="DELETE"))[0] == 200
        assert ask(service.http, "/lookup?topic=u")["channels"] == []
        assert fetch(Request(f"http://127.0.0.1:{admin}/api/topics/u", method="DELETE"))[0] == 200
        assert ask(service.http, "/topics")["topics"] == ["t"]


def test_our_broker_registers(start: Start) -> None:
    with controller() as service:
        options = {"lookupd": (f"127.0.0.1:{service.tcp}",), "broadcast_address": "127.0.0.1"}
        first, second = start(**options), start(**options)
        wait_for(lambda: len(ask(service.http, "/nodes")["producers"]) == 2)
        first.post("/topic/create?topic=t")
        first.post("/channel/create?topic=t&channel=c")
        wait_for(lambda: ask(service.http, "/lookup?topic=t").get("channels") == ["c"])
        with Client(second.address) as client:
            client.publish("t", b"first")
        wait_for(lambda: len(ask(service.http, "/lookup?topic=t")["producers"]) == 2)
        second.wait_until(lambda b: b.topics["t"].channels["c"].depth == 1)
        first.post("/topic/delete?topic=t")
        wait_for(lambda: len(ask(service.http, "/lookup?topic=t")["producers"]) == 1)


def test_our_broker_registers_again_with_a_controller_that_came_back(start: Start) -> None:
    with controller() as service:
        broker = start(lookupd=(f"127.0.0.1:{service.tcp}",), broadcast_address="127.0.0.1")
        broker.post("/topic/create?topic=t")
        wait_for(lambda: ask(service.http, "/lookup?topic=t").get("producers"))
    with controller(tcp_port=service.tcp, http_port=service.http):
        wait_for(lambda: ask(service.http, "/lookup?topic=t").get("producers"))


@needs_pynsq
def test_pynsq_finds_brokers(start: Start, tmp_path: Path) -> None:
    with controller() as service:
        brokers = [start(lookupd=(f"127.0.0.1:{service.tcp}",), broadcast_address="127.0.0.1") for _ in range(2)]
        wait_for(lambda: len(ask(service.http, "/nodes")["producers"]) == 2)
        for number, broker in enumerate(brokers):
            with Client(broker.address) as client:
                client.send(say.pub("t", b"from %d" % number))
                assert client.response() == b"OK"
        program = tmp_path / "reader.py"
        program.write_text(READER)
        command = [sys.executable, str(program), f"http://127.0.0.1:{service.http}", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == ["from 0", "from 1"]
