"""What the API takes, and what it says: the shapes of its JSON, with their limits."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from srtm.control import liveness
from srtm.control.members import DeclaredPublisher, Status
from srtm.control.placing.fitted import described
from srtm.control.reports import Seen
from srtm.errors import InputError
from srtm.model import defaults
from srtm.model.bucket import TokenBucket
from srtm.model.latency import Sketch
from srtm.model.placement import POLICIES
from srtm.model.shares import in_force_ratio
from srtm.protocol.exchange import Contract
from srtm.units import MILLI_PER_TOKEN, NANO_PER_TOKEN, NS_PER_MS, NS_PER_S, exact

if TYPE_CHECKING:
    from srtm.control.controller import Controller
    from srtm.control.members import Member
    from srtm.control.topic import ManagedTopic

STATUSES = get_args(Status)  # of a broker
STATES = ("opening", "fitting", "moving", "placed", "fitted", "no capacity")  # of a topic
_QUANTILES = (Fraction(1, 2), Fraction(95, 100), Fraction(99, 100))  # thousands of times a second: no text to be read

Name = Annotated[str, Field(min_length=1, max_length=256)]
TopicName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[.a-zA-Z0-9_-]+(#ephemeral)?$")]
Rate = Annotated[float, Field(ge=0.001, le=1e9, allow_inf_nan=False)]


Tokens = Annotated[float, Field(ge=1, le=4e9, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, le=600_000, allow_inf_nan=False)]
if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(POLICIES)]  # one list; the schema shows its names
FitBy = Literal["model", "measure", "none"]


def _larger_than_0(quantile: str) -> str:
    if exact(quantile, "quantile") <= 0:
        raise ValueError("a quantile is larger than 0")
    return quantile


Quantile = Annotated[str, Field(pattern=r"^0?\.[0-9]{1,9}$"), AfterValidator(_larger_than_0)]


def slo_ns(slo_ms: float) -> int:
    """An SLO in the unit of contracts."""
    return max(1, round(slo_ms * NS_PER_MS))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PublisherIn(_Strict):
    """A publisher: what it sends, and whom it bursts with."""

    id: Name
    group: Name | None = None
    rate: Rate | None = Field(None, description="mean messages a second; 1 unless given")
    process: Literal["poisson", "periodic"] | None = None
    batch: int = Field(1, ge=1, le=100_000)
    jitter_ms: float = Field(0.0, ge=0, le=60_000, allow_inf_nan=False)

    def declared(self) -> DeclaredPublisher:
        """As the controller keeps it."""
        return DeclaredPublisher(
            self.id,
            self.rate if self.rate is not None else 1.0,
            self.group,
            self.process or "poisson",
            self.batch,
            round(self.jitter_ms * NS_PER_MS),
        )


class PublishersIn(_Strict):
    """Publishers that ask where to publish; `lost` are brokers that they cannot reach."""

    publishers: list[PublisherIn] = Field(max_length=100_000)
    lost: list[Name] = Field(default=[], max_length=1_000)


class TopicIn(_Strict):
    """A contract: the bucket (r, b), the SLO, and how the topic is placed."""

    r: Rate | None = Field(None, description="tokens a second; from the publishers' declarations unless given")
    b: Tokens | None = Field(None, description="tokens; likewise")
    slo_ms: Milliseconds = 1.0
    quantile: Quantile = "0.99"
    policy: Policy = defaults.POLICY
    durability: Literal["memory", "disk"] = "memory"
    overflow: Literal["wait", "drop"] = "wait"
    fit: FitBy = "model"
    adapt: bool = Field(True, description="whether shares follow the traffic; without, they stay as placed")
    publishers: list[PublisherIn] = Field(default=[], max_length=100_000)

    @model_validator(mode="after")
    def _one_bucket(self) -> TopicIn:
        if (self.r is None) != (self.b is None):
            raise ValueError("give r and b, or neither and publishers to profile them from")
        if self.r is None and not self.publishers:
            raise ValueError("without r and b, give publishers: the bucket is profiled from what they declare")
        if self.durability == "disk" and self.overflow == "drop":
            raise ValueError("a topic on disk drops nothing that it has answered: overflow wait, or durability memory")
        return self

    def contract(self, bucket: TokenBucket) -> Contract:
        """As brokers keep it."""
        return Contract(
            bucket.r_mtps,
            bucket.b_ntok,
            slo_ns(self.slo_ms),
            self.quantile,
            self.policy,
            self.durability,
            self.overflow,
            self.fit,
            self.adapt,
        )


class ContractChange(_Strict):
    """What is to be another in a contract; the rest stays."""

    r: Rate | None = Field(None, description="tokens a second")
    b: Tokens | None = Field(None, description="tokens of a full bucket")
    slo_ms: Milliseconds | None = None
    quantile: Quantile | None = None
    policy: Policy | None = None
    fit: FitBy | None = None
    adapt: bool | None = None

    def applied_to(self, contract: Contract) -> Contract:
        """The contract as it is to be."""
        asked = self.model_dump(include={"quantile", "policy", "fit", "adapt"}, exclude_none=True)
        if self.r is not None:
            asked["r_mtps"] = round(exact(self.r, "r") * MILLI_PER_TOKEN)
        if self.b is not None:
            asked["b_ntok"] = round(exact(self.b, "b") * NANO_PER_TOKEN)
        if self.slo_ms is not None:
            asked["slo_ns"] = slo_ns(self.slo_ms)
        return msgspec.structs.replace(contract, **asked)


class MoveIn(_Strict):
    """Publishers that an operator sends to a broker."""

    publishers: list[Name] = Field(min_length=1, max_length=100_000)
    broker: Name


class PlaceOut(BaseModel):
    """Where one publisher publishes."""

    broker: str
    address: str


class DeliveryOut(BaseModel):
    """Where subscribers find a topic's messages: brokers (host:port) or servers of an engine (its address)."""

    engine: str
    addresses: list[str]
    subject: str | None = None  # of NATS


