"""Every kind of store keeps what `keeping.keeper` promises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from srtm.control.controller import Controller
from srtm.control.keeping.keeper import key, parts
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.errors import ControlError, LeadershipLost
from srtm.protocol.exchange import Contract
from srtm.units import NANO_PER_TOKEN
from tests.control.keeping.places import ME, OTHER, Place, nats, new_place, run
from tests.engines import NatsServer

CONTRACT = Contract(100_000, 40 * NANO_PER_TOKEN)
NAMES = ["plain", "a.b", "..", "a/b", "ä €", "=2E", "%", "*", ">", " ", "~", "\x00\n", "x" * 64, "p\u241f2"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("nats", marks=[pytest.mark.needs("nats-server"), pytest.mark.processes]),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind: str = request.param
    return new_place(kind, tmp_path, request.getfixturevalue("server") if kind == "nats" else None)


@pytest.mark.parametrize("name", NAMES)
def test_any_name_makes_a_key(name: str) -> None:
    made = key("kind", name, name)
    assert parts(made) == ["kind", name, name]
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_/=")
    assert key("kind", name) + "/" != key("kind", name + "/")


def test_what_is_committed_is_there_for_the_next_leader(place: Place) -> None:
    async def story() -> None:
        documents: dict[str, bytes | None] = {key("k", name): name.encode() for name in NAMES}
        documents[key("large")] = b"x" * 500_000
        async with place.led() as keeper:
            assert keeper.read() == {}
            keeper.write(documents)
            assert keeper.read() == documents
            keeper.write({key("k", "plain"): b"changed", key("large"): None, key("never was"): None})
            await keeper.committed()
            wanted = keeper.read()
        assert wanted[key("k", "plain")] == b"changed"
        assert key("large") not in wanted
        async with place.led(OTHER) as keeper:
            assert keeper.read() == wanted
            assert keeper.read("k/") == wanted
            assert keeper.read("no such/") == {}

    run(story())


def test_a_deleted_key_can_be_written_again(place: Place) -> None:
    async def story() -> None:
        for number in range(3):
            async with place.led() as keeper:
                assert keeper.read() == ({} if number != 2 else {"a": b"again"})
                keeper.write({"a": b"1"})
                keeper.write({"a": None})
                if number:
                    keeper.write({"a": b"again"})
                await keeper.committed()

    run(story())


def test_many_documents_keep_their_order(place: Place) -> None:
    """More than are ever under way at once; the last write of a key counts."""

    async def story() -> None:
        async with place.led() as keeper:
            for lap in range(0, 3_000, 100):
                keeper.write({key("n", str(number % 1_000)): b"%d" % number for number in range(lap, lap + 100)})
            await keeper.committed()
        async with place.led() as keeper:
            found = keeper.read("n/")
        assert found == {key("n", str(each)): b"%d" % (2_000 + each) for each in range(1_000)}

    run(story())


def test_one_process_leads_at_a_time(place: Place) -> None:
    async def story() -> None:
        async with place.led() as keeper:
            keeper.write({"a": b"1"})
            await keeper.committed()
            if not place.shared:
                with pytest.raises(ControlError, match="in use by process"):
                    await place.open().lead(OTHER)
                return
            other = place.open()
            waiting = asyncio.create_task(other.lead(OTHER))
            await asyncio.sleep(2.5)  # of a lease of 1 s, which is renewed
            assert not waiting.done()
            assert other.leader == ME
            assert keeper.leads
        taken = await asyncio.wait_for(waiting, 5)
        assert other.leader == OTHER
        assert taken.read() == {"a": b"1"}
        await taken.release()

    run(story())


def test_nothing_is_lost_when_a_process_ends_without_a_word(place: Place) -> None:
    async def story() -> None:
        keeper = await place.open().lead(ME)
        keeper.write({"a": b"1"})
        await keeper.committed()
        keeper.close()
        async with place.led(OTHER) as after:
            assert after.read() == {"a": b"1"}

    run(story())


def test_closed_is_lost(place: Place) -> None:
    """Nothing is taken for stored that is not."""

    async def story() -> None:
        keeper = await place.open().lead(ME)
        keeper.close()
        if place.shared:
            keeper.write({"a": b"1"})
            with pytest.raises(LeadershipLost):
                await keeper.committed()
            assert not keeper.leads

    run(story())


def test_a_controller_finds_everything_again(place: Place) -> None:
    async def story() -> None:
        publishers = [DeclaredPublisher(f"p/{n} ä", 2.5, f"g{n}", "periodic", 3, 1_000) for n in range(6)]
        async with place.led() as keeper:
            before = Controller(ControllerOptions(), Store(keeper=keeper), 1)
            before.joined("one", "h", 1, 2, 1)
            before.members["one"].status = "alive"
            for name in ("t", "over", "gone#ephemeral"):
                before.create(name, CONTRACT, 1)
                before.register(name, publishers, 1)
            before.remove("over", 1)
            before.remove("gone#ephemeral", 1)
            before.create("gone#ephemeral", CONTRACT, 1)
            before.pause("t", 1)
            for number in range(1_003 if place.shared else 3):
                before.store.note_action(number, "me", "fit", {"topic": "t"})
            await keeper.committed()
        async with place.led(OTHER) as keeper:
            after = Controller(ControllerOptions(), Store(keeper=keeper), 1)
            assert after.state.epoch > before.state.epoch
            assert after.topics.keys() == {"t", "gone#ephemeral"}
            kept, topic = after.topics["t"], before.topics["t"]
            assert kept.layout.publishers == {each.id: each for each in publishers}
            assert (kept.birth, kept.paused, kept.layout.place) == (topic.birth, True, topic.layout.place)
            assert after.topics["gone#ephemeral"].birth == before.topics["gone#ephemeral"].birth
            assert list(after.store.remains()) == ["over"]
            assert list(after.members) == ["one"]
            actions = after.store.actions()
            assert [each[0] for each in actions] == list(range(1_002, 2, -1) if place.shared else (2, 1, 0))

    run(story())
