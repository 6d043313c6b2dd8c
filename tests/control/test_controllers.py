"""Three controllers on three servers of NATS: the leader is killed and paused under load."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from srtm.model.bucket import TokenBucket
from srtm.model.timeline import Timeline, largest_excess
from tests.control.controllers import Controllers, controllers
from tests.control.processes import PATIENCE_S, Program, Sender, started, stopped, until

pytestmark = [pytest.mark.needs("nats-server"), pytest.mark.processes]

R, B = 400, 80
X = {"r": 1, "b": 1, "fit": "none"}  # a change that may be repeated
NEW_LEADER_S = 15.0  # on a host that is busy with other things; bench/controllers.py measures it
PAUSE_S = 2.5  # of messages: less than an outage, so they do not wait for a leader


class Operator:
    """Creates contracts all the while, at any controller, and remembers which were answered."""

    def __init__(self, world: Controllers) -> None:
        self.world = world
        self.kept: list[str] = []
        self.refused: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Operator:
        self._task = asyncio.create_task(self._create())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def creates(self, wanted: int = 3) -> None:
        """Until so many contracts were made."""
        ends = time.monotonic() + PATIENCE_S
        while len(self.kept) < wanted:
            assert time.monotonic() < ends, self.refused
            await asyncio.sleep(0.02)

    async def _create(self) -> None:
        number = 0
        async with httpx.AsyncClient(timeout=httpx.Timeout(10, connect=1), trust_env=False) as client:
            while True:
                number += 1
                at = self.world.controllers[number % 3]
                name = f"new-{number}"
                try:
                    url = f"http://127.0.0.1:{at.http}/v1/topics/{name}"
                    answer = await client.put(url, json={"r": 1, "b": 10, "fit": "none"})
                    if answer.status_code == 200:
                        self.kept.append(name)
                    else:
                        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
                        self.refused.append(name)
                except httpx.HTTPError:
                    self.refused.append(name)
                await asyncio.sleep(0.1)


async def safe(world: Controllers) -> None:
    """Look at what brokers have in force, all the while."""
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        while True:
            total = 0.0
            for broker in world.brokers.values():
                answer = await client.get(f"http://127.0.0.1:{broker.http}/stats?format=json&topic=t")
                total += float(answer.json()["topics"][0]["srtm"]["r"] or 0) if answer.json()["topics"] else 0.0
            assert total <= R + 1e-6, total
            await asyncio.sleep(0.05)


async def outage(world: Controllers, how: str) -> tuple[float, Program]:
    """Take the leader away; returns how long it took until another one led, and who it was."""
    victim = await asyncio.to_thread(world.some_leader)
    began = time.monotonic()
    (world.kill if how == "kill" else world.pause)(victim)
    return await asyncio.to_thread(world.replaced_s, victim, began), victim


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_the_leader_goes_and_nobody_notices(tmp_path: Path, how: str) -> None:
    async def story(world: Controllers) -> None:
        senders = [Sender("t", world.url, f"p{number}", 30.0) for number in range(4)]
        await started(senders)
        world.record(*world.brokers)
        watching = asyncio.create_task(safe(world))
        await asyncio.sleep(1)
        async with Operator(world) as operator:
            await operator.creates()
            before = len(operator.kept)
            took_s, victim = await outage(world, how)
            assert took_s < NEW_LEADER_S
            if how == "pause":
                world.resume(victim)
            else:
                await asyncio.to_thread(world.start_again, victim)
            await operator.creates(before + 3)
        times = sorted(at for sender in senders for at in sender.acknowledged.values())
        assert max(after - at for at, after in pairwise(times)) < PAUSE_S
        watching.cancel()
        world.recorded(*world.brokers)
        await stopped(senders)
        assert sum(world.leader([each]) is not None for each in world.controllers) == 1
        listed = world.client.get("/v1/topics").json()["topics"]
        assert {each["topic"] for each in listed} >= {*operator.kept, "t"}
        assert largest_excess(world.releases("t"), Timeline(TokenBucket.of(str(R), str(B)))).tokens <= 0
        logged = set(world.logged("t"))
        assert logged >= {body for sender in senders for body in sender.acknowledged}

    with controllers(tmp_path) as world:
        world.all_brokers(2)
        world.create("t", r=R, b=B, durability="disk")
        asyncio.run(story(world))


def test_every_controller_answers_for_the_leader(tmp_path: Path) -> None:
    """Reads, the page's stream, changes and refusals; discovery from what brokers told each of them."""
    with controllers(tmp_path) as world:
        world.all_brokers(1)
        leader = world.some_leader()
        for number, each in enumerate(world.controllers):
            with httpx.Client(base_url=f"http://127.0.0.1:{each.http}", trust_env=False, timeout=10) as api:
                assert api.get("/v1/leader").json()["leads"] is (each is leader)
                assert api.get("/v1/leader").json()["leader"]["url"] == f"http://127.0.0.1:{leader.http}"
                name = f"t{number}"
                made = api.put(f"/v1/topics/{name}", json={"r": 10, "b": 10, "fit": "none"})
                assert made.status_code == 200, made.text
                again = api.put(f"/v1/topics/{name}", json={"r": 11, "b": 10, "fit": "none"})
                assert again.status_code == 409
                assert api.get(f"/v1/topics/{name}").json()["r"] == 10
                assert api.get("/v1/topics/none").status_code == 404
                assert api.patch(f"/v1/topics/{name}", content=b"{").status_code == 422
                until(partial(registered, api, f"/v1/topics/{name}/publishers"))
                with api.stream("GET", "/v1/watch") as stream:
                    assert next(stream.iter_lines()) == "event: snapshot"
                assert api.get("/ping").text == "OK"
                assert [one["hostname"] for one in api.get("/nodes").json()["producers"]] == ["broker-1"]
                assert ("srtm_cluster_leads 1" in api.get("/metrics").text) is (each is leader)
                assert api.delete(f"/v1/topics/{name}").status_code == 204
                # A request that was passed on is not passed on again.
                looped = api.get("/v1/brokers", headers={"Srtm-Forwarded": "1"})
                assert looped.status_code == (200 if each is leader else 503)
        _without_a_store(world, leader)


