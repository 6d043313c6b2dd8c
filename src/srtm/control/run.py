"""The controller as a program: discovery over TCP, the API over HTTP, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError

import srtm
from srtm import program
from srtm.control.access.access import Access
from srtm.control.access.guard import Guard
from srtm.control.access.token import Role
from srtm.control.api import metrics, problems, reference
from srtm.control.api import routes as api
from srtm.control.discovery import http as lookup_http
from srtm.control.discovery.registry import Registry
from srtm.control.discovery.tcp import Discovery
from srtm.control.front import Front
from srtm.control.keeping import address
from srtm.control.keeping.keeper import Leader
from srtm.control.leading import Leading
from srtm.control.store import Store
from srtm.errors import ControlError, InputError
from srtm.net.site import Site
from srtm.net.sockets import listen
from srtm.protocol.lookup import PeerInfo
from srtm.protocol.names import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import ASGIApp

    from srtm.control.options import ControllerOptions
    from srtm.control.service import Service

    Page = Callable[[ASGIApp], ASGIApp]  # wraps the API in an application that also serves the page


log = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Served:
    """A running controller's addresses."""

    me: PeerInfo
    page_port: int | None
    turns: asyncio.Task[None]  # ends when a controller with another store has taken over, or the store refuses us


@contextlib.asynccontextmanager
async def serving(options: ControllerOptions, page: Page | None = None) -> AsyncIterator[Served]:
    """Run a controller for the time of a block; with a page, serve that on a port of its own."""
    registry = Registry(options.inactive_after_s, options.tombstone_s)
    keeping = address.keeping(options.store_address, anew=options.recover, lease_s=options.leader_lease_s)
    given = Access(options, Store())
    front = Front(registry, keeping, given)
    leading = Leading(options, registry, keeping, front, app, given)
    if not keeping.shared:  # a store that cannot be used is an error before anybody connects
        await leading.begin(Leader(options.address, ""))
    with contextlib.ExitStack() as ports:
        try:
            _check_access(options, leading.access or given)
            listener, sites = _opened(options, ports, front, page)
        except BaseException:
            await leading.stop()
            raise
        for each in sites:
            each.start()
        me = PeerInfo(options.address, socket.gethostname(), listener.getsockname()[1], sites[0].port, VERSION)
        host = f"[{options.address}]" if ":" in options.address else options.address
        if not keeping.shared:
            leading.start()
        turns = asyncio.create_task(leading.run(Leader(options.address, f"http://{host}:{me.http_port}")))
        try:
            discovery = Discovery(registry, me, admit=leading.admit)
            async with discovery.serving(listener, options.tls(offered=True)):
                yield Served(me, sites[1].port if len(sites) > 1 else None, turns)
        finally:
            turns.cancel()
            await asyncio.gather(turns, return_exceptions=True)
            await leading.stop()
            for each in sites:
                await each.stop()
            await front.close()
            await keeping.close()


def _opened(
    options: ControllerOptions, ports: contextlib.ExitStack, front: ASGIApp, page: Page | None
) -> tuple[socket.socket, list[Site]]:
    """The listener of discovery, and the sites of API and page."""
    try:
        listener = ports.enter_context(listen(options.host, options.tcp_port))
        sites = [Site(front, options.host, options.http_port, options.tls(offered=True))]
        ports.callback(sites[0].close)
        if page is not None and options.web_port is not None:
            sites.append(Site(page(front), options.host, options.web_port, options.tls()))
            ports.callback(sites[1].close)
    except OSError as error:
        raise ControlError(
            f"cannot listen on {options.host}:{options.tcp_port}, :{options.http_port} and :{options.web_port}:"
            f" {error.strerror}; is another controller running? Choose other ports with --tcp-port, --http-port and"
            " --web-port",
        ) from None
    return listener, sites


def _check_access(options: ControllerOptions, access: Access) -> None:
    """Refuse to start if nobody could ever get in, and warn if everybody can."""
    locked = access.closed and not access.has_spare_admin and not len(access.tokens)
    if locked and options.auth_required:
        raise ControlError("--auth-required, but there is no token; start with SRTM_TOKEN, and create tokens with it")
    if locked:
        log.warning(
            "CONTROLLER: its tokens are lost, so nobody may do anything; start with SRTM_TOKEN to create others"
        )
    if access.anonymous.role is Role.ADMIN and options.host not in _LOOPBACK:
        log.warning(
            "CONTROLLER: whoever reaches %s may do everything; set SRTM_TOKEN, or create a token (srtm token create)",
            options.host,
        )


def app(service: Service) -> FastAPI:
    """The HTTP application: nsqlookupd's endpoints at the root, SRTM's under /v1, and /metrics."""
    found = FastAPI(title="SRTM controller", version=srtm.__version__, docs_url=None, redoc_url=None)
    found.add_middleware(Guard, access=service.access)
    found.include_router(api.router(service))
    found.add_exception_handler(InputError, problems.refused)
    found.add_exception_handler(RequestValidationError, problems.unfit)
    found.router.routes += [*lookup_http.routes(service.registry), metrics.route(service.controller)]
    found.router.routes.append(reference.route(found))
    found.router.default = lookup_http.not_found
    return found


async def run(options: ControllerOptions, page: Page | None = None) -> None:
    """Serve until a signal, or until another controller takes over."""
    stopped = program.stop_signal()
    async with serving(options, page) as served:
        ports = {"TCP": served.me.tcp_port, "HTTP": served.me.http_port, "page": served.page_port}
        places = [f"{what} {options.host}:{port}" for what, port in ports.items() if port]
        print(f"controller: {', '.join(places)}", flush=True)
        ends = {asyncio.ensure_future(stopped.wait()), served.turns}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if served.turns.done() and not stopped.is_set():
            served.turns.result()
            raise ControlError(
                "another controller has taken over the brokers; stop one of the two. Brokers follow the newer one"
            )
        for end in ends - {served.turns}:
            end.cancel()
