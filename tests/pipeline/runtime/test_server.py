from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from srtm.pipeline.runtime import server as servers


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a server that does not exist, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return servers.record_file()


def a_server(pid: int, born: int, port: int = 1) -> servers.Server:
    return servers.Server(pid, born, port, "t", 0.0, 60.0, servers.versions_here())


def test_a_server_is_found_by_its_owner_alone(connect_server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert servers.running_server() == connect_server
    assert servers.record_file().stat().st_mode & 0o077 == 0
    assert servers.start() == connect_server
    monkeypatch.setenv(servers.SWITCH, "off")
    assert servers.running_server() is None


def test_a_server_of_other_versions_is_not_used(
    connect_server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "versions_here", lambda: ["another"])
    assert servers.running_server() is None
    assert servers.recorded_server() == connect_server


@pytest.mark.usefixtures("record")
def test_a_process_that_took_over_the_number_is_neither_used_nor_ended() -> None:
    born = servers.started_at(os.getpid())
    assert born is not None
    servers.write_record(a_server(os.getpid(), born + 1))
    assert servers.recorded_server() is None
    assert servers.stop() is None  # and this test goes on


@pytest.mark.usefixtures("record")
def test_a_server_that_does_not_listen_is_not_used() -> None:
    born = servers.started_at(os.getpid())
    assert born is not None
    servers.write_record(a_server(os.getpid(), born))
    assert servers.recorded_server() is not None
    assert servers.running_server() is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", json.dumps({"pid": 1})])
def test_a_file_that_makes_no_sense_is_no_server(record: Path, content: str) -> None:
    record.write_text(content)
    assert servers.recorded_server() is None


@pytest.mark.spark
def test_a_server_ends_when_nobody_uses_it(record: Path) -> None:
    server = servers.start(idle_s=1)
    deadline = time.monotonic() + 120
    while servers.started_at(server.pid) == server.born:
        assert time.monotonic() < deadline, "it does not end"
        time.sleep(0.1)
    assert not record.exists()
