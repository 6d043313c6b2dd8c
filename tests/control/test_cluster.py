"""A cluster of real processes, of which some are killed, cut off, replaced or lie."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from srtm.client import Cluster, Publisher
from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline, largest_excess
from srtm.net.sockets import listen
from srtm.protocol import exchange, lookup
from srtm.protocol.names import MAGIC_V1
from tests.control.processes import (
    PATIENCE_S,
    Processes,
    Proxy,
    Sender,
    interrupted,
    processes,
    started,
    stopped,
    until,
)

pytestmark = pytest.mark.processes

BACK_S = 5.0  # the goal is 2 s; a machine that is busy with other things may take longer
LEASE_S = 2.0


def conforms(cluster: Processes, topic: str, r: float, b: float) -> bool:
    return largest_excess(cluster.releases(topic), Timeline(TokenBucket.of(r, b))).conforms


async def soon(holds: Any, patience_s: float = PATIENCE_S) -> Any:
    return await asyncio.to_thread(until, holds, patience_s)


def test_a_broker_is_killed_under_load(tmp_path: Path) -> None:
    """Its publishers go on elsewhere, nothing acknowledged is lost, the contract holds, its share is used again."""
    r, b, count = 300, 50, 50

    async def story(cluster: Processes) -> tuple[list[Sender], float]:
        senders = [Sender("t", cluster.url, f"p{number}", 8) for number in range(count)]
        await started(senders)
        await asyncio.to_thread(cluster.record, *cluster.brokers)
        await asyncio.sleep(1.5)
        victims = {name for name, broker in cluster.places("t").items() if broker == "broker-1"}
        assert 0 < len(victims) < count
        await asyncio.to_thread(cluster.recorded, "broker-1")
        killed = time.monotonic()
        cluster.brokers["broker-1"].kill()
        await soon(lambda: cluster.shares("t").keys() == {"broker-2", "broker-3"})
        await asyncio.sleep(2)
        back = [
            min((at for at in sender.acknowledged.values() if at > killed), default=float("inf")) - killed
            for sender in senders
            if sender.publisher.id in victims
        ]
        await soon(lambda: sum(cluster.shares("t").values()) == pytest.approx(r))  # shares may be on their way
        await stopped(senders)
        return senders, max(back)

    with processes(tmp_path) as cluster:
        for name in ("broker-1", "broker-2", "broker-3"):
            cluster.broker(name)
        cluster.all_alive()
        cluster.create("t", r=r, b=b, durability="disk", policy="lb")
        senders, back_s = asyncio.run(story(cluster))
        print(f"the last of its publishers published again after {back_s:.2f} s")
        assert back_s < BACK_S
        cluster.recorded("broker-2", "broker-3")
        assert conforms(cluster, "t", r, b)
        cluster.restart_broker("broker-1")
        cluster.all_alive()
        logged = cluster.logged("t")
    acknowledged = {body for sender in senders for body in sender.acknowledged}
    assert len(acknowledged) > count
    assert acknowledged <= set(logged)


def test_the_controller_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Traffic does not notice; topics, publishers, places and shares are the same; shares follow traffic again."""

    async def story(cluster: Processes) -> None:
        senders = [Sender("t", cluster.url, f"p{number}", 20) for number in range(10)]
        await started(senders)
        await asyncio.sleep(1.5)
        before = cluster.topic("t"), cluster.places("t"), cluster.shares("t")
        cluster.controller.kill()
        killed = time.monotonic()
        await asyncio.sleep(1)
        assert all(max(sender.acknowledged.values()) > killed + 0.5 for sender in senders)
        await asyncio.to_thread(cluster.restart_controller)
        await soon(lambda: cluster.shares("t"))
        after = cluster.topic("t"), cluster.places("t"), cluster.shares("t")
        for key in ("r", "b", "slo_ms", "policy", "durability", "publishers", "declared_rate"):
            assert after[0][key] == before[0][key]
        assert after[1:] == before[1:]
        await asyncio.to_thread(cluster.all_alive)
        for sender in senders:
            sender.paused = before[1][sender.publisher.id] == "broker-1"
        await soon(lambda: cluster.in_force("broker-2", "t") > 1.3 * cluster.in_force("broker-1", "t"))
        await stopped(senders)

    with processes(tmp_path) as cluster:
        for name in ("broker-1", "broker-2"):
            cluster.broker(name)
        cluster.all_alive()
        cluster.create("t", r=400, b=40, policy="lb")
        asyncio.run(story(cluster))


