"""Plain command lines, read without typer: loading it would take longer than all else that a broker needs to start.

In: arguments, and the environment. Out: the options that typer would make of them, or None if typer must decide: for
help, for an error, and for anything unusual.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from srtm.errors import InputError
from srtm.options import Flag, flags

T = TypeVar("T")

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


class _Unusual(Exception):
    """Something that typer must judge."""


def plain_options(options: type[T], arguments: Sequence[str]) -> T | None:
    """The options that a command line sets; None if it is not plain."""
    try:
        return options(**_read(flags(options), arguments))
    except (_Unusual, InputError):
        return None


def _read(known: list[Flag], arguments: Sequence[str]) -> dict[str, Any]:
    """The values of fields that a command line or the environment sets."""
    by_name = {name: flag for flag in known for name in (flag.name, flag.off) if name}
    given: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        name, equals, text = word.partition("=")
        flag = by_name.get(name)
        if flag is None or (flag.kind is bool and equals):
            raise _Unusual
        if flag.kind is bool:
            given[flag.field.name] = name == flag.name
            continue
        value = _value(flag, text if equals else next(words, ""))
        if flag.repeatable:
            value = given.get(flag.field.name, ()) + value
        given[flag.field.name] = value
    for flag in known:
        variable = flag.field.metadata["envvar"]
        if variable is not None and variable in os.environ and flag.field.name not in given:
            text = os.environ[variable]
            given[flag.field.name] = (text or None) if flag.secret else _value(flag, text)
    return given


def _value(flag: Flag, text: str) -> Any:
    if not text or text.startswith("-") or not text.isprintable():
        raise _Unusual
    if flag.field.metadata["parse"] or flag.secret:
        return flag.value(text)
    if flag.repeatable:
        return flag.value([text])
    if flag.kind in (str, str | None):
        return text
    limits = flag.field.metadata["limits"]
    if flag.kind not in (int, int | None) or not _NUMBER.fullmatch(text):
        raise _Unusual
    number = int(text)
    if not limits.get("min", number) <= number <= limits.get("max", number):
        raise _Unusual
    return number
