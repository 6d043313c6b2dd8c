"""Publishers on the move: orders to go to another broker, and reminders.

In: a topic's old and new places, and where publishers are connected. Out: orders for the next exchange with the broker
that a publisher is connected to. Time is an argument; no IO.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from srtm.protocol.exchange import Move
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.control.members import Member
    from srtm.control.topic import ManagedTopic

_NOTICED_S = 0.2  # until rolls show which publishers left
_SETTLE_S = 1.0  # until brokers have sent the backlog of publishers that left
_REMIND_S = 2.0  # between two orders to a publisher that is not where it belongs


class Moves:
    """Orders that wait for an exchange, by the broker that passes them on."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._orders: defaultdict[str, list[Move]] = defaultdict(list)

    def take(self, broker: str) -> list[Move]:
        """Remove and return the orders that a broker must pass on."""
        return self._orders.pop(broker, [])

    def send(self, topic: ManagedTopic, before: Mapping[str, str], now_ns: int) -> set[str]:
        """Order publishers whose place is not what it was before to go there; returns the brokers concerned."""
        layout = topic.layout
        changed = [
            (old, new, publisher)
            for publisher, old in before.items()
            if (new := layout.place.get(publisher, old)) != old
        ]
        if changed:
            layout.migration.publishers.update(publisher for _, _, publisher in changed)
            layout.migration.since_ns = now_ns
        return self._order(topic, changed)

    def remind(self, topic: ManagedTopic, now_ns: int) -> set[str]:
        """Order stray publishers home: they could not reach their broker, or missed the order."""
        layout, migration = topic.layout, topic.layout.migration
        if now_ns - max(migration.since_ns, migration.reminded_ns) < _REMIND_S * NS_PER_S:
            return set()
        alive = {name for name, member in self._members.items() if member.status == "alive"}
        astray = [
            (broker, layout.place[publisher], publisher)
            for broker, wrong in layout.misplaced().items()
            if broker in alive  # orders for others would only pile up
            for publisher in wrong
            if layout.place[publisher] in alive and self._members[layout.place[publisher]].usable
        ]
        unwanted = {
            broker: layout.refused.keys() & seen.roll
            for broker, seen in layout.seen.items()
            if broker in alive and seen.roll and layout.refused.keys() & seen.roll
        }
        if astray or unwanted:
            migration.reminded_ns = now_ns
        told = [self.dismiss(topic, broker, publishers) for broker, publishers in unwanted.items()]
        return self._order(topic, astray).union(*told)

    def dismiss(self, topic: ManagedTopic, broker: str, publishers: Iterable[str]) -> set[str]:
        """Order publishers that were refused to leave a broker and ask for a place again; returns that broker."""
        listed = sorted(publishers)
        if listed:
            self._orders[broker].append(Move(topic.name, topic.birth, (), listed))
        return {broker} if listed else set()

    def settle(self, topic: ManagedTopic, now_ns: int, patience_s: float) -> None:
        """Take publishers that have arrived off the list; after `patience_s`, all of them."""
        layout, migration = topic.layout, topic.layout.migration
        if not migration.publishers:
            return
        waited_s = (now_ns - migration.since_ns) / NS_PER_S
        if waited_s > patience_s:
            migration.publishers.clear()
        elif waited_s > _NOTICED_S:
            migration.publishers &= set().union(*layout.misplaced().values())
        if not migration.publishers:
            layout.forget_rates()
            migration.settling_until_ns = now_ns + round(_SETTLE_S * NS_PER_S)

    def _order(self, topic: ManagedTopic, moves: Iterable[tuple[str, str, str]]) -> set[str]:
        by_way: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for old, new, publisher in moves:
            by_way[old, new].append(publisher)
        for (old, new), publishers in by_way.items():
            self._orders[old].append(Move(topic.name, topic.birth, (self._members[new].address,), publishers))
        return {broker for way in by_way for broker in way}
