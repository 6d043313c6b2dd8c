"""A real controller in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from srtm.control.options import ControllerOptions
from srtm.control.run import serving
from srtm.web import page
from tests.broker.running import in_thread
from tests.control.discovery.transcripts import Service


@contextmanager
def controller(**options: Any) -> Iterator[Service]:
    """A controller with these options, on ports of its own choice."""
    chosen = ControllerOptions(**{"tcp_port": 0, "http_port": 0, **options})
    with in_thread(lambda: serving(chosen)) as (served, _):
        yield Service(served.me.tcp_port, served.me.http_port)


@contextmanager
def controller_with_page(**options: Any) -> Iterator[tuple[Service, str]]:
    """The same with its page; gives its ports, and the address of the page."""
    chosen = ControllerOptions(**{"tcp_port": 0, "http_port": 0, "web_port": 0, **options})
    with in_thread(lambda: serving(chosen, page)) as (served, _):
        yield Service(served.me.tcp_port, served.me.http_port), f"http://127.0.0.1:{served.page_port}/"
