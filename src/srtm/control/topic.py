"""A topic under contract: its publishers and where they are, its shares, and what its brokers say of it."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from srtm.control.members import Declared, Seen
from srtm.control.placing.attendance import Attendance
from srtm.errors import InputError
from srtm.model.placement import policy_named
from srtm.model.split import split_among, within
from srtm.model.tb_adaptor import LEAST_STEPS, History, adapt
from srtm.units import NANO_PER_TOKEN, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from srtm.control.placing.load_distributor import Fit
    from srtm.model.bucket import TokenBucket
    from srtm.model.transfer import Transfer
    from srtm.protocol.exchange import Contract

log = logging.getLogger(__name__)

_EVENTS = 200
_NOISE = 0.25  # by how much a measured rate may differ before shares follow it
_FRESH_NS = 3 * NS_PER_S  # how old the newest second of a broker may be before shares follow it no more


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a topic, for people."""

    at_ns: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Round:
    """One measured round of a fitting: latency at the SLO's quantile by broker, and whether that was certain."""

    k: int
    latency_ns: Mapping[str, int]
    within: bool
    certain: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """How a fitting ended."""

    policy: str
    met: bool
    k: int
    rate_mps: float  # that was placed
    rounds: tuple[Round, ...]
    elapsed_s: float
    reason: str = ""


