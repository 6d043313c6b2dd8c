from __future__ import annotations

import json
from pathlib import Path

import pytest

from srtm.errors import GroupsError
from srtm.model.placement import Broker, Publisher, place
from srtm.workload.groups import read_groups, with_groups, write_groups


def written(path: Path, *entries: object, **more: object) -> Path:
    path.write_text(json.dumps({"groups": entries, **more}))
    return path


def test_what_is_written_is_read_by_topic(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    entries = [
        {"topic": "t", "group": "g-a", "publishers": ["a", "b"], "confidence": 0.9, "anything": "else"},
        {"topic": "u", "group": "g-a", "publishers": ["a", "c"], "confidence": 1},
    ]
    write_groups(path, {"groups": entries, "topics": [{"topic": "lonely"}]})
    assert read_groups(path, "t") == {"a": "g-a", "b": "g-a"}
    assert read_groups(path, "u") == {"a": "g-a", "c": "g-a"}
    assert read_groups(path, "lonely") == {}
    with pytest.raises(GroupsError, match="several topics; choose one: lonely, t, u"):
        read_groups(path)
    with pytest.raises(GroupsError, match="unknown topic 'v'"):
        read_groups(path, "v")
    assert list(tmp_path.iterdir()) == [path]


def test_entries_without_a_topic_count_for_every_topic(tmp_path: Path) -> None:
    path = written(tmp_path / "g.json", {"group": "north", "publishers": ["a", "b"]})
    assert read_groups(path) == read_groups(path, "any") == {"a": "north", "b": "north"}


def test_groups_go_into_placement(tmp_path: Path) -> None:
    path = written(tmp_path / "g.json", {"group": "north", "publishers": ["p0", "p1", "p2", "p3"]})
    publishers = [Publisher(f"p{number}", 10.0, "declared") for number in range(8)]
    regrouped = with_groups(publishers, read_groups(path))
    assert [publisher.group for publisher in regrouped] == ["north"] * 4 + [None] * 4
    placed = place(regrouped, [Broker("b0", 50), Broker("b1", 50)], "srtm")
    assert sorted(placed.broker_of[:4].tolist()) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("north", "entry 0 is 'north', not an object"),
        ({"publishers": ["a"]}, "entry 0: the group must have a name"),
        ({"group": "n", "publishers": "a"}, "group 'n': the publishers must be a list of names"),
        ({"group": "n", "publishers": [1]}, "group 'n': the publishers must be a list of names"),
        ({"group": "n", "publishers": [], "confidence": 2}, "between 0 and 1, not 2"),
        ({"group": "n", "publishers": [], "confidence": None}, "between 0 and 1, not None"),
        ({"group": "n", "publishers": [], "topic": 3}, "entry 0: the topic must be a name"),
    ],
)
def test_what_is_wrong_with_an_entry_is_named(tmp_path: Path, entry: object, told: str) -> None:
    with pytest.raises(GroupsError, match=told):
        read_groups(written(tmp_path / "g.json", entry))


def test_a_publisher_in_two_groups_is_named(tmp_path: Path) -> None:
    one, other = ({"group": name, "publishers": ["a"], "topic": "t"} for name in ("n", "s"))
    with pytest.raises(GroupsError, match="publisher 'a' is in both 'n' and 's'"):
        read_groups(written(tmp_path / "g.json", one, other))
    del one["topic"]
    for entries in ((one, other), (other, one)):
        with pytest.raises(GroupsError, match="publisher 'a' is in both"):
            read_groups(written(tmp_path / "g.json", *entries))


def test_what_is_no_file_of_groups_is_named(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    with pytest.raises(GroupsError, match="cannot read"):
        read_groups(path)
    path.write_text("{")
    with pytest.raises(GroupsError, match="is not JSON"):
        read_groups(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GroupsError, match="is not JSON"):
        read_groups(path)
    path.write_text("[]")
    with pytest.raises(GroupsError, match='an object with a list under "groups"'):
        read_groups(path)
    with pytest.raises(GroupsError, match="and 2 more"):
        read_groups(written(path, *range(7)))
    with pytest.raises(GroupsError, match="cannot write"):
        write_groups(tmp_path / "nowhere" / "g.json", {})
