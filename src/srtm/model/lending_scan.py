"""Lending over arrays: the access delays of a whole trace whose brokers lend each other tokens, compiled.

Equal to `lending.Lending` at every broker, event by event, if no message between brokers is lost and every round trip
takes the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from srtm.errors import InputError
from srtm.model import law as plain
from srtm.model import scan
from srtm.model._compiled import callable_from_compiled, compiled
from srtm.model.lending import RULES
from srtm.units import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from srtm.model.bucket import TokenBucket
    from srtm.model.lending import Rule
    from srtm.units import Number

    Ints = NDArray[np.int64]

callable_from_compiled(*plain.LENDING)
_scan_lending = compiled(plain.scan_lending)


class Lent(NamedTuple):
    """Access delays in ns, asks, and the tokens lent, of which some were lost for lack of room."""

    delays_ns: Ints
    asks: int = 0
    lent: float = 0.0
    lost: float = 0.0


def lending_delays(
    arrivals: ArrayLike, broker_of: NDArray[np.int32], shares: Sequence[TokenBucket], round_trip_ns: int, rule: Rule
) -> Lent:
    """How long each message waits when message i goes through `shares[broker_of[i]]`, and shares lend under `rule`."""
    if round_trip_ns < 0:
        raise InputError(f"round trip = {round_trip_ns} ns: it must not be negative", value=round_trip_ns)
    static = scan.split_access_delays(arrivals, broker_of, shares)  # and all checks
    if rule == "off" or len(shares) < 2:
        return Lent(static)
    times, laws = scan.as_arrivals(arrivals), [share.pico_law for share in shares]
    for pico, share in zip(laws, shares, strict=True):
        scan.check_burst(pico, share)
    turns = np.lexsort((broker_of, times))
    times, brokers = times[turns], broker_of[turns].astype(np.int32, copy=False)
    counts = np.bincount(brokers, minlength=len(shares))
    columns = [(pico.rate, pico.burst, pico.horizon) for pico in laws]
    state = plain.lending_state(np.array(columns, np.int64).T, int(times[0]), np.cumsum(counts) - counts)
    delays = np.empty(len(times), np.int64)
    queue = np.argsort(brokers, kind="stable")
    worth = plain.WORTH if rule == "early" else 0
    asks, lent, lost, peak = _scan_lending(times, brokers, queue, state, round_trip_ns, worth, delays)
    scan.check_peak(laws[0], int(peak))
    out = np.empty(len(times), np.int64)
    out[turns] = delays
    return Lent(out, int(asks), lent / plain.TOKEN, lost / plain.TOKEN)


def choose_rule(
    arrivals: ArrayLike,
    broker_of: NDArray[np.int32],
    shares: Sequence[TokenBucket],
    round_trip_ns: int,
    quantile: Number = "0.99",
) -> Rule:
    """What `auto` means for this traffic: the rule with the least access delay, or `off` if none is sure to help."""
    return choose(arrivals, broker_of, shares, round_trip_ns, quantile)[0]


def choose(
    arrivals: ArrayLike,
    broker_of: NDArray[np.int32],
    shares: Sequence[TokenBucket],
    round_trip_ns: int,
    quantile: Number = "0.99",
) -> tuple[Rule, Lent]:
    """The same, with what it does to this traffic.

    A rule must be no worse at the worst broker, where the SLO is decided, and for all messages together: lending moves
    waiting from one broker to another, and takes tokens from brokers that burst a moment later.
    """
    static, *others = RULES
    chosen, best = static, lending_delays(arrivals, broker_of, shares, round_trip_ns, static)
    least = _tails(best, broker_of, quantile)
    for rule in others:
        lent = lending_delays(arrivals, broker_of, shares, round_trip_ns, rule)
        tails = _tails(lent, broker_of, quantile)
        if tails != least and tails[0] <= least[0] and tails[1] <= least[1]:
            chosen, best, least = rule, lent, tails
    return chosen, best


def _tails(lent: Lent, broker_of: NDArray[np.int32], quantile: Number) -> tuple[int, int]:
    return worst(lent.delays_ns, broker_of, quantile), percentile(lent.delays_ns, quantile)


def worst(delays_ns: Ints, broker_of: NDArray[np.int32], quantile: Number = "0.99") -> int:
    """The delay at this quantile at the broker where it is largest."""
    return max(percentile(delays_ns[broker_of == broker], quantile) for broker in np.unique(broker_of))
