"""The topics that a broker lends tokens of: by whose terms, and what peers have said about them.

In: the controller's terms, with every exchange; asks and answers of peers. Out: tokens into and out of gates. A topic
lends only while its share is in force: with another share, without one, and when the lease ends, its gate drops the
lender, and what comes for it has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from srtm.broker.lending.lender import RULES, Lender
from srtm.protocol.lending import MOST_PTOK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.broker.topic import Topic
    from srtm.broker.topics import Topics
    from srtm.protocol.exchange import Lends
    from srtm.protocol.lending import Entry


class Wire(Protocol):
    """The way to other brokers. What cannot be sent at once is lost."""

    def meet(self, peers: Mapping[str, str]) -> None:
        """Keep connections to these, by name and address, and to no others."""

    def post(self, peer: str, asks: bool, entry: Entry, /) -> None:  # noqa: FBT001 - a callback
        """Say something at the end of this turn."""

    def close(self) -> None:
        """Leave all."""


class Heard(NamedTuple):
    """What a peer said."""

    peer: str
    asks: bool  # and does not answer
    entry: Entry


class Lenders:
    """All topics of this broker that lend."""

    __slots__ = ("_lenders", "_me", "_topics", "inbox", "wire")

    def __init__(self, me: str, topics: Topics) -> None:
        self.wire: Wire | None = None  # without one, nothing is lent
        self.inbox: list[Heard] = []  # in this turn
        self._me = me
        self._topics = topics
        self._lenders: dict[str, Lender] = {}

    def agree(self, lends: Mapping[str, Lends], now_ns: int) -> None:
        """Lend tokens of these topics from now on, all of which are here, and of no others."""
        if self.wire is None or not (lends or self._lenders):
            return
        agreed = {name: self._lender(self._topics[name], terms, now_ns) for name, terms in lends.items()}
        for name in self._lenders.keys() - agreed.keys():
            if name in self._topics:
                self._topics[name].gate.lender = None
        self._lenders = {name: lender for name, lender in agreed.items() if lender is not None}
        for name, lender in agreed.items():
            self._topics[name].gate.lender = lender
        peers = [peer for lender in self._lenders.values() for peer in lender.terms.peers]
        self.wire.meet({peer.name: peer.address for peer in peers if peer.name != self._me})

    def _lender(self, topic: Topic, terms: Lends, now_ns: int) -> Lender | None:
        """A topic's lender that has joined with these terms; None if the topic cannot lend."""
        gate, known = topic.gate, self._lenders.get(topic.name)
        limiter = gate.limiter
        # Of messages that are dropped, none waits, and their arrivals may be older than tokens that have come since.
        if limiter is None or gate.drops or terms.rule not in RULES or limiter.bucket.pico_law.burst > MOST_PTOK:
            return None
        if known is None or known.limiter is not limiter or known.terms.birth != terms.birth:
            assert self.wire is not None
            lender = Lender(self._me, topic.name, limiter, terms, self.wire.post, now_ns)
            if known is not None and known.terms.birth == terms.birth:
                lender.follow(known)
            return lender
        if gate.lender is not known or known.terms != terms:
            known.join(terms, now_ns)
        return known

    def renew(self, peer: str, now_ns: int) -> None:
        """A peer was started again: its asks may have smaller numbers than before, and its bucket another level."""
        for name, lender in self._lenders.items():
            if self._topics[name].gate.lender is lender and any(each.name == peer for each in lender.terms.peers):
                lender.join(lender.terms, now_ns)

    def hear(self, now_ns: int) -> None:
        """Carry out what peers have said in this turn; topics that it concerns are drained at its end."""
        heard, self.inbox = self.inbox, []
        newest = {(each.peer, each.entry.topic): each.entry.id for each in heard if each.asks}
        for peer, asks, entry in heard:
            if asks and entry.id != newest[peer, entry.topic]:
                continue  # it has been given up: a peer has one ask on its way
            topic = self._topics.get(entry.topic)
            lender = topic.gate.lender if topic is not None else None
            if topic is None or lender is None or lender.terms.birth != entry.birth:
                continue
            waiting = topic.gate.let_go(now_ns)
            (lender.asked if asks else lender.answered)(peer, entry, now_ns, waiting)
            self._topics.touch(entry.topic)

    def close(self) -> None:
        """Lend no more."""
        if self.wire is not None:
            self.wire.close()
