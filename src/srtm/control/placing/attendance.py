"""Which publishers of a topic are connected to their broker, and which have been away for too long.

In: rolls of brokers, times as arguments. Out: publishers to forget. A registered publisher that has never connected is
still expected. One that was connected and left keeps its place only for a while.
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
    """The publishers of one topic."""

    _came: set[str] = field(default_factory=set)
    _missing: dict[str, int] = field(default_factory=dict)  # those that left their broker, and when

    def call(self, here: Set[str], placed: Iterable[str], now_ns: int) -> None:
        """Compare the publishers connected to a broker with those that are placed there."""
        self._came |= here
        for publisher in here:
            self._missing.pop(publisher, None)
        for publisher in placed:
            if publisher in self._came and publisher not in here:
                self._missing.setdefault(publisher, now_ns)

    @property
    def present(self) -> set[str]:
        """Publishers that connected and are not missing."""
        return self._came - self._missing.keys()

    def expect(self, publishers: Iterable[str]) -> None:
        """Count these as having connected before: from now on they are present or missing."""
        self._came |= set(publishers)

    def overdue(self, now_ns: int) -> list[str]:
        """Publishers that have been away for too long."""
        return [publisher for publisher, since_ns in self._missing.items() if now_ns - since_ns > AWAY_S * NS_PER_S]

    def forget(self, publisher: str) -> None:
        """Drop a publisher."""
        self._came.discard(publisher)
        self._missing.pop(publisher, None)
