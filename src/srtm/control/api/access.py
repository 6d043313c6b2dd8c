"""`/v1/session` and `/v1/tokens`: logging in to the page, and the tokens of people, programs and brokers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from srtm.control.access.guard import identity_of, session_in
from srtm.control.access.sessions import cookie
from srtm.control.access.token import Role
from srtm.control.api.actions import noted
from srtm.control.api.schema import Refusal
from srtm.control.clock import now_ns
from srtm.errors import InputError
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.control.access.access import Access, Identity
    from srtm.control.service import Service


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LoginIn(_Strict):
    """A login to the page."""

    token: Annotated[str, Field(min_length=1, max_length=512, description="secret of a token")]


class TokenIn(_Strict):
    """A token to make."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    role: Literal["viewer", "operator", "admin", "broker"]
    expires_s: Annotated[float | None, Field(gt=0, le=100 * 365 * 86_400, allow_inf_nan=False)] = Field(
        None, description="seconds until it expires; null: never"
    )


def _described(identity: Identity, access: Access) -> dict[str, Any]:
    """An identity as the page needs it."""
    role = identity.role.value if identity.role else None
    return {"name": identity.name, "role": role, "closed": access.closed, "open": access.anonymous.role is Role.ADMIN}


def add_routes(api: APIRouter, changes: APIRouter, service: Service) -> None:
    """Add the endpoints."""
    access, controller = service.access, service.controller

    @api.get("/session")
    async def session(request: Request) -> dict[str, Any]:
        """Get the name and role of the credential of this request, and whether requests need one."""
        return _described(identity_of(request), access)

    @changes.post("/session")
    async def log_in(wish: LoginIn, request: Request, response: Response) -> dict[str, Any]:
        """Log in to the page: exchange a token for a session cookie, which scripts cannot read."""
        begun = access.log_in(wish.token, now_ns())
        if begun is None:
            raise HTTPException(401, "the token is wrong, expired or revoked")
        identity, value = begun
        response.headers["Set-Cookie"] = cookie(value, secure=request.url.scheme == "https")
        response.headers["Cache-Control"] = "no-store"
        return _described(identity, access)

    @changes.delete("/session", status_code=204)
    async def log_out(request: Request, response: Response) -> None:
        """Log out: end the session of this request's cookie."""
        access.sessions.end(session_in(request.headers))
        response.headers["Set-Cookie"] = cookie("", secure=request.url.scheme == "https")

    @api.get("/tokens")
    async def tokens() -> dict[str, Any]:
        """List all tokens, without their secrets."""
        return {"tokens": [token.described(now_ns()) for token in access.tokens.all()]}

    @changes.post("/tokens", status_code=201, responses={409: {"model": Refusal, "description": "not possible now"}})
    async def create(wish: TokenIn, request: Request, response: Response) -> dict[str, Any]:
        """Make a token; its secret is in this answer and nowhere else."""
        lasts_ns = None if wish.expires_s is None else max(1, round(wish.expires_s * NS_PER_S))
        try:
            token, secret = access.tokens.create(
                wish.name, Role(wish.role), now_ns(), lasts_ns, spare_admin=access.has_spare_admin
            )
        except InputError as problem:
            raise HTTPException(409, str(problem)) from None
        response.headers["Cache-Control"] = "no-store"
        noted(controller, request, "create token", name=token.name, id=token.id, role=token.role.value)
        return {**token.described(now_ns()), "secret": secret}

    @changes.delete("/tokens/{name}", status_code=204, responses={409: {"description": "the last token of an admin"}})
    async def remove(name: str, request: Request) -> None:
        """Revoke a token, and end its sessions."""
        if not any(token.name == name for token in access.tokens.all()):
            raise HTTPException(404, f"unknown token {name!r}; srtm token ls lists them")
        try:
            token = access.tokens.remove(name, spare_admin=access.has_spare_admin)
        except InputError as problem:
            raise HTTPException(409, str(problem)) from None
        noted(controller, request, "remove token", name=token.name, id=token.id, role=token.role.value)
