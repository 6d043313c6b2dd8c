"""Which publisher goes to which broker: the paper's section 4 as pure functions.

Step 1, *concentration*: `fewest` picks the smallest number of brokers whose residual capacities cover the topic.
Step 2, *max-min*: `level_out` gives each of them min(rcap, fair share) and shares out the rest.
Then *correlation-awareness*: `pick` takes publishers from every correlation group in proportion to its size.

Rates are integers inside (thousandths of a message a second), so quotas add up exactly. Invariants: quotas sum to
the topic's rate and never exceed rcap; every publisher is placed once; with `by_group`, each broker holds the
rounded-down or rounded-up proportional number of every group. Publishers are not divisible, so a broker's rate may
differ from its quota by about the rate of a publisher, and by more if rates within groups differ much. Whether the
broker can carry that is for a measurement to say.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from srtm.errors import PlacementError
from srtm.model.rounding import proportional_table
from srtm.units import Number, exact

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    BrokerOf = NDArray[np.int32]

_MILLI = 1_000
UNPLACED = -1
_NO_GROUP = -1


@dataclass(frozen=True, slots=True)
class Publisher:
    """A publisher: its mean rate, and its correlation group, if any."""

    id: str
    rate_mps: float
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker: its maximum message rate under the SLO, and the rate that other topics use of it."""

    name: str
    mcap_mps: float
    allocated_mps: float = 0.0