@dataclass
class Topic:
    """A topic as the controller keeps it."""

    name: str
    contract: Contract
    birth: int  # which contract of that name: unique, and never used again
    transfer: Transfer
    version: int  # of the list of contracts that first had it
    opened: bool = False  # every broker knows of the contract
    unshared: bool = True  # shares are to be computed anew from what is declared
    planned: tuple[int, int] = (-1, -1)  # the changes of shares and brokers that were last looked at
    publishers: dict[str, Declared] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)  # publisher to broker
    seen: defaultdict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    fit: Fit | None = None
    fitted: Fitted | None = None
    settled: frozenset[str] = frozenset()  # publishers that the last fitting placed
    undeclared: set[str] = field(default_factory=set)  # publishers that a broker reported and that never registered
    refused: dict[str, str] = field(default_factory=dict)  # brokers that cannot have a share, and why
    short_since_ns: int | None = None  # since when less of r and b is in force than there is
    told_short: bool = False
    flowing_s: int = 0  # seconds in a row that its publishers have sent about what they declared
    moving: set[str] = field(default_factory=set)  # publishers that have been told to go elsewhere
    moving_since_ns: int = 0
    left: Counter[str] = field(default_factory=Counter)  # publishers that have left a broker, since that was noted
    settling_until_ns: int = 0  # until then shares follow what brokers say of publishers that have just come or gone
    reminded_ns: int = 0  # when publishers that are elsewhere were last ordered home
    attendance: Attendance = field(default_factory=Attendance)
    busy_s: Counter[str] = field(default_factory=Counter)  # seconds in a row that a broker was too slow
    calm_after_ns: int = 0  # until then nobody is sent away for being too many
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    generation: int = 0  # counts changes that watchers want to hear of
    since_ns: int = 0  # when this controller first knew it
    paused: bool = False  # by an operator: its channels get nothing
    roster: int = 0  # counts changes of what publishers declare
    # p99 of access in one bucket, in ns, by the model, and the roster that it was asked about.
    one_bucket: tuple[int, int | None] | None = None

    @property
    def by_group(self) -> bool:
        """Whether publishers that burst together are kept apart."""
        return policy_named(self.contract.policy).by_group

    def note(self, now_ns: int, kind: str, text: str) -> None:
        """Remember an event."""
        self.events.append(Event(now_ns, kind, text))
        log.info("TOPIC(%s): %s: %s", self.name, kind, text)
        self.generation += 1

    def brokers(self) -> set[str]:
        """Where its publishers are placed, and where there is traffic of it."""
        active = {name for name, seen in self.seen.items() if seen.publishers or seen.waiting or seen.rate_mps}
        return set(self.place.values()) | active

    def rates(self) -> dict[str, float]:
        """Declared rate that is placed at each broker."""
        rates: defaultdict[str, float] = defaultdict(float)
        for publisher, broker in self.place.items():
            rates[broker] += self.publishers[publisher].rate_mps
        return dict(rates)

    @property
    def rate_mps(self) -> float:
        """Declared rate of all publishers."""
        return sum(publisher.rate_mps for publisher in self.publishers.values())

    @property
    def conformant(self) -> float:
        """The part of what is declared that the contract lets pass."""
        return min(1.0, self.contract.bucket.r / self.rate_mps) if self.rate_mps else 1.0

    def bursts(self) -> dict[str, int]:
        """The largest number of messages that publishers of one broker send together."""
        largest: dict[str, int] = {}
        together: Counter[tuple[str, str | None]] = Counter()
        for publisher, broker in self.place.items():
            declared = self.publishers[publisher]
            key = (broker, declared.group if declared.group is not None else f"\0{publisher}")
            together[key] += declared.batch
            largest[broker] = max(largest.get(broker, 1), together[key])
        return largest

    def misplaced(self) -> dict[str, set[str]]:
        """Publishers that are connected to another broker than theirs, by the broker where they are."""
        return {
            broker: wrong
            for broker, seen in self.seen.items()
            if seen.roll and (wrong := {name for name in seen.roll if self.place.get(name, broker) != broker})
        }

    def forget_rates(self) -> None:
        """Publishers have moved: what brokers carried before says nothing of what they carry now."""
        for seen in self.seen.values():
            seen.history = History()

    @property
    def established(self) -> bool:
        """Whether shares follow traffic that was seen, and not what was declared."""
        return self.contract.adapt and all(
            len(self.seen[broker].history) >= LEAST_STEPS for broker in set(self.place.values())
        )

    def uneven(self, broker: str) -> bool:
        """Whether a broker has more or fewer publishers than are placed there."""
        return broker in self.seen and self.seen[broker].publishers != sum(at == broker for at in self.place.values())

    def calls_roll(self, broker: str) -> bool:
        """Whether a broker should list the publishers that are connected to it."""
        return bool(self.moving) or self.fit is not None or broker not in self.seen or self.uneven(broker)

    def all_wanted(self, alive: Iterable[str]) -> bool:
        """Whether what living brokers should hold, and what others may hold still, is all that there is."""
        whole, living = self.transfer.whole, set(alive)
        shares = [share for name, share in self.transfer.wanted.items() if name in living]
        shares += [share for name, share in self.transfer.possible.items() if name not in living]
        return (
            sum(share.r_mtps for share in shares) >= whole.r_mtps
            and sum(share.b_ntok for share in shares) >= whole.b_ntok
        )

    def share_out(self, alive: Iterable[str], *, flush: bool = False) -> None:
        """Shares by what is declared and, while publishers are on their way, by where they still are.

        With `flush`, tokens go first to what waits. A share that nobody uses stays where it is, or goes to one broker.
        """
        usable = set(alive) - self.refused.keys()
        weights: defaultdict[str, float] = defaultdict(float)
        for broker, rate in self.rates().items():
            weights[broker] += rate
        for broker, wrong in self.misplaced().items():
            weights[broker] += sum(self.publishers[name].rate_mps for name in wrong)
        guessed = {self.place[name] for name in self.undeclared if name in self.place}
        for broker, seen in self.seen.items():
            if broker in guessed:
                weights[broker] = max(weights[broker], seen.mean_mps)
            elif broker not in weights and (seen.waiting or seen.carried_mps or seen.publishers):
                weights[broker] = max(seen.carried_mps, 0.01 * self.rate_mps, 0.001)
        wanting = {broker: weight for broker, weight in weights.items() if broker in usable}
        if not wanting and usable:
            idle = self.transfer.wanted.keys() & usable or {min(usable)}
            wanting = dict.fromkeys(idle, 1.0)
        target = self._split(wanting, usable, flush=flush)
        # What is measured is never twice the same: shares that go to and fro are nobody's on the way.
        if flush or not guessed or _changed_much(self.transfer.wanted, target) or not self.all_wanted(usable):
            self.transfer.retarget(target)
        self.unshared = False

    def _split(self, rates: Mapping[str, float], usable: set[str], *, flush: bool) -> dict[str, TokenBucket]:
        """Shares of r by rates, and of b by rates and by what waits: tokens let it go at once, a rate in a while."""
        kept = self._kept(usable)
        left = _without(self.transfer.whole, kept.values())
        shares = {}
        if left and rates:
            b_each = left.b / sum(rates.values())
            waiting = {name: self.seen[name].waiting if flush and name in self.seen else 0 for name in rates}
            bursts = {name: repr(rate * b_each + min(waiting[name], left.b)) for name, rate in rates.items()}
            shares = split_among(left, {name: repr(rate) for name, rate in rates.items()}, bursts)
        return kept | shares

    def _kept(self, usable: set[str]) -> dict[str, TokenBucket]:
        """What others may have in force, and keep; nothing, once they are heard, if it is more than there is."""
        kept = {name: share for name, share in self.transfer.possible.items() if name not in usable}
        return kept if within(self.transfer.whole, kept.values()) else {}

    def astray(self, alive: Set[str]) -> bool:
        """Whether shares are elsewhere than the brokers that have publishers or traffic."""
        wanting = self.brokers() & alive - self.refused.keys()
        return bool(wanting) and wanting != self.transfer.wanted.keys() & alive

    def adapt(self, alive: Set[str], now_ns: int) -> bool:
        """Let shares follow the traffic; returns whether they are to change."""
        held = self.transfer.wanted
        usable = set(alive) - self.refused.keys()
        kept = self._kept(usable)
        wanting = self.brokers() & usable
        shares: dict[str, TokenBucket | None] = {name: held.get(name) for name in sorted(wanting)}
        left = _without(self.transfer.whole, kept.values())
        if not wanting:  # shares stay where they were useful last
            return False
        if left is None:
            target = kept
        else:
            # Brokers count seconds by clocks of their own, so how old they are is judged by ours.
            fresh = {name for name in wanting if now_ns - self.seen[name].heard_ns <= _FRESH_NS}
            histories = {name: self.seen[name].history for name in fresh}
            waiting = {name: self.seen[name].waiting for name in fresh}
            try:
                target = kept | adapt(left, shares, histories, number=0, waiting=waiting)
            except InputError:  # those who said nothing hold more than is left
                self.unshared = True
                return False
        if target == held:
            return False
        self.transfer.retarget(target)
        return True


