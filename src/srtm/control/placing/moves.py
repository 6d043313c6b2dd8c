"""Publishers on their way: who has been told to go elsewhere, and who has to be told again.

In: a topic's places before and now, and where publishers are connected. Out: orders, to be carried by the next exchange
with the broker where they are. Time as an argument; no IO.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from srtm.protocol.exchange import Move
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srtm.control.members import Member
    from srtm.control.topic import Topic

_NOTICED_S = 0.2  # until rolls tell who has gone
_SETTLE_S = 1.0  # until brokers that were left have sent what waited there
_REMIND_S = 2.0  # between two orders to a publisher that is not where it should be


class Moves:
    """Orders that wait for an exchange, by the broker that has to pass them on."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._orders: defaultdict[str, list[Move]] = defaultdict(list)

    def take(self, broker: str) -> list[Move]:
        """What a broker has to pass on."""
        return self._orders.pop(broker, [])

    def send(self, topic: Topic, before: Mapping[str, str], now_ns: int) -> set[str]:
        """Order publishers whose place has changed to go there; returns the brokers that this concerns."""
        changed = [
            (old, new, publisher)
            for publisher, old in before.items()
            if (new := topic.place.get(publisher, old)) != old
        ]
        if changed:
            topic.moving.update(publisher for _, _, publisher in changed)
            topic.moving_since_ns = now_ns
        return self._order(topic, changed)

    def remind(self, topic: Topic, now_ns: int) -> set[str]:
        """Order publishers home that are elsewhere: they could not reach their broker, or did not hear the order."""
        if now_ns - max(topic.moving_since_ns, topic.reminded_ns) < _REMIND_S * NS_PER_S:
            return set()
        alive = {name for name, member in self._members.items() if member.status == "alive"}
        astray = [
            (broker, topic.place[publisher], publisher)
            for broker, wrong in topic.misplaced().items()
            if broker in alive  # others would only pile up what they are told
            for publisher in wrong
            if topic.place[publisher] in alive and self._members[topic.place[publisher]].usable
        ]
        if astray:
            topic.reminded_ns = now_ns
        return self._order(topic, astray)

    def settle(self, topic: Topic, now_ns: int, patience_s: float) -> None:
        """See who has arrived; after a while, who has not is not waited for."""
        if not topic.moving:
            return
        waited_s = (now_ns - topic.moving_since_ns) / NS_PER_S
        if waited_s > patience_s:
            topic.moving.clear()
        elif waited_s > _NOTICED_S:
            topic.moving &= set().union(*topic.misplaced().values())
        if not topic.moving:
            topic.forget_rates()
            topic.settling_until_ns = now_ns + round(_SETTLE_S * NS_PER_S)

    def _order(self, topic: Topic, moves: Iterable[tuple[str, str, str]]) -> set[str]:
        by_way: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for old, new, publisher in moves:
            by_way[old, new].append(publisher)
        for (old, new), publishers in by_way.items():
            self._orders[old].append(Move(topic.name, topic.birth, (self._members[new].address,), publishers))
        return {broker for way in by_way for broker in way}
