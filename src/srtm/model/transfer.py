"""Moving shares between brokers so that at no instant more is out than there is: cut, acknowledged, then given.

A loop without IO: `orders` says which grants to send now, `acknowledged` hears that a broker has put one in force.
What a broker may be using is what it last acknowledged or what it was sent since, whichever is larger, for r and for b.
Those amounts add up to no more than the whole bucket, always. Where the whole itself is made smaller (`resize`), they
do from when the cuts that it takes are acknowledged; until then nothing is enlarged. Tokens that a smaller bucket had
to give up travel with the next grants that enlarge one; a broker applies a grant, and its gift, once per sequence
number. A broker that never answers holds back what it was to give, no more. One whose lease lapsed has cut itself to
its safe share (`lapsed`), and one that is proven dead holds nothing (`gone`); the tokens that it had are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from srtm.errors import InputError
from srtm.model.bucket import TokenBucket
from srtm.model.split import split_among, within
from srtm.units import NANO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Grant:
    """A share for a broker to put in force, None to give it up; `gift_ntok` are tokens that come along.

    A broker that had no share starts with the gift alone, not with a full bucket: `Limiter(share, now, gift)`.
    """

    broker: str
    share: TokenBucket | None
    sequence: int
    gift_ntok: int = 0


class _Amount(NamedTuple):
    """A share that may be nothing."""

    r_mtps: int = 0
    b_ntok: int = 0

    @property
    def share(self) -> TokenBucket | None:
        """The bucket of this size; none where it is too small to be one."""
        return TokenBucket(*self) if self.r_mtps >= 1 and self.b_ntok >= NANO_PER_TOKEN else None


_NOTHING = _Amount()


class Transfer:
    """The way from the shares that brokers hold to those that they should hold; who has none is not in the mapping."""

    def __init__(
        self,
        whole: TokenBucket,
        held: Mapping[str, TokenBucket],
        wanted: Mapping[str, TokenBucket],
        first_sequence: int = 1,
        pool_ntok: int = 0,
    ) -> None:
        """`pool_ntok` are tokens that nobody holds yet: all of b where the contract begins."""
        self._whole = whole
        self._held = {name: _amount(share) for name, share in held.items()}
        self._sent: dict[str, Grant] = {}
        self._firm: set[str] = set()  # brokers that have a share for as long as their lease, and would cut it then
        self._lapsed: set[str] = set()  # brokers that have cut it, and put no grant in force since
        self._late: dict[str, int] = {}  # grants that were under way then, and may be put in force yet, cut
        self._pool_ntok = pool_ntok
        self.next_sequence = first_sequence
        self.retarget(wanted)

    def retarget(self, wanted: Mapping[str, TokenBucket]) -> None:
        """Go for other shares from here on; grants that are under way stay valid."""
        if not within(self._whole, wanted.values()):
            raise InputError(f"the wanted shares exceed the whole bucket {self._whole}")
        self._wanted = {name: _amount(share) for name, share in wanted.items()}

    def resize(self, whole: TokenBucket) -> None:
        """Share another bucket from here on, in the same proportions.

        Nobody has the tokens that a larger b has more: they come with time.
        """
        self._whole = whole
        self.retarget(scaled(whole, self.wanted))
        self._pool_ntok = min(self._pool_ntok, self._free().b_ntok)

    @property
    def whole(self) -> TokenBucket:
        """The bucket that is shared."""
        return self._whole

    @property
    def pool_ntok(self) -> int:
        """Tokens that nobody holds."""
        return self._pool_ntok

    @property
    def wanted(self) -> dict[str, TokenBucket]:
        """The shares that brokers should hold."""
        return {name: share for name, amount in self._wanted.items() if (share := amount.share)}

    @property
    def held(self) -> dict[str, TokenBucket]:
        """The shares that brokers have acknowledged."""
        return {name: share for name, amount in self._held.items() if (share := amount.share)}

    @property
    def possible(self) -> dict[str, TokenBucket]:
        """The most that each broker may be using now."""
        amounts = {name: self._possible(name) for name in self._held.keys() | self._sent.keys()}
        return {name: share for name, amount in amounts.items() if (share := amount.share)}

    @property
    def unanswered(self) -> list[Grant]:
        """Grants that were sent and not acknowledged."""
        return list(self._sent.values())

    @property
    def done(self) -> bool:
        """Every broker has acknowledged what it should hold."""
        names = self._held.keys() | self._wanted.keys()
        return not self._sent and all(self._has(name) == self._goal(name) for name in names)

    def orders(self) -> list[Grant]:
        """Grants to send now: cuts first, and gives as far as what was cut has been acknowledged."""
        idle = sorted((self._held.keys() | self._wanted.keys()) - self._sent.keys())
        grants = [self._send(name, cut) for name in idle if (cut := self._cut(name)) != self._has(name)]
        return grants + [
            self._send(name, given)
            for name in idle
            if name not in self._sent and (given := self._give(name)) != self._has(name)
        ]

    def acknowledged(self, grant: Grant, surrendered_ntok: int = 0) -> None:
        """A broker has put the grant in force, and gave up so many tokens. Answers to older grants change nothing."""
        if self._sent.get(grant.broker) != grant:
            return
        if surrendered_ntok < 0:
            raise InputError(f"broker {grant.broker!r} says it gave up {surrendered_ntok} nano-tokens")
        del self._sent[grant.broker]
        now = _amount(grant.share)
        lost = max(0, self._has(grant.broker).b_ntok - now.b_ntok)
        self._held[grant.broker] = now
        self._lapsed.discard(grant.broker)
        self._late.pop(grant.broker, None)
        surrendered_ntok = min(surrendered_ntok, lost)  # nobody can give up more than was taken from it
        self._pool_ntok = min(self._pool_ntok + surrendered_ntok, self._free().b_ntok)

    def lapsed(self, broker: str, safe_percent: int) -> None:
        """The broker's lease has ended: what it had in force by that lease, it has cut to this part of it."""
        has, sent = self._has(broker), self._sent.pop(broker, None)
        if broker in self._firm:
            has = _amount(safe_share(has.share, safe_percent))
            self._firm.discard(broker)
        self._lapsed.add(broker)
        late = _amount(safe_share(sent.share, safe_percent)) if sent else _NOTHING
        if sent:
            self._late[broker] = sent.sequence
        self._held[broker] = _most(has, late)
        self._wanted[broker] = self._cut(
            broker
        )  # it is not to be given back what others may get, until someone says so

    def gone(self, broker: str) -> None:
        """The broker is dead for certain, or has started anew: it holds nothing."""
        self._sent.pop(broker, None)
        self._held.pop(broker, None)
        self._wanted.pop(broker, None)  # or it would be granted its share again, which nobody would acknowledge
        self._firm.discard(broker)
        self._lapsed.discard(broker)
        self._late.pop(broker, None)

    def found(self, broker: str, share: TokenBucket | None, *, safe: bool, sequence: int | None = None) -> None:
        """The broker says what it has in force, by which of our grants, and whether it is its safe share already.

        Less than was thought frees the rest; more is not believed, nor that a share is whole whose lease has ended:
        that was said before it did, and came late. Nor does it free anything that a grant which was under way when the
        lease ended may bring yet.
        """
        has, said = self._has(broker), _amount(share)
        if sequence is not None and sequence >= self._late.get(broker, 0):
            self._late.pop(broker, None)
        if broker not in self._sent and broker not in self._late:
            self._held[broker] = _Amount(min(has.r_mtps, said.r_mtps), min(has.b_ntok, said.b_ntok))
        if safe:
            self._firm.discard(broker)
        elif broker not in self._lapsed:
            self._firm.add(broker)

    def recalled(self, broker: str, share: TokenBucket) -> None:
        """The books are lost, and the broker says that it holds this."""
        self._held[broker] = _amount(share)

    def forget_pool(self) -> None:
        """Nobody knows how many tokens are out: none are left to be given."""
        self._pool_ntok = 0

    def _send(self, name: str, amount: _Amount) -> Grant:
        gift_ntok = min(self._pool_ntok, max(0, amount.b_ntok - self._has(name).b_ntok))
        self._pool_ntok -= gift_ntok
        grant = Grant(name, amount.share, self.next_sequence, gift_ntok)
        self.next_sequence += 1
        self._sent[name] = grant
        assert self._possible(name) == self._has(name) or within(self._whole, self.possible.values())
        return grant

    def _cut(self, name: str) -> _Amount:
        has, goal = self._has(name), self._goal(name)
        return _Amount(min(has.r_mtps, goal.r_mtps), min(has.b_ntok, goal.b_ntok))

    def _give(self, name: str) -> _Amount:
        has, goal, free = self._has(name), self._goal(name), self._free()
        given = _Amount(
            has.r_mtps + min(free.r_mtps, goal.r_mtps - has.r_mtps),
            has.b_ntok + min(free.b_ntok, goal.b_ntok - has.b_ntok),
        )
        return given if given.share else has

    def _free(self) -> _Amount:
        """What nobody may be using: nothing while more is out than there is."""
        out = [self._possible(name) for name in self._held.keys() | self._sent.keys()]
        r_mtps = self._whole.r_mtps - sum(amount.r_mtps for amount in out)
        b_ntok = self._whole.b_ntok - sum(amount.b_ntok for amount in out)
        return _Amount(r_mtps, b_ntok) if r_mtps >= 0 and b_ntok >= 0 else _NOTHING

    def _has(self, name: str) -> _Amount:
        return self._held.get(name, _NOTHING)

    def _goal(self, name: str) -> _Amount:
        return self._wanted.get(name, _NOTHING)

    def _possible(self, name: str) -> _Amount:
        has = self._has(name)
        return _most(has, _amount(self._sent[name].share)) if name in self._sent else has


def _most(one: _Amount, other: _Amount) -> _Amount:
    return _Amount(max(one.r_mtps, other.r_mtps), max(one.b_ntok, other.b_ntok))


def scaled(whole: TokenBucket, shares: Mapping[str, TokenBucket]) -> dict[str, TokenBucket]:
    """Shares of another bucket, in the same proportions."""
    r_weights = {name: share.r_mtps for name, share in shares.items()}
    return split_among(whole, r_weights, {name: share.b_ntok for name, share in shares.items()})


def safe_share(share: TokenBucket | None, percent: int) -> TokenBucket | None:
    """What a broker goes on with when its lease has ended; none where so little is no bucket."""
    has = _amount(share)
    return _Amount(has.r_mtps * percent // 100, has.b_ntok * percent // 100).share


def _amount(share: TokenBucket | None) -> _Amount:
    return _Amount(share.r_mtps, share.b_ntok) if share else _NOTHING
