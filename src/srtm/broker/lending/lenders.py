"""The topics that a broker lends tokens of: by whose terms, and what peers have said about them.

In: the controller's terms, with every exchange; asks and answers of peers. Out: tokens into and out of gates. A topic
lends only while its share is in force: with another share, without one, and when the lease ends, its gate drops the
lender, and what comes for it has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from srtm.broker.lending.lender import RULES, Lender
from srtm.model.books import Books
from srtm.protocol.lending import MOST_PTOK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from srtm.broker.topic import Topic
    from srtm.broker.topics import Topics
    from srtm.protocol.exchange import Lends
    from srtm.protocol.lending import Entry

    Shifted = Callable[[str, str, int, int], None]  # topic, peer, time, pico-tokens


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
    incarnation: int = 0  # of the peer


class Lenders:
    """All topics of this broker that lend."""

    __slots__ = ("_books", "_lenders", "_me", "_topics", "inbox", "on_shift", "wire")

    def __init__(self, me: str, topics: Topics) -> None:
        self.wire: Wire | None = None  # without one, nothing is lent
        self.inbox: list[Heard] = []  # in this turn
        self.on_shift: Shifted | None = None  # is told of tokens that come (or go, if negative)
        self._me = me
        self._topics = topics
        self._lenders: dict[str, Lender] = {}
        self._books: dict[str, tuple[int, Books]] = {}  # by topic, with the birth of the contract

    def books(self, topic: str, birth: int) -> Books | None:
        """The books of a contract; None if it never lent tokens here. They stay when lending pauses."""
        kept = self._books.get(topic)
        return kept[1] if kept is not None and kept[0] == birth else None

    def forget(self, topics: Iterable[str]) -> None:
        """These contracts are over."""
        for name in topics:
            if self._books.pop(name, None) and name in self._topics:
                self._topics[name].gate.books = None

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
        books = self.books(topic.name, terms.birth)
        if books is None:
            books = Books()
            self._books[topic.name] = terms.birth, books
        gate.books = books
        if known is None or known.limiter is not limiter or known.terms.birth != terms.birth:
            assert self.wire is not None
            return Lender(self._me, topic.name, limiter, terms, self.wire.post, now_ns, books)
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
        for peer, asks, entry, incarnation in heard:
            if asks and entry.id != newest[peer, entry.topic]:
                continue  # it has been given up: a peer has one ask on its way
            topic = self._topics.get(entry.topic)
            lender = topic.gate.lender if topic is not None else None
            if topic is None or lender is None or lender.terms.birth != entry.birth:
                continue
            if not lender.expects(peer, incarnation):
                continue
            waiting = topic.gate.let_go(now_ns)
            came_ptok = (lender.asked if asks else lender.answered)(peer, incarnation, entry, now_ns, waiting)
            if came_ptok and self.on_shift is not None:
                self.on_shift(entry.topic, peer, now_ns, came_ptok)
            self._topics.touch(entry.topic)

    def close(self) -> None:
        """Lend no more."""
        if self.wire is not None:
            self.wire.close()
