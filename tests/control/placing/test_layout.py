"""Where publishers belong: one mapping, one way to change it, one module that does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import srtm.control
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.placing.layout import Layout, Places
from srtm.control.reports import Seen
from srtm.control.store import Store
from srtm.errors import InputError
from srtm.protocol.exchange import Contract, Second
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN


def test_places_are_assigned_and_taken_away() -> None:
    place = Places("t", {"a": "one"})
    place.assign({"b": "one", "c": "two"}, "registered")
    place.assign({"a": "two", "b": None, "stranger": None}, "moved")
    assert place == {"a": "two", "c": "two"}
    assert (place.at("two"), place.at("one"), place.brokers) == (["a", "c"], [], {"two"})
    assert (len(place), "b" in place, place.get("b")) == (2, False, None)


def test_only_placing_changes_them() -> None:
    root = Path(srtm.control.__file__).parent
    callers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "assign"
    }
    assert callers == {"placing/placing.py"}


def test_bursts_are_counted_by_broker_and_group() -> None:
    layout = Layout(Places("t", {"a": "one", "b": "one", "c": "two", "d": "one"}))
    for name, group, batch in (("a", "g", 2), ("b", "g", 3), ("c", "g", 4), ("d", None, 1)):
        layout.publishers[name] = DeclaredPublisher(name, 10.0, group, batch=batch)
    assert layout.bursts() == {"one": 5, "two": 4}
    assert layout.rates() == {"one": 30.0, "two": 10.0}


def test_a_publisher_connected_elsewhere_is_misplaced() -> None:
    layout = Layout(Places("t", {"a": "one", "b": "one"}))
    layout.seen["two"].roll = frozenset({"a", "stranger"})
    layout.seen["one"].roll = frozenset({"b"})
    assert layout.misplaced() == {"two": {"a"}}


def test_the_second_in_which_publishers_move_says_nothing_about_rates() -> None:
    layout, seen = Layout(Places("t")), Seen()
    layout.seen["one"] = seen
    for number in (7, 8, 9, 10):
        if number == 9:
            layout.forget_rates()
        seen.hear(Second(number, 100 * number, 0, 1, 0, 0, [], []), 0, 10)
    assert seen.mean_mps == 1_000


def test_publishers_are_not_moved_to_a_draining_broker() -> None:
    world = VirtualCluster(1, ControllerOptions(), Store(), brokers=2)
    world.run(1)
    assert world.controller
    topic = world.controller.create("t", Contract(100_000, 10 * NANO_PER_TOKEN, fit="none"), world.now_ns)
    world.publish("t", [DeclaredPublisher("p", 5.0)])
    world.run(1)
    here = topic.layout.place["p"]
    (there,) = world.brokers.keys() - {here}
    world.controller.drain(there, world.now_ns)
    with pytest.raises(InputError, match=f"cannot move publishers to broker '{there}': it is draining"):
        world.controller.move("t", ["p"], there, world.now_ns)
    world.controller.drain(there, world.now_ns, on=False)
    world.controller.move("t", ["p"], there, world.now_ns)
    world.run(1)
    publisher = world.publishers["p"]
    assert topic.layout.place["p"] == there
    assert publisher.broker
    assert publisher.broker.name == there
