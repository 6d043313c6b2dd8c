"""A topic under contract: its publishers and where they are, its shares, and what its brokers say of it."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from srtm.control.attendance import Attendance
from srtm.control.members import Declared, Seen
from srtm.errors import InputError
from srtm.model.adaptation import LEAST_STEPS, History, adapt
from srtm.model.placement import policy_named
from srtm.model.split import split_among, within
from srtm.units import NANO_PER_TOKEN, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.control.distributor import Fit
    from srtm.control.members import Member
    from srtm.model.bucket import TokenBucket
    from srtm.model.transfer import Transfer
    from srtm.protocol.exchange import Contract

log = logging.getLogger(__name__)

_EVENTS = 200
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
    transfer: Transfer
    version: int  # of the list of contracts that first had it
    opened: bool = False  # every broker knows of the contract
    publishers: dict[str, Declared] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)  # publisher to broker
    seen: defaultdict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    fit: Fit | None = None
    fitted: Fitted | None = None
    settled: frozenset[str] = frozenset()  # publishers that the last fitting placed
    flowing_s: int = 0  # seconds in a row that its publishers have sent about what they declared
    moving: set[str] = field(default_factory=set)  # publishers that have been told to go elsewhere
    moving_since_ns: int = 0
    left: Counter[str] = field(default_factory=Counter)  # publishers that have left a broker, since that was noted
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
        return all(len(self.seen[broker].history) >= LEAST_STEPS for broker in set(self.place.values()))

    def uneven(self, broker: str) -> bool:
        """Whether a broker has more or fewer publishers than are placed there."""
        return broker in self.seen and self.seen[broker].publishers != sum(at == broker for at in self.place.values())

    def share_out(self, alive: Iterable[str]) -> None:
        """Shares by what is declared and, where publishers are on their way, by where they still are."""
        usable = set(alive)
        weights: defaultdict[str, float] = defaultdict(float)
        for broker, rate in self.rates().items():
            if broker in usable:
                weights[broker] += rate
        for broker, wrong in self.misplaced().items():
            if broker in usable:
                weights[broker] += sum(self.publishers[name].rate_mps for name in wrong)
        for broker, seen in self.seen.items():
            if broker in usable and broker not in weights and (seen.waiting or seen.rate_mps or seen.publishers):
                weights[broker] += max(seen.rate_mps, 0.01 * self.rate_mps, 0.001)
        self._want(dict(weights), usable)

    def _want(self, weights: Mapping[str, float], usable: set[str]) -> None:
        kept = self._kept(usable)
        left = _without(self.transfer.whole, kept.values())
        shares = split_among(left, {name: repr(weight) for name, weight in weights.items()}) if left else {}
        self.transfer.retarget(kept | shares)

    def _kept(self, usable: set[str]) -> dict[str, TokenBucket]:
        """What others may have in force, and keep; nothing, once they are heard, where it is more than there is."""
        kept = {name: share for name, share in self.transfer.possible.items() if name not in usable}
        return kept if within(self.transfer.whole, kept.values()) else {}

    def adapt(self, members: Mapping[str, Member], now_ns: int) -> bool:
        """Let shares follow the traffic; returns whether they are to change."""
        alive = {name for name, member in members.items() if member.status == "alive"}
        held = self.transfer.wanted
        kept = self._kept(alive)
        wanting = self.brokers() & alive
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
            except InputError:  # too little is left for so many, or those who said nothing hold too much
                return False
        if target == held:
            return False
        self.transfer.retarget(target)
        return True


def _without(whole: TokenBucket, shares: Iterable[TokenBucket]) -> TokenBucket | None:
    """What is left of a bucket; none where that is no bucket."""
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
