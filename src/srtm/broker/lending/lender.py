"""A topic that lends: `model.lending` beside its gate, and its words on the wire.

In: looks at the gate after each drain, asks and answers of peers. Out: asks and answers, to whoever `post`s them. The
gate drops its lender when its bucket changes, and `Lenders` gives it back with the shares that are then in force.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from srtm.model.lending import Answer as Lent
from srtm.model.lending import Ask, Lending, Rule
from srtm.protocol import exchange
from srtm.protocol.lending import MOST_PTOK, Entry
from srtm.units import NANO_PER_TOKEN, NS_PER_MS, PICO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from srtm.model.books import Account, Books
    from srtm.model.limiter import Limiter
    from srtm.protocol.exchange import Lends

    Post = Callable[[str, bool, Entry], None]  # to whom; whether it is an ask, and not an answer

RULES: dict[str, Rule] = {rule: rule for rule in get_args(Rule) if rule != "off"}
_FIRST_ROUND_TRIP_NS = NS_PER_MS  # until one was measured
_PICO_PER_NANO = PICO_PER_TOKEN // NANO_PER_TOKEN


class Lender:
    """One broker's side of one topic's lending."""

    __slots__ = ("_lending", "_me", "_post", "limiter", "terms")

    def __init__(
        self, me: str, topic: str, limiter: Limiter, terms: Lends, post: Post, now_ns: int, books: Books
    ) -> None:
        """Begin beside a share that is in force, and go on with the books of this contract; `me` is this broker."""
        self.limiter = limiter
        self._me = me
        self._post = post
        took_ns = books.round_trip_ns or _FIRST_ROUND_TRIP_NS
        self._lending = Lending(topic, limiter, now_ns, rule=RULES[terms.rule], round_trip_ns=took_ns, books=books)
        self.join(terms, now_ns)

    def join(self, terms: Lends, now_ns: int) -> None:
        """Lend by these terms from now on; what was asked before is forgotten."""
        self.terms = terms
        self._lending.rule = RULES[terms.rule]
        shares = {peer.name: peer.share.bucket for peer in terms.peers if peer.name != self._me}
        self._lending.join(terms.birth, shares, now_ns)

    def expects(self, peer: str, incarnation: int) -> bool:
        """Whether the controller named this very process as a peer, not one that had its name before or since."""
        return any(each.name == peer and each.incarnation in (0, incarnation) for each in self.terms.peers)

    def forget(self, now_ns: int) -> None:
        """Messages have given up claims on tokens: take no answer to what was asked before."""
        self._lending.forget(now_ns)

    def look(self, now_ns: int, waiting: int) -> int | None:
        """The gate was drained: ask somebody, if that helps; returns when to look again at the latest."""
        lending = self._lending
        if found := lending.turn(now_ns, waiting):
            peer, ask = found
            self._say(peer, ask.id, ask.want_ptok, ask.level_ptok, asks=True)
        return lending.wake_ns

    def asked(self, peer: str, incarnation: int, entry: Entry, now_ns: int, waiting: int) -> int:
        """Answer a peer that asks; returns the pico-tokens that come, which is 0 or negative.

        The gate has released what was due.
        """
        ask = Ask(entry.topic, entry.birth, entry.id, entry.ptok, entry.level_ptok)
        answer = self._lending.lend(peer, ask, now_ns, waiting, incarnation)
        if answer is None:
            return 0
        self._say(peer, answer.id, answer.lent_ptok, answer.level_ptok, asks=False)
        return -answer.lent_ptok

    def answered(self, peer: str, incarnation: int, entry: Entry, now_ns: int, waiting: int) -> int:
        """Take what a peer lends; returns the pico-tokens. The gate has released what was due, and is drained next."""
        lent = Lent(entry.topic, entry.id, entry.ptok, entry.level_ptok)
        return self._lending.borrow(peer, lent, now_ns, waiting, incarnation)

    def _say(self, peer: str, number: int, ptok: int, level_ptok: int, *, asks: bool) -> None:
        level_ptok = max(level_ptok, -MOST_PTOK)  # millions of messages wait: how many does not matter
        self._post(peer, asks, Entry(self._lending.topic, self.terms.birth, number, ptok, level_ptok))


def reported(books: Books) -> exchange.Lent:
    """Books as the controller and `/stats` get them."""
    total = books.total
    return exchange.Lent(
        total.asks,
        total.unanswered,
        total.lent_ptok // _PICO_PER_NANO,
        total.borrowed_ptok // _PICO_PER_NANO,
        total.lost_ptok // _PICO_PER_NANO,
        books.round_trip_ns,
        books.spent,
        [_peer(name, account) for name, account in sorted(books.accounts.items())],
    )


def _peer(name: str, account: Account) -> exchange.PeerLent:
    lent, borrowed = account.lent_ptok, account.borrowed_ptok
    return exchange.PeerLent(
        name,
        account.asks,
        account.unanswered,
        account.heard,
        account.refused,
        account.lost_ptok // _PICO_PER_NANO,
        [
            (each, lent.get(each, 0) // _PICO_PER_NANO, borrowed.get(each, 0) // _PICO_PER_NANO)
            for each in sorted(lent.keys() | borrowed.keys())
        ],
        account.sketch.flat,
    )