class Roster:
    """The publishers of a topic as arrays; a publisher's index in the roster is its number everywhere in model/."""

    def __init__(self, publishers: Iterable[Publisher]) -> None:
        listed = list(publishers)
        if not listed:
            raise PlacementError("cannot place a topic without publishers")
        self.ids = tuple(publisher.id for publisher in listed)
        twice = next((name for name, times in Counter(self.ids).items() if times > 1), None)
        if twice is not None:
            raise PlacementError(f"publisher {twice!r} is listed more than once", publisher=twice)
        rates = {rate: _milli(rate, "rate") for rate in {publisher.rate_mps for publisher in listed}}
        self.rates: Ints = np.array([rates[publisher.rate_mps] for publisher in listed], np.int64)
        if self.rates.min() <= 0:
            slow = listed[int(self.rates.argmin())]
            raise PlacementError(
                f"publisher {slow.id!r} has a rate of {slow.rate_mps} msg/s; rates must be at least 0.001",
                publisher=slow.id,
            )
        names: dict[str, int] = {}
        self.groups: Ints = np.array(
            [_NO_GROUP if p.group is None else names.setdefault(p.group, len(names)) for p in listed], np.int64
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rate(self) -> int:
        """The topic's rate, in thousandths of a message a second."""
        return int(self.rates.sum())

    def rates_by_broker(self, broker_of: BrokerOf, brokers: int) -> Ints:
        """Rate that each broker carries under an assignment."""
        placed = broker_of >= 0
        totals = np.zeros(brokers, np.int64)
        np.add.at(totals, broker_of[placed], self.rates[placed])
        return totals


def rcap(broker: Broker) -> int:
    """Residual capacity: mcap less what is allocated, never negative, in thousandths of a message a second."""
    return max(0, _milli(broker.mcap_mps, f"mcap of {broker.name}") - _milli(broker.allocated_mps, broker.name))


def fewest(rate: int, caps: Sequence[int], in_use: Collection[int] = ()) -> list[int] | None:
    """The fewest brokers, by number, whose capacities cover `rate`; None if all together do not.

    Brokers already in use come first, the others in decreasing order of capacity.
    """
    order = sorted((i for i in range(len(caps)) if caps[i]), key=lambda i: (i not in in_use, -caps[i], i))
    covered = 0
    for used, broker in enumerate(order, 1):
        covered += caps[broker]
        if covered >= rate:
            return order[:used]
    return None


def level_out(rate: int, caps: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Water-filling: quotas that bring loads to one level, as far as capacities allow.

    Without loads that is max-min: each broker gets the fair share, or its capacity if that is less.
    """
    if sum(caps) < rate:
        raise _too_small(rate, caps)

    def filled(level: int) -> list[int]:
        return [min(cap, max(0, level - load)) for cap, load in zip(caps, loads, strict=True)]

    low, high = 0, max(load + cap for load, cap in zip(loads, caps, strict=True))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(filled(middle)) >= rate else (middle + 1, high)
    quotas, lower = filled(low), filled(low - 1)
    surplus = sum(quotas) - rate
    for broker in reversed(range(len(caps))):
        if surplus and quotas[broker] > lower[broker]:
            quotas[broker] -= 1
            surplus -= 1
    return quotas


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to place a topic: on the fewest brokers or all; by equal shares or equal loads; by group or blindly.

    Who chooses publishers itself reads these traits: `place`, `model.fitting`, `model.halving`, and of the controller
    `placing.housing` and `placing.shedding`. A new trait that only some of them know is ignored by the others.
    """

    name: str
    concentrates: bool
    equalises_loads: bool
    by_group: bool

    def quotas(self, rate: int, caps: Sequence[int], loads: Sequence[int]) -> list[int]:
        """The part of the rate that each of these brokers gets."""
        return level_out(rate, caps, loads if self.equalises_loads else [0] * len(caps))

    def choose(
        self, rate: int, caps: Sequence[int], loads: Sequence[int], in_use: Collection[int] = ()
    ) -> list[int] | None:
        """The quota of every broker, 0 if it is not used; None if the capacity does not suffice."""
        used = fewest(rate, caps, in_use)
        if used is None:
            return None
        if not self.concentrates:
            used = [i for i in range(len(caps)) if caps[i]]
        quotas = [0] * len(caps)
        for broker, quota in zip(
            used, self.quotas(rate, [caps[i] for i in used], [loads[i] for i in used]), strict=True
        ):
            quotas[broker] = quota
        return quotas


# In this order everywhere. Of plans that are equally good, the planner prefers the policy that comes later.
POLICIES = {
    policy.name: policy
    for policy in (
        Policy("lb", concentrates=False, equalises_loads=False, by_group=False),
        Policy("conc", concentrates=True, equalises_loads=True, by_group=False),
        Policy("max_min", concentrates=True, equalises_loads=False, by_group=False),
        Policy("srtm", concentrates=True, equalises_loads=False, by_group=True),
    )
}


def policy_named(name: str) -> Policy:
    """The policy of that name; PlacementError with all names if it is unknown."""
    try:
        return POLICIES[name]
    except KeyError:
        raise PlacementError(f"unknown policy {name!r}; known policies: {', '.join(POLICIES)}") from None


@dataclass(frozen=True, slots=True)
class Placement:
    """A topic placed by rates alone: the broker of every publisher, and the quota and rate of each broker."""

    broker_of: BrokerOf
    quotas_mps: tuple[float, ...]
    rates_mps: tuple[float, ...]

    @property
    def k(self) -> int:
        """How many brokers carry the topic."""
        return len(set(self.broker_of.tolist()))


def place(
    publishers: Iterable[Publisher], brokers: Sequence[Broker], policy: str, seed: int = 0, *, k: int | None = None
) -> Placement:
    """Steps 1 and 2 of the Load Distributor, without measuring; if `k` is given, on the k brokers with most room."""
    roster = Roster(publishers)
    check_fits(roster, brokers)
    caps, loads = [rcap(broker) for broker in brokers], allocated(brokers)
    rule = policy_named(policy)
    if k is not None:
        caps = _roomiest(caps, k)
        rule = replace(rule, concentrates=False)
    quotas = rule.choose(roster.rate, caps, loads)
    if quotas is None:
        raise _too_small(roster.rate, caps)
    broker_of = pick(roster, quotas, by_group=rule.by_group, seed=seed)
    carried = roster.rates_by_broker(broker_of, len(brokers)).tolist()
    return Placement(broker_of, tuple(quota / _MILLI for quota in quotas), tuple(rate / _MILLI for rate in carried))


def _roomiest(caps: list[int], k: int) -> list[int]:
    """The capacities of the k brokers that have most, and zero for the others."""
    if not 1 <= k <= len(caps):
        raise PlacementError(f"cannot use k = {k} brokers; there are {len(caps)}", k=k)
    chosen = sorted(range(len(caps)), key=lambda broker: (-caps[broker], broker))[:k]
    return [cap if broker in chosen else 0 for broker, cap in enumerate(caps)]


def allocated(brokers: Sequence[Broker]) -> list[int]:
    """The rate that other topics use of each broker."""
    return [_milli(broker.allocated_mps, broker.name) for broker in brokers]


def check_fits(roster: Roster, brokers: Sequence[Broker]) -> None:
    """PlacementError if there is no broker, or if a publisher is faster than every broker."""
    if not brokers:
        raise PlacementError("no broker is available for placement")
    names = [broker.name for broker in brokers]
    if len(set(names)) != len(names):
        raise PlacementError(f"brokers must have different names, not {names}")
    largest = max(brokers, key=rcap)
    fastest = int(roster.rates.argmax())
    if roster.rates[fastest] > rcap(largest):
        raise PlacementError(
            f"publisher {roster.ids[fastest]!r} sends {roster.rates[fastest] / _MILLI:g} msg/s, more than the"
            f" {rcap(largest) / _MILLI:g} msg/s that broker {largest.name!r}, the least loaded, has left;"
            " with split: true in its declaration, it may use several brokers",
            publisher=roster.ids[fastest],
        )


def pick(
    roster: Roster,
    quotas: Sequence[int],
    *,
    by_group: bool,
    seed: int,
    among: Ints | None = None,
    current: BrokerOf | None = None,
) -> BrokerOf:
    """Choose publishers for the brokers' quotas; returns each publisher's broker (UNPLACED if it is not `among` them).

    Publishers without a group, and all of them unless `by_group`, are chosen at random. A publisher stays on its
    `current` broker if that may keep it, so quotas that change a little move few publishers.
    """
    rng = np.random.default_rng(seed)
    members = np.arange(len(roster)) if among is None else among
    now = np.full(len(roster), UNPLACED, np.int32) if current is None else current
    members = rng.permutation(members)
    members = members[np.argsort(-roster.rates[members], kind="stable")]
    # A group of one needs no spreading; it goes to a broker with room.
    of_size = np.bincount(roster.groups[members] + 1)[roster.groups[members] + 1]
    grouped = (roster.groups[members] >= 0) & (of_size > 1) & by_group
    room = list(quotas)  # left of each quota; rounding may take it below zero
    result = np.full(len(roster), UNPLACED, np.int32)

    with_group = members[grouped]
    names, inverse, sizes = np.unique(roster.groups[with_group], return_inverse=True, return_counts=True)
    slots = proportional_table(sizes, quotas, rng) if len(names) else np.zeros((0, len(quotas)), np.int64)
    by_name = with_group[np.argsort(inverse, kind="stable")]
    for group, ends in enumerate(np.cumsum(sizes).tolist()):
        _seat(roster, by_name[ends - sizes[group] : ends], slots[group].tolist(), room, now, result)
    _pour(roster, members[~grouped], room, now, result)
    return result


def _seat(roster: Roster, group: Ints, slots: list[int], room: list[int], now: BrokerOf, result: BrokerOf) -> None:
    """Place the publishers of one group: `slots[l]` of them on broker l, the fastest first."""
    movers = []
    for publisher in group.tolist():
        broker = int(now[publisher])
        if broker >= 0 and slots[broker] > 0:
            slots[broker] -= 1
            room[broker] -= int(roster.rates[publisher])
            result[publisher] = broker
        else:
            movers.append(publisher)
    open_ = [broker for broker, left in enumerate(slots) if left > 0]
    for publisher in movers:
        broker = max(open_, key=room.__getitem__)
        slots[broker] -= 1
        if not slots[broker]:
            open_.remove(broker)
        room[broker] -= int(roster.rates[publisher])
        result[publisher] = broker


def _pour(roster: Roster, members: Ints, room: list[int], now: BrokerOf, result: BrokerOf) -> None:
    """Place each publisher, the fastest first, on the broker with most room left."""
    movers = []
    for publisher in members.tolist():
        broker, rate = int(now[publisher]), int(roster.rates[publisher])
        if broker >= 0 and room[broker] >= rate:
            room[broker] -= rate
            result[publisher] = broker
        else:
            movers.append((publisher, rate))
    heap = [(-left, broker) for broker, left in enumerate(room)]
    heapq.heapify(heap)
    for publisher, rate in movers:
        left, broker = heap[0]
        heapq.heapreplace(heap, (left + rate, broker))
        room[broker] -= rate
        result[publisher] = broker


def _milli(value: Number, what: str) -> int:
    """Thousandths of a message a second."""
    try:
        amount = exact(value, what)
    except ValueError as error:
        raise PlacementError(str(error), value=value) from None
    if amount < 0:
        raise PlacementError(f"{what} must not be negative, but is {value} msg/s", value=value)
    return round(amount * _MILLI)


def _too_small(rate: int, caps: Sequence[int]) -> PlacementError:
    roomy = sum(cap > 0 for cap in caps)
    who = "1 broker has" if roomy == 1 else f"{roomy} brokers together have"
    return PlacementError(
        f"the topic sends {rate / _MILLI:g} msg/s, more than the {sum(caps) / _MILLI:g} msg/s that {who} left;"
        " add brokers",
        rate=rate,
        capacity=sum(caps),
    )
