"""Eq. (1) of the paper: what a token bucket costs under Poisson arrivals, exactly and without a simulation.

A bucket (r, b) fed at rate λ is an M/D/1 queue with service time 1/r and ρ = λ/r; U is its unfinished work in tokens.
The textbook form of P(U > x) alternates in sign, and in doubles it has lost all its digits by x = 30. It is therefore
summed in decimals, with as many digits as it needs. Far out only one exponential is left of it,
P(U > x) = (1 − ρ) / (ρ + η − 1) · e^(−ηx) with ρ(e^η − 1) = η; the next one falls so much faster that a double does not
see it. Which of the two is used depends on x and ρ alone, and both agree to 1e-12 where they meet.

The paper's Eq. (1) multiplies P(U > b−1) by the mean wait 1/(2(r−λ)). That is exact for b = 1 and an upper estimate
beyond: 3.2 % too high at ρ = 1/1.1 (docs/adr/0004-eq1-is-an-estimate.md). `mean_delay` is the exact mean,
`mean_delay_eq1` the formula as printed.
"""

from __future__ import annotations

import cmath
import math
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING

from srtm.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from srtm.model.bucket import TokenBucket

_UNSEEN = 40.0  # e^-40 is less than a double can add to 1


def exceeds(x: float, utilisation: float) -> float:
    """P(U > x) in an M/D/1 queue with unit service time; x counts in service times (tokens)."""
    _check(utilisation)
    if not math.isfinite(x):
        raise InputError(f"x must be a finite number of tokens, not {x!r}", value=x)
    if x < 0 or utilisation == 0:
        return 1.0 if x < 0 else 0.0
    if x >= _one_exponential_from(utilisation):
        eta = decay(utilisation)
        return (1 - utilisation) / (utilisation + eta - 1) * math.exp(-eta * x)
    return _textbook(x, utilisation)


def expected_excess(x: float, utilisation: float) -> float:
    """E[(U − x)^+] in tokens: how much a message that needs U ≤ x waits for, on average.

    Level crossing gives P(U > x) = ρ (E[(U−x+1)^+] − E[(U−x)^+]), so the mean follows, token by token, from the
    mean further out, where it is that of one exponential: P(U > x) / η.
    """
    _check(utilisation)
    if utilisation == 0:
        return max(0.0, -x)
    if x < 0:
        return utilisation / (2 * (1 - utilisation)) - x
    at, total = x, 0.0
    while at < _one_exponential_from(utilisation):
        at += 1
        term = exceeds(at, utilisation)
        total += term / utilisation
        if term <= total * 1e-17:  # at small loads the tail vanishes before it is one exponential
            return total
    return total + exceeds(at, utilisation) / decay(utilisation)


@lru_cache
def decay(utilisation: float) -> float:
    """The rate η at which P(U > x) falls: the positive root of ρ (e^η − 1) = η."""
    _check(utilisation)
    if utilisation == 0:
        return math.inf
    eta = 2 * (1 - utilisation) / utilisation  # right of the root for every ρ, where Newton descends onto it
    for _ in range(1_000):
        if eta > 700:  # e^η would overflow; one step of Newton is then one step to the left
            eta = math.log(eta / utilisation + 1)
            continue
        shorter = eta - (utilisation * math.expm1(eta) - eta) / (utilisation * math.exp(eta) - 1)
        if not shorter < eta:
            break
        eta = shorter
    return eta


@lru_cache
def _one_exponential_from(utilisation: float) -> float:
    """The x from which on the next exponential is e^-40 of the first; its root s solves ρ(e^s − 1) = s."""
    root = complex(2, 7)
    for _ in range(200):
        root = cmath.log(1 + root / utilisation) + 2j * math.pi
    return _UNSEEN / (root.real - decay(utilisation))


def _textbook(x: float, utilisation: float) -> float:
    """1 − (1 − ρ) Σ_{j ≤ x} e^{ρ(x−j)} (−ρ(x−j))^j / j!: terms up to e^{1.3x} cancel, and e^{−ηx} is left."""
    digits = 40 + math.ceil(x * (1.3 + decay(utilisation)) / math.log(10))
    with localcontext(Context(prec=digits)):
        at, rho = Decimal(x), Decimal(utilisation)
        total, factorial = Decimal(0), Decimal(1)
        for j in range(int(x) + 1):
            factorial *= max(j, 1)
            load = rho * (at - j)
            total += load.exp() * (-load) ** j / factorial if j else load.exp()
        return float(1 - (1 - rho) * total)


def mean_delay(rate_mps: float, bucket: TokenBucket, batch: int = 1) -> float:
    """Mean access delay in seconds of messages that come at `rate_mps` in Poisson batches of `batch`.

    Counted in batches it is the same queue: a batch takes `batch` tokens, and its j-th message waits for
    U + j tokens to drain to b.
    """
    if batch < 1:
        raise InputError(f"batch must be at least 1 message, not {batch}", value=batch)
    utilisation = rate_mps / bucket.r
    waits = (expected_excess((bucket.b - j) / batch, utilisation) for j in range(1, batch + 1))
    return sum(waits) / bucket.r


def mean_delay_eq1(rate_mps: float, bucket: TokenBucket) -> float:
    """Eq. (1) as the paper prints it, in seconds: P(U > b − 1) / (2 r (1 − λ/r))."""
    utilisation = rate_mps / bucket.r
    return exceeds(bucket.b - 1, utilisation) / (2 * bucket.r * (1 - utilisation))


def split_mean_delay(shares: Iterable[tuple[float, TokenBucket]], batch: int = 1) -> float:
    """Mean access delay over all messages when each rate goes through its own sub-token bucket."""
    listed = list(shares)
    total = sum(rate_mps for rate_mps, _ in listed)
    if not total > 0:
        raise InputError(f"the rates add up to {total:g} msg/s: the sum must be positive", value=total)
    return sum(rate_mps * mean_delay(rate_mps, bucket, batch) for rate_mps, bucket in listed if rate_mps) / total


def _check(utilisation: float) -> None:
    if not 0 <= utilisation < 1:
        raise InputError(
            f"λ/r = {utilisation!r}: the token rate must exceed the message rate, or the delay is unbounded",
            value=utilisation,
        )
