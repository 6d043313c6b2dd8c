"""What outlives a controller, and what a controller makes of it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from srtm.control.controller import Controller
from srtm.control.keeping.keeper import key
from srtm.control.keeping.sqlite import SqliteKeeper
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.errors import ControlError, InputError
from srtm.model.split import within
from srtm.protocol.exchange import Contract, Exchange
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN

CONTRACT = Contract(100_000, 40 * NANO_PER_TOKEN, 2_000_000, "0.999", "lb", "memory", "drop", "none")


def cluster(folder: Path) -> VirtualCluster:
    return VirtualCluster(1, ControllerOptions(lease_s=3.0), Store(folder), brokers=2)


@contextmanager
def edited(folder: Path, at: str) -> Iterator[Any]:
    """A document, to be changed."""
    keeper = SqliteKeeper(folder)
    document = json.loads(keeper.read(at)[at])
    yield document
    keeper.write({at: json.dumps(document).encode()})
    keeper.close()


def test_everything_is_there_again(tmp_path: Path) -> None:
    world = cluster(tmp_path)
    assert world.controller
    world.run(1)
    world.controller.create("t", CONTRACT, world.now_ns)
    world.run(1)
    publishers = [DeclaredPublisher(f"p/{n} ä", 2.5, f"g{n}", "periodic", 3, 1_000) for n in range(6)]
    world.publish("t", publishers)
    world.run(5)
    before = world.controller
    world.store.close()
    after = Controller(ControllerOptions(lease_s=3.0), Store(tmp_path), world.now_ns)
    assert after.state.epoch > before.state.epoch
    topic, kept = before.topics["t"], after.topics["t"]
    assert kept.contract == CONTRACT
    assert kept.layout.publishers == {each.id: each for each in publishers}
    assert (kept.layout.place, kept.opened) == (topic.layout.place, True)
    assert kept.birth == topic.birth
    assert {name: member.incarnation for name, member in after.members.items()} == {
        name: member.incarnation for name, member in before.members.items()
    }


def test_what_was_granted_is_in_the_books_before_it_is_sent(tmp_path: Path) -> None:
    """A controller that dies between the two finds at least that much when it is back."""
    world = cluster(tmp_path / "first")
    assert world.controller
    world.run(1)
    world.controller.create("t", CONTRACT, world.now_ns)
    world.publish("t", [DeclaredPublisher(f"p{n}", 5.0) for n in range(10)])
    sent: dict[str, Exchange] = {}
    for number in range(40):
        world.run(0.05)
        world.controller.tick(world.now_ns)
        world.controller.adapt(world.now_ns)
        sent = {name: world.controller.compose(name) for name in world.brokers}
        left = shutil.copytree(tmp_path / "first", tmp_path / f"as it was {number}")
        store = Store(left)
        (kept,) = store.topics()
        store.close()
        assert within(CONTRACT.bucket, kept.transfer.possible.values())
        for name, said in sent.items():
            grant = said.grants.get("t")
            if grant and grant.share:
                possible = kept.transfer.possible[name]
                assert possible.r_mtps >= grant.share.r_mtps
                assert possible.b_ntok >= grant.share.b_ntok
    assert sent


def test_a_contract_of_an_older_version_gets_the_defaults(tmp_path: Path) -> None:
    store = Store(tmp_path)
    controller = Controller(ControllerOptions(), store, 1)
    controller.create("t", structs.replace(CONTRACT, adapt_window_s=30, adapt_period_s=5, lending="auto"), 1)
    store.close()
    store = Store(tmp_path)
    (kept,) = store.topics()
    assert (kept.contract.adapt_window_s, kept.contract.adapt_period_s, kept.contract.lending) == (30, 5, "auto")
    store.close()
    with edited(tmp_path, key("topic", "t")) as document:
        old = {name: each for name, each in document["contract"].items() if not name.startswith(("adapt_", "lending"))}
        assert len(old) < len(document["contract"])
        document["contract"] = old
    store = Store(tmp_path)
    (kept,) = store.topics()
    store.close()
    assert kept.contract == CONTRACT
    assert (kept.contract.adapt_window_s, kept.contract.adapt_period_s, kept.contract.lending) == (10, 1, "off")


def test_a_publisher_of_an_older_version_is_not_split(tmp_path: Path) -> None:
    store = Store(tmp_path)
    controller = Controller(ControllerOptions(), store, 1)
    controller.create("t", CONTRACT, 1)
    controller.register("t", [DeclaredPublisher("p", 5.0)], 1)
    store.close()
    with edited(tmp_path, key("publisher", "t", "p")) as document:
        for name in ("split", "parts"):
            del document["declared"][name]
    store = Store(tmp_path)
    (kept,) = store.topics()
    store.close()
    assert kept.layout.publishers == {"p": DeclaredPublisher("p", 5.0)}


def test_a_topic_or_publisher_that_was_removed_stays_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    controller = Controller(ControllerOptions(), store, 1)
    controller.joined("one", "h", 1, 2, 1)
    controller.members["one"].status = "alive"
    for name in ("a", "b"):
        controller.create(name, CONTRACT, 1)
        controller.register(name, [DeclaredPublisher("p"), DeclaredPublisher("q")], 1)
    controller.remove("a", 0)
    controller.unregister("b", "p")
    controller.forget("one", 1)
    store.close()
    store = Store(tmp_path)
    (kept,) = store.topics()
    assert kept.name == "b"
    assert list(kept.layout.publishers) == ["q"]
    assert store.members(1.0) == []
    controller = Controller(ControllerOptions(), store, 1)
    with pytest.raises(InputError, match="no publisher 'p'"):
        controller.unregister("b", "p")


@pytest.mark.parametrize("damage", ["nonsense", "cut", "empty", "folder", "newer"])
def test_a_store_that_cannot_be_used_is_named_with_the_remedy(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "controller.sqlite"
    if damage == "folder":
        path.mkdir()
    else:
        store = Store(tmp_path)
        controller = Controller(ControllerOptions(), store, 1)
        for number in range(50):
            controller.create(f"t{number}", CONTRACT, 1)
        store.close()
    if damage == "nonsense":
        path.write_bytes(b"nonsense" * 4096)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:6000])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "newer":
        with sqlite3.connect(path) as db:
            db.execute("UPDATE meta SET value = 99 WHERE key = 'version'")
        db.close()
    with pytest.raises(ControlError) as caught:
        Store(tmp_path)
    assert str(path) in str(caught.value)
    assert "99" in str(caught.value) if damage == "newer" else "--recover" in str(caught.value)


def test_a_store_that_is_set_aside_is_kept(tmp_path: Path) -> None:
    assert SqliteKeeper(tmp_path / "new", anew=True).aside is None
    for number in (1, 2):
        store = Store(tmp_path)
        epoch = store.next_epoch()
        store.close()
        anew = SqliteKeeper(tmp_path, anew=True)
        anew.close()
        aside = anew.aside
        assert aside == tmp_path / f"controller.sqlite.{number}"
        assert aside
        assert aside.exists()
        assert epoch == 1


def test_a_store_has_one_controller_at_a_time(tmp_path: Path) -> None:
    """Not even one that would set it aside takes it from another."""
    first = Store(tmp_path)
    for anew in (False, True):
        with pytest.raises(ControlError, match=f"in use by process {os.getpid()}; give each controller"):
            SqliteKeeper(tmp_path, anew=anew)
    first.next_epoch()
    first.close()
    Store(tmp_path).close()
