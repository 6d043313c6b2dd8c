"""A controller as a program: brokers register over TCP; HTTP answers whoever asks for them, or wants something."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError

import srtm
from srtm import program
from srtm.control import api, lookup_http
from srtm.control.clock import now_ns
from srtm.control.controller import Controller
from srtm.control.discovery import Discovery
from srtm.control.registry import Registry
from srtm.control.service import Service
from srtm.control.store import Store
from srtm.errors import ControlError, InputError
from srtm.protocol.lookup import PeerInfo
from srtm.protocol.names import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from srtm.control.options import ControllerOptions


@contextlib.asynccontextmanager
async def serving(options: ControllerOptions) -> AsyncIterator[Discovery]:
    """A controller that serves for the time of a block."""
    registry = Registry(options.inactive_after_s, options.tombstone_s)
    with contextlib.ExitStack() as ports:
        service = Service(_controller(options, ports), registry)
        try:
            listener = ports.enter_context(program.bound(options.host, options.tcp_port))
            site = program.Site(app(service), options.host, options.http_port)
        except OSError as error:
            raise ControlError(
                f"cannot listen on {options.host}:{options.tcp_port} and :{options.http_port}: {error.strerror};"
                " is another controller running there? choose others with --tcp-port and --http-port",
            ) from None
        me = PeerInfo(options.address, socket.gethostname(), listener.getsockname()[1], site.port, VERSION)
        discovery = Discovery(registry, me)
        site.start()
        service.start()
        try:
            async with discovery.serving(listener):
                yield discovery
        finally:
            await service.stop()
            await site.stop()


def _controller(options: ControllerOptions, ends: contextlib.ExitStack) -> Controller:
    if options.recover and options.data_path is not None:
        aside = Store.set_aside(options.data_path)
        if aside is not None:
            print(f"controller: the old store is now {aside}", flush=True)
    store = Store(options.data_path)
    ends.callback(store.close)
    # An epoch is later than any other, also than those of a store that was lost.
    controller = Controller(options, store, now_ns(), first_epoch=int(time.time()))
    if options.recover:
        controller.recall(now_ns())
    return controller


def app(service: Service) -> FastAPI:
    """The HTTP application: nsqlookupd's endpoints at the root, SRTM's under /v1."""
    found = FastAPI(title="SRTM controller", version=srtm.__version__)
    found.include_router(api.router(service))
    found.add_exception_handler(InputError, api.refused)
    found.add_exception_handler(RequestValidationError, api.unfit)
    found.router.routes += lookup_http.routes(service.registry)
    found.router.default = lookup_http.not_found
    return found


async def run(options: ControllerOptions) -> None:
    """Serve until told to stop."""
    stopped = program.stop_signal()
    async with serving(options) as discovery:
        me = discovery.me
        print(f"controller: TCP {options.host}:{me.tcp_port}, HTTP {options.host}:{me.http_port}", flush=True)
        await stopped.wait()
