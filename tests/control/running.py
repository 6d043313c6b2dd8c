"""A real controller in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from srtm.control.options import ControllerOptions
from srtm.control.run import serving
from tests.broker.running import in_thread
from tests.control.transcripts import Service


@contextmanager
def controller(**options: Any) -> Iterator[Service]:
    """A controller with these options, on ports of its own choice."""
    chosen = ControllerOptions(**{"tcp_port": 0, "http_port": 0, **options})
    with in_thread(lambda: serving(chosen)) as (discovery, _):
        yield Service(discovery.me.tcp_port, discovery.me.http_port)