def test_a_store_that_is_corrupt_is_rebuilt_from_what_brokers_report(tmp_path: Path) -> None:
    async def story(cluster: Processes) -> None:
        senders = [Sender("t", cluster.url, f"p{number}", 20, group=f"g{number}") for number in range(4)]
        await started(senders)
        await soon(lambda: sum(each["connected"] for each in cluster.topic("t")["brokers"]) == 4)
        before = cluster.topic("t"), cluster.places("t")
        cluster.controller.kill()
        store = tmp_path / "controller" / "controller.sqlite"
        for path in store.parent.iterdir():
            path.write_bytes(b"nonsense" * 1000)
        command = [sys.executable, "-m", "srtm", *cluster.controller.arguments]
        failed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert failed.returncode == 1
        assert f"srtm: cannot use {store}: file is not a database" in failed.stderr
        assert "--recover" in failed.stderr
        await asyncio.to_thread(cluster.restart_controller, "--recover")
        assert cluster.controller.said == [f"controller: the old store is now {store}.1\n"]
        assert Path(f"{store}.1").read_bytes().startswith(b"nonsense")
        await soon(lambda: cluster.topic("t").get("state", "opening") != "opening")
        after = cluster.topic("t"), cluster.places("t")
        for key in ("r", "b", "slo_ms", "policy", "durability", "overflow", "publishers"):
            assert after[0][key] == before[0][key]
        assert after[1] == before[1]
        await soon(lambda: sum(cluster.shares("t").values()) == pytest.approx(400))
        sent = time.monotonic()
        await asyncio.sleep(0.5)
        assert all(max(sender.acknowledged.values()) > sent for sender in senders)
        await stopped(senders)

    with processes(tmp_path, "--lease-s", str(LEASE_S)) as cluster:
        for name in ("broker-1", "broker-2"):
            cluster.broker(name)
        cluster.all_alive()
        cluster.create("t", r=400, b=40, policy="lb", overflow="drop")
        asyncio.run(story(cluster))


def test_a_broker_is_cut_off_for_longer_than_its_lease(tmp_path: Path) -> None:
    """It goes on with its safe share, the other gets the rest, and no window has more than the contract."""
    r, b = 200, 30

    async def story(cluster: Processes) -> None:
        control = Proxy(("127.0.0.1", 0), ("127.0.0.1", cluster.controller.tcp))
        registers_at = f"127.0.0.1:{await control.start()}"
        cut = await asyncio.to_thread(lambda: cluster.broker("broker-1", address="127.0.0.2", controller=registers_at))
        exchanges = Proxy(("127.0.0.2", cut.http), ("127.0.0.1", cut.http))
        clients = Proxy(("127.0.0.2", cut.tcp), ("127.0.0.1", cut.tcp))
        await exchanges.start()
        await clients.start()
        await asyncio.to_thread(cluster.broker, "broker-2")
        await asyncio.to_thread(cluster.all_alive)
        await asyncio.to_thread(lambda: cluster.create("t", r=r, b=b, policy="lb"))
        senders = [Sender("t", cluster.url, f"p{number}", 30) for number in range(10)]
        await started(senders)
        await asyncio.to_thread(cluster.record, *cluster.brokers)
        await asyncio.sleep(2)
        for proxy in (control, exchanges):
            proxy.open.clear()
        before = cluster.in_force("broker-1", "t")  # no grant reaches it from here on
        assert before > 0.1 * r
        await soon(lambda: cluster.in_force("broker-1", "t") == pytest.approx(before / 2, rel=0.01))
        await soon(lambda: cluster.statuses()["broker-1"] == "lapsed")
        # The controller counts with the larger one if a grant was on its way when the line was cut.
        safe = cluster.shares("t")["broker-1"]
        assert before / 2 <= safe * 1.01 <= r
        await soon(lambda: cluster.in_force("broker-2", "t") == pytest.approx(r - cluster.shares("t")["broker-1"]))
        await asyncio.sleep(1)
        for proxy in (control, exchanges):
            proxy.open.set()
        await soon(lambda: cluster.in_force("broker-1", "t") > 0.9 * before)
        await asyncio.sleep(1)
        await asyncio.to_thread(cluster.recorded, *cluster.brokers)
        await stopped(senders)
        for proxy in (control, exchanges, clients):
            await proxy.stop()

    with processes(tmp_path, "--lease-s", str(LEASE_S)) as cluster:
        asyncio.run(story(cluster))
        assert len(cluster.releases("t")) > 3 * r
        assert conforms(cluster, "t", r, b)


