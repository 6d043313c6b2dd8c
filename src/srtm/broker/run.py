"""A broker as a program: its loop, its HTTP, its signals, and Python's garbage collector kept out of the way.

The collector stops the loop for as long as it looks at objects, and a broker has many that live long. What is there at
the start is frozen; after that, collections run when the loop has been idle for a while, or when garbage has piled up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING

from srtm import program
from srtm.broker.broker import Broker
from srtm.broker.http.api import app
from srtm.broker.lookup import Registration
from srtm.broker.memory import timed_collections
from srtm.broker.options import tls_of
from srtm.broker.turn import Turn
from srtm.errors import BrokerError, SRTMError
from srtm.net.site import Site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from srtm.broker.options import BrokerOptions
    from srtm.broker.turn import Clock

_IDLE_S = 0.5
_MOST_OBJECTS = 200_000  # new containers that may pile up before they are looked at in spite of traffic
_SWITCH_S = 0.0005  # the loop waits no longer than this for a thread that loads modules


@contextlib.asynccontextmanager
async def serving(
    options: BrokerOptions, clock: Clock = time, turns: Callable[..., Turn] = Turn
) -> AsyncIterator[Broker]:
    """A broker that serves for the time of a block."""
    loop = asyncio.get_running_loop()
    broker = Broker(options, loop, clock, turns=turns)
    registration = Registration(broker)
    sites: list[Site] = []
    try:
        broker.listen()
        sites.append(Site(app(broker, registration), options.host, options.http_port, path=options.http_socket))
        if options.https_port is not None:
            secured = app(broker, registration, tls=True)
            sites.append(Site(secured, options.host, options.https_port, tls_of(options, offered=True)))
    except BrokerError:
        broker.stop()
        raise
    except OSError as error:
        broker.stop()
        for site in sites:
            site.close()
        ports = [options.tcp_port, options.http_port, options.https_port]
        paths = "".join(f" or at {path}" for path in (options.tcp_socket, options.http_socket) if path)
        remedy = "give an address of this machine with --host, and ports that this user may take"
        if error.errno == errno.EADDRINUSE:
            remedy = "is another broker running there? choose others with --tcp-port, --http-port and --https-port"
        raise BrokerError(
            f"cannot listen on {options.host}, ports {', '.join(str(port) for port in ports if port is not None)}"
            f"{paths}: {error.strerror}; {remedy}",
        ) from None
    broker.http_port, broker.https_port = sites[0].port, sites[-1].port if len(sites) > 1 else 0
    for site in sites:
        site.start()
    registration.start()
    try:
        yield broker
    finally:
        await registration.stop()
        if broker.turn.recorder:
            with contextlib.suppress(SRTMError):
                await broker.turn.recorder.stop()
        try:
            broker.stop()
        finally:
            if broker.clients.authority:
                await broker.clients.authority.close()
            for site in sites:
                await site.stop()


async def run(options: BrokerOptions, turns: Callable[..., Turn] = Turn) -> None:
    """Serve until told to stop."""
    stopped = program.stop_signal()
    async with serving(options, turns=turns) as broker:
        ports = {"TCP": broker.tcp_port, "HTTP": broker.http_port, "HTTPS": broker.https_port}
        places = [f"{what} {options.host}:{port}" for what, port in ports.items() if port]
        with timed_collections(), _no_collector():
            tidying = asyncio.create_task(_tidy(broker))
            print(f"broker {options.name}: {', '.join(places)}", flush=True)
            await _load_the_rest(options)
            await stopped.wait()
            tidying.cancel()


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def _load_the_rest(options: BrokerOptions) -> None:
    """While the broker serves already, load what sums up its first second of messages, and what may record them."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    for module in ("numpy", "srtm.broker.recorder") if options.trace_folder else ("numpy",):
        await asyncio.to_thread(import_module, module)
    sys.setswitchinterval(usual_s)
    gc.freeze()


async def _tidy(broker: Broker) -> None:
    seen = 0
    while True:
        await asyncio.sleep(_IDLE_S)
        messages = sum(topic.messages for topic in broker.topics.values())
        young, middle, _ = gc.get_count()
        if young + 700 * middle > _MOST_OBJECTS:
            gc.collect(0)
        elif messages == seen and young:
            gc.collect()
        seen = messages
