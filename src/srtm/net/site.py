"""HTTP of one ASGI application on one port: uvicorn on a socket of ours, with signals left to the program."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn

from srtm.net.sockets import close_unix, listen, listen_unix
from srtm.net.tls import names_in

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

CERTIFIED = "srtm.certified"  # in the scope of a request: the names in its client's certificate
_GRACE_S = 1  # for answers in progress when the site stops; event streams never end by themselves


class Site:
    """Serves an ASGI application, with TLS or without, on a port and, if `path` is given, on a unix socket."""

    def __init__(
        self,
        app: Callable[..., Any],
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        path: str | None = None,
    ) -> None:
        self._listener = listen(host, port)
        self._path = path
        try:
            self._unix = None if path is None else listen_unix(path)
        except OSError:
            self._listener.close()
            raise
        self.port = int(self._listener.getsockname()[1])
        config = uvicorn.Config(
            app,
            log_config=None,  # the program has configured logging
            log_level="warning",
            lifespan="off",
            ws="none",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        config.load()
        config.ssl = tls
        if tls is not None:
            config.http_protocol_class = _naming(config.http_protocol_class)
        self._server = _Server(config)

    def start(self) -> None:
        """Serve; a loop must be running."""
        sockets = [self._listener] if self._unix is None else [self._listener, self._unix]
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=sockets))

    async def stop(self) -> None:
        """Finish the requests in progress, and stop serving."""
        self._server.stop()
        with _quiet(logging.getLogger("uvicorn.error")):  # cutting off event streams is not an error
            await self._task
        for connection in list(self._server.server_state.connections):  # event streams, which uvicorn leaves open
            connection.transport.abort()
        await asyncio.sleep(0)  # transports close in the next turn of the loop
        self.close()

    def close(self) -> None:
        """Release the port and the unix socket."""
        self._listener.close()
        if self._unix is not None and self._path is not None:
            close_unix(self._unix, self._path)


def _naming(protocol: type[Any]) -> type[Any]:
    """A protocol whose requests carry the names in the client's verified certificate, if it showed one."""

    class Named(protocol):  # type: ignore[misc]
        app: Any

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            names, inner = names_in(transport.get_extra_info("peercert")), self.app
            if names:

                async def named(scope: Any, receive: Any, send: Any) -> None:
                    scope[CERTIFIED] = names
                    await inner(scope, receive, send)

                self.app = named

    return Named


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to the program, and wakes the loop once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
