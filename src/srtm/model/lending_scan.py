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
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from srtm.model.bucket import TokenBucket
    from srtm.model.lending import Rule
    from srtm.units import Number

    Ints = NDArray[np.int64]

# Asks per message that `auto` spends without need: an ask costs about as much as a message (docs/measurements.md).
CHEAP_ASKS = 0.1

callable_from_compiled(*plain.LENDING)
_scan_lending = compiled(plain.scan_lending)


class Lent(NamedTuple):
    """Access delays in ns, asks, and the tokens lent, of which some were lost for lack of room."""

    delays_ns: Ints
    asks: int = 0
    lent: float = 0.0
    lost: float = 0.0


class Lenders:
    """Traffic over several brokers, prepared: what the same messages do under many rules and round trips."""

    def __init__(self, arrivals: ArrayLike, broker_of: NDArray[np.int32], shares: Sequence[TokenBucket]) -> None:
        """Message i goes through `shares[broker_of[i]]`."""
        self.broker_of = broker_of
        self._static = scan.split_access_delays(arrivals, broker_of, shares)  # and all checks
        self._laws = [share.pico_law for share in shares]
        self._shares = shares
        times = scan.as_arrivals(arrivals)
        self._turns = np.lexsort((broker_of, times))
        self._times, self._brokers = times[self._turns], broker_of[self._turns].astype(np.int32, copy=False)
        self._queue = np.argsort(self._brokers, kind="stable")

    def delays(self, round_trip_ns: int, rule: Rule) -> Lent:
        """How long each message waits if shares lend under `rule`."""
        if round_trip_ns < 0:
            raise InputError(f"round trip = {round_trip_ns} ns: it must not be negative", value=round_trip_ns)
        times, shares = self._times, self._shares
        if rule == "off" or len(shares) < 2 or not len(times):
            return Lent(self._static)
        for pico, share in zip(self._laws, shares, strict=True):
            scan.check_burst(pico, share)
        counts = np.bincount(self._brokers, minlength=len(shares))
        columns = np.array([(pico.rate, pico.burst, pico.horizon) for pico in self._laws], np.int64)
        worth = plain.WORTH if rule == "early" else 0
        brokers = len(shares)
        state, peers = np.zeros((plain.LENDING_ROWS, brokers), np.int64), np.zeros((2, brokers, brokers), np.int64)
        plain.fill_lending(state, peers, columns.T, int(times[0]), np.cumsum(counts) - counts, worth)
        delays = np.empty(len(times), np.int64)
        found = _scan_lending(times, self._brokers, self._queue, state, peers, round_trip_ns, worth, delays)
        asks, lent, lost, peak = found
        scan.check_peak(self._laws[0], int(peak))
        out = np.empty(len(times), np.int64)
        out[self._turns] = delays
        return Lent(out, int(asks), lent / plain.TOKEN, lost / plain.TOKEN)


def lending_delays(
    arrivals: ArrayLike, broker_of: NDArray[np.int32], shares: Sequence[TokenBucket], round_trip_ns: int, rule: Rule
) -> Lent:
    """How long each message waits when message i goes through `shares[broker_of[i]]`, and shares lend under `rule`."""
    return Lenders(arrivals, broker_of, shares).delays(round_trip_ns, rule)


class Tails(NamedTuple):
    """What a rule does to traffic: delays at the worst broker and of all messages, their mean, and asks per message."""

    worst_ns: int
    all_ns: int
    mean_ns: float
    asks: float

    @classmethod
    def of(cls, lent: Lent, broker_of: NDArray[np.int32], quantile: Number, until: int | None = None) -> Tails:
        """Those of the first `until` messages, or of all."""
        delays = lent.delays_ns[:until]
        at_worst = worst(delays, broker_of[:until], quantile)
        return cls(at_worst, percentile(delays, quantile), float(delays.mean()), lent.asks / len(lent.delays_ns))

    def betters(self, other: Tails) -> bool:
        """Whether it is no worse anywhere, and better somewhere.

        At the worst broker the SLO is decided. Lending moves waiting from one broker to another, so all messages count,
        too. The mean tells rules apart that both keep the quantile at zero on the traffic that they are judged by, of
        which one is closer to missing it.
        """
        mine, others = self[:3], other[:3]
        return mine != others and all(a <= b for a, b in zip(mine, others, strict=True))


def pick(tails: Mapping[Rule, Tails], limit_ns: int | None = None) -> Rule:
    """What `auto` means if the rules do this to the traffic, and the SLO is `limit_ns`.

    The rule with the least access delay, unless it asks often and the one before it leaves half of the SLO to
    processing. `off` if none is sure to help.
    """
    chosen, *others = RULES
    for rule in others:
        enough = limit_ns is not None and tails[chosen].worst_ns <= limit_ns // 2
        if tails[rule].betters(tails[chosen]) and (tails[rule].asks <= CHEAP_ASKS or not enough):
            chosen = rule
    return chosen


def choose_rule(
    arrivals: ArrayLike,
    broker_of: NDArray[np.int32],
    shares: Sequence[TokenBucket],
    round_trip_ns: int,
    quantile: Number = "0.99",
    limit_ns: int | None = None,
) -> Rule:
    """What `auto` means for this traffic, for an SLO of `limit_ns` at this quantile."""
    return choose(arrivals, broker_of, shares, round_trip_ns, quantile, limit_ns)[0]


def choose(
    arrivals: ArrayLike,
    broker_of: NDArray[np.int32],
    shares: Sequence[TokenBucket],
    round_trip_ns: int,
    quantile: Number = "0.99",
    limit_ns: int | None = None,
) -> tuple[Rule, Lent]:
    """The same, with what it does to this traffic."""
    lenders = Lenders(arrivals, broker_of, shares)
    lent = {rule: lenders.delays(round_trip_ns, rule) for rule in RULES}
    rule = pick({rule: Tails.of(found, broker_of, quantile) for rule, found in lent.items()}, limit_ns)
    return rule, lent[rule]


def worst(delays_ns: Ints, broker_of: NDArray[np.int32], quantile: Number = "0.99") -> int:
    """The delay at this quantile at the broker where it is largest."""
    brokers = np.flatnonzero(np.bincount(broker_of))
    return max(percentile(delays_ns[broker_of == broker], quantile) for broker in brokers)
