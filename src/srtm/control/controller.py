"""The controller: which topics are under contract, who publishes where, and which broker holds how much of a bucket.

A state machine without IO, time as an argument (`now_ns`, by a monotonic clock). In: brokers that come and go, their
answers, wishes of people and clients, and the passing of time. Out: exchanges to be sent (`compose`), jobs to be run
beside (`jobs`), and what has to be kept (`store`). Always holds, whatever comes and whatever is lost:

- for each topic, what brokers may have in force adds up to no more than the contract (`model.transfer`, and
  docs/adr/0012-control-exchange.md for leases);
- what nobody holds is given to a broker that can use it (docs/adr/0016-identity-and-liveness.md);
- a grant is in the store before it is sent, so that a controller that comes back knows what may be out;
- what belongs to a contract that is over, or to a broker that has started anew since, changes nothing;
- nonsense from a broker changes nothing for others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from srtm.control.members import MOST_MESSAGES, Declared, Member, believable
from srtm.control.placing.attendance import AWAY_S
from srtm.control.placing.housing import housed, on_fewest, room
from srtm.control.placing.load_distributor import Fit
from srtm.control.placing.moves import Moves
from srtm.control.placing.shedding import overloaded, shed
from srtm.control.topic import Topic
from srtm.errors import InputError, SRTMError
from srtm.model.placement import policy_named
from srtm.model.shares import patience_s, short
from srtm.model.transfer import Remains, Transfer
from srtm.protocol.engine import refusal
from srtm.protocol.exchange import Answer, Exchange, Grant, Listed, Share
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set

    from srtm.control.options import ControllerOptions
    from srtm.control.store import Store
    from srtm.model.placement import Broker
    from srtm.protocol.exchange import Contract, TopicReport

log = logging.getLogger(__name__)

_CLOCKS = 1.02  # how much faster than ours a broker's clock may run
_SLACK_NS = 300_000_000  # a busy broker notices the end of its lease a little late
_SILENT_S = 3.0  # of exchanges, until a broker counts as silent
_HURRY_S = 0.1  # between exchanges while something is under way
_AT_ONCE_S = 0.02  # between exchanges if there is something new to say
_DEAD = 5  # times as long between exchanges with a broker that counts as dead, and may not be
_OPENING_NS = 2 * NS_PER_S  # how long shares of a new contract follow its publishers to their places
_YOUNG_NS = 5 * NS_PER_S  # how long publishers of a new contract are sent to their places as soon as they are seen
_STRANGERS = 3  # answers in a row of another program, until the broker that was there counts as dead
_FLOWING, _STEADY_S = 0.7, 3  # of the declared rate, for so many seconds, until a topic is fitted for the first time
_RECALL_NS = 10 * NS_PER_S  # brokers look for a controller every 4 s or more often
_SET_BACK_NS = 10 * NS_PER_S  # without a new second of a broker that answers
_GROWTH = 1.1  # of what was fitted, until the difference is fitted


@dataclass(slots=True)
class _Former:
    """A contract that is over: what brokers may not know yet, and who published."""

    version: int  # of the first list without it
    remains: Remains
    publishers: dict[str, Declared]
    place: dict[str, str]
    until_ns: int


class Controller:
    """All that is known, and what is to be done about it."""

    def __init__(self, options: ControllerOptions, store: Store, now_ns: int, first_epoch: int = 1) -> None:
        self.options = options
        self.store = store
        self.service, self.mcap_mps = options.calibrated()
        self.epoch = store.next_epoch(first_epoch)
        self.members: dict[str, Member] = {}
        self.topics: dict[str, Topic] = {}
        self.on_change: Callable[[str], None] = lambda _: None  # the topic of that name changed
        self._version = 1
        self._number = 0  # of the last exchange; one count for all, so that no broker that comes back is behind it
        self._sequences = count(1)  # of grants, of all topics: a topic that is made again goes on counting
        self._former: dict[str, _Former] = {}
        self._turns = 0  # counts changes of brokers' status
        self._hurried: set[str] = set()  # brokers that something is under way with
        self._lease_ns = round(options.lease_s * NS_PER_S)
        self._safe_percent = round(100 * options.safe_share)
        self._moves = Moves(self.members)
        self._due: set[str] = set()
        self._recalling_until_ns = 0
        self._load(now_ns)

    # Brokers come and go.

    def joined(self, name: str, host: str, tcp_port: int, http_port: int, now_ns: int) -> None:
        """A broker has registered; it is part of the cluster once it has answered."""
        member = self.members.get(name)
        if member is None:
            member = self.members[name] = Member(name, host, tcp_port, http_port, self.mcap_mps, since_ns=now_ns)
        elif member.status == "dead":
            member.version = 0
            self._turn(member, "joining", now_ns)
        member.host, member.tcp_port, member.http_port, member.strangers = host, tcp_port, http_port, 0
        self.store.save_member(member)
        self._due.add(name)

    def died(self, name: str, now_ns: int, reason: str) -> None:
        """A broker is dead for certain: what it held is free, and its publishers go elsewhere.

        That is kept over a restart of the controller, and ends with a sign of life: it registers, or answers.
        """
        member = self.members.get(name)
        if member is None or member.status == "dead":
            return
        self._turn(member, "dead", now_ns)
        member.stamp, member.lease_ends_ns, member.void = None, None, self._number
        member.rate_mps = member.free_mps = member.lag_ns = 0
        self.store.save_member(member)
        self._moves.take(name)
        for topic in self.topics.values():
            if topic.seen.pop(name, None) is not None or name in topic.place.values():
                topic.note(now_ns, "broker", f"{name} is dead: {reason}")
            self._lost(topic, name)
            self._leave(topic, name, now_ns)
        self._forget_remains(name)
        self._plan(now_ns)

    def forget(self, name: str, now_ns: int) -> None:
        """An operator says that a broker will not come back."""
        self.died(name, now_ns, "removed by an operator")
        self.members.pop(name, None)
        for topic in self.topics.values():
            topic.seen.pop(name, None)
        self.store.delete_member(name)

    def drain(self, name: str, now_ns: int, *, on: bool = True) -> None:
        """Send all publishers of a broker elsewhere, and send it no more; or end that."""
        member = self._member(name)
        member.draining = on
        self.store.save_member(member)
        if on:
            for topic in self.topics.values():
                self._leave(topic, name, now_ns)

    def foreign(self, name: str, now_ns: int) -> None:
        """Another program answers: a stock nsqd, a broker without a controller, or one that took over the port.

        A broker that has taken orders from us before listens there no more, which only its end explains.
        """
        member = self.members.get(name)
        if member is not None and member.incarnation:
            member.oddities += 1
            member.strangers += 1
            if member.strangers >= _STRANGERS:
                self.died(name, now_ns, f"another program answers at {member.url}")
            return
        self.members.pop(name, None)
        self.store.delete_member(name)

    def recall(self, now_ns: int) -> None:
        """The store is lost: ask brokers which contracts they know, and believe them.

        Nothing is granted for a lease, so that brokers which are not heard have cut their shares by then, nor until
        all had the time to find us.
        """
        self._recalling_until_ns = now_ns + max(self._lease_ns, _RECALL_NS)

    # Topics and publishers.

    def create(self, name: str, contract: Contract, now_ns: int) -> Topic:
        """Put a topic under contract, or change nothing if it is under the same."""
        for engine in {member.engine for member in self.members.values() if member.status != "dead"}:
            if problem := refusal(engine, name):
                raise InputError(problem, topic=name)
        unable = sorted(each.name for each in self.members.values() if each.usable and not each.can_have(contract))
        if unable:
            raise InputError(
                f"topic {name!r} cannot be on disk: {', '.join(unable)} {'has' if len(unable) == 1 else 'have'} no"
                " --data-path; start brokers with one (srtm up --data-path DIR), or create it with durability memory",
                topic=name,
            )
        former = self._former.get(name) if name not in self.topics else None
        topic = self._create(name, contract, now_ns)
        if former is not None and former.publishers:
            self._inherit(topic, former.publishers, now_ns)
        return topic

    def _inherit(self, topic: Topic, publishers: Mapping[str, Declared], now_ns: int) -> None:
        """Place publishers that are connected since the contract before; who does not show up is forgotten in time."""
        topic.attendance.expect(publishers)
        self.register(topic.name, publishers.values(), now_ns)
        self._gather(topic, now_ns)

    def _create(self, name: str, contract: Contract, now_ns: int, birth: int | None = None) -> Topic:
        policy_named(contract.policy)
        known = self.topics.get(name)
        if known is not None:
            if known.contract != contract:
                raise InputError(f"topic {name!r} is under another contract already: change that", topic=name)
            return known
        whole = contract.bucket
        self._version += 1
        if birth is None:  # larger than those of any store that was lost, as epochs are
            birth = self.store.next_birth(self.epoch << 20)
        former = self._former.pop(name, None)
        transfer = Transfer.begun(whole, self._sequences, self._unaware(former) if former else Remains())
        topic = Topic(name, contract, birth, transfer, self._version, since_ns=now_ns)
        topic.settling_until_ns = now_ns + _OPENING_NS
        if former:
            for broker in self.members.keys() & former.place.values():  # where they are, until rolls say so
                topic.seen[broker].roll = frozenset(each for each, at in former.place.items() if at == broker)
        self.topics[name] = topic
        topic.note(now_ns, "created", f"under {whole}, policy {contract.policy}")
        self.store.save_topic(topic)
        self._hurry_all()
        return topic

    def _unaware(self, former: _Former) -> Remains:
        """What brokers may have in force of a contract that is over, as far as they do not know that."""
        members = self.members.values()
        return former.remains.only(
            {each.name for each in members if each.status != "dead" and each.version < former.version}
        )

    def _forget_remains(self, broker: str) -> None:
        """A broker is dead or has started anew, and holds nothing of what is over."""
        for former in self._former.values():
            former.remains = former.remains.only(set(former.remains.shares) - {broker})

    def _forget_former(self, now_ns: int) -> None:
        """Contracts that are over everywhere, and for a while."""
        for name, former in list(self._former.items()):
            if now_ns > former.until_ns and not self._unaware(former).shares:
                del self._former[name]
                self.store.delete_remains(name)

    def change(self, name: str, contract: Contract, now_ns: int) -> Topic:
        """Put a topic under another contract while it goes on, and fit it anew once its publishers are there.

        A larger bucket is shared out at once. Of a smaller one nothing is given until brokers have acknowledged the
        cuts that it takes; one that cannot be heard keeps what it has until its lease ends, and then its safe share.
        """
        topic, before = self._topic(name), self._topic(name).contract
        policy_named(contract.policy)
        for what in ("durability", "overflow"):
            if getattr(contract, what) != getattr(before, what):
                raise InputError(f"the {what} of topic {name!r} cannot be changed: remove it first", topic=name)
        if contract == before:
            return topic
        topic.contract = contract
        topic.transfer.resize(contract.bucket)
        self._version += 1
        topic.fitted, topic.flowing_s, topic.one_bucket = None, 0, None
        slo = f"p{100 * float(contract.quantile):g} within {contract.slo_ns / NS_PER_MS:g} ms"
        topic.note(now_ns, "changed", f"to {contract.bucket}, {slo}, policy {contract.policy}")
        if topic.fit is not None:
            topic.note(now_ns, "fit", "begun anew, because the contract was changed")
            self._again(topic, now_ns)
        self.store.save_topic(topic)
        self._hurry_all()
        self._changed(topic)
        return topic

    def remove(self, name: str, now_ns: int) -> None:
        """End a contract; the topic is free where brokers have it."""
        topic = self.topics.pop(self._topic(name).name)
        self._version += 1
        remains, until_ns = topic.transfer.remains, now_ns + self._lease_ns
        here = topic.attendance.present
        publishers = {each: declared for each, declared in topic.publishers.items() if each in here}
        self._former[name] = _Former(self._version, remains, publishers, topic.place, until_ns)
        self.store.delete_topic(name, remains)
        self._hurry_all()
        self.on_change(name)

    def register(
        self, name: str, publishers: Iterable[Declared], now_ns: int, lost: Iterable[str] = ()
    ) -> dict[str, str]:
        """Where these publishers of a topic are to publish; who is known stays where it is, if that is reachable."""
        topic, unreachable = self._topic(name), set(lost)
        homeless, listed = [], list(publishers)
        for publisher in listed:
            known = topic.publishers.get(publisher.id)
            topic.undeclared.discard(publisher.id)
            if known != publisher:
                topic.publishers[publisher.id] = publisher
                topic.roster += 1
            broker = topic.place.get(publisher.id)
            member = self.members.get(broker) if broker else None
            if member is None or not member.usable or broker in unreachable:
                topic.place.pop(publisher.id, None)
                homeless.append(publisher)
                topic.left.update([broker] if broker else [])
        self._house(topic, homeless, unreachable)
        self.store.save_publishers(topic, [publisher.id for publisher in listed])
        if homeless:
            shared = topic.transfer.wanted.keys() >= set(topic.place.values())
            if not (shared and topic.established):
                topic.unshared = True
                self._plan(now_ns)
            self._changed(topic)
            self._grown(topic, now_ns)
        return {publisher.id: topic.place[publisher.id] for publisher in listed if publisher.id in topic.place}

    def gather(self, name: str, now_ns: int) -> None:
        """Send publishers that are connected elsewhere to their places, now."""
        self._gather(self._topic(name), now_ns)

    def unregister(self, name: str, publisher: str) -> None:
        """A publisher will not come back."""
        topic = self._topic(name)
        if topic.publishers.pop(publisher, None) is None:
            raise InputError(f"topic {name!r} has no publisher {publisher!r}", publisher=publisher)
        topic.roster += 1
        topic.place.pop(publisher, None)
        topic.unshared = topic.unshared or not topic.established
        topic.undeclared.discard(publisher)
        topic.attendance.forget(publisher)
        self.store.delete_publisher(topic, publisher)

    def _forget_missing(self, topic: Topic, now_ns: int) -> None:
        """Publishers that went, and did not come back, take no room from others; whoever comes registers anyway."""
        gone = topic.attendance.overdue(now_ns)
        for publisher in gone:
            self.unregister(topic.name, publisher)
        if gone:
            topic.note(now_ns, "forgotten", f"{len(gone)} publishers that were away for {AWAY_S} s")

    def least_loaded(self) -> Member | None:
        """A broker for a topic that is under no contract."""
        usable = [member for member in self.members.values() if member.usable]
        return min(usable, key=lambda member: (member.rate_mps / member.mcap_mps, member.name), default=None)

    def move(self, name: str, publishers: Iterable[str], broker: str, now_ns: int) -> None:
        """Send publishers to a broker, because an operator wants it."""
        topic, member = self._topic(name), self._member(broker)
        if not member.usable:
            raise InputError(f"broker {broker!r} is {member.status}: publishers cannot be sent to it", broker=broker)
        wanted = list(publishers)
        unknown = [publisher for publisher in wanted if publisher not in topic.publishers]
        if unknown:
            raise InputError(f"topic {name!r} has no publisher {unknown[0]!r}", publisher=unknown[0])
        self._resettle(topic, dict.fromkeys(wanted, broker), now_ns, "moved", f"{len(wanted)} publishers to {broker}")

    def pause(self, name: str, now_ns: int, *, on: bool = True) -> None:
        """Let brokers take a topic's messages, and give none to its channels; or end that."""
        topic = self._topic(name)
        if topic.paused != on:
            topic.paused = on
            self.store.save_topic(topic)
            topic.note(now_ns, "paused" if on else "resumed", "by an operator")
            self._changed(topic)
            self._hurry_all()

    def fit(self, name: str, now_ns: int, *, only: Sequence[Declared] | None = None) -> None:
        """Begin a fitting of a topic's publishers, or of some of them; one that is under way is given up."""
        topic = self._topic(name)
        chosen = list(topic.publishers.values()) if only is None else list(only)
        if not chosen:
            raise InputError(f"topic {name!r} has no publishers to be placed: register them first", topic=name)
        brokers = self.brokers_for(topic, {publisher.id for publisher in chosen})
        if not brokers:
            raise InputError("no broker is there to be placed on: start one with --controller", topic=name)
        predicts = topic.contract.fit == "model" and only is None
        topic.fit = Fit(
            topic,
            chosen,
            brokers,
            self.service,
            now_ns,
            predicts=predicts,
            confirms=predicts and on_fewest(topic, brokers, self.options.seed),
            seed=self.options.seed,
        )
        topic.note(now_ns, "fit", f"begun: {len(chosen)} publishers, {len(brokers)} brokers to choose from")
        self._changed(topic)

    def brokers_for(self, topic: Topic, movable: Set[str]) -> list[Broker]:
        """Usable brokers, with what they carry besides these publishers of the topic."""
        return room(topic, movable, self.topics.values(), self.members.values())

    # Exchanges.

    def due(self, name: str, last_sent_ns: int, now_ns: int) -> bool:
        """Whether it is time for the next exchange with a broker."""
        member = self.members.get(name)
        if member is None:
            return False
        waited_s = (now_ns - last_sent_ns) / NS_PER_S
        gap_s = self.options.exchange_s
        if member.status == "dead":
            gap_s *= _DEAD
        elif name in self._due:
            gap_s = min(gap_s, _AT_ONCE_S)
        elif name in self._hurried:
            gap_s = min(gap_s, _HURRY_S)
        return waited_s >= gap_s

    @property
    def urgent(self) -> bool:
        """Whether a broker is to hear something new."""
        return bool(self._due)

    def compose(self, name: str) -> Exchange:
        """The next exchange for a broker. What it grants is in the store."""
        member = self.members[name]
        grants = {
            topic.name: Grant(topic.birth, grant.sequence, Share.of(grant.share), grant.gift_ntok)
            for topic in self.topics.values()
            for grant in topic.transfer.unanswered
            if grant.broker == name
        }
        self._number += 1
        if member.stamp is not None:
            ends_ns = member.stamp_heard_ns + round(self._lease_ns * _CLOCKS) + _SLACK_NS
            member.lease_ends_ns = max(ends_ns, member.lease_ends_ns or ends_ns)
        self._due.discard(name)
        recalls = self._recalling_until_ns > 0
        tells = member.version < self._version and not recalls  # a list that is not whole yet would end contracts
        heard = [topic.seen[name].last_number for topic in self.topics.values() if name in topic.seen]
        return Exchange(
            self.epoch,
            self._number,
            member.incarnation,
            member.stamp,
            self._lease_ns,
            self._safe_percent,
            self._version,
            {topic.name: Listed(topic.birth, topic.contract) for topic in self.topics.values()} if tells else None,
            grants,
            self._moves.take(name),
            min(heard, default=0),
            [topic.name for topic in self.topics.values() if topic.calls_roll(name)],
            recalls,
            [topic.name for topic in self.topics.values() if topic.paused],
        )

    def heard(self, name: str, said: Exchange, answer: Answer, now_ns: int) -> None:
        """A broker has answered an exchange."""
        member = self.members.get(name)
        if member is None:
            return
        if answer.broker != name:
            self.foreign(name, now_ns)
            return
        if not self._plausible(member, said, answer):
            return
        if answer.incarnation != member.incarnation:
            self._restarted(member, answer.incarnation, now_ns)
        member.strangers = 0
        member.stamp, member.stamp_heard_ns = answer.stamp, now_ns
        member.version, member.rate_mps = answer.version, answer.rate_mps
        member.free_mps, member.lag_ns = answer.free_mps, answer.lag_ns
        member.engine, member.engine_problem, member.stores = answer.engine, answer.engine_problem, answer.stores
        member.engine_address = answer.engine_address
        if member.status != "alive":
            self._turn(member, "alive", now_ns)
            self.store.save_member(member)
        if self._recalling_until_ns and answer.contracts:
            self._recall(name, answer, now_ns)
        for topic in self.topics.values():
            report = answer.topics.get(topic.name)
            if report is not None and report.birth == topic.birth:
                self._take(topic, member, report, answer.acted, now_ns)
            elif member.version >= topic.version:  # it knows of the contract, and has nothing of it
                topic.transfer.learned(name)
                if name in topic.transfer.possible:
                    topic.transfer.found(name, None, safe=False, answered=answer.acted)
        if answer.acted == said.number:
            self._retire(name, said, answer, now_ns)
        self._plan(now_ns)

    def _retire(self, name: str, said: Exchange, answer: Answer, now_ns: int) -> None:
        """Every grant is answered: one that is neither in force nor refused is void, and nobody waits for it."""
        for topic_name in said.grants:
            topic = self.topics.get(topic_name)
            sent = said.grants[topic_name]
            if topic is None or topic.birth != sent.birth:
                continue
            if any((each.broker, each.sequence) == (name, sent.sequence) for each in topic.transfer.unanswered):
                topic.transfer.retire(name, self._number)
                why = answer.refused.get(topic_name)
                if why is not None and topic.refused.get(name) != why:
                    topic.refused[name] = why
                    topic.unshared = True
                    topic.note(now_ns, "shares", f"{name} refuses its share: {why}")
                    self._leave(topic, name, now_ns)
                elif why is None:
                    topic.note(now_ns, "shares", f"{name} left a grant unanswered; it gets another")

    def failed(self, name: str, now_ns: int, *, refused: bool = False) -> None:
        """An exchange got no answer; where its host refused the connection, the broker is dead."""
        if refused:
            self.died(name, now_ns, "its host refuses the connection")

    def tick(self, now_ns: int) -> None:
        """Time has passed: leases end, shares follow the traffic, fittings go on. Call it every 0.1 s or so."""
        for member in self.members.values():
            silent_s = (now_ns - max(member.stamp_heard_ns, member.since_ns)) / NS_PER_S
            if member.status == "alive" and silent_s > _SILENT_S * self.options.exchange_s:
                self._turn(member, "silent", now_ns)
            if member.status == "silent" and member.lease_ends_ns is not None and now_ns > member.lease_ends_ns:
                self._turn(member, "lapsed", now_ns)
                for topic in self.topics.values():
                    topic.transfer.lapsed(member.name, self._safe_percent, self._number)
        for topic in self.topics.values():
            while topic.left:
                broker, number = topic.left.popitem()
                topic.note(now_ns, "moved", f"{number} publishers away from {broker}")
        self._plan(now_ns)

    def adapt(self, now_ns: int) -> None:
        """The TB Adaptor's period is over."""
        alive = set(self._alive())
        for topic in self.topics.values():
            self._forget_missing(topic, now_ns)
            if topic.opened and topic.fit is None and not topic.moving:
                if now_ns >= topic.settling_until_ns:
                    self._follow(topic, alive, now_ns)
                self._begin_to_fit(topic, now_ns)
                if topic.contract.adapt:
                    self._relieve(topic, now_ns)
            self._watch(topic, now_ns)
        self._forget_former(now_ns)
        self._plan(now_ns)

    def _follow(self, topic: Topic, alive: Set[str], now_ns: int) -> None:
        if topic.contract.adapt:
            topic.adapt(alive, now_ns)
        else:
            topic.unshared = topic.unshared or topic.astray(alive)

    def _watch(self, topic: Topic, now_ns: int) -> None:
        """Evaluate the topic's liveness, and say so if it is short for longer than any fault explains."""
        missing = self.missing(topic)
        patience_ns = patience_s(self.options.lease_s, self.options.exchange_s) * NS_PER_S
        if missing is None:
            if topic.told_short:
                topic.note(now_ns, "shares", "all of (r, b) is in force again")
            topic.short_since_ns, topic.told_short = None, False
            return
        topic.short_since_ns = now_ns if topic.short_since_ns is None else topic.short_since_ns
        if now_ns - topic.short_since_ns > patience_ns and not topic.told_short:
            topic.told_short = True
            waits = ", ".join(self.waited_for(topic))
            why = f"; waiting for {waits}" if waits else ""
            topic.note(now_ns, "shares", f"{missing}, for more than {patience_ns / NS_PER_S:g} s{why}")

    def missing(self, topic: Topic) -> str | None:
        """What a topic is short of, as its brokers report it; None if nothing is missing, or no broker is there."""
        alive = set(self._alive())
        if not alive:
            return None
        waiting = {name: seen.waiting for name, seen in topic.seen.items() if name in alive}
        return short(topic.contract.bucket, topic.transfer.held, waiting)

    def jobs(self) -> list[Fit]:
        """Fittings that wait for their `job` to be run; call `done` after it."""
        return [topic.fit for topic in self.topics.values() if topic.fit and topic.fit.job]

    def done(self, fit: Fit, now_ns: int) -> None:
        """A fitting's job was run."""
        topic = next((topic for topic in self.topics.values() if topic.fit is fit), None)
        if topic is None:  # given up meanwhile
            return
        before = dict(topic.place)
        fit.resume(now_ns)
        self._due |= self._moves.send(topic, before, now_ns)
        if fit.given_up:
            topic.fit = None
            topic.note(now_ns, "fit", f"given up: {fit.given_up}")
        if fit.outcome:
            topic.fit, topic.fitted = None, fit.outcome
            topic.settled = frozenset(topic.publishers)
            topic.unshared = True
            verdict = "met" if fit.outcome.met else f"not met: {fit.outcome.reason}"
            topic.note(now_ns, "fit", f"k = {fit.outcome.k} after {len(fit.outcome.rounds)} rounds: SLO {verdict}")
            self.store.save_topic(topic)
        self.store.save_publishers(topic, topic.publishers)
        self._changed(topic)

    # How it is done.

    def _plan(self, now_ns: int) -> None:
        if now_ns < self._recalling_until_ns:
            return
        alive = self._alive()
        self._recalling_until_ns = 0
        self._hurried = set()
        for topic in self.topics.values():
            if not topic.opened:
                self._try_open(topic, now_ns)
            self._moves.settle(topic, now_ns, self.options.move_s)
            if topic.fit is not None:
                topic.fit.tick(now_ns, shares_done=topic.transfer.done)
                if not topic.fit.names <= set(alive):
                    topic.note(now_ns, "fit", "begun anew, because a broker was lost")
                    self._again(topic, now_ns)
            self._due |= self._moves.remind(topic, now_ns)
            self._share(topic, alive, now_ns)
            self._hurried |= self._under_way(topic, now_ns)

    def _share(self, topic: Topic, alive: list[str], now_ns: int) -> None:
        """Say what brokers should hold, and grant what can be granted now."""
        settling = bool(topic.moving) or now_ns < topic.settling_until_ns
        busy = topic.unshared or settling or topic.fit is not None
        if not busy and topic.planned == (topic.transfer.changes, self._turns):
            return
        if busy:
            topic.share_out(alive, flush=settling)
        elif alive and not topic.all_wanted(alive):  # nobody is to have a part of it: give it to whoever can use it
            if topic.contract.adapt:
                topic.adapt(set(alive), now_ns)
            if not topic.all_wanted(alive):
                topic.share_out(alive)
        grants = topic.transfer.orders()
        if grants:
            self.store.save_topic(topic)
            self._due |= {grant.broker for grant in grants}
        topic.planned = (topic.transfer.changes, self._turns)

    def _again(self, topic: Topic, now_ns: int) -> None:
        topic.fit = None
        try:
            self.fit(topic.name, now_ns)
        except SRTMError as problem:
            topic.note(now_ns, "fit", f"given up: {problem}")

    def _try_open(self, topic: Topic, now_ns: int) -> None:
        """A contract begins when nobody is left who might let its messages pass freely, or was heard for a lease."""
        there = [member for member in self.members.values() if member.status != "dead"]
        unaware = self.unaware_of(topic)
        overdue = now_ns - topic.since_ns > self._lease_ns * _CLOCKS + _SLACK_NS
        if not any(member.status == "alive" for member in there) or (unaware and not overdue):
            return
        topic.opened = True
        topic.transfer.forget_remains()
        number = len(there) - len(unaware)
        known = f"known to {number} broker{'s' * (number != 1)}"
        topic.note(now_ns, "opened", f"{known}, without {', '.join(unaware)}" if unaware else known)
        self.store.save_topic(topic)
        self._changed(topic)

    def unaware_of(self, topic: Topic) -> list[str]:
        """Brokers that have yet to learn of a contract."""
        return sorted(
            member.name
            for member in self.members.values()
            if member.status != "dead" and member.version < topic.version
        )

    def waited_for(self, topic: Topic) -> list[str]:
        """Brokers that hold up a topic: they have yet to learn of its contract, to answer, or to give up a share."""
        silent = topic.transfer.possible.keys() - set(self._alive())
        return sorted({*self.unaware_of(topic), *topic.transfer.awaited, *silent})

    def _gather(self, topic: Topic, now_ns: int) -> None:
        alive = set(self._alive())
        astray = {
            publisher: broker
            for broker, wrong in topic.misplaced().items()
            if broker in alive
            for publisher in wrong - topic.moving
        }
        if astray:
            self._due |= self._moves.send(topic, astray, now_ns)

    def _plausible(self, member: Member, said: Exchange, answer: Answer) -> bool:
        # Answers come in any order. The broker's own clock tells in which order it gave them.
        same = answer.incarnation == member.incarnation
        late = answer.number <= member.void or (same and member.stamp is not None and answer.stamp <= member.stamp)
        odd = answer.number != said.number or answer.version > self._version or answer.acted > self._number
        if odd:
            member.oddities += 1
            log.warning("BROKER(%s): its answer to exchange %s is for %s", member.name, said.number, answer.number)
        return not odd and not late

    def _restarted(self, member: Member, incarnation: int, now_ns: int) -> None:
        if member.incarnation:
            for topic in self.topics.values():
                if topic.seen.pop(member.name, None) is not None or member.name in topic.transfer.possible:
                    topic.note(now_ns, "broker", f"{member.name} has started anew")
                self._lost(topic, member.name)
            self._forget_remains(member.name)
        # Its clock may have been set back, so that starts cannot be put in order. But what was asked before it was
        # heard first, the one before it may have answered.
        member.void = self._number if member.incarnation else 0
        member.incarnation, member.lease_ends_ns = incarnation, None
        self.store.save_member(member)

    def _lost(self, topic: Topic, broker: str) -> None:
        """A broker holds nothing of a topic any more."""
        topic.transfer.gone(broker)
        topic.refused.pop(broker, None)
        topic.unshared = True

    def _take(self, topic: Topic, member: Member, report: TopicReport, acted: int, now_ns: int) -> None:
        """What a broker says of one topic, having acted on this exchange."""
        name = member.name
        transfer, seen = topic.transfer, topic.seen[name]
        transfer.learned(name)
        for grant in transfer.unanswered:
            if grant.broker == name and (report.epoch, report.sequence) == (self.epoch, grant.sequence):
                transfer.acknowledged(grant, report.surrendered_ntok)
        share = report.share.bucket if report.share else None
        if transfer.possibly(share):
            transfer.found(name, share, safe=report.safe, answered=acted)
        else:
            member.oddities += 1
        seen.waiting = min(report.waiting, MOST_MESSAGES)
        seen.count(report.arrived, report.rate_mps, now_ns)
        seen.publishers, seen.durable = report.publishers, report.durable
        seen.roll = frozenset(publisher for publisher, _ in report.roll) if report.roll is not None else None
        self._adopt(topic, name, report)
        if now_ns - topic.since_ns < _YOUNG_NS:
            self._gather(topic, now_ns)
        if seen.roll is not None and not topic.moving:
            placed = [publisher for publisher, place in topic.place.items() if place == name]
            topic.attendance.call(seen.roll, placed, now_ns)
        if now_ns - seen.heard_ns > _SET_BACK_NS:  # its clock may have been set: its seconds are counted anew
            seen.forget()
            seen.heard_ns = now_ns
        for second in report.seconds:
            if not believable(second, topic.contract.bucket):
                member.oddities += 1
            elif second.number > seen.last_number:
                seen.hear(second, now_ns)

    def _adopt(self, topic: Topic, broker: str, report: TopicReport) -> None:
        """Publishers that came before the contract are under it where they are: they do not know to register.

        So are those that had no place left to go to, and went on where they could.
        """
        unknown = {each: group for each, group in report.roll or () if each not in topic.place}
        known = topic.publishers
        strangers = [known.get(each) or Declared(each, group=group) for each, group in unknown.items()]
        if strangers:
            topic.undeclared |= unknown.keys() - known.keys()
            topic.unshared = topic.unshared or not topic.established
            topic.publishers |= {each.id: each for each in strangers}
            topic.place |= {each.id: broker for each in strangers}
            topic.roster += 1
            self.store.save_publishers(topic, [each.id for each in strangers])
            self._changed(topic)

    def _recall(self, name: str, answer: Answer, now_ns: int) -> None:
        """Rebuild what was lost from what a broker has in force."""
        for topic_name, listed in (answer.contracts or {}).items():
            known = self.topics.get(topic_name)
            if known is not None and listed.birth > known.birth:  # the one that we know is over, and this one is not
                self.remove(topic_name, now_ns)
                known = None
            if known is None:
                made = self._create(topic_name, listed.contract, now_ns, listed.birth)
                made.transfer.forget_pool()
                made.note(now_ns, "recovered", f"as {name} knew it")
            topic, report = self.topics[topic_name], answer.topics.get(topic_name)
            if report and report.birth != topic.birth:
                continue
            if report and report.share:
                topic.transfer.recalled(name, report.share.bucket)
            for publisher, group in (report.roll or ()) if report else ():
                topic.publishers.setdefault(publisher, Declared(publisher, group=group))
                topic.place[publisher] = name
            self.store.save_publishers(topic, topic.publishers)

    def _house(self, topic: Topic, homeless: Sequence[Declared], unreachable: set[str]) -> None:
        """Find a place for publishers that have none, if there is any."""
        movable = {publisher.id for publisher in homeless}
        unusable = unreachable | topic.refused.keys()
        brokers = [broker for broker in self.brokers_for(topic, movable) if broker.name not in unusable]
        if homeless and brokers:
            topic.place |= housed(topic, homeless, brokers, self.options.seed)

    def _leave(self, topic: Topic, broker: str, now_ns: int) -> None:
        """Find other places for all publishers of a broker."""
        leaving = [publisher for publisher, where in topic.place.items() if where == broker]
        if not leaving:
            return
        before = dict(topic.place)
        for publisher in leaving:
            del topic.place[publisher]
        self._house(topic, [topic.publishers[publisher] for publisher in leaving], {broker})
        topic.left[broker] += len(leaving)
        self._due |= self._moves.send(topic, before, now_ns)
        self.store.save_publishers(topic, leaving)
        topic.unshared = True
        self._changed(topic)

    def _resettle(self, topic: Topic, places: Mapping[str, str], now_ns: int, kind: str, text: str) -> None:
        before = dict(topic.place)
        topic.place.update(places)
        topic.note(now_ns, kind, text)
        self._due |= self._moves.send(topic, before, now_ns)
        self.store.save_publishers(topic, places)
        self._changed(topic)

    def _begin_to_fit(self, topic: Topic, now_ns: int) -> None:
        """A topic's first fitting begins when its publishers are there and send about what they said."""
        if topic.fitted is not None or topic.fit is not None or topic.contract.fit == "none" or not topic.publishers:
            return
        flowing = sum(seen.rate_mps for seen in topic.seen.values()) >= _FLOWING * topic.rate_mps
        topic.flowing_s = topic.flowing_s + 1 if flowing else 0
        if topic.flowing_s >= _STEADY_S and any(member.usable for member in self.members.values()):
            self.fit(topic.name, now_ns)

    def _grown(self, topic: Topic, now_ns: int) -> None:
        """Publishers that came since the last fitting are fitted on their own once they are many."""
        if topic.fitted is None or topic.fit is not None or topic.rate_mps <= _GROWTH * topic.fitted.rate_mps:
            return
        new = [publisher for name, publisher in topic.publishers.items() if name not in topic.settled]
        if new and any(member.usable for member in self.members.values()):
            self.fit(topic.name, now_ns, only=new)

    def _relieve(self, topic: Topic, now_ns: int) -> None:
        """Send publishers away from a broker that is too busy."""
        for broker in overloaded(topic, self.members):
            if now_ns >= topic.calm_after_ns:
                targets = self.brokers_for(topic, set())
                places = shed(topic, broker, targets, self.topics.values())
                if places:
                    topic.calm_after_ns = now_ns + round(self.options.calm_s * NS_PER_S)
                    text = f"{len(places)} publishers away from {broker}, which was too slow"
                    self._resettle(topic, places, now_ns, "shed", text)

    def _under_way(self, topic: Topic, now_ns: int) -> set[str]:
        """Brokers that have something to do about a topic before it is at rest."""
        measuring = topic.fit is not None and topic.fit.state in ("measuring", "computing")
        if topic.moving or (topic.fit is not None and not measuring) or not topic.opened:
            return set(self.members)
        if now_ns < topic.settling_until_ns:
            return topic.brokers() | topic.transfer.awaited
        return topic.transfer.awaited

    def _turn(self, member: Member, status: str, now_ns: int) -> None:
        log.info("BROKER(%s): %s, was %s", member.name, status, member.status)
        self._turns += 1
        back = status == "alive" and member.status != "silent"
        member.status, member.since_ns = status, now_ns  # type: ignore[assignment]
        for topic in self.topics.values():
            concerned = member.name in topic.brokers()
            topic.unshared = topic.unshared or (back and (concerned or not topic.place))
            if concerned:
                topic.generation += 1
                self.on_change(topic.name)

    def _alive(self) -> list[str]:
        return [name for name, member in self.members.items() if member.status == "alive"]

    def _hurry_all(self) -> None:
        self._due |= self.members.keys()

    def _changed(self, topic: Topic) -> None:
        topic.generation += 1
        self.on_change(topic.name)

    def _topic(self, name: str) -> Topic:
        if name not in self.topics:
            raise InputError(f"no topic {name!r} is under contract; create it first", topic=name)
        return self.topics[name]

    def _member(self, name: str) -> Member:
        if name not in self.members:
            known = ", ".join(sorted(self.members)) or "none"
            raise InputError(f"there is no broker {name!r}: there is {known}", broker=name)
        return self.members[name]

    def _load(self, now_ns: int) -> None:
        """Go on where the last controller stopped: what brokers may hold, they may hold for a whole lease yet."""
        for member in self.store.members(self.mcap_mps):
            member.since_ns = now_ns
            if member.status != "dead":
                member.lease_ends_ns = now_ns + round(self._lease_ns * _CLOCKS) + _SLACK_NS
            self.members[member.name] = member
        for topic in self.store.topics(self._sequences):
            topic.version, topic.since_ns = self._version, now_ns
            self.topics[topic.name] = topic
        for name, remains in self.store.remains().items():
            self._former[name] = _Former(self._version, remains, {}, {}, now_ns + self._lease_ns)
