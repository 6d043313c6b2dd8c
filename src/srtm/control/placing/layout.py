"""A topic's publishers: what they declared, which broker each belongs to, and what brokers report of them.

`Places` holds where each publisher belongs. Everybody reads it as a mapping; only `Places.assign` writes it, and only
`srtm.control.placing.placing` calls that.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from srtm.control.members import PART, part_id
from srtm.control.placing.attendance import Attendance
from srtm.control.reports import Seen
from srtm.model.declared import batches, expected_bursts, rates_mps, sources
from srtm.model.tb_adaptor import LEAST_STEPS, History

if TYPE_CHECKING:
    from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView

    from srtm.control.members import DeclaredPublisher
    from srtm.model.bucket import TokenBucket

log = logging.getLogger(__name__)

Reason = Literal[
    "registered",  # a publisher asked for a place
    "unreachable",  # it cannot use the place it had
    "unregistered",
    "adopted",  # it was connected there before the controller knew it
    "recovered",  # a broker reported it to a controller that lost its store
    "evacuated",  # its broker died, is drained, or refuses its share
    "fitted",
    "shed",  # its broker was too busy
    "packed",  # its broker is not needed
    "regrouped",  # its correlation group was not spread over the brokers
    "moved",  # an operator asked for it
]


class Places(Mapping[str, str]):
    """The broker of each publisher of a topic."""

    def __init__(self, topic: str, places: Mapping[str, str] | None = None) -> None:
        self.changes = 0  # counts assignments
        self._topic = topic
        self._broker_of = dict(places or {})

    def assign(self, places: Mapping[str, str | None], reason: Reason) -> None:
        """Change where these publishers belong; None takes a publisher's place away."""
        for publisher, broker in places.items():
            if broker is None:
                self._broker_of.pop(publisher, None)
            else:
                self._broker_of[publisher] = broker
        if places:
            self.changes += 1
            log.debug("TOPIC(%s): new places for %d publishers: %s", self._topic, len(places), reason)

    def at(self, broker: str) -> list[str]:
        """The publishers that belong to a broker."""
        return [publisher for publisher, where in self._broker_of.items() if where == broker]

    @property
    def brokers(self) -> set[str]:
        """The brokers that publishers belong to."""
        return set(self._broker_of.values())

    def __getitem__(self, publisher: str) -> str:
        return self._broker_of[publisher]

    def __iter__(self) -> Iterator[str]:
        return iter(self._broker_of)

    def __len__(self) -> int:
        return len(self._broker_of)

    # The views of a dict are several times as fast as those that Mapping would make.

    def keys(self) -> KeysView[str]:
        """All publishers that have a place."""
        return self._broker_of.keys()

    def values(self) -> ValuesView[str]:
        """Their brokers."""
        return self._broker_of.values()

    def items(self) -> ItemsView[str, str]:
        """Both."""
        return self._broker_of.items()


@dataclass(slots=True)
class Migration:
    """Publishers of a topic that were told to go to another broker and have not arrived yet."""

    publishers: set[str] = field(default_factory=set)
    since_ns: int = 0
    reminded_ns: int = 0  # when stray publishers were last told again
    left: Counter[str] = field(default_factory=Counter)  # publishers that left a broker, since the last event about it
    settling_until_ns: int = 0  # until then, shares follow what brokers report of publishers that just moved


