"""A store's way from a file to NATS and back, with a cluster that runs all the while."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from srtm.cli.app import run
from srtm.control.access.token import Role
from srtm.control.access.tokens import Tokens
from srtm.control.store import Store
from tests.control.keeping.places import nats
from tests.control.processes import Processes, Program, until
from tests.engines import NatsServer

pytestmark = [pytest.mark.needs("nats-server"), pytest.mark.processes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats(tmp_path_factory.mktemp("nats")) as running:
        yield running


def exported(path: Path) -> Any:
    found = json.loads(path.read_text())
    assert found["srtm_store"] == 3
    return found["documents"]


def without_counts(documents: Any) -> Any:
    """What a restart does not change."""
    return {key: value for key, value in documents.items() if not key.startswith(("count/", "member/"))}


def test_a_cluster_moves_to_nats_and_back(tmp_path: Path, server: NatsServer) -> None:
    """The controller stops, its store moves, and it starts again on the other: contracts and shares stay in force."""
    file, bucket = f"sqlite:{tmp_path / 'controller'}", f"{server.url}/moved"
    with ExitStack() as stack:
        world = Processes(tmp_path, stack)
        world.broker("one")
        world.all_alive()
        world.create("t", r=100, b=10)
        until(lambda: world.in_force("one", "t") == 100)
        for number, (source, target) in enumerate([(file, bucket), (bucket, f"sqlite:{tmp_path / 'back'}")]):
            out = tmp_path / f"{number}.json"
            assert run(["store", "export", "--store", source, "--out", str(out)]) == 0  # while it runs
            assert run(["store", "import", str(out), "--store", source, "--force"]) == 1  # not while it runs
            world.controller.stop()
            assert world.in_force("one", "t") == 100
            assert run(["store", "export", "--store", source, "--out", str(out)]) == 0
            assert run(["store", "import", str(out), "--store", target]) == 0
            flags = [each for each in world.controller.arguments if not each.startswith(("--data-path", "--store"))]
            flags = [each for each in flags if each not in (str(tmp_path / "controller"), source)]
            ports = {"--tcp-port": world.controller.tcp, "--http-port": world.controller.http}
            for flag, port in ports.items():
                flags[flags.index(flag) + 1] = str(port)
            world.controller = world._started(Program(*flags, "--store", target))
            until(lambda: world.statuses() == {"one": "alive"})
            assert world.topic("t")["r"] == 100
            assert world.in_force("one", "t") == 100
            again = tmp_path / f"{number}-again.json"
            assert run(["store", "export", "--store", target, "--out", str(again)]) == 0
            assert without_counts(exported(again)) == without_counts(exported(out))
            assert exported(again)["count/epoch"] > exported(out)["count/epoch"]
        assert out.stat().st_mode & 0o077 == 0


def test_a_store_that_is_not_empty_is_replaced_only_by_force(
    tmp_path: Path, server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "a")
    store.next_epoch(7)
    store.note_action(1, "me", "fit", {})
    store.close()
    assert run(["store", "export", "--store", f"sqlite:{tmp_path / 'a'}", "--out", str(tmp_path / "out.json")]) == 0
    for target in (f"sqlite:{tmp_path / 'b'}", f"{server.url}/forced"):
        command = ["store", "import", str(tmp_path / "out.json"), "--store", target]
        assert run(command) == 0
        assert run(command) == 2
        assert "is not empty: it has 2 documents; replace them with --force" in capsys.readouterr().err
        assert run([*command, "--force", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"store": target, "documents": 2, "replaced": 2}


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", "{}", '{"srtm_store": 4, "documents": {}}', '{"srtm_store": 3}']
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text(text)
    assert run(["store", "import", str(tmp_path / "file"), "--store", f"sqlite:{tmp_path / 'a'}"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_what_cannot_be_read_is_named(tmp_path: Path, server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    for store, said in [
        (f"sqlite:{tmp_path / 'none'}", "cannot read a store in"),
        (f"{server.url}/none", "has no bucket 'none'"),
    ]:
        assert run(["store", "export", "--store", store]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "file", "sqlite:", "nsqd://host", "nats://", "nats://h/a.b", "nats://h/a?x=1", "nats://h:x"]
)
def test_an_address_that_is_wrong_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["controller", "--store", text]) == 2
    assert "store" in capsys.readouterr().err


def test_tokens_move_with_a_store_of_one_controller_alone(
    tmp_path: Path, server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new store is as closed as the old one, or it is refused."""
    first, out = Store(tmp_path / "first"), tmp_path / "store.json"
    token, secret = Tokens(first).create("root", Role.ADMIN, 1)
    first.close()
    assert run(["store", "export", "--store", f"sqlite:{tmp_path / 'first'}", "--out", str(out)]) == 0
    assert secret not in out.read_text()
    assert run(["store", "import", str(out), "--store", f"{server.url}/tokens"]) == 2
    assert "cannot check its 1 tokens" in capsys.readouterr().err
    assert run(["store", "import", str(out), "--store", f"sqlite:{tmp_path / 'second'}"]) == 0
    second = Store(tmp_path / "second")
    assert (Tokens(second).find(secret, 2), second.closed) == (token, True)
    second.close()