def test_a_controller_that_another_one_has_taken_over_from_ends(tmp_path: Path) -> None:
    with processes(tmp_path) as cluster:
        cluster.broker("broker-1")
        cluster.all_alive()
        later = exchange.Exchange(2**40, 1, 0, None, 10**10, 50, 1, {})
        url = f"http://127.0.0.1:{cluster.brokers['broker-1'].http}/srtm/exchange"
        assert httpx.post(url, content=exchange.write(later), trust_env=False).status_code == 200
        assert cluster.controller.process.wait(PATIENCE_S) == 1


def test_a_thousand_publishers_are_moved(tmp_path: Path) -> None:
    count = 1000

    async def story(cluster: Processes) -> float:
        async with Cluster(cluster.url) as shared:
            publishers = [Publisher("t", controller=shared, id=f"p{number}", rate=1) for number in range(count)]
            await asyncio.gather(*(publisher.open() for publisher in publishers))
            (here,) = {publisher.address for publisher in publishers}
            names = {each["address"]: each["name"] for each in cluster.client.get("/v1/brokers").json()["brokers"]}
            ((there, name),) = ((address, name) for address, name in names.items() if address != here)
            await publish(publishers, 0)
            sending = asyncio.create_task(publish(publishers, 1))
            began = time.monotonic()
            wish = {"publishers": [publisher.id for publisher in publishers], "broker": name}
            await asyncio.to_thread(lambda: cluster.client.post("/v1/topics/t/move", json=wish).raise_for_status())
            while any(publisher.address != there for publisher in publishers):
                await asyncio.sleep(0.005)
                assert time.monotonic() - began < PATIENCE_S
            took_s = time.monotonic() - began
            await sending
            await publish(publishers, 2)
            assert [publisher.migrations for publisher in publishers] == [1] * count
            await asyncio.gather(*(publisher.close() for publisher in publishers))
            return took_s

    async def publish(publishers: list[Publisher], turn: int) -> None:
        await asyncio.gather(*(each.publish(f"{each.id} {turn}".encode()) for each in publishers))

    with processes(tmp_path) as cluster:
        for name in ("broker-1", "broker-2"):
            cluster.broker(name)
        cluster.all_alive()
        cluster.create("t", r=20_000, b=5_000, durability="disk")
        took_s = asyncio.run(story(cluster))
        print(f"{count} publishers moved in {took_s:.2f} s")
        assert sorted(cluster.logged("t")) == sorted(
            f"p{number} {turn}".encode() for number in range(count) for turn in range(3)
        )


class Liar(BaseHTTPRequestHandler):
    """A broker that answers anything; `lies` are told in turn."""

    lies: tuple[Any, ...] = ()
    told = 0
    birth = 0  # of topic t, which it was told once

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if said["contracts"]:
            Liar.birth = said["contracts"]["t"]["birth"]
        lie = self.lies[type(self).told % len(self.lies)]
        type(self).told += 1
        status, body = lie(said)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not on the tests' output."""


def answer(said: Any, **changes: Any) -> dict[str, Any]:
    base = {"broker": "liar", "incarnation": 1, "number": said["number"], "acted": said["number"]}
    return {**base, "stamp": time.monotonic_ns(), "version": said["version"], "topics": {}, **changes}


def report(**changes: Any) -> dict[str, Any]:
    base = {"birth": Liar.birth, "epoch": 0, "sequence": 0, "share": None, "safe": False, "surrendered_ntok": 0}
    more = {"waiting": 0, "publishers": 0, "durable": False, "rate_mps": 0, "arrived": 0, "seconds": []}
    return {**base, **more, **changes}


def second(**changes: Any) -> dict[str, Any]:
    base = {"number": int(time.time()), "messages": 0, "max_backlog_ntok": 0, "largest_batch": 0}
    return {**base, "sent": 0, "over": 0, "access": [], "total": [], **changes}


HUGE = 2**62


def lies() -> list[Any]:
    def told(**changes: Any) -> Any:
        return lambda said: (200, json.dumps(answer(said, **changes)).encode())

    def of_topic(**changes: Any) -> Any:
        return lambda said: (200, json.dumps(answer(said, topics={"t": report(**changes)})).encode())

    def of_second(**changes: Any) -> Any:
        return lambda said: (
            200,
            json.dumps(answer(said, topics={"t": report(seconds=[second(**changes)])})).encode(),
        )

    return [
        told(),
        told(broker="broker-1"),
        told(number=-1),
        lambda said: (200, json.dumps(answer(said, number=said["number"] - 1)).encode()),
        lambda said: (200, json.dumps(answer(said, number=said["number"] + 1000)).encode()),
        told(version=HUGE),
        told(incarnation="yesterday"),
        told(rate_mps=-5),
        told(rate_mps=float("nan")),
        told(rate_mps=HUGE, free_mps=HUGE, lag_ns=HUGE),
        told(contracts={"t": {"r_mtps": 1, "b_ntok": 1}}),
        told(acted=HUGE),
        told(topics={"unheard of": report()}),
        told(topics={"unheard-of": report(share={"r_mtps": 10**12, "b_ntok": HUGE})}),
        of_topic(birth=HUGE, share={"r_mtps": 10**12, "b_ntok": HUGE}),
        of_topic(rate_mps=HUGE, arrived=HUGE),
        of_topic(share={"r_mtps": 10**12, "b_ntok": HUGE}),
        of_topic(share={"r_mtps": -1, "b_ntok": 0}),
        of_topic(epoch=HUGE, sequence=HUGE, surrendered_ntok=HUGE),
        lambda said: (
            200,
            json.dumps(answer(said, topics={"t": report(epoch=said["epoch"] - 1, sequence=1)})).encode(),
        ),
        of_topic(seconds="many"),
        of_second(messages=HUGE),
        of_second(number=HUGE),
        of_second(max_backlog_ntok=HUGE, largest_batch=HUGE),
        of_second(sent=1, over=2),
        of_second(sent=1, access=[HUGE, 1], total=[2**30, 1]),
        of_second(sent=1, access=[1, 2, 3]),
        of_second(messages=1, backlogs=[1]),
        of_second(messages=1, backlogs=[1_500, 1]),
        of_second(messages=1, backlogs=[1, HUGE]),
        lambda _: (200, b"not JSON"),
        lambda _: (200, b"[" * 100_000),
        lambda _: (200, b"\xff" * 1000),
        lambda _: (200, b" " * (17 * 1024 * 1024)),
        lambda _: (404, b"who?"),
        lambda _: (500, b"<h1>no</h1>"),
        lambda _: (204, b""),
    ]


@contextmanager
def liar(controller_tcp: int) -> Iterator[type[Liar]]:
    """A broker that registers as brokers do, and then tells lies."""
    kind = type("ThisLiar", (Liar,), {"lies": tuple(lies()), "told": 0})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        port = server.server_address[1]
        with socket.create_connection(("127.0.0.1", controller_tcp), timeout=PATIENCE_S) as registered:
            registered.sendall(MAGIC_V1 + lookup.identify(lookup.PeerInfo("127.0.0.1", "liar", port, port, "1.3.0")))
            assert registered.recv(65536)
            yield kind
        server.shutdown()
        serving.join()


