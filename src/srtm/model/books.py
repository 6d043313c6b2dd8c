"""Books of lending: what one broker of a topic has asked of, lent to and borrowed from each of its peers.

Counts only grow, as long as a broker runs and the contract is the same, so that books of two brokers can be compared
(`model.audit`) whenever they were read. Tokens are counted by the incarnation of the peer: a broker that was started
again begins with empty books, and what its predecessor lent is no longer in anybody's report but the borrower's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from srtm.model.latency import Sketch

KEPT_ROUND_TRIPS = 256  # of each peer
_MOST_INCARNATIONS = 16  # of each peer; earlier ones are counted together, as incarnation 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What has been exchanged since the start. `lost` are tokens that came too late, or that had no room left."""

    asks: int = 0
    unanswered: int = 0
    lent_ptok: int = 0
    borrowed_ptok: int = 0
    lost_ptok: int = 0


@dataclass(slots=True)
class Account:
    """What one broker has exchanged with one peer."""

    asks: int = 0  # of the peer
    unanswered: int = 0  # of these
    heard: int = 0  # asks that came from the peer
    refused: int = 0  # of these, because they came too often
    lost_ptok: int = 0
    lent_ptok: dict[int, int] = field(default_factory=dict)  # by incarnation of the peer
    borrowed_ptok: dict[int, int] = field(default_factory=dict)
    round_trips_ns: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_ROUND_TRIPS))

    def lend(self, incarnation: int, ptok: int) -> None:
        """Tokens leave for the peer."""
        _add(self.lent_ptok, incarnation, ptok)

    def borrow(self, incarnation: int, ptok: int, lost_ptok: int) -> None:
        """Tokens of the peer were taken, and others lost."""
        _add(self.borrowed_ptok, incarnation, ptok)
        self.lost_ptok += lost_ptok

    @property
    def sketch(self) -> Sketch:
        """The latest round trips."""
        if not self.round_trips_ns:
            return Sketch()
        import numpy as np  # here, because a broker that starts must not wait for it

        return Sketch.of(np.array(self.round_trips_ns, np.int64))


@dataclass(slots=True)
class Books:
    """One broker's books of one contract."""

    accounts: dict[str, Account] = field(default_factory=dict)  # by name of the peer
    round_trip_ns: int = 0  # of asks, lately; 0 until one was answered
    spent: int = 0  # messages that took a token of this broker's bucket

    def of(self, peer: str) -> Account:
        """The account of a peer."""
        found = self.accounts.get(peer)
        if found is None:
            found = self.accounts[peer] = Account()
        return found

    @property
    def total(self) -> Counts:
        """The sums over all peers."""
        accounts = self.accounts.values()
        return Counts(
            sum(each.asks for each in accounts),
            sum(each.unanswered for each in accounts),
            sum(sum(each.lent_ptok.values()) for each in accounts),
            sum(sum(each.borrowed_ptok.values()) for each in accounts),
            sum(each.lost_ptok for each in accounts),
        )


def _add(amounts: dict[int, int], incarnation: int, ptok: int) -> None:
    amounts[incarnation] = amounts.get(incarnation, 0) + ptok
    if len(amounts) > _MOST_INCARNATIONS:
        oldest = next(each for each in amounts if each)
        amounts[0] = amounts.get(0, 0) + amounts.pop(oldest)
