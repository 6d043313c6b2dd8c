"""The lease by which one controller leads: who may act and who may take over, by each one's own clock; no IO.

A leader writes its lease again and again, each time as a new revision. It counts a lease from the moment at which it
sent that revision for the first time. Everybody else counts a whole lease, and a little, from the moment at which it
first saw the revision, which is later. So no clocks are compared; only their speeds must agree to within `_CLOCKS`.

The lease decides who acts. What is stored is decided by the store alone: every write names the one before it, so a
leader that was paused for too long, or has a wrong clock, is refused.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from srtm.control.keeping.keeper import Leader
from srtm.units import NS_PER_S

LEASE_S = 3.0
_CLOCKS = 0.02  # by which part clocks may run faster or slower
_SLACK_NS = 100_000_000  # between a leader's last act and the first of the next one
_BEATS = 6  # writes of the lease in one lease


def now_ns() -> int:
    """The time of this host's clock that also counts while the host sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a leader writes."""

    leader: Leader
    holder: str  # of this lease: unique, never reused
    lease_ns: int
    beat: int = 0  # counts writes
    free: bool = False  # given up: anybody may lead at once


class Held:
    """The lease of a leader, as it sees it."""

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._until_ns: int | None = None

    @property
    def beat_s(self) -> float:
        """Time between two writes of the lease."""
        return self._lease_ns / _BEATS / NS_PER_S

    def written(self, sent_ns: int) -> None:
        """A revision is stored that was sent at this time, or later."""
        until_ns = sent_ns + round(self._lease_ns * (1 - _CLOCKS))
        self._until_ns = until_ns if self._until_ns is None else max(self._until_ns, until_ns)

    def holds(self, at_ns: int) -> bool:
        """Whether nobody else can lead yet."""
        return self._until_ns is not None and at_ns < self._until_ns


class Observed:
    """The lease of others, as seen by a controller that is ready."""

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._revision: int | None = None
        self._since_ns = 0
        self.claim: Claim | None = None

    def see(self, revision: int, claim: Claim | None, at_ns: int) -> None:
        """The last revision at this time; 0 and None if nobody ever led."""
        if revision != self._revision:
            self._revision, self._since_ns = revision, at_ns
            self.claim = claim

    @property
    def revision(self) -> int | None:
        """The last revision seen."""
        return self._revision

    def ended(self, at_ns: int) -> bool:
        """Whether the lease has ended for certain."""
        if self._revision is None:
            return False
        if self.claim is None or self.claim.free:
            return True
        lease_ns = max(self._lease_ns, self.claim.lease_ns)
        return at_ns - self._since_ns > round(lease_ns * (1 + _CLOCKS)) + _SLACK_NS

    def leader(self, at_ns: int) -> Leader | None:
        """Who leads; None if nobody does for certain."""
        return self.claim.leader if self.claim is not None and not self.ended(at_ns) else None
