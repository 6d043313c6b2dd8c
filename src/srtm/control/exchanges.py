"""Exchanges with brokers: what to tell each broker and when, and what to make of its answers.

In: answers, in any order, late or twice, and the passing of time. Out: exchanges to send. Grants in them are in the
store already. What belongs to a contract that is over, or to a broker that restarted since, changes nothing;
implausible reports of one broker change nothing for others (docs/adr/0012-control-exchange.md).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from srtm.control.auditing import Auditor
from srtm.control.lending import lends
from srtm.control.members import Condition
from srtm.control.reports import MOST_MESSAGES, believable
from srtm.protocol.exchange import Answer, Exchange, Grant, Listed, Share
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.control.contracts import Contracts
    from srtm.control.members import Member
    from srtm.control.membership import Membership
    from srtm.control.placing.placing import Placing
    from srtm.control.reports import Seen
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic
    from srtm.protocol.exchange import TopicReport

log = logging.getLogger(__name__)

_SILENT_S = 3.0  # of exchanges without an answer before a broker counts as silent
_HURRY_S = 0.1  # between exchanges while something is under way
_AT_ONCE_S = 0.02  # between exchanges if there is news
_OPENING_S = 0.005  # the same while a contract opens or publishers move: messages may wait for it
_DEAD = 5  # times as long between exchanges with a dead broker, in case it is not dead
_YOUNG_NS = 5 * NS_PER_S  # how long publishers of a new contract are sent home as soon as they are seen
_SET_BACK_NS = 10 * NS_PER_S  # without a new second from a broker that answers: its clock was set back


class Exchanges:
    """The conversation with all brokers."""

    def __init__(self, state: ControllerState, membership: Membership, contracts: Contracts, placing: Placing) -> None:
        self._state = state
        self._membership = membership
        self._contracts = contracts
        self._placing = placing
        self._auditor = Auditor(state)
        self._hurried: set[str] = set()  # brokers that something is under way with
        self._settling = False  # a contract opens, or publishers move

    def due(self, name: str, last_sent_ns: int, now_ns: int) -> bool:
        """Whether it is time for the next exchange with a broker."""
        member = self._state.members.get(name)
        if member is None:
            return False
        waited_s = (now_ns - last_sent_ns) / NS_PER_S
        gap_s = self._state.options.exchange_s
        if member.status == "dead":
            gap_s *= _DEAD
        elif name in self._state.due:
            gap_s = min(gap_s, _OPENING_S if self._settling else _AT_ONCE_S)
        elif name in self._hurried:
            gap_s = min(gap_s, _HURRY_S)
        return waited_s >= gap_s

    def hurry(self, now_ns: int) -> None:
        """Exchange more often with brokers that must do something before a topic is at rest."""
        topics = self._state.topics.values()
        self._hurried = set().union(*(self._under_way(topic, now_ns) for topic in topics))
        self._settling = any(topic.settling(now_ns) for topic in topics)

    def compose(self, name: str) -> Exchange:
        """The next exchange with a broker."""
        state, topics = self._state, self._state.topics.values()
        link, options = state.members[name].link, state.options
        grants = {
            topic.name: Grant(topic.birth, grant.sequence, Share.of(grant.share), grant.gift_ntok)
            for topic in topics
            for grant in topic.transfer.unanswered
            if grant.broker == name
        }
        state.number += 1
        if link.stamp is not None:
            ends_ns = link.stamp_heard_ns + options.longest_lease_ns
            link.lease_ends_ns = max(ends_ns, link.lease_ends_ns or ends_ns)
        state.due.discard(name)
        recalls = self._contracts.recalling
        tells = link.version < state.version and not recalls  # an incomplete list would end contracts
        heard = [topic.layout.seen[name].last_number for topic in topics if name in topic.layout.seen]
        return Exchange(
            state.epoch,
            state.number,
            state.members[name].incarnation,
            link.stamp,
            options.lease_ns,
            options.safe_percent,
            state.version,
            {topic.name: Listed(topic.birth, topic.contract) for topic in topics} if tells else None,
            grants,
            self._placing.take_orders(name),
            min(heard, default=0),
            [topic.name for topic in topics if topic.calls_roll(name)],
            recalls,
            [topic.name for topic in topics if topic.paused],
            lends(state, name),
        )

    def heard(self, name: str, said: Exchange, answer: Answer, now_ns: int) -> bool:
        """Take in a broker's answer; False if it came too late, or cannot be an answer to this exchange."""
        member = self._state.members[name]
        if not self._plausible(member, said, answer):
            return False
        if answer.incarnation != member.incarnation:
            self._membership.restarted(member, answer.incarnation, now_ns)
            self._auditor.restarted(member, now_ns)
        link = member.link
        link.strangers = 0
        link.stamp, link.stamp_heard_ns, link.version = answer.stamp, now_ns, answer.version
        member.condition = Condition(
            answer.rate_mps,
            answer.free_mps,
            answer.lag_ns,
            answer.engine,
            answer.engine_problem,
            answer.engine_address,
            answer.stores,
            answer.busy,
        )
        if member.status != "alive":
            self._membership.turn(member, "alive", now_ns)
            self._state.store.save_member(member)
        if self._contracts.recalling and answer.contracts:
            self._recover(name, answer, now_ns)
        for topic in self._state.topics.values():
            report = answer.topics.get(topic.name)
            if report is not None and report.birth == topic.birth:
                self._take(topic, member, report, answer, now_ns)
            elif link.version >= topic.version:  # the broker knows the contract, and has nothing of it
                topic.transfer.learned(name)
                if name in topic.transfer.possible:
                    topic.transfer.found(name, None, safe=False, answered=answer.acted)
        if answer.acted == said.number:
            self._retire(name, said, answer, now_ns)
        return True

    def check_silence(self, now_ns: int) -> None:
        """Time has passed: brokers fall silent, and leases of silent brokers end."""
        state = self._state
        for member in state.members.values():
            link = member.link
            silent_s = (now_ns - max(link.stamp_heard_ns, member.since_ns)) / NS_PER_S
            if member.status == "alive" and silent_s > _SILENT_S * state.options.exchange_s:
                self._membership.turn(member, "silent", now_ns)
            if member.status == "silent" and link.lease_ends_ns is not None and now_ns > link.lease_ends_ns:
                self._membership.turn(member, "lapsed", now_ns)
                for topic in state.topics.values():
                    topic.transfer.lapsed(member.name, state.options.safe_percent, state.number)

    def _plausible(self, member: Member, said: Exchange, answer: Answer) -> bool:
        # Answers come in any order. The broker's own clock tells in which order it gave them.
        link, same = member.link, answer.incarnation == member.incarnation
        late = answer.number <= link.void or (same and link.stamp is not None and answer.stamp <= link.stamp)
        ahead = answer.version > self._state.version or answer.acted > self._state.number
        odd = answer.number != said.number or ahead
        if odd:
            link.oddities += 1
            log.warning(
                "BROKER(%s): ignored an answer to exchange %s: it names %s", member.name, said.number, answer.number
            )
        return not odd and not late

    def _take(self, topic: ManagedTopic, member: Member, report: TopicReport, answer: Answer, now_ns: int) -> None:
        """Take in a broker's report of one topic, with the answer that it came in."""
        name, transfer, layout = member.name, topic.transfer, topic.layout
        seen, most, gift_ntok = layout.seen[name], transfer.possible.get(name), 0
        transfer.learned(name)
        for grant in transfer.unanswered:
            if grant.broker == name and (report.epoch, report.sequence) == (self._state.epoch, grant.sequence):
                transfer.acknowledged(grant, report.surrendered_ntok)
                gift_ntok += grant.gift_ntok
        share = report.share.bucket if report.share else None
        if transfer.possibly(share):
            transfer.found(name, share, safe=report.safe, answered=answer.acted)
        else:
            member.link.oddities += 1
        seen.waiting = min(report.waiting, MOST_MESSAGES)
        seen.count(report.arrived, report.rate_mps, now_ns)
        seen.publishers, seen.durable = report.publishers, report.durable
        seen.hear_lent(report.lent, now_ns)
        self._auditor.hear(topic, member, report.lent, answer.number, most, gift_ntok, now_ns)
        seen.roll = frozenset(publisher for publisher, _ in report.roll) if report.roll is not None else None
        self._membership.adopt(topic, name, dict(report.roll or ()))
        if now_ns - topic.since_ns < _YOUNG_NS:
            self._placing.gather(topic, now_ns)
        if seen.roll is not None and not layout.migration.publishers:
            layout.attendance.call(seen.roll, layout.place.at(name), now_ns)
        self._take_seconds(topic, member, seen, report, now_ns)

    def _take_seconds(self, topic: ManagedTopic, member: Member, seen: Seen, report: TopicReport, now_ns: int) -> None:
        if (
            now_ns - seen.heard_ns > _SET_BACK_NS
        ):  # the broker's clock may have been set, so start over with its numbers
            seen.forget()
            seen.heard_ns = now_ns
        for second in report.seconds:
            if not believable(second, topic.contract.bucket):
                member.link.oddities += 1
            elif second.number > seen.last_number:
                seen.hear(second, now_ns, topic.contract.adapt_window_s)

    def _retire(self, name: str, said: Exchange, answer: Answer, now_ns: int) -> None:
        """Void each grant of an answered exchange that is neither in force nor refused."""
        for topic_name, sent in said.grants.items():
            topic = self._state.topics.get(topic_name)
            if topic is None or topic.birth != sent.birth:
                continue
            if any((each.broker, each.sequence) == (name, sent.sequence) for each in topic.transfer.unanswered):
                topic.transfer.retire(name, self._state.number)
                why, refused = answer.refused.get(topic_name), topic.sharing.refused
                if why is not None and refused.get(name) != why:
                    refused[name] = why
                    topic.sharing.stale = True
                    topic.journal.note(now_ns, "shares", f"{name} refuses its share: {why}")
                    self._placing.evacuate(topic, name, now_ns)
                elif why is None:
                    topic.journal.note(now_ns, "shares", f"{name} ignored a grant; granting again")

    def _recover(self, name: str, answer: Answer, now_ns: int) -> None:
        """Rebuild what the store lost from what a broker has in force."""
        for topic_name, listed in (answer.contracts or {}).items():
            topic = self._contracts.recover(topic_name, listed.birth, listed.contract, name, now_ns)
            report = answer.topics.get(topic_name)
            if report is not None and report.birth != topic.birth:
                continue
            if report is not None and report.share:
                topic.transfer.recalled(name, report.share.bucket)
            self._membership.recover(topic, name, dict(report.roll or ()) if report else {})

    def _under_way(self, topic: ManagedTopic, now_ns: int) -> set[str]:
        """Brokers that must do something about a topic before it is at rest."""
        layout, fitting = topic.layout, topic.fitting.running
        moving = fitting is not None and fitting.state not in ("measuring", "computing")
        if layout.migration.publishers or moving or not topic.opened:
            return set(self._state.members)
        if now_ns < layout.migration.settling_until_ns:
            # A broker that nobody uses any more holds a share until it reports that.
            return layout.brokers() | topic.transfer.wanted.keys() | topic.transfer.awaited
        return topic.transfer.awaited
