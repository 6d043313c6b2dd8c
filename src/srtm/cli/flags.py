"""Commands from options: the flags of a program (`srtm.options`), as typer knows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

import typer

from srtm.options import Flag, flags

T = TypeVar("T")


def flags_of(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Turn a function of options into a command with a flag for every field that has a help text."""
    found = flags(options)

    def command(run: Callable[[T], None]) -> Callable[..., None]:
        @wraps(run)
        def wrapped(**given: Any) -> None:
            run(options(**{each.field.name: each.value(given[each.field.name]) for each in found}))

        parameters = [_parameter(each) for each in found]
        wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapped

    return command


def _parameter(flag: Flag) -> Parameter:
    how, kind, default = flag.field.metadata, flag.kind, flag.field.default
    shown, variable = how["shown"] or True, None if flag.secret else how["envvar"]
    if how["parse"]:
        kind, default, shown = str | None, None, how["shown"] or str(default)
    elif flag.repeatable:
        kind, default = list[str] | None, None
    option = typer.Option(
        f"{flag.name}/{flag.off}" if flag.off else flag.name,
        help=how["help"],
        metavar=how["metavar"],
        envvar=variable,
        rich_help_panel=how["panel"],
        show_default=shown,
        **how["limits"],
    )
    return Parameter(flag.field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
