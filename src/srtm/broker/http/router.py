"""Finding the endpoint of a request, and nsqd's answers where there is none: 404, 405, OPTIONS and redirects.

In: a table of pages by path and method. Out: an ASGI application. Like nsqd's router, it sends a client that wrote
`/ping/` or `/PING` to `/ping`, and lists a path's methods in `Allow`.
"""

from __future__ import annotations

from html import escape
from posixpath import normpath
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from srtm.broker.http.request import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    Page = Callable[[Request], Awaitable[Response]]
    Methods = Mapping[str, Page]

_NSQ = {"X-NSQ-Content-Type": "nsq; version=1.0"}


class Json(JSONResponse):
    """A document, labelled as nsqd labels it."""

    media_type = "application/json; charset=utf-8"


class Router:
    """Pages by path and method; a path that ends with `/` takes one more part, which the page finds in `path_params`.

    Answers of the paths in `plain` go without nsqd's header, as that of its `/ping` does.
    """

    def __init__(self, pages: Mapping[str, Methods], plain: frozenset[str]) -> None:
        self._pages = pages
        self._plain = plain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path, method = request.scope["path"], request.method
        if path == "*":
            return Response()
        found, part = self._find(path)
        page = found.get(method)
        if page is not None:
            request.scope["path_params"] = {"part": part}
            response = await _carried_out(page, request)
        elif (location := self._elsewhere(path, method)) is not None:
            return _redirect(request, location)
        elif found and method == "OPTIONS":
            return Response(headers=_allow(found))
        elif found:
            response = Json({"message": "METHOD_NOT_ALLOWED"}, 405, _allow(found))
        else:
            response = Json({"message": "NOT_FOUND"}, 404)
        if path not in self._plain or response.status_code != 200:
            response.headers.update(_NSQ)
        return response

    def _find(self, path: str) -> tuple[Methods, str]:
        if path in self._pages and not path.endswith("/"):
            return self._pages[path], ""
        head, slash, part = path.rpartition("/")
        return (self._pages.get(head + slash, {}), part) if part else ({}, "")

    def _elsewhere(self, path: str, method: str) -> str | None:
        """The path that was meant, if only case, a slash at the end or dots differ, and the method fits it."""
        meant = "/" + normpath(path).lstrip("/")
        known, part = self._find(meant.lower())
        if method not in known:
            return None
        kept = len(meant) - len(part)  # the last part may be a name
        return meant[:kept].lower() + meant[kept:]


def _allow(found: Methods) -> dict[str, str]:
    return {"Allow": ", ".join(sorted([*found, "OPTIONS"]))}


def _redirect(request: Request, path: str) -> Response:
    location = path + (f"?{asked}" if (asked := request.scope["query_string"].decode("latin-1")) else "")
    if request.method != "GET":
        return Response(status_code=307, headers={"Location": location})
    text = f'<a href="{escape(location)}">Moved Permanently</a>.\n\n'
    return Response(text, 301, {"Location": location, "Content-Type": "text/html; charset=utf-8"})


async def _carried_out(page: Page, request: Request) -> Response:
    try:
        return await page(request)
    except ClientDisconnect:  # before the end of its body: no one reads the answer
        return Response(status_code=400)
    except Refused as problem:
        document: dict[str, Any] = {"message": str(problem)} | ({"code": problem.code} if problem.code else {})
        return Json(document, problem.status)


def tls_required(https_port: Callable[[], int]) -> ASGIApp:
    """An application that answers everything as nsqd does to plain HTTP if it requires TLS."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        document = {"message": "TLS_REQUIRED", "https_port": https_port()}
        await Json(document, 403, _NSQ)(scope, receive, send)

    return refuse
