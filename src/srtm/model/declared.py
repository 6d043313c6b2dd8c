"""Shares by what publishers declare: those of a controller before brokers have measured anything, and of the simulator.

In: publishers with their brokers, and the whole bucket. Out: for each broker its rate, the burst to expect, the largest
batch, and its share. The controller and `sim` call the same functions, so that on the same publishers and places they
come to the same shares.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from srtm.model.burst import Source, expected_b
from srtm.model.split import split_among
from srtm.units import NS_PER_S, Number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.model.bucket import TokenBucket


class Declares(Protocol):
    """What a publisher declares: its mean rate, its correlation group, its batch, and the jitter within its group."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def rate_mps(self) -> float:
        """Messages a second, on average."""

    @property
    def group(self) -> str | None:
        """The publishers that it sends together with."""

    @property
    def batch(self) -> int:
        """Messages that it sends at once."""

    @property
    def jitter_ns(self) -> int:
        """The time over which members of its group spread."""


def rates_mps(placed: Iterable[tuple[Declares, str]]) -> dict[str, float]:
    """Declared rate by broker."""
    rates: defaultdict[str, float] = defaultdict(float)
    for publisher, broker in placed:
        rates[broker] += publisher.rate_mps
    return dict(rates)


def batches(placed: Iterable[tuple[Declares, str]]) -> dict[str, int]:
    """The largest batch that publishers of each broker declare."""
    largest: dict[str, int] = {}
    for publisher, broker in placed:
        largest[broker] = max(largest.get(broker, 1), publisher.batch)
    return largest


def sources(placed: Iterable[tuple[Declares, str]]) -> dict[str, list[list[Declares]]]:
    """Publishers of each broker that send together: members of one correlation group, or one publisher alone."""
    groups: defaultdict[str, dict[str, list[Declares]]] = defaultdict(dict)
    for publisher, broker in placed:
        key = publisher.group if publisher.group is not None else f"\0{publisher.id}"
        groups[broker].setdefault(key, []).append(publisher)
    return {broker: list(here.values()) for broker, here in groups.items()}


def expected_bursts(placed: Iterable[tuple[Declares, str]], whole: TokenBucket, quantile: Number) -> dict[str, float]:
    """The burst to expect at each broker at its share of r.

    Publishers of one correlation group send together, spread over the jitter while tokens come.
    """
    listed = list(placed)
    rates = rates_mps(listed)
    r_each = whole.r / sum(rates.values()) if rates else 0.0
    return {
        broker: expected_b(
            (_source(members, r_each * rates[broker]) for members in here), r_each * rates[broker], quantile
        )
        for broker, here in sources(listed).items()
    }


def _source(members: list[Declares], r_mps: float) -> Source:
    sizes = [publisher.batch for publisher in members]
    jitter_s = max(publisher.jitter_ns for publisher in members) / NS_PER_S
    together = max(sum(sizes) - r_mps * jitter_s, max(sizes))
    return Source(sum(publisher.rate_mps for publisher in members), together)


def share_out(
    whole: TokenBucket,
    rates: Mapping[str, float],
    bursts: Mapping[str, float],
    largest: Mapping[str, int],
    waiting: Mapping[str, int] | None = None,
) -> dict[str, TokenBucket]:
    """Shares of r by rates, and of b by bursts and backlogs: tokens release a backlog at once, a rate slowly.

    `largest` are batches, and `waiting` messages that have no token yet.
    """
    if not rates:
        return {}
    b_each = whole.b / sum(bursts[name] for name in rates)
    queues = waiting or {}
    needs = {name: repr(bursts[name] * b_each + min(queues.get(name, 0), whole.b)) for name in rates}
    return split_among(whole, {name: repr(rate) for name, rate in rates.items()}, needs, largest)


def shares(placed: Iterable[tuple[Declares, str]], whole: TokenBucket, quantile: Number) -> dict[str, TokenBucket]:
    """The share of each broker, by what its publishers declare."""
    listed = list(placed)
    return share_out(whole, rates_mps(listed), expected_bursts(listed, whole, quantile), batches(listed))
