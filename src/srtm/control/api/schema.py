"""The JSON shapes that the API takes and returns, with their limits."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from srtm.control.members import PART, DeclaredPublisher
from srtm.control.placing.fitted import described
from srtm.errors import InputError
from srtm.model import defaults
from srtm.model.bucket import TokenBucket
from srtm.model.lending import TERMS, known_term
from srtm.model.placement import POLICIES
from srtm.protocol.exchange import Contract
from srtm.units import MILLI_PER_TOKEN, NANO_PER_TOKEN, NS_PER_MS, NS_PER_S, exact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.control.controller import Controller
    from srtm.control.statistics import MemberStatistics, TopicStatistics
    from srtm.control.topic import Event, ManagedTopic

Name = Annotated[str, Field(min_length=1, max_length=256)]
_LONGEST_SPLIT = 250  # leaves space for the number of a part
TopicName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[.a-zA-Z0-9_-]+(#ephemeral)?$")]
Rate = Annotated[float, Field(ge=0.001, le=1e9, allow_inf_nan=False)]


Tokens = Annotated[float, Field(ge=1, le=4e9, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, le=600_000, allow_inf_nan=False)]
if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(POLICIES)]  # one list; the schema shows its names


def _known_term(lending: str) -> str:
    try:
        return known_term(lending)
    except InputError as problem:
        raise ValueError(str(problem)) from None


Lending = Annotated[str, AfterValidator(_known_term), Field(json_schema_extra={"enum": [*TERMS]})]
FitBy = Literal["model", "measure", "none"]
WindowSeconds = Annotated[int, Field(ge=3, le=3_600)]  # shares are not judged by fewer seconds
PeriodSeconds = Annotated[int, Field(ge=1, le=3_600)]  # brokers count by the second


def _larger_than_0(quantile: str) -> str:
    if exact(quantile, "quantile") <= 0:
        raise ValueError("a quantile must be larger than 0")
    return quantile


Quantile = Annotated[str, Field(pattern=r"^0?\.[0-9]{1,9}$"), AfterValidator(_larger_than_0)]


def _whole(publisher: str) -> str:
    if PART in publisher:
        raise ValueError(f"the id of a publisher cannot contain {PART!r}, which marks parts of a publisher")
    return publisher


PublisherId = Annotated[Name, AfterValidator(_whole)]


def slo_ns(slo_ms: float) -> int:
    """An SLO in nanoseconds."""
    return max(1, round(slo_ms * NS_PER_MS))


def _check_period(window_s: int, period_s: int) -> None:
    if period_s > window_s:
        raise ValueError(
            f"adapt_period_s is {period_s}, longer than adapt_window_s ({window_s}): shares would miss traffic between"
            " two windows; use a shorter period or a longer window"
        )


Identities = Annotated[list[Name], Field(max_length=1_000)]
_IDENTITIES = "identities, of AUTH servers or certificates,"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PublisherIn(_Strict):
    """A publisher: its traffic, and its correlation group."""

    id: PublisherId
    group: Name | None = None
    rate: Rate | None = Field(None, description="mean rate in messages per second; 1 by default")
    process: Literal["poisson", "periodic"] | None = None
    batch: int = Field(1, ge=1, le=100_000)
    jitter_ms: float = Field(0.0, ge=0, le=60_000, allow_inf_nan=False)
    split: bool = Field(
        False, description="whether it may be split over several connections, if it is faster than a broker"
    )

    @model_validator(mode="after")
    def _short(self) -> PublisherIn:
        if self.split and len(self.id) > _LONGEST_SPLIT:
            raise ValueError(f"the id of a publisher with split must have at most {_LONGEST_SPLIT} characters")
        return self

    def declared(self) -> DeclaredPublisher:
        """The publisher as the controller keeps it."""
        return DeclaredPublisher(
            self.id,
            self.rate if self.rate is not None else 1.0,
            self.group,
            self.process or "poisson",
            self.batch,
            round(self.jitter_ms * NS_PER_MS),
            self.split,
        )


class PublishersIn(_Strict):
    """Publishers that ask for a broker; `lost` are brokers that they cannot reach."""

    publishers: list[PublisherIn] = Field(max_length=100_000)
    lost: list[Name] = Field(default=[], max_length=1_000)


class TopicIn(_Strict):
    """A contract: the bucket (r, b), the SLO, and how the topic is placed."""

    r: Rate | None = Field(None, description="tokens per second; profiled from the publishers by default")
    b: Tokens | None = Field(None, description="tokens in a full bucket; profiled from the publishers by default")
    slo_ms: Milliseconds = 1.0
    quantile: Quantile = "0.99"
    policy: Policy = defaults.POLICY
    durability: Literal["memory", "disk"] = "memory"
    overflow: Literal["wait", "drop"] = "wait"
    fit: FitBy = "model"
    adapt: bool = Field(
        True, description="whether shares follow the traffic; otherwise they follow the placement alone"
    )
    adapt_window_s: WindowSeconds = Field(defaults.ADAPT_WINDOW_S, description="seconds of traffic that shares follow")
    adapt_period_s: PeriodSeconds = Field(
        defaults.ADAPT_PERIOD_S, description="seconds between two adaptations of shares"
    )
    lending: Lending = Field(
        defaults.LENDING, description="when brokers of the topic lend each other tokens; auto is chosen by prediction"
    )
    may_publish: Identities = Field(default=[], description=f"{_IDENTITIES} that may publish; anyone, if empty")
    may_subscribe: Identities = Field(default=[], description=f"{_IDENTITIES} that may subscribe; anyone, if empty")
    publishers: list[PublisherIn] = Field(default=[], max_length=100_000)

    @model_validator(mode="after")
    def _one_bucket(self) -> TopicIn:
        if (self.r is None) != (self.b is None):
            raise ValueError("give both r and b, or neither and publishers to profile them from")
        if self.r is None and not self.publishers:
            raise ValueError("give r and b, or publishers to profile them from")
        if self.durability == "disk" and self.overflow == "drop":
            raise ValueError(
                "a disk topic cannot drop messages that it has acknowledged; use overflow wait, or durability memory"
            )
        _check_period(self.adapt_window_s, self.adapt_period_s)
        return self

    def contract(self, bucket: TokenBucket) -> Contract:
        """The contract as brokers keep it."""
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
            self.adapt_window_s,
            self.adapt_period_s,
            self.lending,
            tuple(self.may_publish),
            tuple(self.may_subscribe),
        )


class ContractChange(_Strict):
    """Fields of a contract to change; the others stay."""

    r: Rate | None = Field(None, description="tokens per second")
    b: Tokens | None = Field(None, description="tokens in a full bucket")
    slo_ms: Milliseconds | None = None
    quantile: Quantile | None = None
    policy: Policy | None = None
    fit: FitBy | None = None
    adapt: bool | None = None
    adapt_window_s: WindowSeconds | None = None
    adapt_period_s: PeriodSeconds | None = None
    lending: Lending | None = None
    may_publish: Identities | None = Field(None, description=f"{_IDENTITIES} that may publish; anyone, if empty")
    may_subscribe: Identities | None = Field(None, description=f"{_IDENTITIES} that may subscribe; anyone, if empty")

    def applied_to(self, contract: Contract) -> Contract:
        """The changed contract."""
        same = {"quantile", "policy", "fit", "adapt", "adapt_window_s", "adapt_period_s", "lending"}
        asked = self.model_dump(include=same, exclude_none=True)
        if self.r is not None:
            asked["r_mtps"] = round(exact(self.r, "r") * MILLI_PER_TOKEN)
        if self.b is not None:
            asked["b_ntok"] = round(exact(self.b, "b") * NANO_PER_TOKEN)
        if self.slo_ms is not None:
            asked["slo_ns"] = slo_ns(self.slo_ms)
        for field in ("may_publish", "may_subscribe"):
            if (named := getattr(self, field)) is not None:
                asked[field] = tuple(named)
        changed = msgspec.structs.replace(contract, **asked)
        _check_period(changed.adapt_window_s, changed.adapt_period_s)
        return changed


class MoveIn(_Strict):
    """Publishers to move, and the broker to move them to."""

    publishers: list[Name] = Field(min_length=1, max_length=100_000)
    broker: Name


class PlaceOut(BaseModel):
    """The broker of one publisher."""

    broker: str
    address: str


class PartOut(PlaceOut):
    """The broker of one part of a publisher, and the id that this part connects with."""

    id: str


class DeliveryOut(BaseModel):
    """Where subscribers find a topic's messages: brokers (host:port) or the servers of an engine (its URL)."""

    engine: str
    addresses: list[str]
    subject: str | None = None  # of NATS


class PlacesOut(BaseModel):
    """The broker of each publisher, and all brokers of the topic to fall back to."""

    topic: str
    managed: bool
    publishers: dict[str, PlaceOut]
    brokers: dict[str, str]
    delivery: list[DeliveryOut]
    refused: dict[str, str] = {}  # publishers without a place, and why
    parts: dict[str, list[PartOut]] = {}  # of publishers that are split; the first is also under `publishers`


class Problem(BaseModel):
    """One problem of a request, and where it is."""

    loc: list[str | int]
    msg: str
    type: str


class Refusal(BaseModel):
    """Why a request was refused: a sentence, or a list of problems."""

    detail: str | list[Problem]


def parts_out(
    topic: ManagedTopic, publishers: Iterable[str], places: Mapping[str, PlaceOut]
) -> dict[str, list[PartOut]]:
    """The places of all parts of those publishers that are split."""
    split = {each: [part for part in topic.layout.parts_of(each) if part in places] for each in publishers}
    return {
        each: [PartOut(id=part, broker=places[part].broker, address=places[part].address) for part in parts]
        for each, parts in split.items()
        if len(parts) > 1
    }


def delivery_out(controller: Controller, topic: str, brokers: set[str]) -> list[dict[str, Any]]:
    """Where subscribers find a topic's messages; `brokers` are those that have any.

    An engine keeps messages after publishers moved on, and when its broker is dead, so all engines are listed.
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


def member_out(member: MemberStatistics) -> dict[str, Any]:
    """A broker as JSON."""
    document: dict[str, Any] = msgspec.to_builtins(member)
    return document


def topic_out(topic: TopicStatistics, events: Iterable[Event] | None = None, now_ns: int = 0) -> dict[str, Any]:
    """A topic as JSON; with its events, if they are given."""
    document: dict[str, Any] = msgspec.to_builtins(topic)
    document["fitted"] = described(topic.fitted) if topic.fitted else None
    if events is not None:
        document["events"] = [
            {"ago_s": round((now_ns - event.at_ns) / NS_PER_S, 1), "kind": event.kind, "text": event.text}
            for event in events
        ]
    return document


def bucket_of(wish: TopicIn) -> TokenBucket | None:
    """The requested bucket; None if it is to be profiled."""
    try:
        return TokenBucket.of(wish.r, wish.b) if wish.r is not None and wish.b is not None else None
    except InputError as problem:
        raise ValueError(str(problem)) from None
