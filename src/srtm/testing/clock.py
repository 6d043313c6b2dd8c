"""A clock that moves only when it is told to."""

from __future__ import annotations

from srtm.units import NS_PER_S

START_NS = 1_700_000_000 * NS_PER_S  # of the wall clock; the monotonic one starts at 0


class VirtualClock:
    """A wall clock and a monotonic clock that move only when told to."""

    def __init__(self, start_ns: int = START_NS) -> None:
        self._start_ns = start_ns
        self._elapsed_ns = 0

    def time_ns(self) -> int:
        """Return the time of the wall clock, which also stamps arrivals."""
        return self._start_ns + self._elapsed_ns

    def monotonic_ns(self) -> int:
        """Return the time since the clock was made."""
        return self._elapsed_ns

    def process_time_ns(self) -> int:
        """Return no processor time: what runs in virtual time takes none of it."""
        return 0

    def advance(self, seconds: float) -> None:
        """Let time pass while the loop stands still, as code does that blocks it."""
        self._elapsed_ns += round(seconds * NS_PER_S)
