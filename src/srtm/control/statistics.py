"""A cluster's numbers: frozen snapshots of brokers and topics, taken on demand.

The API, the page's feed, `srtm top` and `/metrics` read nothing else, so they agree. Fields are named, and in the units
that the API's JSON has: rates in messages per second, r and b in tokens, latencies in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, get_args

from srtm.control import lent, liveness
from srtm.control.members import Status
from srtm.control.reports import Seen
from srtm.model.shares import in_force_ratio
from srtm.units import MILLI_PER_TOKEN, NANO_PER_TOKEN, NS_PER_MS, NS_PER_S, exact

if TYPE_CHECKING:
    from srtm.control.lent import LendingStatistics, LentStatistics
    from srtm.control.members import Member
    from srtm.control.placing.fitted import Fitted
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic
    from srtm.model.advice import Kind
    from srtm.model.latency import Sketch

State = Literal["opening", "fitting", "moving", "placed", "fitted", "no capacity"]
STATUSES: tuple[Status, ...] = get_args(Status)
STATES: tuple[State, ...] = get_args(State)
_QUANTILES = (Fraction(1, 2), Fraction(95, 100), Fraction(99, 100))  # exact, and parsed once


@dataclass(frozen=True, slots=True)
class Points:
    """Three points of a latency distribution, in milliseconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class MemberStatistics:
    """A broker of the cluster."""

    name: str
    address: str
    http: str
    status: Status
    draining: bool
    mcap: float
    rcap: float  # mcap that is not allocated
    allocated: float  # declared by publishers placed there, and carried for topics without a contract
    rate: float  # of the last second
    lag_ms: float
    busy: float  # processor seconds per second, as the broker measures itself
    engine: str
    engine_problem: str | None
    engine_address: str | None
    oddities: int  # implausible answers


@dataclass(frozen=True, slots=True)
class PartStatistics:
    """A topic at one of its brokers."""

    broker: str
    publishers: int  # placed there
    connected: int
    declared_rate: float
    rate: float
    r: float  # of the share in force
    b: float
    waiting: int
    durable: bool
    access_ms: Points | None
    processing_ms: Points | None
    total_ms: Points | None
    lending: LentStatistics | None  # None if it never lent


@dataclass(frozen=True, slots=True)
class SharesStatistics:
    """How much of a contract brokers report in force."""

    in_force_ratio: float
    short_since_s: float | None  # None while nothing is missing
    short_of: str | None
    overdue: bool
    waits_for: tuple[str, ...]  # brokers that hold it up


@dataclass(frozen=True, slots=True)
class FittingStatistics:
    """The progress of a fitting."""

    state: str
    rounds: int
    publishers: int


@dataclass(frozen=True, slots=True)
class AdviceStatistics:
    """Advice about a topic that stands; `GET /v1/topics/T/advice` has the evidence."""

    kind: Kind
    text: str
    since_s: float


