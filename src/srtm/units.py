"""Time, tokens and the percentile: the units of every other module.

Times are integer nanoseconds. Token rates are integer milli-tokens per second, bucket sizes integer nano-tokens,
and the law runs in pico-tokens: r milli-tokens/s are exactly r pico-tokens/ns, so no unit is ever rounded.
"""

from __future__ import annotations

import math
import operator
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TYPE_CHECKING, Final, SupportsFloat

from srtm.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

MILLI_PER_TOKEN: Final = 1_000
NANO_PER_TOKEN: Final = 1_000_000_000
PICO_PER_TOKEN: Final = 1_000_000_000_000

Number = int | float | Fraction | Decimal | str

_FIRST_DATE_NS = 10**17  # in 1973, before any recorded trace
_HUGE = re.compile(r"[eE][+-]?[0-9]{4}")  # a number such as 1e999999999 takes hours to convert
_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,3})?)\s*(ns|us|µs|ms|s|m|min|h|d)?\s*")
_UNIT_NS = {
    "ns": 1,
    "us": NS_PER_US,
    "µs": NS_PER_US,
    "ms": NS_PER_MS,
    "s": NS_PER_S,
    "m": 60 * NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
    "d": 86_400 * NS_PER_S,
}


def exact(value: Number, what: str) -> Fraction:
    """Return a value as an exact fraction; a float counts as the decimal that it prints as."""
    try:
        if isinstance(value, float):
            return Fraction(repr(float(value)))
        if hasattr(value, "__index__"):  # numpy's integers would overflow inside a fraction
            return Fraction(operator.index(value))
        if isinstance(value, str) and _HUGE.search(value):
            raise ValueError
        return Fraction(value)
    except (ValueError, TypeError, InvalidOperation, OverflowError, ZeroDivisionError):
        raise InputError(f"{what} must be a finite number, not {value!r}", value=value) from None


def parse_duration_ns(text: Number, *, bare: str = "s") -> int:
    """Return the nanoseconds of a duration such as '1ms', '0.5 s' or '60' (`bare` is the unit of a bare number)."""
    match = _DURATION.fullmatch(str(text))
    if match is None:
        raise InputError(
            f"{text!r} is not a duration: write a number and one of ns, us, ms, s, m, h, d, as in '1ms'",
            value=text,
        )
    return round(Fraction(match[1]) * _UNIT_NS[match[2] or bare])


def parse_instant_ns(text: str) -> int:
    """Return the nanoseconds since 1970 of a date or time such as '2026-11-18' or '2026-11-18T03', in UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{text!r} is not a date or time: write 2026-11-18 or 2026-11-18T03:00", value=text) from None
    aware = found if found.tzinfo else found.replace(tzinfo=UTC)
    return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * NS_PER_US


def format_ns(duration_ns: SupportsFloat) -> str:
    """Format a duration for people: three significant digits in a suitable unit."""
    value = float(duration_ns)
    for unit, size in (("s", NS_PER_S), ("ms", NS_PER_MS), ("µs", NS_PER_US)):
        if abs(value) >= 0.9995 * size:  # smaller values do not round up to 1 of this unit
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} ns"


def format_instant(time_ns: int) -> str:
    """Format a time for people: as a date, or in seconds if its clock started with the run."""
    if abs(time_ns) < _FIRST_DATE_NS:
        return f"{time_ns / NS_PER_S:g} s"
    return str(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_ns // NS_PER_US))[:19]


def rank(count: int, quantile: Number) -> int:
    """Return the 1-based rank of a quantile among `count` sorted values: ceil(quantile · count), exactly."""
    if count < 1:
        raise InputError("no values: a quantile needs at least one", value=count)
    return math.ceil(_share(quantile) * count)


def ranks(counts: NDArray[np.int64], quantile: Number) -> NDArray[np.int64]:
    """Return the `rank` of a quantile for each of many counts, all at least 1."""
    share = _share(quantile)
    # 64 bits may hold neither the product nor the denominator.
    exact_counts = counts if share.denominator < 2**63 else counts.astype(object)
    return (-(-products(exact_counts, share.numerator) // share.denominator)).astype("int64", copy=False)


def products(values: NDArray[np.int64], factor: int) -> NDArray[np.int64] | NDArray[np.object_]:
    """Return the values times a factor, as Python's integers if 64 bits may not hold them."""
    largest = max(abs(int(values.max(initial=0))), abs(int(values.min(initial=0)))) * factor
    return values * factor if largest < 2**63 else values.astype(object) * factor


def _share(quantile: Number) -> Fraction:
    share = exact(quantile, "quantile")
    if not 0 < share <= 1:
        raise InputError(f"quantile must lie in (0, 1], not {quantile!r}", value=quantile)
    return share


def percentiles(values: NDArray[np.int64], quantiles: Sequence[Number], *, overwrite: bool = False) -> list[int]:
    """Return, for each quantile, the smallest value that at least this share of the values does not exceed.

    This is SRTM's only percentile: an order statistic, never an interpolation, so integers stay integers
    and "the p99 access delay is zero" means that at least 99 % of the messages did not wait.
    With `overwrite`, the values may end up in another order, which saves a copy.
    """
    positions = [rank(len(values), quantile) - 1 for quantile in quantiles]
    # The last position is included because numpy's path for a single position is 40 times slower on many equal values,
    # such as delays of zero.
    ordered = values if overwrite else values.copy()
    ordered.partition([*positions, len(values) - 1])
    return [int(ordered[position]) for position in positions]


def percentile(values: NDArray[np.int64], quantile: Number) -> int:
    """Return `percentiles` for one quantile."""
    return percentiles(values, [quantile])[0]


def histogram_percentile(counts: NDArray[np.int64], quantile: Number) -> int:
    """Return the `percentile` of values given as a histogram: `counts[v]` values are equal to v."""
    below = counts.cumsum()
    total = int(below[-1]) if len(below) else 0
    return int(below.searchsorted(rank(total, quantile)))
