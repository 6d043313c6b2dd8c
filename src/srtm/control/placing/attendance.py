"""Which publishers of a topic are where they belong, and who has stayed away for too long.

In: rolls of brokers, times as arguments. Out: publishers to be forgotten. Who was registered and has never come is
expected still; who was there once, and went, takes room from others only for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

AWAY_S = 300


@dataclass(slots=True)
class Attendance:
    """Publishers of one topic."""

    _came: set[str] = field(default_factory=set)
    _missing: dict[str, int] = field(default_factory=dict)  # of those, who is at their broker no more, and since when

    def call(self, here: Set[str], placed: Iterable[str], now_ns: int) -> None:
        """A broker says who is there; these are placed there."""
        self._came |= here
        for publisher in here:
            self._missing.pop(publisher, None)
        for publisher in placed:
            if publisher in self._came and publisher not in here:
                self._missing.setdefault(publisher, now_ns)

    @property
    def present(self) -> set[str]:
        """Those who came, and are not missing."""
        return self._came - self._missing.keys()

    def expect(self, publishers: Iterable[str]) -> None:
        """These were there a moment ago: if they are not, they are missing."""
        self._came |= set(publishers)

    def overdue(self, now_ns: int) -> list[str]:
        """Those who have been away for too long."""
        return [publisher for publisher, since_ns in self._missing.items() if now_ns - since_ns > AWAY_S * NS_PER_S]

    def forget(self, publisher: str) -> None:
        """A publisher is none any more."""
        self._came.discard(publisher)
        self._missing.pop(publisher, None)
