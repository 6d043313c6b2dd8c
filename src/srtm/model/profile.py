"""From arrivals to mean rate and token bucket, by the paper's rule, in one pass and without a search.

r is the mean rate plus 10 % headroom; b is the smallest whole number for which the access delay is zero at a quantile.
Because U does not depend on b, that b is this quantile of U + 1, rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import InputError
from srtm.model import burst, scan
from srtm.model.bucket import TokenBucket
from srtm.model.defaults import HEADROOM, QUANTILE
from srtm.units import MILLI_PER_TOKEN, NANO_PER_TOKEN, NS_PER_S, Number, exact, products

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]

# From here on r is a whole number: at most 0.1 % more, and backlogs stay exact up to billions of messages.
_WHOLE_FROM = 1_000


@dataclass(frozen=True, slots=True)
class Profile:
    """What a topic sent, and the token bucket it needs."""

    messages: int
    rate_mps: Fraction
    bucket: TokenBucket


def mean_rate(messages: int, first_ns: int, last_ns: int) -> Fraction:
    """Messages per second, over at least one second, so that a single burst is not a rate."""
    return Fraction(messages * NS_PER_S, max(last_ns - first_ns, NS_PER_S))


def token_rate(rate_mps: Fraction, headroom: Number = HEADROOM) -> int:
    """The rate with its headroom, in milli-tokens a second, rounded up."""
    r = rate_mps * _factor(headroom)
    return ceil(r) * MILLI_PER_TOKEN if r >= _WHOLE_FROM else max(1, ceil(r * MILLI_PER_TOKEN))


def token_rates(messages: Ints, first_ns: Ints, last_ns: Ints, headroom: Number = HEADROOM) -> Ints:
    """`token_rate` of the `mean_rate` of many topics."""
    factor = _factor(headroom)
    sent = products(messages, NS_PER_S * factor.numerator * MILLI_PER_TOKEN)
    span = products(np.maximum(last_ns - first_ns, NS_PER_S), factor.denominator)
    milli = -(-sent // span)
    whole = -(-milli // MILLI_PER_TOKEN) * MILLI_PER_TOKEN
    rates = np.where(milli >= _WHOLE_FROM * MILLI_PER_TOKEN, whole, np.maximum(1, milli))
    TokenBucket(int(rates.max(initial=1)), NANO_PER_TOKEN)  # refuses what no bucket can have
    return rates.astype(np.int64)


def _factor(headroom: Number) -> Fraction:
    factor = exact(headroom, "headroom")
    if factor < 1:
        raise InputError(
            f"headroom = {headroom}: r below the mean rate makes the backlog grow without limit; use at least 1"
        )
    return factor


def profile(arrivals: ArrayLike, *, headroom: Number = HEADROOM, quantile: Number = QUANTILE) -> Profile:
    """The profile of sorted arrival times."""
    times = scan.as_arrivals(arrivals)
    rate_mps = mean_rate(len(times), int(times[0]), int(times[-1]))
    r_mtps = token_rate(rate_mps, headroom)
    b = burst.needed_b(times, r_mtps, quantile)
    return Profile(len(times), rate_mps, TokenBucket(r_mtps, b * NANO_PER_TOKEN))
