"""A broker under a controller: shares and their lease, closed topics, publishers that migrate.

In: exchanges of the controller, in any order, late or twice. Out: answers. Time is an argument: `now_ns` from the clock
that stamps messages, `mono_ns` from the monotonic clock that leases use. docs/adr/0012-control-exchange.md has the
rules:

- exchanges are numbered, and one that arrives after a newer one changes nothing;
- a grant takes effect once, for the contract that it was made for, or is refused with a reason;
- a topic that is deleted and created again has another contract: nothing of the earlier one remains;
- when the lease ends, every share is cut to its safe part until it is granted again;
- a topic under contract without a share here is closed: its messages wait.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from srtm.broker.lending.lender import reported
from srtm.broker.lending.lenders import Lenders
from srtm.errors import ExchangeRefused
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter
from srtm.model.transfer import safe_share
from srtm.protocol.engine import refusal
from srtm.protocol.exchange import (
    Answer,
    Contract,
    Exchange,
    Grant,
    Lends,
    Listed,
    RefusalCode,
    Second,
    Share,
    TopicReport,
)
from srtm.protocol.orders import Migrate, encode
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from srtm.broker.options import BrokerOptions
    from srtm.broker.statistics import SecondStatistics, TopicStatistics
    from srtm.broker.topic import Topic
    from srtm.broker.topics import Topics
    from srtm.broker.turn import Turn
    from srtm.protocol.identify import Declared

log = logging.getLogger(__name__)


class Ordered(Protocol):
    """A connection that takes orders."""

    def send(self, data: bytes, /) -> None:
        """Write bytes at the end of this turn."""


@dataclass(slots=True)
class _Holding:
    """A topic under contract, and this broker's part in it."""

    contract: Contract
    birth: int  # which contract of that name
    since_ns: int  # earlier seconds may hold messages from before this broker learned of the contract
    stamp: tuple[int, int] = (0, 0)  # epoch and sequence of the grant in force
    surrendered_ntok: int = 0
    safe: bool = False
    paused: bool = False  # by the controller


