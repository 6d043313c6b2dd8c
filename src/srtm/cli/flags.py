"""Flags from options: one for each field of a program's options that has a help text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from srtm.errors import InputError
from srtm.options import LOG_FORMATS, LOG_LEVELS

T = TypeVar("T")


def flags_of(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Turn a function of options into a command with a flag for every field that has a help text."""
    flagged = [each for each in fields(options) if "help" in each.metadata]  # type: ignore[arg-type]
    kinds = get_type_hints(SimpleNamespace(__annotations__={each.name: each.type for each in flagged}))

    def command(run: Callable[[T], None]) -> Callable[..., None]:
        @wraps(run)
        def wrapped(**given: Any) -> None:
            run(options(**{each.name: _value(each, kinds[each.name], given[each.name]) for each in flagged}))

        parameters = [_parameter(each, kinds[each.name]) for each in flagged]
        wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapped

    return command


def _parameter(field: Field[Any], kind: Any) -> Parameter:
    how = field.metadata
    name = how["flag"] or f"--{field.name.replace('_', '-')}"
    names = [f"{name}/--no-{name[2:]}" if kind is bool and field.default is True else name]
    default = field.default
    shown = how["shown"] or True
    if how["parse"]:
        kind, default, shown = str | None, None, how["shown"] or str(default)
    elif get_origin(kind) is tuple:
        kind, default = list[str] | None, None
    flag = typer.Option(
        *names,
        help=how["help"],
        metavar=how["metavar"],
        envvar=how["envvar"],
        rich_help_panel=how["panel"],
        show_default=shown,
        **how["limits"],
    )
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, flag])


def _value(field: Field[Any], kind: Any, given: Any) -> Any:
    if field.metadata["parse"]:
        return field.default if given is None else field.metadata["parse"](given)
    return tuple(given or ()) if get_origin(kind) is tuple else given


def check_logs(form: str, level: str) -> None:
    """Refuse an unknown log format or level."""
    for flag, value, known in (("--log-format", form, LOG_FORMATS), ("--log-level", level, LOG_LEVELS)):
        if value not in known:
            raise InputError(f"{flag} must be {' or '.join(known)}, not {value!r}", value=value)
