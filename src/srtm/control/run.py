"""A controller as a program: brokers register over TCP; HTTP answers whoever asks for them."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from fastapi import FastAPI

import srtm
from srtm import program
from srtm.control import lookup_http
from srtm.control.discovery import Discovery
from srtm.control.registry import Registry
from srtm.errors import ControlError
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
        try:
            listener = ports.enter_context(program.bound(options.host, options.tcp_port))
            site = program.Site(app(registry), options.host, options.http_port)
        except OSError as error:
            raise ControlError(
                f"cannot listen on {options.host}:{options.tcp_port} and :{options.http_port}: {error.strerror};"
                " is another controller running there? choose others with --tcp-port and --http-port",
            ) from None
        me = PeerInfo(options.address, socket.gethostname(), listener.getsockname()[1], site.port, VERSION)
        discovery = Discovery(registry, me)
        site.start()
        try:
            async with discovery.serving(listener):
                yield discovery
        finally:
            await site.stop()


def app(registry: Registry) -> FastAPI:
    """The HTTP application: nsqlookupd's endpoints at the root."""
    found = FastAPI(title="SRTM controller", version=srtm.__version__)
    found.router.routes += lookup_http.routes(registry)
    found.router.default = lookup_http.not_found
    return found


async def run(options: ControllerOptions) -> None:
    """Serve until told to stop."""
    stopped = program.stop_signal()
    async with serving(options) as discovery:
        me = discovery.me
        print(f"controller: TCP {options.host}:{me.tcp_port}, HTTP {options.host}:{me.http_port}", flush=True)
        await stopped.wait()
