"""NSQ's own programs on ports of their own choice, and how to ask them."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.broker.running import PATIENCE_S, fetch
from tests.conftest import PARTS

_PORTS = r"(?=.*TCP: listening on \S+:(\d+))(?=.*HTTP: listening on \S+:(\d+))"


@contextmanager
def program(name: str, log: Path, pattern: str, *flags: str) -> Iterator[re.Match[str]]:
    """A program of NSQ's, once its log matches."""
    with log.open("w") as stderr:
        process = subprocess.Popen([PARTS[name].path or "", *flags], stderr=stderr)
    try:
        until = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, log.read_text(), re.DOTALL)):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.01)
        yield found
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def nsqlookupd(folder: Path, *more: str, tcp: int = 0, http: int = 0) -> Iterator[tuple[int, int]]:
    """A real nsqlookupd; gives its ports for TCP and HTTP."""
    flags = [f"--tcp-address=127.0.0.1:{tcp}", f"--http-address=127.0.0.1:{http}", "--broadcast-address=127.0.0.1"]
    with program("nsqlookupd", folder / "nsqlookupd.log", _PORTS, *flags, *more) as ports:
        yield int(ports[1]), int(ports[2])


@contextmanager
def nsqd(folder: Path, *more: str) -> Iterator[tuple[int, int]]:
    """A real nsqd; gives its ports for TCP and HTTP."""
    flags = ["--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--broadcast-address=127.0.0.1"]
    with program("nsqd", folder / "nsqd.log", _PORTS, *flags, f"--data-path={folder}", *more) as ports:
        yield int(ports[1]), int(ports[2])


@contextmanager
def nsqadmin(folder: Path, lookupd_http: int) -> Iterator[int]:
    """A real nsqadmin; gives its port."""
    flags = [f"--lookupd-http-address=127.0.0.1:{lookupd_http}", "--http-address=127.0.0.1:0"]
    with program("nsqadmin", folder / "nsqadmin.log", r"HTTP: listening on \S+:(\d+)", *flags) as found:
        yield int(found[1])


def ask(port: int, path: str) -> Any:
    """The JSON at a path; {} where there is none."""
    status, body = fetch(urllib.request.Request(f"http://127.0.0.1:{port}{path}"))
    return json.loads(body) if status == 200 else {}


def post(port: int, path: str, body: bytes = b"") -> int:
    """The status of a POST."""
    return fetch(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body, method="POST"))[0]


def wait_for(holds: Callable[[], object]) -> None:
    """Until something is true."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
