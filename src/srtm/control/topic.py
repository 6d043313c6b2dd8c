"""A topic under contract, as the controller keeps it."""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from srtm.control.placing.layout import Layout, Places
from srtm.model.audit import Audit
from srtm.model.placement import policy_named

if TYPE_CHECKING:
    from srtm.control.choosing import Choosing
    from srtm.control.placing.fitted import Fitted
    from srtm.control.placing.load_distributor import LiveFitting
    from srtm.model.advice import Kind
    from srtm.model.lending import Rule
    from srtm.model.transfer import Transfer
    from srtm.protocol.exchange import Contract

log = logging.getLogger(__name__)

_EVENTS = 200


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a topic, for operators."""

    at_ns: int
    kind: str
    text: str


@dataclass(slots=True)
class Journal:
    """A topic's latest events, and a count of its changes for watchers."""

    topic: str
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    generation: int = 0

    def note(self, now_ns: int, kind: str, text: str) -> None:
        """Record and log an event."""
        self.events.append(Event(now_ns, kind, text))
        log.info("TOPIC(%s): %s: %s", self.topic, kind, text)
        self.generation += 1


@dataclass(slots=True)
class Sharing:
    """How far a topic's shares are from what they should be."""

    stale: bool = True  # recompute the shares from what publishers declare
    planned: tuple[int, int] = (-1, -1)  # the changes of shares and of brokers that the last plan took into account
    adapted_ns: int = 0  # when they followed the traffic last
    refused: dict[str, str] = field(default_factory=dict)  # brokers that refuse a share, and why
    short_since_ns: int | None = None  # since when less than (r, b) is in force
    told_short: bool = False


@dataclass(slots=True)
class FittingState:
    """A topic's fittings: the one that runs, and what the last one came to."""

    running: LiveFitting | None = None
    last: Fitted | None = None
    settled: frozenset[str] = frozenset()  # publishers that the last fitting placed
    refusal: str = ""  # why publishers that asked last got no place
    refused_again_ns: int = 0  # until then, the journal need not say so again
    flowing_s: int = 0  # consecutive seconds in which publishers sent about what they declared


@dataclass(slots=True)
class Level:
    """The part of a broker's processor that a topic takes, and when that last rose."""

    load: float
    before: float = 0.0  # it rose
    rose_ns: int = 0


@dataclass(slots=True)
class Overload:
    """Which brokers are too slow for a topic, and for which it is too much. Lost with the controller."""

    busy_s: Counter[str] = field(default_factory=Counter)  # consecutive seconds in which a broker was too slow
    counted: dict[str, int] = field(default_factory=dict)  # the number of the last of these seconds
    calm_after_ns: int = 0  # until then, no publisher is shed
    levels: dict[str, Level] = field(default_factory=dict)  # by broker
    barred: dict[str, tuple[str, int]] = field(default_factory=dict)  # brokers where it broke a neighbour; until when


@dataclass(slots=True)
class LendingState:
    """The rule that was chosen for a topic whose contract leaves it to the controller, and the audit of its lending.

    Lost with the controller; books only grow, so the next one soon finds what this one found.
    """

    chosen: Rule | None = None
    basis: tuple[object, ...] = ()  # publishers, places and brokers that it was chosen for
    choosing: Choosing | None = None
    next_ns: int = 0  # until then, it is not chosen again
    audit: Audit = field(default_factory=Audit)
    audited: bool = False  # a broker has lent tokens
    accused: dict[str, str] = field(default_factory=dict)  # brokers that lied, and what speaks against each
    flooded: set[tuple[str, str]] = field(default_factory=set)  # who asked whom too often


@dataclass(slots=True)
class Standing:
    """Advice that holds, since when, and until when unless it is renewed."""

    text: str
    evidence: dict[str, Any]
    since_ns: int
    until_ns: int


@dataclass(slots=True)
class AdviceState:
    """The advice about one topic, and the groups found in it. Lost with the controller."""

    standing: dict[Kind, Standing] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)  # that changes are told by
    seen: dict[str, str] = field(default_factory=dict)  # found last
    agreeing: int = 0  # consecutive findings in which they were the same
    regrouped_ns: int | None = None


@dataclass
class ManagedTopic:
    """A topic under contract."""

    name: str
    contract: Contract
    birth: int  # identifies this contract among all that ever had the name
    transfer: Transfer
    version: int  # of the first list of contracts that had it
    opened: bool = False  # every broker knows the contract
    since_ns: int = 0  # when this controller first knew it
    paused: bool = False  # by an operator: its channels get nothing
    sharing: Sharing = field(default_factory=Sharing)
    fitting: FittingState = field(default_factory=FittingState)
    overload: Overload = field(default_factory=Overload)
    lending: LendingState = field(default_factory=LendingState)
    advice: AdviceState = field(default_factory=AdviceState)
    # p99 of access delay in one bucket, in ns, by the model, and the roster that it was computed for.
    one_bucket: tuple[int, int | None] | None = None
    layout: Layout = field(init=False)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        """Give the topic an empty layout and journal under its own name."""
        self.layout = Layout(Places(self.name))
        self.journal = Journal(self.name)

    @property
    def by_group(self) -> bool:
        """Whether the policy keeps publishers of a correlation group apart."""
        return policy_named(self.contract.policy).by_group

    @property
    def conformant(self) -> float:
        """The part of the declared rate that the contract lets pass."""
        rate_mps = self.layout.rate_mps
        return min(1.0, self.contract.bucket.r / rate_mps) if rate_mps else 1.0

    @property
    def established(self) -> bool:
        """Whether shares follow observed traffic instead of declared rates."""
        return self.contract.adapt and self.layout.observed

    def settling(self, now_ns: int) -> bool:
        """Whether publishers are on the move, or moved a moment ago."""
        migration = self.layout.migration
        return bool(migration.publishers) or now_ns < migration.settling_until_ns

    def calls_roll(self, broker: str) -> bool:
        """Whether a broker should list its connected publishers in its next answer."""
        layout = self.layout
        busy = bool(layout.migration.publishers) or self.fitting.running is not None
        return busy or broker not in layout.seen or layout.uneven(broker)
