"""A leader that was away for longer than its lease can store nothing, and finds out; a bucket is read up to its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from srtm.control.controller import Controller
from srtm.control.keeping.jetstream import JetStreamKeeper
from srtm.control.keeping.keeper import Keeper
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.errors import InputError, LeadershipLost
from srtm.protocol import nats as protocol
from srtm.protocol.exchange import Contract
from srtm.units import NANO_PER_TOKEN
from tests.control.keeping.places import ME, OTHER, Place, nats, new_place, run
from tests.engines import NatsCluster, NatsServer, free_port

pytestmark = [pytest.mark.needs("nats-server"), pytest.mark.processes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
def place(server: NatsServer, tmp_path: Path) -> Place:
    return new_place("nats", tmp_path, server)


async def absent(place: Place) -> JetStreamKeeper:
    """A leader that renews its lease no more, as a process that is paused."""
    keeper = await place.open().lead(ME)
    assert isinstance(keeper, JetStreamKeeper)
    keeper.write({"a": b"first"})
    await keeper.committed()
    keeper._tasks[1].cancel()
    return keeper


def leading(keeper: Keeper) -> bool:
    """Whether it leads now; it may change its mind."""
    return keeper.leads


async def taken_over(place: Place) -> tuple[JetStreamKeeper, Keeper]:
    """A leader that was away, and the one that took over."""
    old = await absent(place)
    new = await asyncio.wait_for(place.open().lead(OTHER), 10)
    assert not old.leads
    return old, new


def test_every_write_of_a_stale_leader_is_refused(place: Place) -> None:
    """Also to keys that the new leader has not touched."""

    async def story() -> None:
        old, new = await taken_over(place)
        new.write({"b": b"new"})
        await new.committed()
        for key in ("a", "b", "c"):
            old.write({key: b"stale"})
        with pytest.raises(LeadershipLost, match="another controller wrote"):
            await old.committed()
        await asyncio.wait_for(old.lost(), 5)
        with pytest.raises(LeadershipLost):
            await old.confirm()
        old.close()
        await new.committed()
        assert new.leads
        await new.release()
        async with place.led() as after:
            assert after.read() == {"a": b"first", "b": b"new"}

    run(story())


def test_without_the_condition_stale_writes_would_be_stored(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: it is the condition on the last message that refuses them, not the lease."""

    async def story() -> None:
        old, new = await taken_over(place)
        monkeypatch.setattr(protocol, "expecting", lambda _: b"")
        old.write({"a": b"stale"})
        with pytest.raises(LeadershipLost, match="stored a write as"):  # too late
            await old.committed()
        old.close()
        new.close()
        monkeypatch.undo()
        async with place.led() as after:
            assert after.read() == {"a": b"stale"}

    run(story())


def test_a_stale_leader_grants_nothing(place: Place) -> None:
    """Its epoch is over: what it would grant is stored nowhere, so it is sent to nobody."""

    async def story() -> None:
        contract = Contract(100_000, 40 * NANO_PER_TOKEN)
        old = await absent(place)
        before = Controller(ControllerOptions(), Store(keeper=old), 1)
        before.joined("one", "h", 1, 2, 1)
        before.create("t", contract, 1)
        await old.committed()
        new = await asyncio.wait_for(place.open().lead(OTHER), 10)
        after = Controller(ControllerOptions(), Store(keeper=new), 1)
        await new.committed()
        assert after.state.epoch == before.state.epoch + 1
        before.members["one"].status = "alive"
        before.register("t", [DeclaredPublisher("p")], 1)
        before.compose("one")
        with pytest.raises(LeadershipLost):
            await old.committed()
        old.close()
        await new.release()

    run(story())


def test_a_lease_that_nobody_took_goes_on(place: Place) -> None:
    """A leader that lost NATS for longer than its lease stops acting, and resumes with all it had written meanwhile."""

    async def story() -> None:
        old = await absent(place)
        await asyncio.sleep(1.2)
        assert not leading(old)
        old.write({"b": b"2"})
        await old.confirm()
        assert leading(old)
        await old.release()
        async with place.led() as after:
            assert after.read() == {"a": b"first", "b": b"2"}

    run(story())


def test_of_many_that_are_ready_one_leads(place: Place) -> None:
    async def counted() -> None:
        ready = [asyncio.create_task(place.open().lead(ME)) for _ in range(5)]
        for number in range(5):
            done, pending = await asyncio.wait(ready, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.3)
            assert (len(done), any(each.done() for each in pending)) == (1, False)
            ready = list(pending)
            keeper = done.pop().result()
            assert len(keeper.read()) == number
            keeper.write({f"n{number}": b"1"})
            await keeper.release()

    run(counted())


def test_a_login_that_is_refused_is_an_error(tmp_path: Path) -> None:
    async def story(url: str) -> None:
        with pytest.raises(InputError, match="SRTM_STORE"):
            await Place(url).open().lead(ME)

    with NatsServer(tmp_path, "n0", "--user", "u", "--pass", "p") as server:
        run(story(server.url))
        run(story(server.url.replace("//", "//u:wrong@")))


def test_servers_that_are_away_are_waited_for(tmp_path: Path) -> None:
    async def story(port: int) -> None:
        waiting = asyncio.create_task(Place(f"nats://127.0.0.1:{port}").open().lead(ME))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        server = NatsServer(tmp_path)
        server.command[server.command.index("-p") + 1] = str(port)
        with server:
            await (await asyncio.wait_for(waiting, 20)).release()

    run(story(free_port()))


def test_a_cluster_keeps_three_copies_and_writes_survive_its_leader(tmp_path: Path) -> None:
    """Servers are killed and paused while writes are under way; each is stored once, in order."""

    async def story(cluster: NatsCluster) -> None:
        place = Place(cluster.url.partition("?")[0])
        keeper = await asyncio.wait_for(place.open(lease_s=20.0).lead(ME), 50)
        assert isinstance(keeper, JetStreamKeeper)
        connection = await keeper._bucket.connect()
        found = await connection.ask("$JS.API.STREAM.INFO.KV_srtm")
        connection.close()
        assert found["config"]["num_replicas"] == 3
        leads = next(each for each in cluster.servers if each.name == found["cluster"]["leader"])
        for number in range(2_000):
            keeper.write({f"n/{number}": b"%d" % number})
            if number == 500:
                await asyncio.sleep(0.02)
                leads.kill()
            if number % 100 == 0:
                await asyncio.sleep(0.01)
        await keeper.committed()
        leads.start(wait=False)
        other = next(each for each in cluster.servers if each is not leads)
        other.signal(signal.SIGSTOP)
        keeper.write({"n/2000": b"2000"})
        await keeper.committed()
        other.signal(signal.SIGCONT)
        await keeper.release()
        async with place.led() as after:
            assert after.read() == {f"n/{each}": b"%d" % each for each in range(2_001)}

    with NatsCluster(tmp_path) as cluster:
        asyncio.run(asyncio.wait_for(story(cluster), 120))
