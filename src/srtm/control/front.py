"""What a controller process answers over HTTP: as the leader itself, and otherwise by asking the leader.

In: requests. Out: answers. nsqlookupd's endpoints are answered by every controller, from its own registry, because
brokers register with all of them. A change is answered when it is stored. If no controller leads, or the leader cannot
tell whether it still leads, the answer is 503 with `Retry-After`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import httpx
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Match, Route, Router

from srtm.control.access.guard import Guard
from srtm.control.discovery import http as lookup_http
from srtm.errors import LeadershipLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from srtm.control.access.access import Access
    from srtm.control.discovery.registry import Registry
    from srtm.control.keeping.keeper import Keeper, Keeping

log = logging.getLogger(__name__)

_SAFE = ("GET", "HEAD", "OPTIONS")
_FORWARDED = "srtm-forwarded"  # header of a request that a controller passed on: it is not passed on again
_HOPS = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
_CONNECT_S = 1.0
_LOOK_S = 0.25  # between checks whether the leader still leads while it is silent
_STORED_S = 5.0  # for a change to be stored
_AGAIN_S = "1"


def unavailable(text: str) -> Response:
    """The answer to a request that may succeed soon."""
    return JSONResponse({"detail": text}, 503, {"Retry-After": _AGAIN_S})


class Gate:
    """The leader's application; changes are answered when they are stored."""

    def __init__(self, app: ASGIApp, keeper: Keeper) -> None:
        self._app = app
        self._keeper = keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["method"] in _SAFE:
            await self._app(scope, receive, send)
            return
        if not self._keeper.leads:
            text = "this controller has lost its store, so it cannot change anything now; ask again"
            await unavailable(text)(scope, receive, send)
            return
        refused = False

        async def when_stored(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                try:
                    async with asyncio.timeout(_STORED_S):
                        await self._keeper.committed()
                except (LeadershipLost, TimeoutError):
                    refused = True
                    text = "the change may not be stored, as this controller lost its store or its lead; ask again"
                    await unavailable(text)(scope, receive, send)
            if not refused:
                await send(message)

        await self._app(scope, receive, when_stored)


class Front:
    """The application of a controller process, whoever leads."""

    def __init__(self, registry: Registry, keeping: Keeping, access: Access) -> None:
        """`access` knows the credentials of the options, which all controllers have; the leader's knows tokens, too."""
        self._keeping = keeping
        self._leading: ASGIApp | None = None
        self._keeper: Keeper | None = None  # of a shared store, while this process leads
        self._own = [*lookup_http.routes(registry), Route("/metrics", self._metrics)]
        self._guarded = Guard(Router(self._own), access)
        self._client: httpx.AsyncClient | None = None

    def lead(self, app: ASGIApp | None, keeper: Keeper | None = None) -> None:
        """Answer as the leader from now on, with this application; None if another controller leads."""
        self._leading = Gate(app, keeper) if app is not None and keeper is not None else app
        self._keeper = keeper

    async def close(self) -> None:
        """Close the connections to the leader."""
        if self._client is not None:
            await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http" and scope["path"] == "/v1/leader" and scope["method"] in _SAFE:
            await self._leader()(scope, receive, send)
        elif self._leading is not None:
            await self._leading(scope, receive, send)
        elif scope["type"] != "http" or any(route.matches(scope)[0] is not Match.NONE for route in self._own):
            await self._guarded(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    def _leader(self) -> Response:
        found = self._keeping.leader
        shown = {"name": found.name, "url": found.url} if found is not None else None
        leads = self._leading is not None and (self._keeper is None or self._keeper.leads)
        return JSONResponse({"leader": shown, "leads": leads})

    async def _metrics(self, _: Request) -> Response:
        text = "# HELP srtm_cluster_leads Whether this controller leads.\n# TYPE srtm_cluster_leads gauge\n"
        return PlainTextResponse(text + "srtm_cluster_leads 0\n", media_type="text/plain; version=0.0.4")

    # Passing on.

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the leader, and its answer back."""
        leader = self._keeping.leader
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        if leader is None or any(name == _FORWARDED for name, _ in headers):
            await unavailable("no controller leads at the moment; ask again")(scope, receive, send)
            return
        url = leader.url + scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            url += "?" + scope["query_string"].decode("latin-1")
        host = scope["client"][0] if scope.get("client") else ""
        sent = [(name, value) for name, value in headers if name not in _HOPS]
        sent += [(_FORWARDED, "1"), ("x-forwarded-for", host)]
        begun = False
        try:
            request = self._http().build_request(scope["method"], url, headers=sent, content=_body(scope, receive))
            answer = await self._while_leading(leader.url, self._http().send(request, stream=True))
            async with aclosing(answer):
                begun = True
                await send(_start(answer))
                parts = answer.aiter_raw()
                while (part := await self._while_leading(leader.url, anext(parts, None))) is not None:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as problem:
            log.info("CONTROLLER: cannot pass a request on to %s: %s", leader.url, problem or type(problem).__name__)
            if begun:
                raise  # the connection is cut, so the client does not take what it has for the whole
            text = f"the controller that leads ({leader.url}) does not answer; ask again"
            await unavailable(text)(scope, receive, send)

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_S), trust_env=False)
        return self._client

    async def _while_leading(self, url: str, work: Awaitable[Any]) -> Any:
        """The result of some work with the leader; TimeoutError if it leads no longer before that."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
                leader = self._keeping.leader
                if leader is None or leader.url != url:
                    raise TimeoutError("it leads no longer")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _body(scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
    """The body of a request, part by part."""
    more = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
    while more:
        message = await receive()
        more = message.get("more_body", False)
        if body := message.get("body", b""):
            yield body


def _start(answer: httpx.Response) -> Message:
    headers = [(name, value) for name, value in answer.headers.raw if name.decode("latin-1").lower() not in _HOPS]
    return {"type": "http.response.start", "status": answer.status_code, "headers": headers}
