"""Brokers as the controller knows them, and publishers as they declared themselves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from srtm.model.placement import Publisher

if TYPE_CHECKING:
    from srtm.protocol.exchange import Contract

Status = Literal["joining", "alive", "silent", "lapsed", "dead"]

PART = "␟"  # between a publisher's id and the number of a part; no publisher may register with it


@dataclass(frozen=True, slots=True)
class DeclaredPublisher:
    """A publisher as it registered: its rate, its traffic pattern, and its correlation group.

    One that allows it (`split`) may be registered as several `parts`, each with an equal part of its rate.
    """

    id: str
    rate_mps: float = 1.0
    group: str | None = None
    process: Literal["poisson", "periodic"] = "poisson"
    batch: int = 1
    jitter_ns: int = 0
    split: bool = False
    parts: int = 1  # that it consists of, if this is one of them
    found: bool = False  # nobody declared the group: `srtm advise` found it

    @property
    def whole(self) -> DeclaredPublisher:
        """The publisher that this is a part of."""
        if self.parts == 1:
            return self
        return replace(self, id=self.id.partition(PART)[0], rate_mps=self.rate_mps * self.parts, parts=1)

    def found_in(self, known: DeclaredPublisher | None) -> DeclaredPublisher:
        """The same publisher with the group that was found for it before, unless it declares one."""
        if self.group is None and known is not None and known.found:
            return replace(self, group=known.group, found=True)
        return self

    @property
    def as_declared(self) -> DeclaredPublisher:
        """The same publisher without a group that it did not declare."""
        return replace(self, group=None, found=False) if self.found else self

    def in_parts(self, number: int) -> list[DeclaredPublisher]:
        """Split a whole publisher; the first part keeps its id."""
        rate_mps = self.rate_mps / number
        return [
            replace(self, id=part_id(self.id, each), rate_mps=rate_mps, parts=number) for each in range(1, number + 1)
        ]

    @property
    def publisher(self) -> Publisher:
        """The same for the placement model."""
        return Publisher(self.id, self.rate_mps, self.group)


def part_id(publisher: str, number: int) -> str:
    """The id of a publisher's part, counted from 1."""
    return publisher if number == 1 else f"{publisher}{PART}{number}"


@dataclass(slots=True)
class Link:
    """The state of the exchanges with one broker. Times are the controller's own, by its monotonic clock."""

    stamp: int | None = None  # of the last answer; the next exchange echoes it
    stamp_heard_ns: int = 0  # when that answer came: a lease granted for it ends at most one lease later
    lease_ends_ns: int | None = None  # the latest time at which the broker's lease may end
    void: int = 0  # ignore answers to exchanges up to this one: the broker died or restarted since
    strangers: int = 0  # consecutive answers of a program that is not this broker
    version: int = 0  # of the list of contracts that the broker acknowledged
    oddities: int = 0  # implausible answers


@dataclass(frozen=True, slots=True)
class Condition:
    """What a broker last reported of itself."""

    rate_mps: int = 0
    free_mps: int = 0  # of topics without a contract
    lag_ns: int = 0
    engine: str = "local"  # that delivers its topics
    engine_problem: str | None = None
    engine_address: str | None = None  # where subscribers find its messages, if not at the broker
    stores: bool = True  # whether it can keep topics on disk; assumed until it answers
    busy: float = 0.0  # processor seconds per second


@dataclass(slots=True)
class Member:
    """A broker of the cluster."""

    name: str
    host: str
    tcp_port: int
    http_port: int
    mcap_mps: float
    status: Status = "joining"
    since_ns: int = 0  # when the status last changed
    draining: bool = False
    incarnation: int = 0
    https_port: int = 0  # 0 if it serves no HTTPS, or has not registered since the controller started
    link: Link = field(default_factory=Link)
    condition: Condition = field(default_factory=Condition)

    @property
    def address(self) -> str:
        """The host:port that clients connect to."""
        return f"[{self.host}]:{self.tcp_port}" if ":" in self.host else f"{self.host}:{self.tcp_port}"

    @property
    def url(self) -> str:
        """The base URL of its HTTP API; HTTPS, if it serves that."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.https_port}" if self.https_port else f"http://{host}:{self.http_port}"

    @property
    def usable(self) -> bool:
        """Whether publishers may be sent to it."""
        return self.status == "alive" and not self.draining

    def can_have(self, contract: Contract) -> bool:
        """Whether it can keep a contract's durability."""
        return self.condition.stores or contract.durability != "disk"
