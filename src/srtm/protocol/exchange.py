"""Messages between controller and broker: one exchange, one answer (docs/adr/0012-control-exchange.md).

In: JSON from the other side. Out: the message, with every number in range, or a ProtocolError that names the one that
is not. Shares are integers (`r_mtps`, `b_ntok`), so a broker puts exactly the granted share in force. Seconds come from
the broker's wall clock, stamps from its monotonic clock; only the broker interprets a stamp.

A name is not an identity. A topic that is deleted and created again has the same name and another *birth*; contracts,
grants, moves and reports carry it, and neither side applies what belongs to another birth.
"""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, TypeVar

import msgspec

from srtm.errors import ProtocolError
from srtm.model import defaults
from srtm.model.bucket import TokenBucket
from srtm.model.latency import Sketch
from srtm.protocol.names import valid_name

ROUND_TRIP_QUANTILES = (Fraction(1, 2), Fraction(99, 100))
MAX_BODY = 16 * 1024 * 1024  # hundreds of topics, thousands of migrating publishers

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Share(msgspec.Struct, frozen=True):
    """A sub-token bucket, as sent."""

    r_mtps: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    b_ntok: Annotated[int, msgspec.Meta(ge=10**9, le=2**62)]

    @classmethod
    def of(cls, bucket: TokenBucket | None) -> Share | None:
        """Return the share of a bucket; None for None."""
        return cls(bucket.r_mtps, bucket.b_ntok) if bucket else None

    @property
    def bucket(self) -> TokenBucket:
        """The share as a bucket."""
        return TokenBucket(self.r_mtps, self.b_ntok)


class Contract(msgspec.Struct, frozen=True):
    """The terms of a topic. Brokers keep them, so a controller that lost its store can recover them."""

    r_mtps: Count
    b_ntok: Count
    slo_ns: Annotated[int, msgspec.Meta(ge=1, le=10**12)] = 1_000_000
    quantile: Annotated[str, msgspec.Meta(pattern=r"^(0?\.[0-9]{1,9}|1(\.0*)?)$")] = "0.99"
    policy: str = "srtm"
    durability: str = "memory"
    overflow: str = "wait"
    fit: str = "model"
    adapt: bool = True  # shares follow the traffic, and publishers leave overloaded brokers
    adapt_window_s: Annotated[int, msgspec.Meta(ge=3, le=3_600)] = defaults.ADAPT_WINDOW_S
    adapt_period_s: Annotated[int, msgspec.Meta(ge=1, le=3_600)] = defaults.ADAPT_PERIOD_S
    lending: str = defaults.LENDING  # of `model.lending.Term`; for the controller, which tells brokers by `Lends`
    may_publish: tuple[Name, ...] = ()  # identities, of AUTH servers or certificates; anyone, if empty
    may_subscribe: tuple[Name, ...] = ()

    @property
    def bucket(self) -> TokenBucket:
        """The bucket of the whole topic."""
        return TokenBucket(self.r_mtps, self.b_ntok)


class Listed(msgspec.Struct, frozen=True):
    """A contract as the controller lists it: its birth and its terms."""

    birth: Count
    contract: Contract


class Grant(msgspec.Struct, frozen=True):
    """A share of a topic for this broker; without a share, its messages wait. `gift_ntok` are tokens given with it."""

    birth: Count  # of the contract
    sequence: Count  # counts all grants of this epoch, of all topics
    share: Share | None
    gift_ntok: Count = 0


class Peer(msgspec.Struct, frozen=True):
    """Another broker with a share of a topic, where its clients connect, and that share."""

    name: Name
    address: str
    share: Share
    incarnation: Count = 0  # 0: any; else, lend only with that very process


class Lends(msgspec.Struct, frozen=True):
    """How a broker lends and borrows tokens of a topic (docs/adr/0021-lending.md), and with whom."""

    birth: Count  # of the contract: tokens of another one are not taken
    rule: str  # of `model.lending.Rule`
    peers: list[Peer]


class Move(msgspec.Struct, frozen=True):
    """Publishers of a topic that must migrate to another broker."""

    topic: Name
    birth: Count
    to: tuple[str, ...]
    publishers: list[Name]


class Exchange(msgspec.Struct, frozen=True):
    """Controller to broker. `contracts` are those of all topics, sent if their `version` is new to the broker.

    Exchanges of an epoch are numbered. A broker acts only on the newest: once it has answered one, earlier exchanges
    are void, with every grant that a later one does not repeat.
    """

    epoch: Count
    number: Count
    incarnation: Count  # of the broker that is addressed: grants for an earlier one are void
    echo: int | None
    lease_ns: Count
    safe_percent: Annotated[int, msgspec.Meta(ge=0, le=100)]
    version: Count
    contracts: dict[Name, Listed] | None = None
    grants: dict[Name, Grant] = {}
    moves: list[Move] = []
    heard: Count = 0  # the last second that the controller has received
    roll: list[Name] = []  # topics whose publishers the answer must list
    recall: bool = False  # the answer must list known contracts: the controller lost its store
    paused: list[Name] = []  # topics that must not deliver for now
    lends: dict[Name, Lends] = {}  # topics whose brokers lend each other tokens: all of them, each time


