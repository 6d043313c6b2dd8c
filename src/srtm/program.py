"""What programs that serve have in common: a loop, a listening socket, HTTP, an orderly stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn

from srtm.errors import InputError
from srtm.options import LOG_FORMATS, LOG_LEVELS

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Iterator

T = TypeVar("T")
_NOUN = re.compile(r"([A-Z]+)(?:\((.*?)\))?: ", re.DOTALL)
_LAST_WORDS_S = 1  # for answers that are being sent when it is told to stop; streams never end by themselves


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program's main coroutine: on uvloop, or slower where it is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class _Json(logging.Formatter):
    """A line of JSON for each record; the noun that a message begins with, as in `BROKER(one): …`, stands by itself."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        found = _NOUN.match(message)
        noun = (
            {"noun": found[1], "name": found[2], "message": message[found.end() :]} if found else {"message": message}
        )
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), **noun, "logger": record.name}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Text(logging.Formatter):
    """A line for people; what a peer named itself cannot begin another one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


def log_to_stderr(form: str, level: str) -> None:
    """Write what the program has to say to stderr, as text or as JSON, from this level on."""
    if form not in LOG_FORMATS or level not in LOG_LEVELS:
        raise InputError(
            f"log format must be {' or '.join(LOG_FORMATS)}, not {form!r};"
            f" log level must be {' or '.join(LOG_LEVELS)}, not {level!r}"
        )
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # which would write a line for every exchange


def stop_signal() -> asyncio.Event:
    """An event that Ctrl-C and SIGTERM set from now on."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, reuse_port=False)


class Site:
    """HTTP of an ASGI application on one port, with TLS or without."""

    def __init__(self, app: Callable[..., Any], host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._listener = bound(host, port)
        self.port = int(self._listener.getsockname()[1])
        config = uvicorn.Config(
            app,
            log_config=None,  # its words go where ours go
            log_level="warning",
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)

    def start(self) -> None:
        """Serve; there must be a loop."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Answer what was asked, and serve no more."""
        self._server.should_exit = True
        with _quiet(logging.getLogger("uvicorn.error")):  # that streams are cut off is no error
            await self._task
        self.close()

    def close(self) -> None:
        """Give up the port."""
        self._listener.close()


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Server(uvicorn.Server):
    """Uvicorn without hands on the signals, which are the program's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
