"""The web page of the controller: plain files, no build step, nothing loaded from other hosts.

In: the controller's application. Out: an application that serves the page at its root and passes requests under /v1 to
the controller, so that the page talks to one origin. A content security policy limits the page to that origin.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from srtm.model import defaults
from srtm.model.placement import POLICIES

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FILES = Path(__file__).parent / "static"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def page(controller: ASGIApp) -> ASGIApp:
    """The page in front of a controller."""
    app = Starlette(
        routes=[
            Route("/v1/{path:path}", _Passed(controller)),
            Route("/policies.json", _policies),
            Mount("/", StaticFiles(directory=_FILES, html=True)),
        ]
    )
    return _Guarded(app)


async def _policies(_: Request) -> JSONResponse:
    """The policies that exist, the default first."""
    return JSONResponse({"policies": sorted(POLICIES, key=lambda name: name != defaults.POLICY)})


class _Passed:
    """A route that passes every method to the controller."""

    def __init__(self, controller: ASGIApp) -> None:
        self._controller = controller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._controller(scope, receive, send)


class _Guarded:
    """An application that adds the security headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if not headers.get("cache-control"):
                    headers["Cache-Control"] = "no-cache"  # a new version shows at once; ETags keep that cheap
            await send(message)

        await self._app(scope, receive, guarded)
