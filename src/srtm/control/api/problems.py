"""Answers to requests that cannot be carried out: what is wrong, with which value, in words for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

if TYPE_CHECKING:
    from fastapi import Request

_LONGEST = 60  # characters of a value that an answer repeats


def unfit(_: Request, problem: Exception) -> JSONResponse:
    """Answer a request of the wrong shape: where, why, and with which value."""
    assert isinstance(problem, RequestValidationError)
    told = [
        {"loc": [printable(part) for part in each["loc"]], "msg": printable(_message(each)), "type": each["type"]}
        for each in problem.errors()
    ]
    return JSONResponse({"detail": told}, status_code=422)


def refused(_: Request, problem: Exception) -> JSONResponse:
    """Answer a value that the model refused."""
    return JSONResponse({"detail": str(problem)}, status_code=422)


def _message(error: dict[str, Any]) -> str:
    """The validator's words, without its own prefixes, and with a value that is short enough to repeat."""
    message: str = error["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    value = error.get("input")
    if isinstance(value, str | int | float) and len(repr(value)) <= _LONGEST and error["type"] != "value_error":
        message += f", not {value!r}"
    return message


def printable(part: str | int) -> str | int:
    """Text with what JSON cannot hold replaced."""
    return part if isinstance(part, int) else part.encode(errors="replace").decode()
