"""The page: what the controller knows, for a browser. Plain files, nothing from elsewhere, nothing to be built.

In: the controller's application. Out: an application that has the page at its root and passes on what is under /v1, so
that the page asks where it came from. Every answer says what the page may do: load its own files, ask its own origin.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
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
            Mount("/", StaticFiles(directory=_FILES, html=True)),
        ]
    )
    return _Guarded(app)


class _Passed:
    """A route that is the controller's, whatever the method."""

    def __init__(self, controller: ASGIApp) -> None:
        self._controller = controller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._controller(scope, receive, send)


class _Guarded:
    """An application whose every answer has the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if not headers.get("cache-control"):
                    headers["Cache-Control"] = "no-cache"  # a new version is seen at once; ETags keep that cheap
            await send(message)

        await self._app(scope, receive, guarded)
