"""Options of a program: the fields of one frozen dataclass, each with its default and the help of its flag.

Every field that has a help text has a flag (`flags`). `srtm.cli.flags` makes commands of them, and `srtm.cli.plain`
reads plain command lines without typer.
"""

from __future__ import annotations

import os
from dataclasses import Field, dataclass, field, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from srtm.errors import InputError
from srtm.files import read_secret

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
    secret: bool = False,
    **limits: int,
) -> Any:
    """A field with a flag. `parse` turns its text into the value; `shown` is the default as --help shows it."""
    how = {"help": text, "metavar": metavar, "flag": flag, "envvar": envvar, "panel": panel, "parse": parse}
    return field(default=default, metadata={**how, "shown": shown, "secret": secret, "limits": limits})


def secret(text: str, envvar: str, panel: str | None = None) -> Any:
    """A field whose value no command line shows: a variable holds it, or the file that its flag, --…-file, names."""
    return option(None, f"{text}; {envvar} holds it directly", "FILE", envvar=envvar, panel=panel, secret=True)


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of a field: its names, and the kind of value that it takes."""

    field: Field[Any]
    kind: Any

    @property
    def name(self) -> str:
        """The name, which turns a switch on."""
        given: str | None = self.field.metadata["flag"]
        if self.secret:
            return f"--{self.field.name.replace('_', '-')}-file"
        return given or f"--{self.field.name.replace('_', '-')}"

    @property
    def off(self) -> str | None:
        """The name that turns off a switch that is on by default; None of all other flags."""
        return f"--no-{self.name[2:]}" if self.kind is bool and self.field.default is True else None

    @property
    def secret(self) -> bool:
        """Whether it names a file that holds the value."""
        return bool(self.field.metadata["secret"])

    @property
    def repeatable(self) -> bool:
        """Whether it may be given several times, and each value counts."""
        return get_origin(self.kind) is tuple

    def value(self, given: Any) -> Any:
        """The value of the field; `given` is the flag's text if the field parses it, a list if it is repeatable."""
        parse = self.field.metadata["parse"]
        if self.secret:
            return read_secret(given) if given else os.environ.get(self.field.metadata["envvar"]) or None
        if parse is not None:
            return self.field.default if given is None else parse(given)
        return tuple(given or ()) if self.repeatable else given


def flags(options: type) -> list[Flag]:
    """The flags of a program, in the order of its fields."""
    flagged = [each for each in fields(options) if "help" in each.metadata]
    kinds = get_type_hints(SimpleNamespace(__annotations__={each.name: each.type for each in flagged}))
    return [Flag(each, kinds[each.name]) for each in flagged]


# Shared by every program that writes a log.
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = (LOG_FORMATS[0], f"Log format: {' or '.join(LOG_FORMATS)}", "FORMAT")
LOG_LEVEL = (f"Minimum log level: {', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}", "LEVEL")


def check_logs(form: str, level: str) -> None:
    """Refuse an unknown log format or level."""
    for flag, value, known in (("--log-format", form, LOG_FORMATS), ("--log-level", level, LOG_LEVELS)):
        if value not in known:
            raise InputError(f"{flag} must be {' or '.join(known)}, not {value!r}", value=value)