def _changed_much(old: Mapping[str, TokenBucket], new: Mapping[str, TokenBucket]) -> bool:
    if old.keys() != new.keys():
        return True
    return any(abs(old[name].r_mtps - new[name].r_mtps) > _NOISE * old[name].r_mtps for name in new)


def _without(whole: TokenBucket, shares: Iterable[TokenBucket]) -> TokenBucket | None:
    """What is left of a bucket; none if that is too little to be one."""
    r_mtps, b_ntok = whole.r_mtps, whole.b_ntok
    for share in shares:
        r_mtps, b_ntok = r_mtps - share.r_mtps, b_ntok - share.b_ntok
    return type(whole)(r_mtps, b_ntok) if r_mtps >= 1 and b_ntok >= NANO_PER_TOKEN else None


def described(fitted: Fitted) -> dict[str, Any]:
    """A fitting for people and for the store."""
    return {
        "policy": fitted.policy,
        "met": fitted.met,
        "k": fitted.k,
        "rate": fitted.rate_mps,
        "elapsed_s": fitted.elapsed_s,
        "reason": fitted.reason,
        "rounds": [
            {
                "k": each.k,
                "latency_ns": dict(each.latency_ns),
                "within": each.within,
                "certain": each.certain,
                "seconds": each.seconds,
            }
            for each in fitted.rounds
        ],
    }
