"""Servers for clients' tests: ours in threads, NSQ's own in processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.broker.conftest import authority, broker, each, start

__all__ = ["authority", "broker", "each", "start"]


@pytest.fixture
def nsqd(tmp_path: Path) -> Iterator[str]:
    with programs.nsqd(tmp_path) as (port, _):
        yield f"127.0.0.1:{port}"
