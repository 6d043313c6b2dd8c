"""Servers for clients' tests: ours in threads, NSQ's own in processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.broker.conftest import authority, broker, start
from tests.conftest import PARTS

__all__ = ["authority", "broker", "start"]

PATIENCE_S = 10.0


@contextmanager
def program(name: str, folder: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """One of NSQ's programs on ports of its own choice; gives its addresses by protocol."""
    path = PARTS[name].path
    assert path is not None
    output = folder / f"{name}.log"
    listen = ["-tcp-address=127.0.0.1:0", "-http-address=127.0.0.1:0", "-broadcast-address=127.0.0.1"]
    with output.open("w") as log, subprocess.Popen([path, *listen, *arguments], stdout=log, stderr=log) as process:
        try:
            until = time.monotonic() + PATIENCE_S
            found: dict[str, str] = {}
            while len(found) < 2:
                assert time.monotonic() < until, output.read_text()
                time.sleep(0.01)
                for line in output.read_text().splitlines():
                    kind, listening, address = line.partition(": listening on ")
                    if listening:
                        found[kind.rpartition(" ")[2]] = address
            yield found
        finally:
            process.terminate()


@pytest.fixture
def nsqlookupd(tmp_path: Path) -> Iterator[dict[str, str]]:
    with program("nsqlookupd", tmp_path) as found:
        yield found


@pytest.fixture
def nsqd(tmp_path: Path) -> Iterator[str]:
    with program("nsqd", tmp_path, f"-data-path={tmp_path}") as found:
        yield found["TCP"]