class PlacesOut(BaseModel):
    """Where publishers publish, and the brokers of the topic for when one of them is lost."""

    topic: str
    managed: bool
    publishers: dict[str, PlaceOut]
    brokers: dict[str, str]
    delivery: list[DeliveryOut]


class Problem(BaseModel):
    """One thing that is wrong with a request, and where."""

    loc: list[str | int]
    msg: str
    type: str


class Refusal(BaseModel):
    """Why a request was refused: a sentence, or everything that is wrong with its shape."""

    detail: str | list[Problem]


def points_ms(sketch: Sketch) -> dict[str, float] | None:
    """p50, p95 and p99 in milliseconds."""
    if not sketch.counts:
        return None
    p50, p95, p99 = sketch.quantiles_ns(_QUANTILES)
    return {"p50": p50 / NS_PER_MS, "p95": p95 / NS_PER_MS, "p99": p99 / NS_PER_MS}


def members_out(controller: Controller) -> list[dict[str, Any]]:
    """All brokers, for people."""
    declared: Counter[str] = Counter()
    for topic in controller.topics.values():
        conformant = topic.conformant
        declared.update({name: rate * conformant for name, rate in topic.layout.rates().items()})
    return [member_out(member, declared[member.name]) for member in controller.members.values()]


def member_out(member: Member, declared_mps: float) -> dict[str, Any]:
    """A broker, for people, given what publishers that are placed there declare."""
    allocated = declared_mps + member.condition.free_mps
    return {
        "name": member.name,
        "address": member.address,
        "http": member.url,
        "status": member.status,
        "draining": member.draining,
        "mcap": member.mcap_mps,
        "rcap": max(0.0, member.mcap_mps - allocated),
        "allocated": allocated,
        "rate": member.condition.rate_mps,
        "lag_ms": member.condition.lag_ns / NS_PER_MS,
        "engine": member.condition.engine,
        "engine_problem": member.condition.engine_problem,
        "engine_address": member.condition.engine_address,
        "oddities": member.link.oddities,
    }


def delivery_out(controller: Controller, topic: str, brokers: set[str]) -> list[dict[str, Any]]:
    """Where subscribers find a topic's messages; `brokers` are those that have any.

    An engine keeps messages when publishers have moved on and when its broker is dead, so that all engines are named.
    """
    members = [member for _, member in sorted(controller.members.items())]
    found: defaultdict[str, list[str]] = defaultdict(list)
    for member in members:
        if member.condition.engine_address is not None:
            if member.condition.engine_address not in found[member.condition.engine]:
                found[member.condition.engine].append(member.condition.engine_address)
        elif member.condition.engine == "local" and member.name in brokers and member.status != "dead":
            found["local"].append(member.address)
    return [
        {"engine": engine, "addresses": addresses, "subject": topic if engine == "nats" else None}
        for engine, addresses in sorted(found.items())
    ]


