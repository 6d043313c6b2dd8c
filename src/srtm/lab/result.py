"""A result of the lab: points to run, a function that runs one point, claims to judge, a panel to draw.

A result never says where it runs: its `run` is a function of a world (`world.py`; `live/world.py` for live forms), a
point and a seed. In the simulated world the same three give the same rows. Rows are flat, so that they can be kept in
Parquet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import hypot
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Value = str | int | float | bool
Row = dict[str, Value]
Point = dict[str, int | float | str]

# Where a claim comes from. Kinds are counted apart: what the preset was fitted on proves little, and what we say of
# ourselves is no reproduction.
Kind = Literal["paper", "calibration", "ours"]

SLO_MS = 1.0
# How near to a number of the paper ours must be: its searches, too, stop within 20 % of their aim (footnote in 6.5).
NEAR = 0.2
# The column of rows that says at which quantile b was profiled; claims are judged for each of its values.
VARIANT = "b_at"


class Rows(list[Row]):
    """Rows of one result, with the queries that claims and figures need."""

    def where(self, **values: Value) -> Rows:
        """The rows with these values."""
        return Rows(row for row in self if all(row[name] == value for name, value in values.items()))

    def along(self, column: str) -> dict[float, Rows]:
        """The rows of each number in a column, in order."""
        return {x: self.where(**{column: x}) for x in sorted({float(row[column]) for row in self})}

    def column(self, name: str) -> list[float]:
        """The numbers of a column."""
        return [float(row[name]) for row in self]

    def mean(self, name: str) -> float:
        """Mean of a column."""
        return fmean(self.column(name))

    def deviation(self, name: str) -> float:
        """Standard deviation of a column over repetitions; zero for a single one."""
        return stdev(self.column(name)) if len(self) > 1 else 0.0

    def means(self, name: str, along: str) -> list[float]:
        """Mean of a column at each number of another."""
        return [rows.mean(name) for rows in self.along(along).values()]

    def variants(self) -> dict[str, Rows]:
        """The rows of each profile of b, by name; all rows under an empty name if there is one profile."""
        names = dict.fromkeys(str(row[VARIANT]) for row in self if VARIANT in row)
        return {name: self.where(**{VARIANT: name}) for name in names} or {"": self}


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line: mean, standard deviation if runs were repeated, and a label beside each point."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    labels: Sequence[str] | None = None
    line: bool = True

    @classmethod
    def of(cls, name: str, rows: Rows, x: str, y: str, *, label: str | None = None) -> Series:
        """Mean and standard deviation of a column at each number of another; `label` names a third column."""
        along = rows.along(x)
        return cls(
            name,
            list(along),
            [at.mean(y) for at in along.values()],
            [at.deviation(y) for at in along.values()],
            [f"{at.mean(label):.2g}" for at in along.values()] if label else None,
        )


@dataclass(frozen=True, slots=True)
class Panel:
    """One coordinate system; `slo_ms` draws the SLO as a line."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_y: bool = False
    slo_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement about a result, in words and as a number; `judge` returns whether it holds, and ours.

    `where` is the place of the paper's sentence. `needs` are other results that it compares with: their rows are handed
    to `judge`, too. Without `judge` it cannot be reproduced. `why` says why it fails, or why it cannot be reproduced:
    with a number, and why no parameter mends it; one text, or one for each profile of b. `draw` is a picture of its own
    evidence, if the result's is not enough.
    """

    says: str
    paper: str
    judge: Callable[..., tuple[bool, str]] | None
    needs: tuple[str, ...] = ()
    where: str = field(default="", kw_only=True)
    kind: Kind = field(default="paper", kw_only=True)
    why: str | Mapping[str, str] = field(default="", kw_only=True)
    draw: Callable[[Rows], Panel] | None = field(default=None, kw_only=True)

    def reason(self, variant: str) -> str:
        """Why it fails for a profile of b, or is not reproducible."""
        return self.why if isinstance(self.why, str) else self.why.get(variant, "")


@dataclass(frozen=True, slots=True)
class Result:
    """A panel of a figure, or a table.

    `run` returns rows that repeat the point: claims and figures find them by its values. `shows` is the sentence above
    the figure. `tiny` are the points of a quick check, and must suffice to judge every claim. `weight` is the cost per
    publisher, relative to other results; the longest cells start first.
    """

    name: str
    title: str
    shows: str
    points: Sequence[Point]
    tiny: Sequence[Point]
    run: Callable[[Any, Point, int], list[Row]]
    claims: Sequence[Claim]
    draw: Callable[[Rows], Panel]
    weight: float = 1.0
    version: int = 1  # increment when a change of `run` invalidates kept rows
    repetitions: int | None = None  # at most, if a cell takes long and hardly depends on the seed
    more: Sequence[Point] = ()  # points that take too long to run unless asked for
    rows_of: str | None = None  # another result whose rows these are, so that they are computed once
    paced: bool = False  # live, on paced brokers: cells may run beside each other
    # Of rows, for a table, with their headings; none: no table.
    columns: Mapping[str, str] = field(default_factory=dict)


def points(**axes: Iterable[int | float | str]) -> list[Point]:
    """Every combination of these values."""
    found: list[Point] = [{}]
    for name, values in axes.items():
        found = [{**point, name: value} for point in found for value in values]
    return found


def near(ours: float, paper: float) -> bool:
    """Whether a number is that of the paper."""
    return abs(ours - paper) <= NEAR * paper


def falls(rows: Rows, column: str, along: str) -> bool:
    """Whether a column falls along another: from end to end, and without a significant step up."""
    at = list(rows.along(along).values())
    return at[-1].mean(column) < at[0].mean(column) and not any(
        risen(before, after, column) for before, after in pairwise(at)
    )


def risen(before: Rows, after: Rows, column: str) -> bool:
    """Whether a mean has risen by more than two standard errors of the difference."""
    error = hypot(*(rows.deviation(column) / len(rows) ** 0.5 for rows in (before, after)))
    return after.mean(column) - before.mean(column) > 2 * error


def listed(values: Mapping[Any, float] | Sequence[float], digits: str = ".2f") -> str:
    """Numbers formatted for a table cell."""
    numbers = values if isinstance(values, Sequence) else values.values()
    return ", ".join(format(number, digits) for number in numbers)
