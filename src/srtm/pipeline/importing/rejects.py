"""Rejected rows: counted by reason, shown by example, and how many of them an import allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from srtm.errors import InputError
from srtm.pipeline.importing.foreign import path_of
from srtm.units import exact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from fractions import Fraction

    from srtm.pipeline.importing.columns import Columns


class Example(NamedTuple):
    """A rejected row: where it is, what is wrong with it, and what may help."""

    file: str | None
    column: str | None
    value: str | None
    row: str | None
    hint: str | None = None


class Rejected(NamedTuple):
    """How many rows were rejected for one reason, with examples."""

    reason: str
    rows: int
    examples: tuple[Example, ...]


def rejected_for(reason: str, rows: int, examples: list[dict[str, str | None]], columns: Columns) -> Rejected:
    """Rejects of one reason, with hints."""
    shown = (
        Example(path_of(row["file"]), row["column"], row["value"], row["row"], columns.hint(reason, row["value"]))
        for row in examples
    )
    return Rejected(reason, rows, tuple(shown))


def lines(rejected: Iterable[Rejected]) -> list[str]:
    """Rejects as text: a line for each reason, and a line for each example."""
    said = []
    for line in rejected:
        said.append(f"  {line.reason}: {line.rows:,}")
        for example in line.examples:
            value = f"{example.column} = {example.value!r}" if example.column else ""
            place = ": ".join(part for part in (example.file, value) if part)
            said.append(f"    {place}{f' ({example.hint})' if example.hint else ''} in {example.row}")
    return said


def limit(text: str) -> Callable[[int], Fraction]:
    """How many rows may be rejected, of how many: '100', or '1%' of them."""
    share = text.strip().endswith("%")
    number = exact(text.strip().removesuffix("%"), "--max-rejects")
    if number < 0:
        raise InputError(f"--max-rejects {text}: must not be negative", value=text)
    return lambda rows: rows * number / 100 if share else number


def refusal(rejected: tuple[Rejected, ...], rows: int, allowed: str) -> str:
    """The error for more rejects than allowed."""
    count = sum(line.rows for line in rejected)
    said = f"{count:,} of {rows:,} rows are rejected, but at most {allowed} may be: nothing was written."
    remedy = "Correct the rows or the options, or allow more with --max-rejects"
    return "\n".join([f"{said} {remedy}", *lines(rejected)])
