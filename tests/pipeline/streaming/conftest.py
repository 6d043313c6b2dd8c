"""Brokers for tests of the source, a folder for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.streaming.topics import Start, brokers


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with brokers(tmp_path) as found:
        yield found
