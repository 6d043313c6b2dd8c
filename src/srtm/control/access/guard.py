"""The guard of the HTTP application: every request passes it, before anything of its body is read.

In: requests. Out: those that may be made, with the identity of their maker in the scope; 401 or 403 for the others. A
request that changes something must come from the page of this very address, if it comes from a page at all; one that a
cookie vouches for must prove that it does.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from srtm.control.access.access import Identity
from srtm.control.access.rules import rule_of
from srtm.control.access.sessions import COOKIE
from srtm.control.clock import now_ns
from srtm.net.site import CERTIFIED

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from srtm.control.access.access import Access
    from srtm.control.access.rules import Who

_KEY: Final = "srtm.identity"
_LOGIN: Final = 4096  # bytes of a request without a credential, once the controller needs one
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_ASK: Final = {"WWW-Authenticate": 'Bearer realm="SRTM"'}


class Guard:
    """An application that answers only requests that may be made."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        session = session_in(headers)
        identity = self._access.identify(
            headers.get("authorization", ""), session, now_ns(), scope.get(CERTIFIED, frozenset())
        )
        refused = _cross_origin(scope["method"], headers, identity) or _denied(scope, identity, headers)
        if refused is not None:
            await refused(scope, receive, send)
            return
        scope[_KEY] = identity
        await self._app(scope, receive if identity.role is not None else _bounded(receive), send)


def _bounded(receive: Receive) -> Receive:
    """Read no more of a stranger's request than a login has."""
    read = 0

    async def bounded() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > _LOGIN:
            raise HTTPException(413, f"the body exceeds {_LOGIN} bytes; send a credential, or log in first")
        return message

    return bounded


def still_allowed(request: Request, access: Access) -> Callable[[], bool]:
    """Whether a request that takes long may still be made: its token may be revoked meanwhile."""
    authorization, session = request.headers.get("authorization", ""), session_in(request.headers)
    who, names = rule_of(request.method, request.scope["path"]), request.scope.get(CERTIFIED, frozenset())
    return lambda: access.identify(authorization, session, now_ns(), names).may(who)


def identity_of(request: Request) -> Identity:
    """The maker of a request that the guard has let through."""
    found = request.scope[_KEY]
    assert isinstance(found, Identity)
    return found


def session_in(headers: Headers) -> str:
    """The session cookie of a request, or an empty text."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _denied(scope: Scope, identity: Identity, headers: Headers) -> JSONResponse | None:
    who = rule_of(scope["method"], scope["path"])
    if identity.may(who):
        return None
    if identity.name is None:
        shown = "wrong, expired or revoked" if headers.get("authorization") else "missing"
        detail = f"the token is {shown}; send one that {_least(who)} has, as Authorization: Bearer …"
        return JSONResponse({"detail": detail}, 401, _ASK)
    role = identity.role.value if identity.role else "none"
    detail = f"token {identity.name!r} has the role {role}; this takes a token that {_least(who)} has"
    return JSONResponse({"detail": detail}, 403)


def _least(who: Who) -> str:
    """The role that just suffices, in words."""
    roles = {role.value for role in who or ()}
    return next((text for role, text in _LEAST.items() if role in roles), "anyone")


_LEAST: Final = {"viewer": "a viewer", "operator": "an operator", "admin": "an admin"}


def _cross_origin(method: str, headers: Headers, identity: Identity) -> JSONResponse | None:
    if method in _SAFE:
        return None
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and _place(origin) != headers.get("host"):
        said = origin.encode(errors="replace").decode()
        return JSONResponse(
            {"detail": f"cross-origin request from {said}: only the controller's own page may make changes"}, 403
        )
    if identity.by_cookie and origin is None and site != "same-origin":
        return JSONResponse(
            {"detail": "a session is for the controller's own page; programs send Authorization: Bearer …"}, 403
        )
    return None


def _place(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
