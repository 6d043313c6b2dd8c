"""The one place that knows numba: compile plain functions, cached on disk, free of the interpreter lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba
from numba.extending import register_jitable

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


def compiled(function: F) -> F:
    """Machine code of a plain function; the function itself stays interpreted wherever it is called directly."""
    return cast("F", numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def callable_from_compiled(*functions: Callable[..., Any]) -> None:
    """Let compiled functions call these plain ones, which are compiled into them."""
    for function in functions:
        register_jitable(function)
