"""Options of a program: the fields of one frozen dataclass, each with its default and the help of its flag.

`srtm.cli.flags` derives flags and environment variables from the fields that have a help text.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PORT: dict[str, Any] = {"metavar": "PORT", "min": 0, "max": 65535}


def option(
    default: Any,
    text: str,
    metavar: str | None = None,
    *,
    flag: str | None = None,
    envvar: str | None = None,
    panel: str | None = None,
    parse: Callable[[str], Any] | None = None,
    shown: str | None = None,
    **limits: int,
) -> Any:
    """A field with a flag. `parse` turns its text into the value; `shown` is the default as --help shows it."""
    how = {"help": text, "metavar": metavar, "flag": flag, "envvar": envvar, "panel": panel, "parse": parse}
    return field(default=default, metadata={**how, "shown": shown, "limits": limits})


# Shared by every program that writes a log.
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = (LOG_FORMATS[0], f"Log format: {' or '.join(LOG_FORMATS)}", "FORMAT")
LOG_LEVEL = (f"Minimum log level: {', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}", "LEVEL")