def test_a_broker_that_lies_changes_nothing_for_others(tmp_path: Path) -> None:
    async def story(cluster: Processes, told: type[Liar]) -> None:
        senders = [Sender("t", cluster.url, f"p{number}", 20) for number in range(4)]
        await started(senders)
        places = cluster.places("t")
        await soon(lambda: told.told > 2 * len(told.lies))
        assert cluster.places("t") == places
        assert cluster.shares("t") == {"broker-1": 200.0}
        assert cluster.in_force("broker-1", "t") == 200
        assert cluster.topic("t")["rate"] > 0
        sent = time.monotonic()
        await asyncio.sleep(0.5)
        assert all(max(sender.acknowledged.values()) > sent for sender in senders)
        await stopped(senders)

    with processes(tmp_path, "--exchange-s", "0.1") as cluster:
        cluster.broker("broker-1")
        cluster.all_alive()
        cluster.create("t", r=200, b=20)
        with liar(cluster.controller.tcp) as told:
            asyncio.run(story(cluster, told))
            (found,) = (each for each in cluster.client.get("/v1/brokers").json()["brokers"] if each["name"] == "liar")
            assert found["oddities"] > len(told.lies) / 2
        assert cluster.statuses()["broker-1"] == "alive"
        assert cluster.controller.process.poll() is None


class Up:
    """`srtm up`, as its user sees it."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "srtm", "up", "--brokers", "2", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.said = dict(self.process.stdout.readline().split(maxsplit=1) for _ in range(4))

    @property
    def url(self) -> str:
        return self.said["controller:"].split()[0]

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def ports(self) -> list[int]:
        addresses = [self.url, self.said["page:"].strip().rstrip("/"), *self.said["brokers:"].split(", ")]
        return [int(address.rpartition(":")[2]) for address in addresses]


@contextmanager
def up(*flags: str) -> Iterator[Up]:
    cluster = Up("--free-ports", *flags)
    try:
        yield cluster
    finally:
        if cluster.process.poll() is None:
            interrupted(cluster.process)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def free(ports: list[int]) -> bool:
    try:
        for port in ports:
            listen("127.0.0.1", port).close()
    except OSError:
        return False
    return True


def test_up_stops_all_that_it_started() -> None:
    with up() as cluster:
        assert cluster.said["ready"].startswith("after")
        children, ports = cluster.children(), cluster.ports()
        assert len(children) == 3
        assert not free(ports)
        out, err = interrupted(cluster.process)
        assert (out, err) == ("cluster stopped\n", "")
        assert cluster.process.returncode == 0
        assert all(map(gone, children))
        assert free(ports)


def test_up_is_killed_and_leaves_nothing() -> None:
    with up() as cluster:
        children, ports = cluster.children(), cluster.ports()
        cluster.process.kill()
        cluster.process.communicate()
        until(lambda: all(map(gone, children)) and free(ports))


def test_up_starts_a_broker_again_at_the_same_place() -> None:
    with up() as cluster:

        def brokers() -> dict[str, tuple[str, str]]:
            found = httpx.get(f"{cluster.url}/v1/brokers", trust_env=False).json()["brokers"]
            return {each["name"]: (each["status"], each["address"]) for each in found}

        before, children = brokers(), cluster.children()
        os.kill(children[-1], signal.SIGKILL)
        until(lambda: len(set(cluster.children()) - set(children)) == 1)
        until(lambda: brokers() == before)
        assert {status for status, _ in before.values()} == {"alive"}


def test_up_starts_a_controller_again_that_asks_brokers_what_it_knew() -> None:
    with up() as cluster:
        topic = f"{cluster.url}/v1/topics/t"
        assert httpx.put(topic, json={"r": 50, "b": 5}, trust_env=False).status_code == 200
        until(lambda: httpx.get(topic, trust_env=False).json()["state"] == "placed")
        children = cluster.children()
        os.kill(children[0], signal.SIGKILL)
        until(lambda: httpx.get(topic, trust_env=False).json().get("r") == 50)
        assert len(set(cluster.children()) - set(children)) == 1


def test_up_finds_a_port_taken() -> None:
    with listen("127.0.0.1", 4161):
        command = [sys.executable, "-m", "srtm", "up", "--brokers", "1"]
        failed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert failed.returncode == 1
    assert "cannot listen on 127.0.0.1:4160, :4161 and :4171: Address already in use" in failed.stderr
    assert "controller did not start" in failed.stderr
