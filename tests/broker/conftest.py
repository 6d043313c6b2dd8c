"""A broker for each test, or one with options of its own.

Tests marked `memory` get brokers in memory and in virtual time; `each` runs a test with both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.broker.authority import Authority
from tests.broker.running import Running, in_memory, running
from tests.engines import NatsServer, Nsqd

Start = Callable[..., Running]


@contextmanager
def _starting(kind: Callable[..., AbstractContextManager[Running]]) -> Iterator[Start]:
    with ExitStack() as stack:

        def get(**options: Any) -> Running:
            return stack.enter_context(kind(**options))

        yield get


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    with _starting(in_memory if request.node.get_closest_marker("memory") else running) as get:
        yield get


@pytest.fixture
def start_on_sockets() -> Iterator[Start]:
    with _starting(running) as get:
        yield get


@pytest.fixture
def broker(start: Start) -> Running:
    return start()


@pytest.fixture(params=["memory", "sockets"])
def each(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A broker in memory, and then one on a real socket."""
    with in_memory() if request.param == "memory" else running() as found:
        yield found


@pytest.fixture
def authority() -> Iterator[Authority]:
    found = Authority()
    found.thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    found.thread.join()


@pytest.fixture(
    params=[
        pytest.param("nsqd", marks=pytest.mark.needs("nsqd")),
        pytest.param("nats", marks=pytest.mark.needs("nats-server")),
    ]
)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A server of each engine; not started yet, stopped in the end."""
    server = Nsqd(tmp_path) if request.param == "nsqd" else NatsServer(tmp_path)
    yield server
    server.kill()