class Second(msgspec.Struct, frozen=True):
    """One second of a topic at a broker, for the TB Adaptor and the Load Distributor."""

    number: Count
    messages: Count
    max_backlog_ntok: Count
    largest_batch: Count
    sent: Count  # with a latency; `over` of them above the SLO's limit
    over: Count
    access: list[Count]  # a sketch: bin, count, bin, count, …
    total: list[Count]
    processing: list[Count] = []
    backlogs: list[Count] = []  # that messages found, in whole tokens; older brokers report the largest alone


class PeerLent(msgspec.Struct, frozen=True):
    """What a broker has asked of, lent to and borrowed from one peer, in nano-tokens (`model.books.Account`)."""

    name: Name
    asks: Count = 0
    unanswered: Count = 0
    heard: Count = 0  # asks of the peer
    refused: Count = 0  # of these, because they came too often
    lost_ntok: Count = 0
    amounts: list[tuple[Count, Count, Count]] = []  # incarnation of the peer, lent to it, borrowed from it
    round_trips: list[Count] = []  # a sketch of the latest ones

    @property
    def lent_ntok(self) -> int:
        """What was lent to all processes of that name."""
        return sum(lent for _, lent, _ in self.amounts)

    @property
    def borrowed_ntok(self) -> int:
        """What was borrowed from all processes of that name."""
        return sum(borrowed for _, _, borrowed in self.amounts)

    @property
    def round_trip_ns(self) -> list[int]:
        """p50 and p99 of the latest round trips; zeros without any."""
        return Sketch.read(self.round_trips).quantiles_ns(ROUND_TRIP_QUANTILES)


class Lent(msgspec.Struct, frozen=True):
    """What a broker has asked, lent and borrowed under a contract since the broker started, in nano-tokens."""

    asks: Count = 0
    unanswered: Count = 0
    lent_ntok: Count = 0
    borrowed_ntok: Count = 0
    lost_ntok: Count = 0
    round_trip_ns: Count = 0  # of asks, lately
    spent: Count = 0  # messages that took a token
    peers: list[PeerLent] = []


class TopicReport(msgspec.Struct, frozen=True):
    """A topic at a broker: its share, and its statistics since the broker learned of this contract."""

    birth: Count
    epoch: Count
    sequence: Count
    share: Share | None
    safe: bool  # the lease lapsed, and the share was cut
    surrendered_ntok: Count
    waiting: Count
    publishers: Count
    durable: bool
    rate_mps: Count  # messages of the last whole second, under any contract
    arrived: Count  # messages at this broker since it started
    seconds: list[Second] = []
    roll: list[tuple[Name, str | None]] | None = None  # connected publishers, with their groups
    lent: Lent | None = None  # None if it has lent and borrowed nothing under this contract


class Answer(msgspec.Struct, frozen=True):
    """Broker to controller."""

    broker: Name
    incarnation: Count  # its start time: a restarted broker has no shares
    number: Count  # of the exchange that this answers
    acted: Count  # the newest exchange that it has acted on: larger than `number` if this one was overtaken
    stamp: int
    version: Count  # of the list of contracts that it knows
    topics: dict[Name, TopicReport]
    rate_mps: Count = 0  # of all topics
    lag_ns: Count = 0  # maximum lag of its loop in the last second
    free_mps: Count = 0  # of topics without a contract
    contracts: dict[Name, Listed] | None = None
    refused: dict[Name, str] = {}  # refused grants of this exchange, with reasons
    engine: str = "local"  # the engine that delivers its topics
    engine_problem: str | None = None  # why the engine accepts no messages
    engine_address: str | None = None  # for subscribers; without secrets
    stores: bool = True  # it can store topics on disk
    busy: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0  # processor seconds per second, lately


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
    """Return a message as JSON."""
    return _encoder.encode(message)


def refusal_code(data: bytes) -> str | None:
    """Return the code of a refusal in JSON; None if the data is not a refusal."""
    try:
        return msgspec.json.decode(data, type=Refusal).code
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def read(data: bytes, kind: type[Kind]) -> Kind:
    """Decode and check a message from the other side."""
    try:
        message: Kind = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise ProtocolError("E_INVALID", f"cannot decode {kind.__name__.lower()}: {problem}") from None
    names: dict[str, Any] = message.grants if isinstance(message, Exchange) else message.topics
    for name in (*names, *(message.contracts or ())):
        if not valid_name(name):
            raise ProtocolError("E_INVALID", f"{kind.__name__.lower()} has an invalid topic name {name!r}")
    return message