@dataclass(frozen=True, slots=True)
class TopicStatistics:
    """A topic under contract, over all its brokers."""

    topic: str
    state: State
    birth: int
    waits_for: tuple[str, ...]  # while it is opening: brokers that do not know the contract yet
    opening_s: float | None
    shares: SharesStatistics
    paused: bool
    r: float
    b: float
    slo_ms: float
    quantile: str
    policy: str
    durability: str
    overflow: str
    fit: str
    adapt: bool
    adapt_window_s: int
    adapt_period_s: int
    lending: LendingStatistics
    may_publish: tuple[str, ...]  # identities; anyone, if empty
    may_subscribe: tuple[str, ...]
    publishers: int
    declared_rate: float
    rate: float  # of the last second
    waiting: int
    over_contract: bool  # publishers sent more than r over the last ten seconds
    k: int  # brokers that publishers are placed on
    slo_met: bool | None
    access_ms: Points | None
    processing_ms: Points | None
    total_ms: Points | None
    one_bucket_ms: float | None  # p99 of access delay in one bucket, by the model
    penalty_ms: float | None
    moving: int
    brokers: tuple[PartStatistics, ...]
    fitted: Fitted | None
    fitting: FittingStatistics | None
    advice: tuple[AdviceStatistics, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class ClusterStatistics:
    """All brokers, and all topics under contract."""

    brokers: tuple[MemberStatistics, ...]
    topics: tuple[TopicStatistics, ...]


def of_cluster(state: ControllerState, now_ns: int) -> ClusterStatistics:
    """A snapshot of all brokers and topics."""
    topics = tuple(of_topic(state, topic, now_ns) for topic in state.topics.values())
    return ClusterStatistics(of_brokers(state), topics)


def of_brokers(state: ControllerState) -> tuple[MemberStatistics, ...]:
    """A snapshot of all brokers."""
    declared: Counter[str] = Counter()
    for topic in state.topics.values():
        conformant = topic.conformant
        declared.update({name: rate * conformant for name, rate in topic.layout.rates().items()})
    return tuple(_of_broker(member, declared[member.name]) for member in state.members.values())


def _of_broker(member: Member, declared_mps: float) -> MemberStatistics:
    allocated = declared_mps + member.condition.free_mps
    return MemberStatistics(
        name=member.name,
        address=member.address,
        http=member.url,
        status=member.status,
        draining=member.draining,
        mcap=member.mcap_mps,
        rcap=max(0.0, member.mcap_mps - allocated),
        allocated=allocated,
        rate=member.condition.rate_mps,
        lag_ms=member.condition.lag_ns / NS_PER_MS,
        busy=round(member.condition.busy, 4),
        engine=member.condition.engine,
        engine_problem=member.condition.engine_problem,
        engine_address=member.condition.engine_address,
        oddities=member.link.oddities,
    )


def of_topic(state: ControllerState, topic: ManagedTopic, now_ns: int) -> TopicStatistics:
    """A snapshot of one topic."""
    contract, held, layout = topic.contract, topic.transfer.held, topic.layout
    rates, places = layout.rates(), Counter(layout.place.values())
    over, sent, lately_mps, brokers = 0, 0, 0.0, []
    whole = Seen()
    for name in sorted(layout.brokers() | held.keys()):
        here, share = layout.seen.get(name) or Seen(), held.get(name)
        whole.total.add(here.total)
        whole.access.add(here.access)
        whole.processing.add(here.processing)
        over += sum(second.over for second in here.seconds)
        sent += sum(second.sent for second in here.seconds)
        lately_mps += sum(second.messages for second in here.seconds) / max(1, len(here.seconds))
        brokers.append(
            PartStatistics(
                broker=name,
                publishers=places[name],
                connected=here.publishers,
                declared_rate=rates.get(name, 0.0),
                rate=here.rate_mps,
                r=share.r if share else 0.0,
                b=share.b if share else 0.0,
                waiting=here.waiting,
                durable=here.durable,
                access_ms=_points(here.access),
                processing_ms=_points(here.processing),
                total_ms=_points(here.total),
                lending=lent.of_broker(topic, here),
            )
        )
    access, one_bucket = _points(whole.access), topic.one_bucket
    one_bucket_ms = one_bucket[1] / NS_PER_MS if one_bucket and one_bucket[1] is not None else None
    return TopicStatistics(
        topic=topic.name,
        state=_state(topic),
        birth=topic.birth,
        waits_for=tuple(liveness.unaware_of(state, topic)) if not topic.opened else (),
        opening_s=None if topic.opened else (now_ns - topic.since_ns) / NS_PER_S,
        shares=_shares(state, topic, now_ns),
        paused=topic.paused,
        r=contract.r_mtps / MILLI_PER_TOKEN,
        b=contract.b_ntok / NANO_PER_TOKEN,
        slo_ms=contract.slo_ns / NS_PER_MS,
        quantile=contract.quantile,
        policy=contract.policy,
        durability=contract.durability,
        overflow=contract.overflow,
        fit=contract.fit,
        adapt=contract.adapt,
        adapt_window_s=contract.adapt_window_s,
        adapt_period_s=contract.adapt_period_s,
        lending=lent.of_topic(state, topic, [part.lending for part in brokers if part.lending]),
        may_publish=contract.may_publish,
        may_subscribe=contract.may_subscribe,
        publishers=len(layout.publishers),
        declared_rate=layout.rate_mps,
        rate=sum(seen.rate_mps for seen in layout.seen.values()),
        waiting=sum(seen.waiting for seen in layout.seen.values()),
        over_contract=lately_mps * MILLI_PER_TOKEN > contract.r_mtps,
        k=len(places),
        slo_met=slo_met(sent, over, 1 - exact(contract.quantile, "quantile")),
        access_ms=access,
        processing_ms=_points(whole.processing),
        total_ms=_points(whole.total),
        one_bucket_ms=one_bucket_ms,
        penalty_ms=_penalty_ms(access, one_bucket_ms, split=len(held) > 1),
        moving=len(layout.migration.publishers),
        brokers=tuple(brokers),
        fitted=topic.fitting.last,
        fitting=_fitting(topic),
        advice=tuple(
            AdviceStatistics(kind, each.text, round((now_ns - each.since_ns) / NS_PER_S, 1))
            for kind, each in topic.advice.standing.items()
        ),
        generation=topic.journal.generation,
    )


def _shares(state: ControllerState, topic: ManagedTopic, now_ns: int) -> SharesStatistics:
    missing, sharing = liveness.missing(state, topic), topic.sharing
    since_ns = sharing.short_since_ns if sharing.short_since_ns is not None else now_ns
    return SharesStatistics(
        in_force_ratio=in_force_ratio(topic.contract.bucket, topic.transfer.held),
        short_since_s=None if missing is None else (now_ns - since_ns) / NS_PER_S,
        short_of=missing,
        overdue=sharing.told_short,
        waits_for=tuple(liveness.waited_for(state, topic)) if missing is not None else (),
    )


def _points(sketch: Sketch) -> Points | None:
    if not sketch.counts:
        return None
    p50, p95, p99 = sketch.quantiles_ns(_QUANTILES)
    return Points(p50 / NS_PER_MS, p95 / NS_PER_MS, p99 / NS_PER_MS)


def slo_met(sent: int, over: int, allowed: Fraction) -> bool | None:
    """Whether the SLO holds; None if nothing was sent, or if one late message among a few says too little."""
    if not sent or (over == 1 and allowed * sent < 1):
        return None
    return over <= allowed * sent


def _penalty_ms(access: Points | None, one_bucket_ms: float | None, *, split: bool) -> float | None:
    """The DRL penalty as far as it is known live: p99 of the measured access delay, less the model's for one bucket.

    The model goes by declared rates. Messages beyond the contract would wait in one bucket, too, and are not told apart
    here; `over_contract` says when there are any.
    """
    if access is None or (split and one_bucket_ms is None):
        return None
    return max(0.0, access.p99 - (one_bucket_ms or 0.0)) if split else 0.0


def _fitting(topic: ManagedTopic) -> FittingStatistics | None:
    running = topic.fitting.running
    return FittingStatistics(running.state, len(running.rounds), running.size) if running else None


def _state(topic: ManagedTopic) -> State:
    if not topic.opened:
        return "opening"
    if topic.fitting.running is not None:
        return "fitting"
    if topic.layout.migration.publishers:
        return "moving"
    if topic.fitting.last is None:
        return "placed"
    return "fitted" if topic.fitting.last.met else "no capacity"
