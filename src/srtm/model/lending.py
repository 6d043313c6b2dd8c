"""Lending: the brokers of a topic lend each other tokens, so that k buckets behave almost like one.

One `Lending` is one broker's side of one topic, beside the `Limiter` of its share. It does no I/O and has no clock:
asks and answers come in and go out as values, and time is an argument. docs/adr/0021-lending.md has the rule and the
proof.

Invariants, whatever is lost, late, doubled or reordered, and whatever the clocks of other brokers say:
- tokens at brokers, with those on the way that one would still take, are at most what one bucket (r, b) would hold;
- a message that waits leaves no later than its own share alone would have let it go from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from srtm.errors import InputError
from srtm.model.books import Books, Counts
from srtm.model.law import TOKEN, WORTH, in_need, lendable, look_again_ns, step, wanted
from srtm.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.model.books import Account
    from srtm.model.bucket import TokenBucket
    from srtm.model.limiter import Limiter

Rule = Literal["off", "when_waiting", "early"]
Term = Literal["auto", "off", "when_waiting", "early"]  # of a contract: `auto` is for the controller to choose
RULES: tuple[Rule, ...] = get_args(Rule)
TERMS: tuple[Term, ...] = get_args(Term)
PATIENCE = 4  # round trips until an ask counts as lost
LEAST_PATIENCE_NS = 2 * NS_PER_MS  # a broker may be busy for that long
ASK_NS = 20_000  # the least mean time between asks of one peer that are answered: shorter than any round trip
MOST_ASKS = 64  # that may come at once
_SMOOTHING = 8  # one answer changes the measured round trip by an eighth, and does not double it


def known_term(text: str) -> Term:
    """The same text; InputError if a contract cannot say that."""
    for term in TERMS:
        if text == term:
            return term
    raise InputError(f"unknown lending {text[:40]!r}; choose {', '.join(TERMS[:-1])} or {TERMS[-1]}", lending=text)


class Ask(NamedTuple):
    """A broker asks a peer for tokens, and says its level: negative if messages wait."""

    topic: str
    epoch: int
    id: int
    want_ptok: int
    level_ptok: int


class Answer(NamedTuple):
    """What the peer lends, and the level that this leaves it with."""

    topic: str
    id: int
    lent_ptok: int
    level_ptok: int


class _Peer:
    """Another broker of the topic: its share, its backlog as last heard, and its last ask."""

    __slots__ = ("_asked_ns", "_asks_ns", "backlog", "burst", "heard_ns", "last_id", "rate")

    def __init__(self, share: TokenBucket, now_ns: int) -> None:
        self.rate, _, self.burst = share.pico_law
        self.backlog = 0  # a peer counts as full until it is heard
        self.heard_ns = now_ns
        self.last_id = 0
        self._asks_ns = 0  # of work that its asks made lately, `ASK_NS` each
        self._asked_ns = now_ns

    def may_ask(self, now_ns: int) -> bool:
        """Whether this ask of the peer comes no faster than asks of a broker that waits for its answers."""
        asks_ns = step(self._asks_ns, max(0, now_ns - self._asked_ns), 1, ASK_NS)
        if asks_ns > MOST_ASKS * ASK_NS:
            return False
        self._asks_ns, self._asked_ns = asks_ns, now_ns
        return True

    def heard(self, level_ptok: int, at_ns: int) -> None:
        self.backlog, self.heard_ns = max(0, self.burst - level_ptok), at_ns

    def level(self, now_ns: int) -> int:
        return self.burst - step(self.backlog, max(0, now_ns - self.heard_ns), self.rate, 0)


class _Asked(NamedTuple):
    peer: str
    ask: Ask
    sent_ns: int
    until_ns: int  # after that it counts as lost


class Lending:
    """One broker's side of one topic. One ask is on its way at a time.

    Whoever owns the gate calls, each time with the number of messages that then wait for tokens:
    - `turn`, after the gate was drained, and no later than `wake_ns`;
    - `lend` for an ask and `borrow` for an answer, before which the gate must have released what was due;
    - `join` when shares or the epoch change, and `forget` when waiting messages give up their claims.
    """

    __slots__ = (
        "_asked",
        "_burst",
        "_epoch",
        "_given_up",
        "_last_id",
        "_limiter",
        "_peers",
        "_rate",
        "_seen",
        "_top",
        "books",
        "round_trip_ns",
        "rule",
        "topic",
        "wake_ns",
    )

    def __init__(
        self,
        topic: str,
        limiter: Limiter,
        now_ns: int,
        *,
        rule: Rule,
        round_trip_ns: int,
        books: Books | None = None,
    ) -> None:
        """Begin alone: until `join`, there is nobody to ask. With `books`, go on counting in them."""
        self.topic = topic
        self.rule: Rule = rule
        self.round_trip_ns = round_trip_ns  # as measured lately
        self.books = Books() if books is None else books
        self.wake_ns: int | None = None
        self._limiter = limiter
        self._last_id = now_ns  # a broker that starts again does not repeat ids
        self.join(0, {}, now_ns)

    def join(self, epoch: int, peers: Mapping[str, TokenBucket], now_ns: int) -> None:
        """The shares of this epoch are in force, and these are the others'. What was asked before is forgotten."""
        self._epoch = epoch
        self._peers = {name: _Peer(share, now_ns) for name, share in peers.items()}
        self._rate, _, self._burst = self._limiter.bucket.pico_law
        self.forget(now_ns)

    def forget(self, now_ns: int) -> None:
        """Take no answer to what was asked: the level has changed in a way that leaves it no room."""
        self._asked: _Asked | None = None
        self._given_up: _Asked | None = None
        self._top = 0
        self.wake_ns = None
        self._look(now_ns, 0)

    def turn(self, now_ns: int, waiting: int) -> tuple[str, Ask] | None:
        """The gate was drained: whom to ask, if anybody."""
        self._rise(now_ns)
        self._look(now_ns, waiting)
        if self._asked is not None:
            if now_ns < self._asked.until_ns:
                return None
            self.books.of(self._asked.peer).unanswered += 1
            self._peers[self._asked.peer].heard(0, now_ns)  # others first
            self._given_up, self._asked = self._asked, None
        return self._ask(now_ns, waiting)

    @property
    def counts(self) -> Counts:
        """What has been exchanged with all peers."""
        return self.books.total

    def lend(self, sender: str, ask: Ask, now_ns: int, waiting: int, incarnation: int = 0) -> Answer | None:
        """What to answer; nothing to an ask that was answered before, nor to a peer that asks without end."""
        peer = self._peers.get(sender)
        if peer is None or ask.epoch != self._epoch or ask.id <= peer.last_id:
            return None
        account = self.books.of(sender)
        account.heard += 1
        if not peer.may_ask(now_ns):
            account.refused += 1
            return None
        self._rise(now_ns)
        level, lent = self._limiter.level_ptok(now_ns), 0
        if self.rule != "off":
            lent = lendable(ask.want_ptok, waiting, level, self._burst, ask.level_ptok, peer.burst)
        peer.last_id = ask.id
        peer.heard(ask.level_ptok, now_ns - self.round_trip_ns // 2)
        self._limiter.shift(now_ns, -lent)
        self._look(now_ns, waiting)
        account.lend(incarnation, lent)
        return Answer(self.topic, ask.id, lent, level - lent)

    def borrow(self, sender: str, answer: Answer, now_ns: int, waiting: int, incarnation: int = 0) -> int:
        """Take the tokens that there was room for all the time since the ask; returns how many. `turn` comes next."""
        asked, account = self._asked, self.books.of(sender)
        if asked is None or (asked.peer, asked.ask.id) != (sender, answer.id):
            account.lost_ptok += answer.lent_ptok
            late = self._given_up
            if late is not None and (late.peer, late.ask.id) == (sender, answer.id):
                self._given_up = None
                self._measured(account, now_ns - late.sent_ns)  # or every answer of a distant peer would be late
            return 0
        self._rise(now_ns)
        self._asked, self.wake_ns = None, None
        self._measured(account, now_ns - asked.sent_ns)
        self._peers[sender].heard(answer.level_ptok, now_ns - self.round_trip_ns // 2)
        taken = max(0, min(answer.lent_ptok, asked.ask.want_ptok, self._burst - self._top))
        self._limiter.shift(now_ns, taken)
        self._look(now_ns, waiting)
        account.borrow(incarnation, taken, answer.lent_ptok - taken)
        return taken

    def takes_ptok(self, now_ns: int) -> int:
        """The most that an answer could still bring: tokens on the way beyond it are lost already."""
        if self._asked is None:
            return 0
        self._rise(now_ns)
        return max(0, min(self._asked.ask.want_ptok, self._burst - self._top))

    def _measured(self, account: Account, took_ns: int) -> None:
        """An exchange took that long; one that a broker slept through counts as a long one, not as it was."""
        known, took_ns = max(1, self.round_trip_ns), max(0, took_ns)
        self.round_trip_ns += (min(took_ns, _SMOOTHING * known) - self.round_trip_ns) // _SMOOTHING
        self.books.round_trip_ns = self.round_trip_ns
        account.round_trips_ns.append(took_ns)

    def _ask(self, now_ns: int, waiting: int) -> tuple[str, Ask] | None:
        """Ask the peer that seems to have most to lend, if any; if messages wait in vain, look again later."""
        self.wake_ns = None
        if self.rule == "off" or not self._peers:
            return None
        level, refill = self._limiter.level_ptok(now_ns), self._rate * self.round_trip_ns
        worth, most, best = WORTH if self.rule == "early" else 0, 0, ""
        for name, peer in self._peers.items():
            want = wanted(worth, waiting, level, self._burst, refill, peer.level(now_ns), peer.burst)
            if want > most:
                most, best = want, name
        if not most:
            if in_need(waiting, level, refill):
                self.wake_ns = now_ns + look_again_ns(self.round_trip_ns, self._rate)
            return None
        self._last_id += 1
        ask = Ask(self.topic, self._epoch, self._last_id, most, level)
        self.wake_ns = now_ns + max(LEAST_PATIENCE_NS, PATIENCE * self.round_trip_ns)
        self._asked, self._top = _Asked(best, ask, now_ns, self.wake_ns), TOKEN if waiting else level
        self.books.of(best).asks += 1
        return best, ask

    def _rise(self, now_ns: int) -> None:
        """Note how many tokens the bucket may have held since it was last looked at: messages only take from it."""
        level, at_ns, waiting = self._seen
        highest = self._burst - step(self._burst - level, max(0, now_ns - at_ns), self._rate, 0)
        self._top = max(self._top, highest, TOKEN if waiting else 0)

    def _look(self, now_ns: int, waiting: int) -> None:
        self._seen = (self._limiter.level_ptok(now_ns), now_ns, waiting)
