"""The audit of a topic's lending: do the books of its brokers agree, and can each have spent what it says it spent?

No clock and no IO. In: each broker's report of its books, with the exchange that asked for it. Out: disputes between
two brokers, brokers that overspent, and from both, who is accused. docs/adr/0021-lending.md says what this proves.

*Books.* A lender counts tokens before it sends them, and a borrower when they come. So what A borrowed from B is never
more than what B lent to A, at every instant. Reports are of different instants: the claim of A is compared only with a
report that B was asked for after A's was heard. No loss, delay or order of reports makes honest brokers disagree.

*Spending.* A bucket of (r, b) that is looked at in intervals Δt lets no more than r·Δt pass beyond what it held, and
never holds more than b. With tokens that came and went, that bounds every broker's messages. The bound allows `slack`:
reports are late, loops stand still, clocks are set.

Always holds: counts of another incarnation are another process's, and accuse nobody.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from srtm.units import MILLI_PER_TOKEN, NANO_PER_TOKEN, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.model.bucket import TokenBucket

SLACK_S = 5  # of a topic's whole rate: longer than a broker may be silent before its account begins anew


class Party(NamedTuple):
    """A broker's process: its name and its start."""

    name: str
    incarnation: int


class Book(NamedTuple):
    """What a broker says: nano-tokens by peer, and messages that took a token."""

    lent_ntok: Mapping[Party, int]
    borrowed_ntok: Mapping[Party, int]
    spent: int


class Dispute(NamedTuple):
    """A borrower claims more tokens than the lender says it lent."""

    borrower: Party
    lender: Party
    claimed_ntok: int
    lent_ntok: int

    def __str__(self) -> str:
        """Both figures, with names."""
        return (
            f"{self.borrower.name} says it borrowed {_tokens(self.claimed_ntok)} tokens from {self.lender.name},"
            f" which says it lent {_tokens(self.lent_ntok)}"
        )


class Overspent(NamedTuple):
    """A broker says that it spent and lent more than its share and what it borrowed allow."""

    broker: Party
    by_ntok: int

    def __str__(self) -> str:
        """The broker, and by how much."""
        return f"{self.broker.name} spent and lent {_tokens(self.by_ntok)} tokens more than it can have had"


@dataclass(slots=True)
class _Claim:
    """What a borrower says, and the newest exchange when it was heard: reports to later ones are of a later instant."""

    ntok: int
    heard: int


@dataclass(slots=True)
class _Account:
    """The most that a broker's bucket can hold, by its own reports."""

    level_ntok: int
    at_ns: int
    book: Book
    credited_ntok: int  # of what it borrowed, in all
    share: TokenBucket


@dataclass(slots=True)
class Audit:
    """The audit of one contract."""

    disputes: dict[tuple[Party, Party], Dispute] = field(default_factory=dict)
    overspent: dict[Party, Overspent] = field(default_factory=dict)
    _books: dict[Party, Book] = field(default_factory=dict)
    _claims: dict[tuple[Party, Party], _Claim] = field(default_factory=dict)  # by borrower and lender
    _accounts: dict[Party, _Account] = field(default_factory=dict)

    def hear(self, broker: Party, book: Book, asked: int, newest: int) -> None:
        """A broker's report, made after exchange `asked` was sent; `newest` is the last exchange that was sent."""
        for (borrower, lender), claim in list(self._claims.items()):
            if lender == broker and asked > claim.heard:
                lent_ntok = book.lent_ntok.get(borrower, 0)
                if claim.ntok > lent_ntok:
                    self.disputes[borrower, lender] = Dispute(borrower, lender, claim.ntok, lent_ntok)
                del self._claims[borrower, lender]
        for lender, ntok in book.borrowed_ntok.items():
            self._claims.setdefault((broker, lender), _Claim(ntok, newest))
        self._books[broker] = book

    def check_spending(
        self, broker: Party, share: TokenBucket, whole: TokenBucket, gift_ntok: int, now_ns: int
    ) -> None:
        """After `hear`: `share` is the most that the broker may have had in force since its last report."""
        book, account = self._books[broker], self._accounts.get(broker)
        credited = self._credited(broker, book, slack_ntok(whole))
        if account is None or book.spent < account.book.spent:
            self._accounts[broker] = _Account(share.b_ntok, now_ns, book, credited, share)
            return
        r_mtps, b_ntok = max(share.r_mtps, account.share.r_mtps), max(share.b_ntok, account.share.b_ntok)
        refill = r_mtps * (now_ns - account.at_ns) * NANO_PER_TOKEN // (MILLI_PER_TOKEN * NS_PER_S)
        came = refill + gift_ntok + credited - account.credited_ntok
        went = (book.spent - account.book.spent) * NANO_PER_TOKEN
        went += _sum(book.lent_ntok) - _sum(account.book.lent_ntok)
        level = min(b_ntok, account.level_ntok + came) - went
        self._accounts[broker] = _Account(level, now_ns, book, credited, share)
        if -level > slack_ntok(whole):
            self.overspent[broker] = Overspent(broker, -level)

    def lost_sight(self, broker: str) -> None:
        """A broker was silent: it may have worked off what came long before, so its account begins anew."""
        for party in [each for each in self._accounts if each.name == broker]:
            del self._accounts[party]

    def restarted(self, broker: Party) -> None:
        """Forget earlier processes of that name, and what others say about them."""
        for book in (self._books, self._accounts, self.overspent):
            for party in [each for each in book if each.name == broker.name and each != broker]:
                del book[party]
        for pairs in (self._claims, self.disputes):
            stale = [pair for pair in pairs if any(each.name == broker.name and each != broker for each in pair)]
            for pair in stale:
                del pairs[pair]

    @property
    def accused(self) -> dict[str, str]:
        """Brokers that lied, and what speaks against each."""
        found = {party.name: str(each) for party, each in self.overspent.items()}
        disputes = [
            each for each in self.disputes.values() if not {each.borrower.name, each.lender.name} & found.keys()
        ]
        while disputes:
            liar = _most_disputed(disputes)
            found[liar] = "; ".join(str(each) for each in disputes if liar in (each.borrower.name, each.lender.name))
            disputes = [each for each in disputes if liar not in (each.borrower.name, each.lender.name)]
        return found

    def _credited(self, broker: Party, book: Book, slack: int) -> int:
        """What a broker borrowed, as far as lenders confirm it, or may yet: their books are a moment older."""
        return sum(
            min(ntok, self._books[lender].lent_ntok.get(broker, 0) + slack)
            for lender, ntok in book.borrowed_ntok.items()
            if lender in self._books
        )


def slack_ntok(whole: TokenBucket) -> int:
    """By how much a broker may seem to overspend: a full bucket of the topic, and its rate for some seconds."""
    return whole.b_ntok + whole.r_mtps * SLACK_S * NANO_PER_TOKEN // MILLI_PER_TOKEN


def _most_disputed(disputes: Iterable[Dispute]) -> str:
    """The broker that disagrees with most others; of two that only disagree with each other, the borrower.

    A claim that the lender does not confirm counts for nothing, whoever of the two is wrong.
    """
    others: defaultdict[str, set[str]] = defaultdict(set)
    borrows: set[str] = set()
    for each in disputes:
        others[each.borrower.name].add(each.lender.name)
        others[each.lender.name].add(each.borrower.name)
        borrows.add(each.borrower.name)
    return min(others, key=lambda name: (-len(others[name]), name not in borrows, name))


def _sum(amounts: Mapping[Party, int]) -> int:
    return sum(amounts.values())


def _tokens(ntok: int) -> str:
    return f"{ntok / NANO_PER_TOKEN:,.1f}"