class Control:
    """The controller's instructions to this broker that are in force."""

    def __init__(
        self, options: BrokerOptions, topics: Topics, turn: Turn, groups: dict[str, str | None], started_ns: int
    ) -> None:
        self.groups = groups  # correlation groups of publishers
        self.busy = 0.0  # processor seconds per second, lately, of everything that this broker does
        self.lenders = Lenders(options.name, topics)
        self._options = options
        self._topics = topics
        self._turn = turn
        self._started_ns = started_ns
        self._epoch = self._version = 0
        self._number = 0  # of the newest exchange of this epoch
        self._holdings: dict[str, _Holding] = {}
        self._informed = False  # which topics are under contract is known
        self._lease_ends: int | None = None
        self._safe_percent = 50
        self._publishers: defaultdict[str, dict[str, list[Ordered]]] = defaultdict(dict)

    def closes(self, topic: str) -> bool:
        """Whether a new topic must wait for a share."""
        return self._options.controller is not None and (topic in self._holdings or not self._informed)

    def holds(self, topic: str) -> bool:
        """Whether a topic is under contract."""
        return topic in self._holdings

    def made(self, topic: Topic) -> None:
        """A topic was created, perhaps after one of its name was deleted; put it on disk if its contract says so."""
        holding = self._holdings.get(topic.name)
        if holding is not None:
            holding.paused = False
            if holding.contract.durability == "disk":
                self._make_durable(topic)

    def birth(self, topic: str) -> int | None:
        """Return the birth of a topic's contract; None if it has none."""
        holding = self._holdings.get(topic)
        return holding.birth if holding else None

    def refusal(self, topic: str) -> str | None:
        """Return why this broker cannot store a topic as its contract promises; None if it can."""
        holding = self._holdings.get(topic)
        if holding is None or holding.contract.durability != "disk" or self._topics.disk is not None:
            return None
        return f"topic {topic!r} must be on disk, but this broker has no --data-path: set one, or publish elsewhere"

    def exchange(self, said: Exchange, now_ns: int, mono_ns: int) -> Answer:
        """Carry out an exchange, and return this broker's state."""
        if self._options.controller is None:
            raise ExchangeRefused(
                RefusalCode.NOT_MANAGED, "this broker has no controller; start it with --controller to give it one"
            )
        if said.epoch < self._epoch:
            raise ExchangeRefused(
                RefusalCode.OLD_EPOCH,
                f"the controller of epoch {self._epoch} has taken over; this exchange is of epoch {said.epoch}",
            )
        if said.epoch > self._epoch:
            self._epoch, self._version, self._number = said.epoch, 0, 0
        mine = said.incarnation == self._started_ns
        if mine and said.echo is not None:
            self._safe_percent = said.safe_percent
            ends = said.echo + said.lease_ns
            self._lease_ends = max(ends, self._lease_ends or ends)
        self.check_lease(now_ns, mono_ns)  # before anything is granted: tokens of a share that was cut are gone
        refused: dict[str, str] = {}
        if said.number > self._number:  # an overtaken exchange is void: a later one repeats what still holds
            self._number = said.number
            if said.contracts is not None and said.version > self._version:
                self._learn(said.contracts, now_ns)
                self._version = said.version
            lapsed = self._lapsed(mono_ns)
            for name, grant in said.grants.items() if mine else ():
                if problem := self._grant(name, (said.epoch, grant.sequence), grant, now_ns, lapsed=lapsed):
                    refused[name] = problem
            self._pause(set(said.paused), now_ns)
            for move in said.moves:
                holding = self._holdings.get(move.topic)
                if holding is not None and holding.birth == move.birth:
                    self.migrate(move.topic, move.publishers, move.to)
            self.lenders.agree(
                {name: each for name, each in said.lends.items() if mine and self._lends(name, each)}, now_ns
            )
        self._turn.wake()
        return self._answer(said, refused, now_ns, mono_ns)

    def _lends(self, name: str, terms: Lends) -> bool:
        """Whether a topic's tokens may be lent: of this contract, and with a share that is as granted."""
        holding = self._holdings.get(name)
        return holding is not None and holding.birth == terms.birth and not holding.safe and name in self._topics

    def hear_peers(self, now_ns: int, mono_ns: int) -> None:
        """Carry out what other brokers have asked and answered; nothing, if the lease ended before it was read."""
        self.check_lease(now_ns, mono_ns)
        self.lenders.hear(now_ns)

    def check_lease(self, now_ns: int, mono_ns: int) -> None:
        """Cut every share to its safe part if the lease has ended."""
        if self._lease_ends is None or not self._lapsed(mono_ns):
            return
        ended_ns = now_ns - (mono_ns - self._lease_ends)  # perhaps a while ago, if this process was suspended
        for name, holding in self._holdings.items():
            if not holding.safe:
                holding.safe = True
                topic = self._topics.get(name)
                if topic is not None and topic.limiter is not None:
                    self._topics.touch(name)
                    self._put_in_force(topic, safe_share(topic.limiter.bucket, self._safe_percent), ended_ns)
                    self._turn.wake()

    def migrate(self, topic: str, publishers: Iterable[str], to: tuple[str, ...]) -> list[str]:
        """Tell publishers of a topic to continue elsewhere; return those that are not connected here."""
        here, missing = self._publishers.get(topic, {}), []
        order = encode(Migrate(topic, to))
        for publisher in publishers:
            for connection in here.get(publisher, ()):
                connection.send(order)
            if publisher not in here:
                missing.append(publisher)
        self._turn.wake()
        return missing

    def came(self, declared: Declared, connection: Ordered) -> None:
        """A publisher declared itself in IDENTIFY."""
        self.groups[declared.publisher] = declared.group
        if declared.topic:
            self._publishers[declared.topic].setdefault(declared.publisher, []).append(connection)

    def went(self, declared: Declared, connection: Ordered) -> None:
        """A publisher's connection is closed."""
        if declared.topic:
            here = self._publishers[declared.topic]
            left = [other for other in here.get(declared.publisher, ()) if other is not connection]
            if left:
                here[declared.publisher] = left
            else:
                here.pop(declared.publisher, None)

    def _learn(self, listed: dict[str, Listed], now_ns: int) -> None:
        """Take over the controller's list of contracts."""
        contracts = {name: each for name, each in listed.items() if self._possible(name)}
        ended = self._holdings.keys() - contracts.keys()
        for name in ended:
            del self._holdings[name]
        self.lenders.forget(ended)
        for name, each in contracts.items():
            contract, known = each.contract, self._holdings.get(name)
            if known and known.birth == each.birth:
                known.contract = contract
                if name in self._topics:
                    self._topics[name].recent.slo_ns = contract.slo_ns
            else:
                paused = known is not None and known.paused  # the controller repeats it with every exchange
                self._holdings[name] = _Holding(contract, each.birth, now_ns, paused=paused)
                self.lenders.forget([name])
                if name in self._topics:
                    topic = self._topics.touch(name)
                    self._holdings[name].since_ns += NS_PER_S if topic.recent.messages else 0
                    self._put_in_force(topic, None, now_ns)
            if problem := self.refusal(name):
                log.warning("TOPIC(%s): %s", name, problem)
            elif contract.durability == "disk":
                self._make_durable(self._topics.touch(name))
        self._informed = True
        self._topics.permissions.learn({name: each.contract for name, each in contracts.items()})
        for topic in list(self._topics.values()):
            if topic.name in ended or (topic.name not in contracts and topic.gate.closed):
                topic.gate.limit(None, now_ns)
                topic.gate.closed = False
            if topic.name in ended or topic.waiting:
                self._topics.touch(topic.name)

    def _possible(self, name: str) -> bool:
        """Whether this broker's engine can have a topic; a controller that knows the engine creates no other."""
        engine = self._topics.engine
        problem = refusal(engine.kind, name) if engine else None
        if problem:
            log.warning("TOPIC(%s): %s", name, problem)
        return problem is None

    def _make_durable(self, topic: Topic) -> None:
        """Put an empty topic on disk; messages in memory would be lost on the way."""
        if topic.durable is None and self._topics.disk is not None and not topic.messages:
            self._topics.disk.adopt(topic)

    def _lapsed(self, mono_ns: int) -> bool:
        return self._lease_ends is not None and mono_ns >= self._lease_ends

    def _grant(self, name: str, stamp: tuple[int, int], grant: Grant, now_ns: int, *, lapsed: bool) -> str | None:
        """Put a grant in force, or its safe part if its lease has ended already; return why not, if impossible."""
        holding = self._holdings.get(name)
        if holding is None or holding.birth != grant.birth:
            return (
                "this broker does not know the contract"
                if holding is None
                else "this broker knows a different contract"
            )
        if problem := self.refusal(name):
            return problem
        if stamp > holding.stamp:
            holding.stamp, holding.safe = stamp, lapsed
            bucket = grant.share.bucket if grant.share else None
            if bucket is not None and lapsed:
                bucket = safe_share(bucket, self._safe_percent)
            surrendered = self._put_in_force(self._topics.touch(name), bucket, now_ns, grant.gift_ntok)
            holding.surrendered_ntok = 0 if lapsed else surrendered  # tokens that a lapse costs are lost
        return None

    def _pause(self, wanted: set[str], now_ns: int) -> None:
        """Pause the topics that the controller wants paused, and resume the others that it paused before."""
        for name, holding in self._holdings.items():
            if name in self._topics and holding.paused != (name in wanted):
                holding.paused = name in wanted
                self._topics.touch(name).pause(now_ns, on=holding.paused)

    def _put_in_force(self, topic: Topic, share: TokenBucket | None, now_ns: int, gift_ntok: int = 0) -> int:
        """Give a topic its share, or close it; return the nano-tokens that it gave up."""
        contract = self._holdings[topic.name].contract
        topic.gate.drops, topic.recent.slo_ns = contract.overflow == "drop" and topic.durable is None, contract.slo_ns
        topic.gate.closed = share is None
        if topic.limiter is None and share is not None:
            topic.gate.open(Limiter(share, now_ns, gift_ntok), now_ns)
            return max(0, gift_ntok - share.b_ntok)
        return topic.gate.limit(share, now_ns, gift_ntok)

    def _answer(self, said: Exchange, refused: dict[str, str], now_ns: int, mono_ns: int) -> Answer:
        topics = self._topics
        engine = topics.engine.statistics() if topics.engine else None
        rates = {name: topic.rate_mps for name, topic in topics.items()}
        return Answer(
            self._options.name,
            self._started_ns,
            said.number,
            self._number,
            mono_ns,
            self._version,
            {
                name: self._report(topics[name].statistics(now_ns), holding, said)
                for name, holding in self._holdings.items()
                if name in topics
            },
            rate_mps=sum(rates.values()),
            lag_ns=self._turn.lag_ns,
            free_mps=sum(rate for name, rate in rates.items() if name not in self._holdings),
            contracts={name: Listed(each.birth, each.contract) for name, each in self._holdings.items()}
            if said.recall
            else None,
            refused=refused,
            engine=engine.kind if engine else "local",
            engine_problem=engine.trouble if engine else None,
            engine_address=engine.delivery if engine else None,
            stores=topics.disk is not None,
            busy=self.busy,
        )

    def _report(self, topic: TopicStatistics, holding: _Holding, said: Exchange) -> TopicReport:
        here, books = self._publishers.get(topic.name, {}), self.lenders.books(topic.name, holding.birth)
        listed = said.recall or topic.name in said.roll
        return TopicReport(
            holding.birth,
            *holding.stamp,
            Share.of(topic.limit),
            holding.safe,
            holding.surrendered_ntok,
            topic.waiting,
            len(here),
            topic.log is not None,
            topic.rate_mps,
            topic.arrived,
            [_second(each) for each in topic.seconds if each.number > said.heard and each.at_ns >= holding.since_ns],
            [(name, self.groups.get(name)) for name in here] if listed else None,
            reported(books) if books else None,
        )


def _second(second: SecondStatistics) -> Second:
    # Without a subscriber, the access delay is the only known part of the latency.
    latencies = second.total_sketch if second.total_sketch.counts else second.access_sketch
    return Second(
        second.number,
        second.messages,
        second.max_backlog_ntok,
        second.largest_batch,
        latencies.total,
        second.over,
        second.access_sketch.flat,
        latencies.flat,
        second.processing_sketch.flat,
        second.backlog_sketch.flat,
    )
