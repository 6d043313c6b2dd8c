"""Eq. (1) of the paper: what a token bucket costs under Poisson arrivals, exactly and without a simulation.

A bucket (r, b) fed at rate λ is an M/D/1 queue with service time 1/r and ρ = λ/r; U is its unfinished work in
tokens. The textbook form of P(U ≤ x) alternates in sign and has lost all its digits by x = 30. Its complement is a
sum of positive terms, P(U > x) = (1 − ρ) Σ_{j > x} e^{−ρ(j−x)} (ρ(j−x))^j / j!, each computed in logarithms
around Stirling's formula, so nothing cancels: good to about 1e-12 for any b, and any ρ up to 0.999.

The paper's Eq. (1) multiplies P(U > b−1) by the mean wait 1/(2(r−λ)). That is exact for b = 1 and an upper
estimate beyond: 3.2 % too high at ρ = 1/1.1 (docs/adr/0004-eq1-is-an-estimate.md). `mean_delay` is the exact mean,
`mean_delay_eq1` the formula as printed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from srtm.errors import InputError
from srtm.model._compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from srtm.model.bucket import TokenBucket

_TAIL_STEPS = 40  # past these many tokens the tail is geometric to the last digit


def exceeds(x: float, utilisation: float) -> float:
    """P(U > x) in an M/D/1 queue with unit service time; x counts in service times (tokens)."""
    _check(utilisation)
    if not math.isfinite(x):
        raise InputError(f"x must be a finite number of tokens, not {x!r}", value=x)
    if x < 0 or utilisation == 0:
        return 1.0 if x < 0 else 0.0
    return float((1 - utilisation) * _positive_sum(float(x), utilisation))


def expected_excess(x: float, utilisation: float) -> float:
    """E[(U − x)^+] in tokens: what a message that needs U ≤ x has to wait for, on average.

    Level crossing gives P(U > x) = ρ (E[(U−x+1)^+] − E[(U−x)^+]), hence E[(U−x)^+] = Σ_{n ≥ 1} P(U > x+n) / ρ,
    again positive terms only. Far out P(U > x+n) falls by a constant factor, which closes the sum.
    """
    _check(utilisation)
    if utilisation == 0:
        return max(0.0, -x)
    if x < 0:
        return utilisation / (2 * (1 - utilisation)) - x
    ratio = math.exp(-decay(utilisation))
    head = sum(exceeds(x + n, utilisation) for n in range(1, _TAIL_STEPS))
    return (head + exceeds(x + _TAIL_STEPS, utilisation) / (1 - ratio)) / utilisation


def decay(utilisation: float) -> float:
    """The rate η at which P(U > x) falls: the positive root of ρ (e^η − 1) = η."""
    _check(utilisation)
    eta = 2 * (1 - utilisation) / utilisation  # right of the root for every ρ, where Newton descends onto it
    for _ in range(100):
        slope = utilisation * math.exp(eta) - 1
        shorter = eta - (utilisation * math.expm1(eta) - eta) / slope
        if not shorter < eta:
            break
        eta = shorter
    return eta


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


def split_mean_delay(parts: Iterable[tuple[float, TokenBucket]], batch: int = 1) -> float:
    """Mean access delay over all messages when each part's rate goes through its own sub-token bucket."""
    listed = list(parts)
    total = sum(rate_mps for rate_mps, _ in listed)
    if not total > 0:
        raise InputError(f"the rates of the parts add up to {total:g} msg/s: they must be positive", value=total)
    return sum(rate_mps * mean_delay(rate_mps, bucket, batch) for rate_mps, bucket in listed if rate_mps) / total


def _check(utilisation: float) -> None:
    if not 0 <= utilisation < 1:
        raise InputError(
            f"λ/r = {utilisation!r}: the token rate must exceed the message rate, or the delay has no limit",
            value=utilisation,
        )


@compiled
def _positive_sum(x: float, rho: float) -> float:
    # Term j with y = j − x > 0 and t = ρy/j is e^{j(1 + ln t − t)} / (√(2πj) · e^{1/12j − …}). Terms rise to one
    # peak and then fall, each at least by ρe^{1−ρ} < 1 in the limit, which bounds what is left out. Logarithms are
    # compared, not terms, because far out in the tail every term underflows before the peak is reached.
    j = math.floor(x) + 1.0
    fall = rho * math.exp(1 - rho)
    total = 0.0
    previous = -math.inf
    while True:
        y = j - x
        if j < 30:
            power = j * math.log(rho * y) - rho * y - math.lgamma(j + 1)
        else:
            d = rho * y / j - 1
            stirling = 1 / (12 * j) - 1 / (360 * j**3) + 1 / (1260 * j**5)
            power = j * (math.log1p(d) - d) - 0.5 * math.log(2 * math.pi * j) - stirling
        term = math.exp(power)
        total += term
        if power < previous and term * fall / (1 - fall) <= total * 1e-17:
            return total
        previous = power
        j += 1.0
