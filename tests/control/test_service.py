"""How a controller takes refusals of brokers: by their code, whatever the text says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from srtm.control.clock import now_ns
from srtm.control.controller import Controller
from srtm.control.discovery.registry import Registry
from srtm.control.options import ControllerOptions
from srtm.control.service import Service
from srtm.control.store import Store
from srtm.protocol.exchange import refusal_code


@contextmanager
def broker_that_refuses(status: int, body: bytes) -> Iterator[int]:
    """An HTTP server with this answer to everything; gives its port."""

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Not on the tests' output."""

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "refusal", "superseded", "known", "odd"),
    [
        pytest.param(409, {"message": "anything", "code": "OLD_EPOCH"}, True, True, 0, id="old epoch"),
        pytest.param(409, {"message": "anything", "code": "NOT_MANAGED"}, False, False, 0, id="not managed"),
        pytest.param(404, {"message": "NOT_FOUND"}, False, False, 0, id="a stock nsqd"),
        pytest.param(401, {"message": "OLD_EPOCH: no", "code": "UNAUTHORIZED"}, False, True, 1, id="another code"),
        pytest.param(409, {"message": "OLD_EPOCH: no"}, False, True, 1, id="a text alone"),
        pytest.param(500, "OLD_EPOCH", False, True, 1, id="not a refusal"),
    ],
)
def test_a_refusal_is_recognised_by_its_code(
    status: int, refusal: Any, superseded: bool, known: bool, odd: int
) -> None:
    async def story(port: int) -> None:
        controller = Controller(ControllerOptions(), Store(), now_ns())
        service = Service(controller, Registry(300, 45))
        controller.joined("one", "127.0.0.1", 1, port, now_ns())
        member = controller.members["one"]
        await service._exchange(member)
        await service.stop()
        assert service.superseded.is_set() is superseded
        assert ("one" in controller.members) is known
        assert member.link.oddities == odd

    with broker_that_refuses(status, json.dumps(refusal).encode()) as port:
        asyncio.run(story(port))


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b'{"code": "OLD_EPOCH"}', b'{"message": 1}', b"\xff", b"[" * 9999]
)
def test_what_is_not_a_refusal_has_no_code(body: bytes) -> None:
    assert refusal_code(body) is None
