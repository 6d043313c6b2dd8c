"""Moving shares between brokers without ever exceeding the whole bucket: cut, wait for the acknowledgement, then give.

A loop without IO: `orders` says which grants to send now; `acknowledged` and `found` hear what brokers have in force. A
broker may be using the largest of what it last reported, what it was sent since, and what it may hold of the contract
that had the name before. These amounts add up to no more than the whole bucket, always. If the whole shrinks (`resize`,
or a new contract of the same name), that holds again once the necessary cuts are acknowledged; until then no share
grows.

Brokers act on the newest exchange alone (`protocol.exchange`), so an answer settles everything sent before it: a grant
that an answer omits is void (`retire`), and what a broker reports is what it has, be it less or more than expected.

Tokens that a shrinking bucket gives up travel with the next grants that enlarge one; a broker applies a grant and its
gift once. A broker that never answers holds back only what it should give up. A broker whose lease lapsed has cut
itself to its safe share (`lapsed`), and a dead one holds nothing (`gone`); its tokens are lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from srtm.errors import InputError
from srtm.model.bucket import TokenBucket
from srtm.model.split import split_among, within
from srtm.units import NANO_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set


@dataclass(frozen=True, slots=True)
class PendingGrant:
    """A grant under way: a share for a broker to put in force, or None to give it up, with `gift_ntok` tokens.

    A broker without a share starts with the gift alone, not with a full bucket: `Limiter(share, now, gift)`.
    """

    broker: str
    share: TokenBucket | None
    sequence: int
    gift_ntok: int = 0


@dataclass(frozen=True, slots=True)
class Remains:
    """What brokers may still have in force of a contract that is over; `firm` brokers cut it when their lease ends.

    `doubtful` brokers may have it of an earlier contract, or less by now: they must be heard before they are granted.
    """

    shares: Mapping[str, TokenBucket] = field(default_factory=dict)
    firm: frozenset[str] = frozenset()
    doubtful: frozenset[str] = frozenset()

    def only(self, brokers: set[str]) -> Remains:
        """The part of these brokers."""
        shares = {name: share for name, share in self.shares.items() if name in brokers}
        return Remains(shares, self.firm & brokers, self.doubtful & brokers)


class _Amount(NamedTuple):
    """The size of a share; it may be zero."""

    r_mtps: int = 0
    b_ntok: int = 0

    @property
    def share(self) -> TokenBucket | None:
        """The bucket of this size; None if that is too small for a bucket."""
        return TokenBucket(*self) if self.r_mtps >= 1 and self.b_ntok >= NANO_PER_TOKEN else None


_NOTHING = _Amount()


class Transfer:
    """The way from the shares that brokers hold to those that they should hold, as mappings from broker to share."""

    def __init__(
        self,
        whole: TokenBucket,
        held: Mapping[str, TokenBucket],
        wanted: Mapping[str, TokenBucket],
        *,
        numbers: Iterator[int] | None = None,
        pool_ntok: int = 0,
        remains: Remains | None = None,
        kept: bool = False,
    ) -> None:
        """`pool_ntok` are tokens that no broker holds yet; `numbers` numbers the grants of all topics of a controller.

        With `kept`, `held` comes from a store and is the most that brokers had then. Each broker must be heard before
        it is granted anything: a cut from what it may have had could give it more than it has.
        """
        self._whole = whole
        self._held = {name: _amount(share) for name, share in held.items()}
        self._largest = _amount(whole)  # share that any broker can ever have had
        for amount in self._held.values():
            self._largest = _most(self._largest, amount)
        self._former = {name: _amount(share) for name, share in remains.shares.items()} if remains else {}
        self._sent: dict[str, PendingGrant] = {}
        # Grants that are no longer waited for but may still be put in force, with the exchange that settles them.
        self._loose: dict[str, tuple[int, _Amount]] = {}
        self._firm = set(remains.firm) if remains else set()  # brokers that cut their share when their lease ends
        self._unheard = {*held, *self._former} if kept else set(remains.doubtful) if remains else set()
        self._pool_ntok = pool_ntok
        self._numbers = numbers or count(1)
        self.changes = 0  # counts changes of everything that `orders` depends on
        self.retarget(wanted)

    @classmethod
    def begun(cls, whole: TokenBucket, numbers: Iterator[int], remains: Remains) -> Transfer:
        """A new contract: no broker has a share, and all of b is in the pool, except what may be out already."""
        taken_ntok = sum(share.b_ntok for share in remains.shares.values())
        return cls(whole, {}, {}, numbers=numbers, pool_ntok=max(0, whole.b_ntok - taken_ntok), remains=remains)

    def retarget(self, wanted: Mapping[str, TokenBucket]) -> None:
        """Aim for other shares from now on; grants under way stay valid."""
        if not within(self._whole, wanted.values()):
            raise InputError(f"the wanted shares exceed the whole bucket {self._whole}")
        self._wanted = {name: _amount(share) for name, share in wanted.items()}
        self.changes += 1

    def resize(self, whole: TokenBucket) -> None:
        """Share another bucket from now on, in the same proportions.

        The additional tokens of a larger b are not there yet; they come with time.
        """
        self._whole = whole
        self._largest = _most(self._largest, _amount(whole))
        self.retarget(scaled(whole, self.wanted))
        self._pool_ntok = min(self._pool_ntok, self._free().b_ntok)

    @property
    def whole(self) -> TokenBucket:
        """The bucket to share."""
        return self._whole

    def possibly(self, share: TokenBucket | None) -> bool:
        """Whether a broker can ever have been granted such a share."""
        amount = _amount(share)
        return _most(amount, self._largest) == self._largest

    @property
    def pool_ntok(self) -> int:
        """Tokens that no broker holds."""
        return self._pool_ntok

    @property
    def wanted(self) -> dict[str, TokenBucket]:
        """The shares that brokers should hold."""
        return {name: share for name, amount in self._wanted.items() if (share := amount.share)}

    @property
    def held(self) -> dict[str, TokenBucket]:
        """The shares that brokers last reported in force."""
        return {name: share for name, amount in self._held.items() if (share := amount.share)}

    @property
    def possible(self) -> dict[str, TokenBucket]:
        """The most that each broker may be using now."""
        return {name: share for name in self._known() if (share := self._possible(name).share)}

    @property
    def booked(self) -> dict[str, TokenBucket]:
        """The most that each broker may be using of this contract, without the one before."""
        return {name: share for name in self._known() if (share := self._new(name).share)}

    @property
    def former(self) -> Remains:
        """What brokers may have in force of the contract before this one."""
        shares = {name: share for name, amount in self._former.items() if (share := amount.share)}
        return Remains(shares, frozenset(self._firm & shares.keys()))

    @property
    def remains(self) -> Remains:
        """What brokers may have in force if this contract ends now."""
        return Remains(self.possible, frozenset(self._firm), frozenset(self._former))

    @property
    def unanswered(self) -> list[PendingGrant]:
        """Grants that were sent and not acknowledged."""
        return list(self._sent.values())

    @property
    def awaited(self) -> set[str]:
        """Brokers whose next answer will settle something."""
        return self._sent.keys() | self._loose.keys() | self._former.keys()

    @property
    def unsettled(self) -> set[str]:
        """Brokers whose share is not yet what it should be, or not known to be."""
        names = self._known() | self._wanted.keys()
        return {name for name in names if name in self._sent or self._possible(name) != self._goal(name)}

    @property
    def done(self) -> bool:
        """Whether every broker has acknowledged what it should hold."""
        return not self.unsettled

    def orders(self, withheld: Set[str] = frozenset()) -> list[PendingGrant]:
        """Grants to send now: cuts first, then increases from what is free, but none for brokers in `withheld`."""
        idle = sorted((self._known() | self._wanted.keys()) - self._sent.keys() - self._unheard)
        grants = [
            self._send(name, cut)
            for name in idle
            # A broker has nothing of a new contract until it is granted, even if its share of the old one counts still.
            if (cut := self._cut(name)) != self._has(name) or name in self._former
        ]
        free = self._free()
        for name in idle:
            has = self._has(name)
            if name in withheld or name in self._sent:
                continue
            if has != self._goal(name) and (given := self._give(name, free)) != has:
                grants.append(self._send(name, given))
                free = self._free()
        return grants

    def acknowledged(self, grant: PendingGrant, surrendered_ntok: int = 0) -> None:
        """A broker has put a grant in force, and gave up these tokens. Answers to older grants change nothing."""
        if self._sent.get(grant.broker) != grant:
            return
        if surrendered_ntok < 0:
            raise InputError(
                f"broker {grant.broker!r} reports that it gave up {surrendered_ntok} nano-tokens, which is negative"
            )
        del self._sent[grant.broker]
        self.changes += 1
        self.learned(grant.broker)
        now = _amount(grant.share)
        lost = max(0, self._has(grant.broker).b_ntok - now.b_ntok)
        self._held[grant.broker] = now
        self._loose.pop(grant.broker, None)
        surrendered_ntok = min(surrendered_ntok, lost)  # a broker cannot give up more than was taken from it
        self._pool_ntok = min(self._pool_ntok + surrendered_ntok, self._free().b_ntok)

    def learned(self, broker: str) -> None:
        """The broker knows this contract, and has dropped its share of the one before."""
        if broker not in self._held:
            self._unheard.discard(broker)
        former = self._former.pop(broker, None)
        if former is not None:
            self.changes += 1
            self._firm.discard(broker)
            self._pool_ntok = min(self._pool_ntok + former.b_ntok, self._free().b_ntok)

    def forget_remains(self) -> None:
        """Stop counting shares of the contract before this one: brokers that may hold some were silent for a lease."""
        for broker in list(self._former):
            self.learned(broker)

    def retire(self, broker: str, last: int) -> None:
        """Stop waiting for a grant that an answer omitted. Exchanges up to `last` may still bring it."""
        sent = self._sent.pop(broker, None)
        if sent is not None:
            self.changes += 1
            self._loosen(broker, last, _amount(sent.share))

    def lapsed(self, broker: str, safe_percent: int, last: int = 0) -> None:
        """The broker's lease has ended: it has cut its share to this part of it.

        The same holds for grants in exchanges up to `last` that it has not put in force yet.
        """
        if broker in self._firm:
            self._firm.discard(broker)
            for books in (self._held, self._former):
                if broker in books:
                    books[broker] = _safe(books[broker], safe_percent)
        self.retire(broker, last)
        _, loose = self._loose.get(broker, (last, _NOTHING))
        self._loose[broker] = last, _safe(loose, safe_percent)
        self.changes += 1
        # Others may get the rest, so it must not come back here before a new target says so.
        self._wanted[broker] = self._cut(broker)

    def gone(self, broker: str) -> None:
        """The broker is dead for certain, or restarted: it holds nothing."""
        for books in (self._sent, self._held, self._loose, self._former):
            books.pop(broker, None)
        self._unheard.discard(broker)
        self.changes += 1
        self._wanted.pop(broker, None)  # else it would be granted its share again, and never acknowledge that
        self._firm.discard(broker)

    def found(self, broker: str, share: TokenBucket | None, *, safe: bool, answered: int | None = None) -> None:
        """The broker reports what it has in force, and whether that is its safe share.

        `answered` is the newest exchange that it had acted on; None if that is newer than all that matter. The report
        counts: less frees the rest, and more reduces what is free. But an answer to an exchange from before the lease
        ended may be older than the broker's cut, so such an answer cannot raise the share.
        """
        said, before = _amount(share), (self._held.get(broker), broker in self._loose, broker in self._unheard)
        self._unheard.discard(broker)
        late = answered is not None and broker in self._loose and answered <= self._loose[broker][0]
        if not late:
            self._loose.pop(broker, None)
            (self._firm.discard if safe else self._firm.add)(broker)
        has = self._held.get(broker, _NOTHING)
        if late:
            said = _Amount(min(has.r_mtps, said.r_mtps), min(has.b_ntok, said.b_ntok))
        elif broker in self._sent:  # a report from before the grant arrived frees nothing
            said = _most(has, said)
        self._held[broker] = said
        self.changes += before != (said, broker in self._loose, False)

    def recalled(self, broker: str, share: TokenBucket) -> None:
        """The store is lost, and the broker reports that it holds this."""
        self._held[broker] = _amount(share)
        self.changes += 1

    def forget_pool(self) -> None:
        """Empty the pool: it is unknown how many tokens are out."""
        self._pool_ntok = 0

    def _loosen(self, broker: str, last: int, amount: _Amount) -> None:
        before, other = self._loose.get(broker, (0, _NOTHING))
        self._loose[broker] = max(before, last), _most(other, amount)

    def _send(self, name: str, amount: _Amount) -> PendingGrant:
        gift_ntok = min(self._pool_ntok, max(0, amount.b_ntok - self._has(name).b_ntok))
        self._pool_ntok -= gift_ntok
        grant = PendingGrant(name, amount.share, next(self._numbers), gift_ntok)
        self._sent[name] = grant
        assert self._possible(name) == self._has(name) or within(self._whole, self.possible.values())
        return grant

    def _cut(self, name: str) -> _Amount:
        has, goal = self._has(name), self._goal(name)
        cut = _Amount(min(has.r_mtps, goal.r_mtps), min(has.b_ntok, goal.b_ntok))
        if name not in self._former:
            return cut
        # The share of the old contract may be more than all of the new one. Grant no more than is left of that.
        others = [self._new(other) for other in self._known() if other != name]
        r_mtps = self._whole.r_mtps - sum(amount.r_mtps for amount in others)
        b_ntok = self._whole.b_ntok - sum(amount.b_ntok for amount in others)
        return _amount(_Amount(min(cut.r_mtps, r_mtps), min(cut.b_ntok, b_ntok)).share)

    def _new(self, name: str) -> _Amount:
        """The most that a broker may have in force of this contract alone."""
        _, loose = self._loose.get(name, (0, _NOTHING))
        has = _most(self._held.get(name, _NOTHING), loose)
        return _most(has, _amount(self._sent[name].share)) if name in self._sent else has

    def _give(self, name: str, free: _Amount) -> _Amount:
        has, goal = self._has(name), self._goal(name)
        given = _Amount(
            has.r_mtps + min(free.r_mtps, goal.r_mtps - has.r_mtps),
            has.b_ntok + min(free.b_ntok, goal.b_ntok - has.b_ntok),
        )
        return given if given.share else has

    def _free(self) -> _Amount:
        """What no broker may be using; nothing while more is out than the whole."""
        out = [self._possible(name) for name in self._known()]
        r_mtps = self._whole.r_mtps - sum(amount.r_mtps for amount in out)
        b_ntok = self._whole.b_ntok - sum(amount.b_ntok for amount in out)
        return _Amount(r_mtps, b_ntok) if r_mtps >= 0 and b_ntok >= 0 else _NOTHING

    def _known(self) -> set[str]:
        return self._held.keys() | self._sent.keys() | self._loose.keys() | self._former.keys()

    def _has(self, name: str) -> _Amount:
        """What a broker may have in force, not counting the grant under way."""
        if name not in self._loose and name not in self._former:
            return self._held.get(name, _NOTHING)
        _, loose = self._loose.get(name, (0, _NOTHING))
        return _most(self._held.get(name, _NOTHING), _most(loose, self._former.get(name, _NOTHING)))

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
    """The share that a broker keeps when its lease ends; None if that is too small for a bucket."""
    return _safe(_amount(share), percent).share


def _safe(amount: _Amount, percent: int) -> _Amount:
    return _amount(_Amount(amount.r_mtps * percent // 100, amount.b_ntok * percent // 100).share)


def _amount(share: TokenBucket | None) -> _Amount:
    return _Amount(share.r_mtps, share.b_ntok) if share else _NOTHING
