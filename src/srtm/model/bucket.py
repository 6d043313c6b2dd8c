"""The token bucket (r, b), in exact integers; `limiter` has its running state at one broker."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import NamedTuple

from srtm.errors import BucketError
from srtm.model.law import LIMIT
from srtm.units import MILLI_PER_TOKEN, NANO_PER_TOKEN, NS_PER_S, PICO_PER_TOKEN, Number, exact

_PICO_PER_NANO = PICO_PER_TOKEN // NANO_PER_TOKEN
_MAX_R_MTPS = NS_PER_S * MILLI_PER_TOKEN  # a token every nanosecond


class Law(NamedTuple):
    """A token bucket in the integers of `model.law`: unit per ns, units per token, units per full bucket."""

    rate: int
    token: int
    burst: int

    @property
    def horizon(self) -> int:
        """Nanoseconds that empty any backlog up to LIMIT, with rate · horizon still inside 64 bits."""
        return (2**63 - 1) // self.rate


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """A contract or a share of one: `r_mtps` milli-tokens a second, `b_ntok` nano-tokens at most."""

    r_mtps: int
    b_ntok: int

    def __post_init__(self) -> None:
        """Refuse an invalid bucket: with r = 0 it stops, with b < 1 no message ever finds a whole token."""
        for name in ("r_mtps", "b_ntok"):
            value = getattr(self, name)
            try:  # numpy's integers would overflow where Python's grow
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise BucketError(f"{name} must be a whole number, not {value!r}", value=value) from None
        if not 1 <= self.r_mtps <= _MAX_R_MTPS:
            raise BucketError(f"r = {self.r:g} tokens/s: r must lie between 0.001 and 1e9", r=self.r)
        if self.b_ntok < NANO_PER_TOKEN:
            raise BucketError(f"b = {self.b:g} tokens: b must be at least 1, or no message can pass", b=self.b)
        if self.b_ntok > LIMIT:
            raise BucketError(f"b = {self.b:g} tokens: b must not exceed {LIMIT // NANO_PER_TOKEN:,}", b=self.b)

    @classmethod
    def of(cls, r: Number, b: Number) -> TokenBucket:
        """The bucket of r tokens a second and b tokens, to the nearest thousandth and billionth."""
        return cls(
            round(_exact(r, "r") * MILLI_PER_TOKEN),
            round(_exact(b, "b") * NANO_PER_TOKEN),
        )

    @property
    def r(self) -> float:
        """Tokens a second."""
        return self.r_mtps / MILLI_PER_TOKEN

    @property
    def b(self) -> float:
        """Tokens that a full bucket holds."""
        return self.b_ntok / NANO_PER_TOKEN

    @property
    def law(self) -> Law:
        """The coarsest exact unit for this rate: a whole r counts in nano-tokens, a fractional one finer."""
        rate, token, burst = self.pico_law
        scale = gcd(rate, MILLI_PER_TOKEN)
        return Law(rate // scale, token // scale, burst // scale)

    @property
    def pico_law(self) -> Law:
        """The same in pico-tokens, a unit that buckets of different rates share."""
        return Law(self.r_mtps, PICO_PER_TOKEN, self.b_ntok * _PICO_PER_NANO)

    def __str__(self) -> str:
        return f"({self.r:g}/s, {self.b:g})"


def _exact(value: Number, name: str) -> Fraction:
    try:
        return exact(value, name)
    except ValueError as error:
        raise BucketError(str(error), value=value) from None
