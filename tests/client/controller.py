"""A small controller over real HTTP: it assigns publishers as a test says, and pushes the brokers of topics."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request  # noqa: TC002 - routes are told apart by it
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PATIENCE_S = 30.0  # a machine that is busy with other things answers late


class Controller:
    """Publishers go where `target` says, unless they cannot reach it; then to the first broker that is left."""

    def __init__(self, brokers: dict[str, str]) -> None:
        self.brokers = dict(brokers)
        self.target = next(iter(brokers), "")
        self.placed: dict[str, str] = {}  # broker of each publisher
        self.specs: dict[str, dict[str, Any]] = {}
        self.topics: dict[str, dict[str, Any]] = {}
        self.requests: list[dict[str, Any]] = []
        self.removed: list[str] = []
        self.alive: set[str] = set()  # brokers that it has seen to be alive, whatever publishers report
        self.token: str | None = None
        self.port = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._changes: list[asyncio.Event] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listed(self) -> dict[str, str]:
        """The brokers that have publishers, or may get some."""
        names = {*self.placed.values(), self.target} & self.brokers.keys()
        return {name: self.brokers[name] for name in sorted(names)}

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/topics/{topic}/publishers", self._publishers, methods=["POST"]),
                Route("/v1/topics/{topic}/publishers/{id}", self._remove, methods=["DELETE"]),
                Route("/v1/topics/{topic}/watch", self._watch),
                Route("/v1/topics/{topic}", self._topic, methods=["GET", "PUT"]),
            ]
        )

    async def _publishers(self, request: Request) -> Response:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"detail": "give the controller's token"}, 401)
        asked = await request.json()
        self.requests.append(asked)
        lost = set(asked["lost"]) - self.alive
        left = {name: address for name, address in self.brokers.items() if name not in lost}
        if not left:
            return JSONResponse({"detail": "no broker is registered"}, 503)
        for spec in asked["publishers"]:
            name = self.placed.get(spec["id"], self.target)
            self.placed[spec["id"]] = name if name in left else next(iter(left))
            self.specs[spec["id"]] = spec
        self._changed()
        places = {
            spec["id"]: {"broker": (name := self.placed[spec["id"]]), "address": self.brokers[name]}
            for spec in asked["publishers"]
        }
        topic = request.path_params["topic"]
        return JSONResponse({"topic": topic, "managed": True, "publishers": places, "brokers": self.listed()})

    async def _remove(self, request: Request) -> Response:
        self.removed.append(request.path_params["id"])
        self.placed.pop(request.path_params["id"], None)
        return Response(status_code=204)

    async def _topic(self, request: Request) -> Response:
        name = request.path_params["topic"]
        if request.method == "PUT":
            self.topics[name] = await request.json()
        if name not in self.topics:
            return JSONResponse({"detail": f"there is no topic {name!r}"}, 404)
        return JSONResponse(self.topics[name])

    async def _watch(self, request: Request) -> Response:
        topic = request.path_params["topic"]

        self.loop = asyncio.get_running_loop()

        async def events() -> AsyncIterator[str]:
            change = asyncio.Event()
            self._changes.append(change)
            try:
                last = None
                while True:
                    change.clear()
                    if (now := self.listed()) != last:
                        last = now
                        yield f": a comment\n\nevent: brokers\ndata: {json.dumps({'topic': topic, 'brokers': now})}\n\n"
                        yield 'event: news\ndata: {"of": "tomorrow"}\n\n'
                    await change.wait()
            finally:
                self._changes.remove(change)

        return StreamingResponse(events(), media_type="text/event-stream")

    def _changed(self) -> None:
        for change in self._changes:
            change.set()

    def change(self) -> None:
        """Tell those who watch, from any thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._changed)


@contextmanager
def controlling(controller: Controller) -> Iterator[Controller]:
    """The controller serves, at the port that it had before if any."""
    listener = socket.create_server(("127.0.0.1", controller.port))
    controller.port = listener.getsockname()[1]
    config = uvicorn.Config(
        controller.app(), log_level="error", lifespan="off", access_log=False, timeout_graceful_shutdown=0
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield controller
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()
    assert not thread.is_alive()