def registered(api: httpx.Client, path: str) -> bool:
    return api.post(path, json={"publishers": [{"id": "p"}]}).is_success


def _without_a_store(world: Controllers, leader: Program) -> Any:
    """Without NATS, nobody leads: changes are refused, and the last leader still shows what it knows."""
    for server in world.cluster.servers:
        server.kill()
    with httpx.Client(base_url=f"http://127.0.0.1:{leader.http}", trust_env=False, timeout=10) as api:
        refused = until(lambda: (found := api.put("/v1/topics/x", json=X)).status_code == 503 and found)
        assert refused.headers["retry-after"] == "1"
        assert [each["status"] for each in api.get("/v1/brokers").json()["brokers"]]
    follower = next(each for each in world.controllers if each is not leader)
    with httpx.Client(base_url=f"http://127.0.0.1:{follower.http}", trust_env=False, timeout=10) as api:
        until(lambda: api.get("/v1/leader").json()["leader"] is None)
        assert "no controller leads" in api.get("/v1/brokers").json()["detail"]
    for server in world.cluster.servers:
        server.start(wait=False)
    world.some_leader()
    assert world.client.put("/v1/topics/x", json=X).status_code == 200


def answers(api: httpx.Client, headers: dict[str, str]) -> bool:
    return api.get("/v1/topics", headers=headers).is_success


def test_every_controller_asks_for_the_token(tmp_path: Path) -> None:
    """Those that do not lead, too, on the paths that they answer themselves."""
    secret = tmp_path / "token"
    secret.write_text("s3cret")
    paths = ("/nodes", "/topics", "/metrics", "/v1/topics")
    with controllers(tmp_path, "--auth-required", "--token-file", str(secret)) as world:
        right, no_headers = {"Authorization": "Bearer s3cret"}, dict[str, str]()
        for each in world.controllers:
            with httpx.Client(base_url=f"http://127.0.0.1:{each.http}", trust_env=False, timeout=10) as api:
                until(partial(answers, api, right))
                for wrong in (no_headers, {"Authorization": "Bearer other"}):
                    assert [api.get(path, headers=wrong).status_code for path in paths] == [401] * 4
                    assert api.post("/topic/create?topic=t", headers=wrong).status_code == 401
                assert [api.get(path, headers=right).status_code for path in paths] == [200] * 4
                assert api.get("/ping").status_code == 200
                made = api.post("/v1/tokens", headers=right, json={"name": "root", "role": "admin"})
                assert (made.status_code, "several controllers share" in made.text) == (409, True)