def topic_out(topic: ManagedTopic, controller: Controller, now_ns: int, *, events: bool = True) -> dict[str, Any]:
    """A topic, for people."""
    contract, held = topic.contract, topic.transfer.held
    rates, places = topic.layout.rates(), Counter(topic.layout.place.values())
    over, sent, lately_mps, brokers = 0, 0, 0.0, []
    whole = Seen()
    for name in sorted(topic.layout.brokers() | held.keys()):
        here, share = topic.layout.seen.get(name) or Seen(), held.get(name)
        whole.total.add(here.total)
        whole.access.add(here.access)
        whole.processing.add(here.processing)
        over += sum(second.over for second in here.seconds)
        sent += sum(second.sent for second in here.seconds)
        lately_mps += sum(second.messages for second in here.seconds) / max(1, len(here.seconds))
        brokers.append(
            {
                "broker": name,
                "publishers": places[name],
                "connected": here.publishers,
                "declared_rate": rates.get(name, 0.0),
                "rate": here.rate_mps,
                "r": share.r if share else 0.0,
                "b": share.b if share else 0.0,
                "waiting": here.waiting,
                "durable": here.durable,
                "access_ms": points_ms(here.access),
                "processing_ms": points_ms(here.processing),
                "total_ms": points_ms(here.total),
            }
        )
    allowed = 1 - exact(contract.quantile, "quantile")
    access, one_bucket = points_ms(whole.access), topic.one_bucket
    one_bucket_ms = one_bucket[1] / NS_PER_MS if one_bucket and one_bucket[1] is not None else None
    document = {
        "topic": topic.name,
        "state": state_of(topic),
        "birth": topic.birth,
        "waits_for": liveness.unaware_of(controller.state, topic) if not topic.opened else [],
        "opening_s": None if topic.opened else (now_ns - topic.since_ns) / NS_PER_S,
        "shares": shares_out(topic, controller, now_ns),
        "paused": topic.paused,
        "r": contract.r_mtps / MILLI_PER_TOKEN,
        "b": contract.b_ntok / NANO_PER_TOKEN,
        "slo_ms": contract.slo_ns / NS_PER_MS,
        "quantile": contract.quantile,
        "policy": contract.policy,
        "durability": contract.durability,
        "overflow": contract.overflow,
        "fit": contract.fit,
        "adapt": contract.adapt,
        "publishers": len(topic.layout.publishers),
        "declared_rate": topic.layout.rate_mps,
        "rate": sum(seen.rate_mps for seen in topic.layout.seen.values()),
        "waiting": sum(seen.waiting for seen in topic.layout.seen.values()),
        "over_contract": lately_mps * MILLI_PER_TOKEN > contract.r_mtps,
        "k": len(places),
        "slo_met": _met(sent, over, allowed),
        "access_ms": access,
        "processing_ms": points_ms(whole.processing),
        "total_ms": points_ms(whole.total),
        "one_bucket_ms": one_bucket_ms,
        "penalty_ms": _penalty_ms(access, one_bucket_ms, split=len(held) > 1),
        "moving": len(topic.layout.migration.publishers),
        "brokers": brokers,
        "fitted": described(topic.fitting.last) if topic.fitting.last else None,
        "fitting": fitting_out(topic),
        "generation": topic.journal.generation,
    }
    if events:
        document["events"] = [
            {"ago_s": round((now_ns - event.at_ns) / NS_PER_S, 1), "kind": event.kind, "text": event.text}
            for event in topic.journal.events
        ]
    return document


def shares_out(topic: ManagedTopic, controller: Controller, now_ns: int) -> dict[str, Any]:
    """How much of (r, b) brokers report in force; while that is too little, since when, why, and who holds it up."""
    missing = liveness.missing(controller.state, topic)
    since_ns = topic.sharing.short_since_ns if topic.sharing.short_since_ns is not None else now_ns
    return {
        "in_force_ratio": in_force_ratio(topic.contract.bucket, topic.transfer.held),
        "short_since_s": None if missing is None else (now_ns - since_ns) / NS_PER_S,
        "short_of": missing,
        "overdue": topic.sharing.told_short,
        "waits_for": liveness.waited_for(controller.state, topic) if missing is not None else [],
    }


def _met(sent: int, over: int, allowed: Fraction) -> bool | None:
    """Whether the SLO holds; None where nothing was sent, or one late message of a few is all that is known."""
    if not sent or (over == 1 and allowed * sent < 1):
        return None
    return over <= allowed * sent


def _penalty_ms(access: dict[str, float] | None, one_bucket_ms: float | None, *, split: bool) -> float | None:
    """The DRL penalty, as far as it is known live: p99 of access as measured, less what the model says of one bucket.

    The model goes by what publishers declare; what they send beyond their contract waits in one bucket, too, and is not
    told apart here (`over_contract` says when).
    """
    if access is None or (split and one_bucket_ms is None):
        return None
    return max(0.0, access["p99"] - (one_bucket_ms or 0.0)) if split else 0.0


def fitting_out(topic: ManagedTopic) -> dict[str, Any] | None:
    """How far a fitting has come."""
    if topic.fitting.running is None:
        return None
    return {
        "state": topic.fitting.running.state,
        "rounds": len(topic.fitting.running.rounds),
        "publishers": topic.fitting.running.size,
    }


def state_of(topic: ManagedTopic) -> str:
    """A word for how a topic is doing."""
    if not topic.opened:
        return "opening"
    if topic.fitting.running is not None:
        return "fitting"
    if topic.layout.migration.publishers:
        return "moving"
    if topic.fitting.last is None:
        return "placed"
    return "fitted" if topic.fitting.last.met else "no capacity"


def bucket_of(wish: TopicIn) -> TokenBucket | None:
    """The bucket that was asked for."""
    try:
        return TokenBucket.of(wish.r, wish.b) if wish.r is not None and wish.b is not None else None
    except InputError as problem:
        raise ValueError(str(problem)) from None
