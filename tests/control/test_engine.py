"""A cluster whose topics an engine delivers: moved, adapted, measured and refused as any other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from srtm.client import Publisher
from srtm.control.local.cluster import LocalCluster, LocalOptions
from srtm.errors import ControlError, InputError
from tests.control.processes import Processes, Sender, processes, started, stopped
from tests.control.test_cluster import conforms, soon
from tests.engines import NatsCluster, NatsServer, stored, until
from tests.programs import ask

pytestmark = pytest.mark.processes


@pytest.mark.needs("nats-server")
def test_a_topic_on_jetstream_is_moved_and_adapted_and_loses_a_node(tmp_path: Path) -> None:
    """Publishers move under load, shares follow traffic, a node of the engine is killed: nothing lost or doubled."""
    r, b, count = 300, 50, 20

    async def story(cluster: Processes, engine: NatsCluster) -> list[Sender]:
        senders = [Sender("t", cluster.url, f"p{number}", 10) for number in range(count)]
        await started(senders)
        await asyncio.to_thread(cluster.record, *cluster.brokers)
        await asyncio.sleep(1)
        places = cluster.places("t")
        assert set(places.values()) == {"broker-1", "broker-2"}
        for sender in senders:
            sender.paused = places[sender.publisher.id] == "broker-1"
        await soon(lambda: cluster.in_force("broker-2", "t") > 1.3 * cluster.in_force("broker-1", "t"))
        for sender in senders:
            sender.paused = False
        there = [name for name, broker in places.items() if broker == "broker-1"]
        answer = cluster.client.post("/v1/topics/t/move", json={"publishers": there, "broker": "broker-2"})
        assert answer.status_code == 200, answer.text
        await soon(lambda: set(cluster.places("t").values()) == {"broker-2"} and not cluster.topic("t")["moving"])
        await asyncio.sleep(1)
        engine.servers[0].kill()
        killed = time.monotonic()
        await soon(lambda: all(max(each.acknowledged.values(), default=0) > killed + 1 for each in senders))
        await soon(lambda: (cluster.topic("t")["total_ms"] or {}).get("p50", 0) > 0)
        await stopped(senders)
        return senders

    with NatsCluster(tmp_path) as engine, processes(tmp_path) as cluster:
        for name in ("broker-1", "broker-2"):
            cluster.broker(name, "--engine", engine.url)
        cluster.all_alive()
        refused = cluster.client.put("/v1/topics/a..b", json={"r": 10, "b": 5})
        assert (refused.status_code, "is not a subject of the engine nats" in refused.text) == (422, True)
        cluster.create("t", r=r, b=b, policy="lb", slo_ms=10_000)  # a busy host must not undo the move
        until(
            lambda: {each["engine_problem"] for each in cluster.client.get("/v1/brokers").json()["brokers"]} == {None}
        )
        senders = asyncio.run(story(cluster, engine))
        assert {each["engine"] for each in cluster.client.get("/v1/brokers").json()["brokers"]} == {"nats"}
        cluster.recorded("broker-1", "broker-2")
        assert conforms(cluster, "t", r, b)
        got = Counter(body for _, body in asyncio.run(stored(engine.url, "t")))
    acknowledged = {body for sender in senders for body in sender.acknowledged}
    assert len(acknowledged) > 10 * count
    assert acknowledged <= got.keys()
    assert max(got.values()) == 1


@pytest.mark.needs("nats-server")
def test_a_topic_on_disk_goes_on_without_its_engine_under_its_contract(tmp_path: Path) -> None:
    r, b, count = 200, 20, 8

    async def story(cluster: Processes, engine: NatsServer) -> list[Sender]:
        senders = [Sender("t", cluster.url, f"p{number}", 10) for number in range(count)]
        await started(senders)
        await soon(lambda: all(each["durable"] for each in cluster.topic("t")["brokers"] if each["publishers"]))
        await asyncio.to_thread(cluster.record, *cluster.brokers)
        await asyncio.sleep(1)
        engine.kill()
        killed = time.monotonic()
        await soon(lambda: all(max(each.acknowledged.values(), default=0) > killed + 2 for each in senders))
        assert cluster.topic("t")["waiting"] > 0
        await asyncio.to_thread(engine.start)
        await soon(lambda: cluster.topic("t")["waiting"] == 0)
        await stopped(senders)
        return senders

    with NatsServer(tmp_path) as engine, processes(tmp_path) as cluster:
        for name in ("broker-1", "broker-2"):
            cluster.broker(name, "--engine", engine.url)
        cluster.all_alive()
        cluster.create("t", r=r, b=b, policy="lb", durability="disk")
        senders = asyncio.run(story(cluster, engine))
        acknowledged = {body for sender in senders for body in sender.acknowledged}
        until(lambda: acknowledged <= {body for _, body in asyncio.run(stored(engine.url, "t"))})
        cluster.recorded("broker-1", "broker-2")
        assert conforms(cluster, "t", r, b)
        assert max(Counter(body for _, body in asyncio.run(stored(engine.url, "t"))).values()) == 1


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("nsqd", marks=pytest.mark.needs("nsqd")),
        pytest.param("nats", marks=pytest.mark.needs("nats-server")),
    ],
)
def test_up_brings_its_engine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conftest import PARTS

    program = PARTS["nsqd" if kind == "nsqd" else "nats-server"].path
    assert program
    monkeypatch.setenv("PATH", str(Path(program).parent), prepend=":")

    async def go() -> list[str]:
        options = LocalOptions(2, data_path=tmp_path, free_ports=True, engine=kind, web_port=None)
        async with LocalCluster(options) as cluster, httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
            await client.put("/v1/topics/t", json={"r": 1000, "b": 100, "fit": "none", "policy": "lb"})
            for name in ("a", "b"):
                async with Publisher("t", controller=cluster.url, id=name) as publisher:
                    await publisher.publish(name.encode())
            brokers = (await client.get("/v1/brokers")).json()["brokers"]
            assert {each["engine"] for each in brokers} == {kind}
            places = [child.ports["TCP"] for child in cluster.engines]
            if kind == "nats":
                assert {body for _, body in await stored(f"nats://127.0.0.1:{places[0]}", "t")} == {b"a", b"b"}
            else:
                http = cluster.controller.ports["HTTP"]
                found = await asyncio.to_thread(until, lambda: ask(http, "/lookup?topic=t").get("producers"))
                assert {each["tcp_port"] for each in found} <= set(places)  # and none of ours
        return [child.name for child in cluster.engines if child.process and child.process.returncode is None]

    assert asyncio.run(go()) == []


@pytest.mark.needs("nats-server")
def test_up_reaches_an_engine_through_tls_and_the_controller_says_when_it_cannot(tmp_path: Path) -> None:
    pytest.importorskip("trustme", reason="pip install trustme makes certificates for tests")
    from tests.broker.engines.test_engine_tls import Files, address, secured

    files = Files(tmp_path)
    ca = files.file("trusted.pem", Path(files.stranger_ca).read_bytes())

    async def go(engine: str) -> None:
        options = LocalOptions(1, free_ports=True, engine=engine, web_port=None)
        async with LocalCluster(options) as cluster, httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:

            async def problem() -> str:
                return str((await client.get("/v1/brokers")).json()["brokers"][0]["engine_problem"])

            while "invalid server certificate" not in await problem():
                await asyncio.sleep(0.05)
            process = cluster.brokers[0].process
            assert process is not None
            assert b"secret" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            files.file("trusted.pem", Path(files.ca).read_bytes())
            await client.put("/v1/topics/t", json={"r": 1000, "b": 100, "fit": "none", "policy": "lb"})
            async with Publisher("t", controller=cluster.url, id="p") as publisher:
                await publisher.publish(b"x")
            while await problem() != "None":
                await asyncio.sleep(0.05)

    with secured("nats", files, "--user", "me", "--pass", "secret") as server:
        asyncio.run(asyncio.wait_for(go(address(server, f"?ca={ca}", "me:secret@")), 60))


def test_an_engine_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="invalid engine 'redis'"):
        LocalCluster(LocalOptions(engine="redis"))
    monkeypatch.setenv("PATH", str(tmp_path))

    async def go() -> None:
        async with LocalCluster(LocalOptions(1, free_ports=True, engine="nsqd", web_port=None)):
            pass

    with pytest.raises(ControlError, match="cannot find nsqd; put NSQ's programs on the PATH"):
        asyncio.run(go())
