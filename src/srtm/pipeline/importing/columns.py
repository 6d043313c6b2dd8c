"""Where the columns of a trace come from, and the units of their times.

In: what a caller says about an input. Out: `Columns`, or an InputError that lists all that is wrong. A unit is given,
or evident from the type of a column; it is never guessed. Times are points in time, UTC unless they say otherwise, and
outside of 1971 to 2116 the unit is taken to be wrong. `relative` times count from the start of the recording instead,
and only must not be negative.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError, TraceError
from srtm.model.scan import LATEST_NS
from srtm.units import NS_PER_MS, NS_PER_S, NS_PER_US
from srtm.workload.trace import ARRIVAL_SCHEMA, RECORDED_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable

Unit = str | Mapping[str, str] | None

UNITS = ("s", "ms", "us", "ns", "iso8601")
FACTORS = {"s": NS_PER_S, "ms": NS_PER_MS, "us": NS_PER_US, "ns": 1}
EARLIEST_NS = 365 * 86_400 * NS_PER_S  # 1971
_RECORDED = ("broker", "release_ns")
_CONSTANTS = ("topic", "publisher")
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal", "string")


@dataclass(frozen=True, slots=True)
class Columns:
    """The source of each column of a trace: a column of the input, one name for all rows, or none."""

    mapping: Mapping[str, str]
    unit: str | None
    units: Mapping[str, str]
    constants: Mapping[str, str]
    relative: bool

    @classmethod
    def of(
        cls, mapping: Mapping[str, str] | None, unit: Unit, topic: str | None, publisher: str | None, *, relative: bool
    ) -> Columns:
        """Columns from a caller's arguments; InputError if they are wrong."""
        mapping = dict(mapping or {})
        constants = {name: value for name, value in (("topic", topic), ("publisher", publisher)) if value is not None}
        units = dict(unit) if isinstance(unit, Mapping) else {}
        bare = unit if isinstance(unit, str) else None
        times = [name for name in RECORDED_SCHEMA.names if name.endswith("_ns")]
        wrong = [
            f"unknown trace column {name!r}; known: {', '.join(RECORDED_SCHEMA.names)}"
            for name in mapping
            if name not in RECORDED_SCHEMA.names
        ]
        wrong += [f"{name} is given both as a column and as a name" for name in constants if name in mapping]
        wrong += [f"the {name} name is empty" for name, value in constants.items() if not value.strip()]
        wrong += [f"{name!r} has no unit: choose from {', '.join(times)}" for name in units if name not in times]
        wrong += [
            f"unknown unit of time {each!r}; known: {', '.join(UNITS)}"
            for each in [bare, *units.values()]
            if each is not None and each not in UNITS
        ]
        if wrong:
            raise InputError("; ".join(wrong))
        return cls(mapping, bare, units, constants, relative)

    def names(self) -> set[str]:
        """The columns of the input that an import may use."""
        return {self.mapping.get(name, name) for name in RECORDED_SCHEMA.names if name not in self.constants}

    def is_recorded(self, columns: Iterable[str]) -> bool:
        """Whether these columns are a recorded run, by the mapping or by their names."""
        explicit = any(name in self.mapping for name in (*_RECORDED, "sent_ns"))
        return explicit or all(name in columns for name in _RECORDED)

    def mapped(self, columns: Iterable[str], where: str, *, recorded: bool) -> dict[str, str]:
        """The column of the input for each column of the trace that has one."""
        there = list(columns)
        mapped, missing = {}, []
        for field in RECORDED_SCHEMA if recorded else ARRIVAL_SCHEMA:
            source = self.mapping.get(field.name, field.name)
            if field.name in self.constants:
                continue
            if source in there:
                mapped[field.name] = source
            elif field.name in self.mapping:
                missing.append(f"has no column {source!r} for {field.name}")
            elif not field.nullable:
                constant = f", or set one name for all rows with --{field.name}" if field.name in _CONSTANTS else ""
                missing.append(f"has no column {field.name!r}: map one with --column {field.name}=…{constant}")
        if missing:
            alone = len(there) == 1 and re.search(r"[;\t|,]", there[0])
            remedy = f"; if these are several columns, set --delimiter to {alone[0]!r}" if alone else ""
            have = ", ".join(map(repr, there)) or "none"
            raise TraceError(f"{where} {'; '.join(missing)}. Its columns are {have}{remedy}", columns=there)
        return mapped

    def unit_of(self, name: str, kind: str, source: str) -> str:
        """The unit of a column of times; the type itself if that implies the unit."""
        if kind in ("timestamp", "timestamp_ntz", "date"):
            return kind
        unit = self.units.get(name, self.unit)
        if kind.partition("(")[0] not in _NUMBERS:
            raise TraceError(f"column {source!r} is {kind}, not a time: choose another for {name}", column=source)
        if unit is None:
            raise InputError(
                f"the unit of column {source!r} ({kind}) is unknown: add --unit {', '.join(UNITS[:-1])} or {UNITS[-1]}",
                column=source,
            )
        if unit == "iso8601" and kind != "string":
            raise InputError(f"column {source!r} is {kind}, not ISO 8601 text: use --unit s, ms, us or ns")
        return unit

    def hint(self, reason: str, value: str | None) -> str | None:
        """A likely cause for a time that is out of range."""
        if not reason.endswith("out of range") or value is None:
            return None
        try:
            number = Decimal(value)
        except InvalidOperation:
            return None
        for unit, factor in FACTORS.items():
            if unit != self.unit and EARLIEST_NS <= number * factor <= LATEST_NS:
                return f"in {unit} it would be {iso(int(number * factor))}"
        return None if self.relative or number < 0 else "if times count from the start of the recording, add --relative"

    @property
    def earliest_ns(self) -> int:
        """Times before this one, or after LATEST_NS, are rejected."""
        return 0 if self.relative else EARLIEST_NS


def iso(time_ns: int) -> str:
    """A time in ISO 8601, in UTC."""
    return f"{np.datetime64(time_ns, 'ns')}Z"
