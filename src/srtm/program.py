"""Common parts of all programs: an event loop, logs on stderr, a stop signal."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from srtm.errors import InputError
from srtm.options import LOG_FORMATS, LOG_LEVELS

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")
_NOUN = re.compile(r"([A-Z]+)(?:\((.*?)\))?: ", re.DOTALL)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop, or on asyncio's slower loop if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class _Json(logging.Formatter):
    """One line of JSON per record; the noun that starts a message, as in `BROKER(one): …`, becomes a field."""

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
    """One line of text per record; control characters are escaped, so a peer's name cannot start a new line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


def log_to_stderr(form: str, level: str) -> None:
    """Log to stderr as text or JSON, from this level upwards."""
    if form not in LOG_FORMATS:
        raise InputError(f"unknown log format {form!r}; use {' or '.join(LOG_FORMATS)}")
    if level not in LOG_LEVELS:
        raise InputError(f"unknown log level {level!r}; use {', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}")
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise it logs every exchange


def stop_signal() -> asyncio.Event:
    """Return an event that Ctrl-C and SIGTERM set."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped
