"""What controller and broker say to each other: one exchange, one answer (docs/adr/0012-control-exchange.md).

In: JSON of the other side. Out: the message, every number of it in range, or a ProtocolError that says which is not.
Shares are integers (`r_mtps`, `b_ntok`), so that what is in force is what was granted. Seconds are counted by the
broker's wall clock, stamps by its monotonic one; a stamp means something to the broker alone.

A name is not an identity. A topic that is deleted and created again has the same name and another *birth*; contracts,
grants, moves and reports carry it, and neither side applies what belongs to another birth.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec

from srtm.errors import ProtocolError
from srtm.model.bucket import TokenBucket
from srtm.protocol.names import valid_name

MAX_BODY = 16 * 1024 * 1024  # hundreds of topics, thousands of publishers on the move

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Share(msgspec.Struct, frozen=True):
    """A sub-token bucket on its way."""

    r_mtps: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    b_ntok: Annotated[int, msgspec.Meta(ge=10**9, le=2**62)]

    @classmethod
    def of(cls, bucket: TokenBucket | None) -> Share | None:
        """A bucket as it travels; none is none."""
        return cls(bucket.r_mtps, bucket.b_ntok) if bucket else None

    @property
    def bucket(self) -> TokenBucket:
        """The bucket that it is."""
        return TokenBucket(self.r_mtps, self.b_ntok)


class Contract(msgspec.Struct, frozen=True):
    """All that a topic was promised. Brokers keep it, so that a controller that lost its store can ask them."""

    r_mtps: Count
    b_ntok: Count
    slo_ns: Annotated[int, msgspec.Meta(ge=1, le=10**12)] = 1_000_000
    quantile: Annotated[str, msgspec.Meta(pattern=r"^(0?\.[0-9]{1,9}|1(\.0*)?)$")] = "0.99"
    policy: str = "srtm"
    durability: str = "memory"
    overflow: str = "wait"
    fit: str = "model"
    adapt: bool = True  # shares follow the traffic, and overloaded brokers shed publishers

    @property
    def bucket(self) -> TokenBucket:
        """The bucket of the whole topic."""
        return TokenBucket(self.r_mtps, self.b_ntok)


class Listed(msgspec.Struct, frozen=True):
    """A contract as the controller lists it: which one of that name, and its terms."""

    birth: Count
    contract: Contract


class Grant(msgspec.Struct, frozen=True):
    """A share of a topic for this broker, or none: then its messages wait. `gift_ntok` are tokens that come along."""

    birth: Count  # of the contract that it is a share of
    sequence: Count  # counts all grants of this epoch, of all topics
    share: Share | None
    gift_ntok: Count = 0


class Move(msgspec.Struct, frozen=True):
    """Publishers of a topic that are to go on at another broker."""

    topic: Name
    birth: Count
    to: tuple[str, ...]
    publishers: list[Name]


class Exchange(msgspec.Struct, frozen=True):
    """Controller to broker. `contracts` are those of all topics, told when their `version` is new to the broker.

    Exchanges of an epoch are numbered. A broker acts on the newest alone: once it has answered one, those before it are
    void, and with them every grant that a later one does not repeat.
    """

    epoch: Count
    number: Count
    incarnation: Count  # of the broker that is spoken to: grants for the one before are void
    echo: int | None
    lease_ns: Count
    safe_percent: Annotated[int, msgspec.Meta(ge=0, le=100)]
    version: Count
    contracts: dict[Name, Listed] | None = None
    grants: dict[Name, Grant] = {}
    moves: list[Move] = []
    heard: Count = 0  # the last second that the controller knows
    roll: list[Name] = []  # topics whose publishers are to be listed
    recall: bool = False  # tell the contracts that are known: the controller lost its store
    paused: list[Name] = []  # topics that give nothing to their channels for a while


class Second(msgspec.Struct, frozen=True):
    """One second of a topic at a broker: what the TB Adaptor and the Load Distributor go by."""

    number: Count
    messages: Count
    max_backlog_ntok: Count
    largest_batch: Count
    sent: Count  # with a latency; `over` of them above the SLO's limit
    over: Count
    access: list[Count]  # a sketch: bin, count, bin, count, …
    total: list[Count]
    processing: list[Count] = []


class TopicReport(msgspec.Struct, frozen=True):
    """A topic at a broker: what is in force, and what was seen since it learned of this contract."""

    birth: Count
    epoch: Count
    sequence: Count
    share: Share | None
    safe: bool  # the lease lapsed, and the share was cut
    surrendered_ntok: Count
    waiting: Count
    publishers: Count
    durable: bool
    rate_mps: Count  # messages of the last whole second, under whichever contract
    arrived: Count  # messages ever, at this broker since it started
    seconds: list[Second] = []
    roll: list[tuple[Name, str | None]] | None = None  # publishers that are here, with their groups


class Answer(msgspec.Struct, frozen=True):
    """Broker to controller."""

    broker: Name
    incarnation: Count  # when it started: a restarted broker holds nothing
    number: Count  # of the exchange that this answers
    acted: Count  # the newest exchange that it has acted on: larger, if this one was overtaken
    stamp: int
    version: Count  # of the list of contracts that it knows
    topics: dict[Name, TopicReport]
    rate_mps: Count = 0  # of all topics
    lag_ns: Count = 0  # how late its loop was at most, in the last second
    free_mps: Count = 0  # of topics without a contract
    contracts: dict[Name, Listed] | None = None
    refused: dict[Name, str] = {}  # grants of this exchange that were not put in force, and why
    engine: str = "local"  # that delivers its topics
    engine_problem: str | None = None  # why that takes nothing
    engine_address: str | None = None  # where subscribers find it; without what is secret
    stores: bool = True  # it can keep topics on disk


class RefusalCode(StrEnum):
    """Why a broker refuses an exchange."""

    OLD_EPOCH = "OLD_EPOCH"  # it has heard a later controller
    NOT_MANAGED = "NOT_MANAGED"  # it was started without a controller
    UNAUTHORIZED = "UNAUTHORIZED"  # the control token is missing or wrong
    INVALID_EXCHANGE = "INVALID_EXCHANGE"


class Refusal(msgspec.Struct, frozen=True):
    """Broker to controller, instead of an answer. `code` is for programs, `message` for people."""

    message: str
    code: str | None = None  # a RefusalCode; None from other programs and for other problems


Kind = TypeVar("Kind", Exchange, Answer)
_encoder = msgspec.json.Encoder()


def write(message: Exchange | Answer) -> bytes:
    """The message as JSON."""
    return _encoder.encode(message)


def refusal_code(data: bytes) -> str | None:
    """The code of a refusal in JSON; None if the data is anything else."""
    try:
        return msgspec.json.decode(data, type=Refusal).code
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def read(data: bytes, kind: type[Kind]) -> Kind:
    """The message in JSON of the other side."""
    try:
        message: Kind = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise ProtocolError("E_INVALID", f"cannot decode {kind.__name__.lower()}: {problem}") from None
    names: dict[str, Any] = message.grants if isinstance(message, Exchange) else message.topics
    for name in (*names, *(message.contracts or ())):
        if not valid_name(name):
            raise ProtocolError("E_INVALID", f"{kind.__name__.lower()} has an invalid topic name {name!r}")
    return message