@dataclass(slots=True)
class Layout:
    """A topic's publishers and their brokers."""

    place: Places
    publishers: dict[str, DeclaredPublisher] = field(default_factory=dict)
    undeclared: set[str] = field(default_factory=set)  # reported by a broker, never registered
    refused: dict[str, float] = field(default_factory=dict)  # rates of publishers that asked for a place and got none
    roster: int = 0  # counts changes of what publishers declare
    attendance: Attendance = field(default_factory=Attendance)
    migration: Migration = field(default_factory=Migration)
    seen: defaultdict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))  # by broker

    @property
    def rate_mps(self) -> float:
        """Declared rate of all publishers."""
        return sum(publisher.rate_mps for publisher in self.publishers.values())

    @property
    def registered(self) -> bool:
        """Whether any publisher has declared itself."""
        return len(self.publishers) > len(self.undeclared)

    @property
    def observed(self) -> bool:
        """Whether every broker with publishers has reported enough traffic to judge it by."""
        return all(len(self.seen[broker].history) >= LEAST_STEPS for broker in self.place.brokers)

    def parts_of(self, publisher: str, first: int = 1) -> list[str]:
        """The ids of a publisher's parts from a number on; one that is not split has the first only."""
        declared = self.publishers.get(publisher)
        ids = [part_id(publisher, number) for number in range(first, declared.parts + 1)] if declared else []
        return [part for part in ids if part in self.publishers]

    def rest_of(self, parts: Iterable[str]) -> list[str]:
        """The other parts of publishers that these are parts of."""
        chosen = dict.fromkeys(parts)
        split = {each.whole.id: each for each in map(self.publishers.__getitem__, chosen) if each.parts > 1}
        ids = [each.id for part in split.values() for each in part.whole.in_parts(part.parts)]
        return [each for each in ids if each in self.publishers and each not in chosen]

    def brokers(self) -> set[str]:
        """Brokers that publishers belong to, or that have traffic of the topic."""
        active = {name for name, seen in self.seen.items() if seen.publishers or seen.waiting or seen.rate_mps}
        return self.place.brokers | active

    def guessed(self) -> set[str]:
        """Brokers with a publisher that declared nothing."""
        return {self.place[name] for name in self.undeclared if name in self.place}

    def rates(self) -> dict[str, float]:
        """Declared rate by broker."""
        return rates_mps(self._placed())

    def bursts(self) -> dict[str, int]:
        """The largest number of messages that publishers of one broker send together, by broker."""
        return {
            broker: max(sum(publisher.batch for publisher in members) for members in here)
            for broker, here in sources(self._placed()).items()
        }

    def expected_bursts(self, whole: TokenBucket, quantile: str) -> dict[str, float]:
        """The burst to expect at each broker, by what its publishers declare."""
        return expected_bursts(self._placed(), whole, quantile)

    def batches(self) -> dict[str, int]:
        """The largest batch that publishers of each broker declare."""
        return batches(self._placed())

    def _placed(self) -> Iterator[tuple[DeclaredPublisher, str]]:
        return ((self.publishers[publisher], broker) for publisher, broker in self.place.items())

    def misplaced(self) -> dict[str, set[str]]:
        """Publishers connected to another broker than theirs, by the broker they are connected to."""
        return {
            broker: wrong
            for broker, seen in self.seen.items()
            if seen.roll and (wrong := {name for name in seen.roll if self.place.get(name, broker) != broker})
        }

    def uneven(self, broker: str) -> bool:
        """Whether a broker has more or fewer connected publishers than belong there."""
        return broker in self.seen and self.seen[broker].publishers != sum(at == broker for at in self.place.values())

    def forgive(self, publisher: str) -> bool:
        """Drop a publisher that was refused, with all its parts; returns whether there was one."""
        ids = [each for each in self.refused if each.partition(PART)[0] == publisher]
        for each in ids:
            del self.refused[each]
        return bool(ids)

    def forget(self, publisher: str) -> None:
        """Drop a publisher that has no place any more."""
        if self.publishers.pop(publisher, None) is not None:
            self.roster += 1
        self.undeclared.discard(publisher)
        self.attendance.forget(publisher)

    def forget_rates(self) -> None:
        """Drop the history of all brokers: publishers moved, and the traffic of each broker with them.

        The present second has both: it would count publishers at the broker that they left.
        """
        for seen in self.seen.values():
            seen.history = History(after=seen.last_number + 1)
