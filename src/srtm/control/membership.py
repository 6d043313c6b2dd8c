"""Membership: brokers that join, die, drain or leave for good, and publishers that register or leave."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from srtm.control.members import PART, DeclaredPublisher, Member
from srtm.control.placing.attendance import AWAY_S
from srtm.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from srtm.control.contracts import Contracts
    from srtm.control.members import Status
    from srtm.control.placing.layout import Reason
    from srtm.control.placing.placing import Placing
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic

log = logging.getLogger(__name__)

_STRANGERS = 3  # consecutive answers of another program before the broker at that address counts as dead


class Membership:
    """Who belongs to the cluster."""

    def __init__(self, state: ControllerState, placing: Placing, contracts: Contracts, mcap_mps: float) -> None:
        self._state = state
        self._placing = placing
        self._contracts = contracts
        self._mcap_mps = mcap_mps

    # Brokers.

    def load(self, now_ns: int) -> None:
        """Take up the brokers of the last controller: each may hold what it was granted for one more lease."""
        for member in self._state.store.members(self._mcap_mps):
            member.since_ns = now_ns
            if member.status != "dead":
                member.link.lease_ends_ns = now_ns + self._state.options.longest_lease_ns
            self._state.members[member.name] = member

    def joined(self, name: str, host: str, tcp_port: int, http_port: int, now_ns: int, https_port: int = 0) -> None:
        """A broker registered; it is part of the cluster once it has answered."""
        members = self._state.members
        member = members.get(name)
        if member is None:
            member = members[name] = Member(name, host, tcp_port, http_port, self._mcap_mps, since_ns=now_ns)
        elif member.status == "dead":
            member.link.version = 0
            self.turn(member, "joining", now_ns)
        member.host, member.tcp_port, member.http_port, member.link.strangers = host, tcp_port, http_port, 0
        member.https_port = https_port
        self._state.store.save_member(member)
        self._state.due.add(name)

    def died(self, name: str, now_ns: int, reason: str) -> bool:
        """A broker is dead for certain: its shares are free, and its publishers go elsewhere.

        This survives a restart of the controller, and ends with a sign of life: the broker registers or answers.
        Returns False if the broker was dead already.
        """
        member = self._state.members.get(name)
        if member is None or member.status == "dead":
            return False
        self.turn(member, "dead", now_ns)
        member.link.stamp, member.link.lease_ends_ns, member.link.void = None, None, self._state.number
        member.condition = replace(member.condition, rate_mps=0, free_mps=0, lag_ns=0, busy=0.0)
        self._state.store.save_member(member)
        self._placing.take_orders(name)
        for topic in self._state.topics.values():
            if topic.layout.seen.pop(name, None) is not None or name in topic.layout.place.values():
                topic.journal.note(now_ns, "broker", f"{name} is dead: {reason}")
            _drop_share(topic, name)
            self._placing.evacuate(topic, name, now_ns)
        self._contracts.forget_remains(name)
        return True

    def forget(self, name: str) -> None:
        """Drop all memory of a broker."""
        self._state.members.pop(name, None)
        for topic in self._state.topics.values():
            topic.layout.seen.pop(name, None)
        self._state.store.delete_member(name)

    def foreign(self, name: str, now_ns: int) -> bool:
        """Another program answers at a broker's address: a stock nsqd, or a broker without this controller.

        A broker that took our orders before no longer listens there, so it is dead after a few such answers. Returns
        whether it died just now.
        """
        member = self._state.members.get(name)
        if member is not None and member.incarnation:
            member.link.oddities += 1
            member.link.strangers += 1
            if member.link.strangers >= _STRANGERS:
                return self.died(name, now_ns, f"another program answers at {member.url}")
            return False
        self._state.members.pop(name, None)
        self._state.store.delete_member(name)
        return False

    def drain(self, member: Member, now_ns: int, *, on: bool = True) -> None:
        """Send all publishers of a broker elsewhere, and no new ones to it; or use it again."""
        member.draining = on
        self._state.store.save_member(member)
        if on:
            for topic in self._state.topics.values():
                self._placing.evacuate(topic, member.name, now_ns)

    def restarted(self, member: Member, incarnation: int, now_ns: int) -> None:
        """A broker answers for the first time, or for the first time since it restarted: it holds nothing."""
        if member.incarnation:
            for topic in self._state.topics.values():
                seen = topic.layout.seen.pop(member.name, None)
                if seen is not None or member.name in topic.transfer.possible:
                    topic.journal.note(now_ns, "broker", f"{member.name} restarted")
                _drop_share(topic, member.name)
            self._contracts.forget_remains(member.name)
        # Its clock may have been set back, so starts cannot be ordered by time. But its predecessor may have answered
        # whatever was asked before this first answer.
        member.link.void = self._state.number if member.incarnation else 0
        member.incarnation, member.link.lease_ends_ns = incarnation, None
        self._state.store.save_member(member)

    def turn(self, member: Member, status: Status, now_ns: int) -> None:
        """Change a broker's status."""
        log.info("BROKER(%s): %s, was %s", member.name, status, member.status)
        self._state.turns += 1
        back = status == "alive" and member.status != "silent"
        member.status, member.since_ns = status, now_ns
        for topic in self._state.topics.values():
            concerned = member.name in topic.layout.brokers()
            topic.sharing.stale = topic.sharing.stale or (back and (concerned or not topic.layout.place))
            if concerned:
                self._state.changed(topic)

    # Publishers.

    def split(
        self, topic: ManagedTopic, publishers: Iterable[DeclaredPublisher], lost: Iterable[str] = ()
    ) -> list[DeclaredPublisher]:
        """The publishers to register: in parts, if a publisher allows it and no broker has room for all of it.

        Parts that a publisher had before and does not need any more are dropped. What was a part is split anew with
        the rest of its publisher.
        """
        found: dict[str, DeclaredPublisher] = {}
        for declared in {each.id: each for each in (part.whole for part in publishers)}.values():
            publisher = declared.found_in(topic.layout.publishers.get(declared.id))
            number = self._number_of_parts(topic, publisher, set(lost)) if publisher.split else 1
            for surplus in topic.layout.parts_of(publisher.id, number + 1):
                self.unregister(topic, surplus)
            found |= {part.id: part for part in publisher.in_parts(number)}
        refused = topic.layout.refused
        for part in [each for each in refused if each not in found and each.partition(PART)[0] in found]:
            del refused[part]
        return list(found.values())

    def _number_of_parts(self, topic: ManagedTopic, publisher: DeclaredPublisher, unreachable: set[str]) -> int:
        """As few parts as brokers have room for; a publisher that declares what it did keeps those that it has."""
        known = topic.layout.publishers.get(publisher.id)
        had = known.parts if known is not None else 1
        wanted = self._placing.parts_for(topic, publisher, had, unreachable)
        return max(had, wanted) if known == publisher.in_parts(had)[0] else wanted

    def register(
        self, topic: ManagedTopic, publishers: Sequence[DeclaredPublisher], lost: Iterable[str] = ()
    ) -> list[DeclaredPublisher]:
        """Register publishers, and place those without a usable broker; `lost` are brokers they cannot reach.

        Returns the publishers that it placed, or could not place.
        """
        layout, unreachable = topic.layout, set(lost)
        homeless, displaced = [], dict[str, str | None]()
        for publisher in publishers:
            layout.undeclared.discard(publisher.id)
            if layout.publishers.get(publisher.id) != publisher:
                layout.publishers[publisher.id] = publisher
                layout.roster += 1
            broker = layout.place.get(publisher.id) if publisher.id not in displaced else None
            member = self._state.members.get(broker) if broker else None
            if member is None or not member.usable or broker in unreachable:
                displaced[publisher.id] = broker
                homeless.append(publisher)
                layout.migration.left.update([broker] if broker else [])
        self._placing.remove(topic, displaced, "unreachable")
        # Measuring says what those do that are connected already, and were not sent away for it.
        here = set().union(*(seen.roll or () for seen in layout.seen.values())) - layout.refused.keys()
        new = {publisher for publisher, broker in displaced.items() if broker is None and publisher not in here}
        refused = self._placing.place(topic, homeless, "registered", unreachable, new)
        # One that is refused in part is refused as a whole, unless a part of it had a place before.
        rest = layout.rest_of(publisher.id for publisher in refused)
        rest = [each for each in rest if new.issuperset([each, *layout.rest_of([each])])]
        self._placing.remove(topic, rest, "unregistered")
        self._placing.refuse(topic, [layout.publishers[each] for each in rest])
        for each in [*(publisher.id for publisher in refused), *rest]:
            layout.forget(each)
        self._state.store.save_publishers(topic, [publisher.id for publisher in publishers])
        return homeless

    def unregister(self, topic: ManagedTopic, publisher: str) -> None:
        """Drop a publisher that will not come back."""
        if publisher not in topic.layout.publishers:
            raise InputError(f"topic {topic.name!r} has no publisher {publisher!r}", publisher=publisher)
        self._placing.remove(topic, [publisher], "unregistered")
        topic.layout.forget(publisher)
        topic.sharing.stale = topic.sharing.stale or not topic.established
        self._state.store.delete_publisher(topic, publisher)

    def forget_missing(self, topic: ManagedTopic, now_ns: int) -> None:
        """Drop publishers that have been away for too long; one that comes back registers again anyway."""
        gone = topic.layout.attendance.overdue(now_ns)
        for publisher in gone:
            self.unregister(topic, publisher)
        if gone:
            topic.journal.note(now_ns, "forgotten", f"{len(gone)} publishers, away for {AWAY_S} s")

    def adopt(self, topic: ManagedTopic, broker: str, roll: Mapping[str, str | None]) -> None:
        """Accept publishers without a place at the broker that reports them; `roll` maps each to its group.

        They came before the contract and do not know that they should register, or found no place and went on where
        they could.
        """
        layout = topic.layout
        unknown = {
            each: group for each, group in roll.items() if each not in layout.place and each not in layout.refused
        }
        if not unknown:
            return
        layout.undeclared |= unknown.keys() - layout.publishers.keys()
        topic.sharing.stale = topic.sharing.stale or not topic.established
        self._introduce(topic, broker, unknown, "adopted")
        layout.roster += 1
        self._state.store.save_publishers(topic, unknown)
        self._state.changed(topic)

    def recover(self, topic: ManagedTopic, broker: str, roll: Mapping[str, str | None]) -> None:
        """Take the publishers that a broker reports as belonging to it: the store is lost."""
        self._introduce(topic, broker, roll, "recovered")
        self._state.store.save_publishers(topic, topic.layout.publishers)

    def _introduce(self, topic: ManagedTopic, broker: str, roll: Mapping[str, str | None], reason: Reason) -> None:
        for publisher, group in roll.items():
            topic.layout.publishers.setdefault(publisher, DeclaredPublisher(publisher, group=group))
        self._placing.accept(topic, roll, broker, reason)


def _drop_share(topic: ManagedTopic, broker: str) -> None:
    """A broker holds nothing of a topic any more."""
    topic.transfer.gone(broker)
    topic.sharing.refused.pop(broker, None)
    topic.sharing.stale = True
