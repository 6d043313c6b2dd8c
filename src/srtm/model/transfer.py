"""Moving shares between brokers so that at no instant more is out than there is: cut, acknowledged, then given.

A loop without IO: `orders` says which grants to send now, `acknowledged` hears that a broker has put one in force.
What a broker may be using is the larger of what it last acknowledged and what it was sent since, component by
component; those add up to no more than the whole bucket, always. Tokens that a cut bucket had to give up travel
with the next grants that enlarge one. A broker that never answers holds back what it was asked to give, no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.model.bucket import TokenBucket
from srtm.model.split import within

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Grant:
    """A share for a broker to put in force; `sequence` orders grants, `gift_ntok` are tokens that come along."""

    broker: str
    share: TokenBucket
    sequence: int
    gift_ntok: int = 0


class Transfer:
    """The way from the shares that brokers hold to those that they should hold."""

    def __init__(
        self,
        whole: TokenBucket,
        held: Mapping[str, TokenBucket],
        wanted: Mapping[str, TokenBucket],
        first_sequence: int = 1,
    ) -> None:
        if held.keys() != wanted.keys():
            raise InputError(
                f"shares of {sorted(held)} cannot become shares of {sorted(wanted)}: name the same brokers"
            )
        for name, shares in (("held", held), ("wanted", wanted)):
            if not within(whole, shares.values()):
                raise InputError(f"the {name} shares exceed the whole bucket {whole}")
        self._whole = whole
        self._held = dict(held)
        self._wanted = dict(wanted)
        self._sent: dict[str, Grant] = {}
        self._sequence = first_sequence
        self._pool_ntok = 0

    @property
    def possible(self) -> dict[str, TokenBucket]:
        """The most that each broker may be using now."""
        return {
            name: _larger(share, self._sent[name].share) if name in self._sent else share
            for name, share in self._held.items()
        }

    @property
    def done(self) -> bool:
        """Every broker has acknowledged what it should hold."""
        return not self._sent and self._held == self._wanted

    def orders(self) -> list[Grant]:
        """Grants to send now: cuts first, and gives as far as what was cut has been acknowledged."""
        idle = [name for name in self._held if name not in self._sent]
        grants = [self._send(name, cut) for name in idle if (cut := self._cut(name)) != self._held[name]]
        return grants + [
            self._send(name, given)
            for name in idle
            if name not in self._sent and (given := self._give(name)) != self._held[name]
        ]

    def acknowledged(self, grant: Grant, surrendered_ntok: int = 0) -> None:
        """A broker has put the grant in force, and gave up so many tokens. Answers to older grants change nothing."""
        if self._sent.get(grant.broker) != grant:
            return
        if surrendered_ntok < 0:
            raise InputError(f"broker {grant.broker!r} says it gave up {surrendered_ntok} nano-tokens")
        del self._sent[grant.broker]
        lost = max(0, self._held[grant.broker].b_ntok - grant.share.b_ntok) + grant.gift_ntok
        self._held[grant.broker] = grant.share
        self._pool_ntok += min(surrendered_ntok, lost)  # nobody can give up more than was taken from it

    def _send(self, name: str, share: TokenBucket) -> Grant:
        gift_ntok = min(self._pool_ntok, max(0, share.b_ntok - self._held[name].b_ntok))
        self._pool_ntok -= gift_ntok
        grant = Grant(name, share, self._sequence, gift_ntok)
        self._sequence += 1
        self._sent[name] = grant
        assert within(self._whole, self.possible.values())
        return grant

    def _cut(self, name: str) -> TokenBucket:
        held, wanted = self._held[name], self._wanted[name]
        return TokenBucket(min(held.r_mtps, wanted.r_mtps), min(held.b_ntok, wanted.b_ntok))

    def _give(self, name: str) -> TokenBucket:
        held, wanted, out = self._held[name], self._wanted[name], self.possible.values()
        r_free = self._whole.r_mtps - sum(share.r_mtps for share in out)
        b_free = self._whole.b_ntok - sum(share.b_ntok for share in out)
        return TokenBucket(
            held.r_mtps + min(r_free, wanted.r_mtps - held.r_mtps),
            held.b_ntok + min(b_free, wanted.b_ntok - held.b_ntok),
        )


def _larger(one: TokenBucket, other: TokenBucket) -> TokenBucket:
    return TokenBucket(max(one.r_mtps, other.r_mtps), max(one.b_ntok, other.b_ntok))
