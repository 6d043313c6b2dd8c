"""Positions in logs: the offset of the next message, and the log it belongs to.

In and out: JSON as Spark keeps it, `{"broker": {"offset": 50, "log": "5f0c…"}, …}`; if an engine has the messages, its
stream takes the place of the broker, and a query of several topics writes `topic/broker`. A plain number is an offset
of the current log: users write it, and so did checkpoints before logs had ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Offsets = dict[str, Any]  # as JSON


class Extent(NamedTuple):
    """A log's oldest offset, its next one, and the id of the log (None if unknown)."""

    begin: int
    end: int
    log: str | None = None


class Position(NamedTuple):
    """The offset of a log's next message, and the id of the log (None if unknown)."""

    offset: int
    log: str | None = None

    def may_be_of(self, log: str | None) -> bool:
        """Whether this may be a position in that log: no ids contradict it."""
        return self.log is None or log is None or self.log == log

    def rows_to(self, end: Position) -> int:
        """How many messages lie between; 0 if the two are of different logs."""
        return max(0, end.offset - self.offset) if self.may_be_of(end.log) else 0


Positions = dict[str, Position]


def read(offsets: Mapping[str, Any]) -> Positions:
    """Positions by broker; ValueError if the JSON holds none."""
    return {str(name): _position(value) for name, value in offsets.items()}


def write(positions: Positions) -> Offsets:
    """Positions as JSON."""
    return {
        name: at.offset if at.log is None else {"offset": at.offset, "log": at.log} for name, at in positions.items()
    }


def _position(value: Any) -> Position:
    offset, log = (value.get("offset"), value.get("log")) if isinstance(value, dict) else (value, None)
    if type(offset) is not int or offset < 0 or not (log is None or isinstance(log, str)):
        raise ValueError(f"{value!r} is not an offset")
    return Position(offset, log)
