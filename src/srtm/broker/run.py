"""A broker as a program: its loop, its HTTP, its signals, and Python's garbage collector kept out of the way.

The collector stops the loop for as long as it looks at objects, and a broker has many that live long. What is there at
the start is frozen; after that, collections run when the loop has been idle for a while, or when garbage has piled up.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn

from srtm.broker.http import app
from srtm.broker.ioloop import Broker
from srtm.errors import BrokerError, SRTMError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from srtm.broker.options import BrokerOptions

_IDLE_S = 0.5
_MOST_OBJECTS = 200_000  # new containers that may pile up before they are looked at in spite of traffic


@contextlib.asynccontextmanager
async def serving(options: BrokerOptions) -> AsyncIterator[Broker]:
    """A broker that serves for the time of a block."""
    loop = asyncio.get_running_loop()
    broker = Broker(options, loop)
    registration = None
    if options.lookupd or options.controller:
        from srtm.broker.lookup import Registration

        registration = Registration(broker)
    with _no_collector():
        try:
            broker.listen()
            listener = _bound(options.host, options.http_port)
        except OSError as error:
            broker.stop()
            raise BrokerError(
                f"cannot listen on {options.host}:{options.tcp_port} and :{options.http_port}: {error.strerror};"
                " is another broker running there? choose others with --tcp-port and --http-port",
            ) from None
        broker.http_port = int(listener.getsockname()[1])
        server = _Server(uvicorn.Config(app(broker), log_level="warning", lifespan="off", access_log=False))
        pages = loop.create_task(server.serve(sockets=[listener]))
        tidying = loop.create_task(_tidy(broker))
        if registration:
            registration.start()
        try:
            yield broker
        finally:
            tidying.cancel()
            if registration:
                await registration.stop()
            if broker.recorder:
                with contextlib.suppress(SRTMError):
                    await broker.recorder.stop()
            broker.stop()
            if broker.authority:
                await broker.authority.close()
            server.should_exit = True
            await pages
            listener.close()


async def run(options: BrokerOptions) -> None:
    """Serve until told to stop."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with serving(options) as broker:
        print(
            f"broker {options.name}: TCP {options.host}:{broker.tcp_port}, HTTP {options.host}:{broker.http_port}",
            flush=True,
        )
        await stopped.wait()


class _Server(uvicorn.Server):
    """Uvicorn without hands on the signals, which are the broker's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), reuse_port=False)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


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
