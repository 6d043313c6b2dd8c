"""What the parts of a controller share: brokers, topics, the store, and the counters that put messages in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srtm.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from srtm.control.members import Member
    from srtm.control.options import ControllerOptions
    from srtm.control.store import Store
    from srtm.control.topic import ManagedTopic


@dataclass(slots=True)
class ControllerState:
    """Everything that more than one part of a controller reads or writes."""

    options: ControllerOptions
    store: Store
    epoch: int
    members: dict[str, Member] = field(default_factory=dict)
    topics: dict[str, ManagedTopic] = field(default_factory=dict)
    on_change: Callable[[str], None] = lambda _: None  # is called with the name of a topic that changed
    version: int = 1  # of the list of contracts
    number: int = 0  # of the last exchange; one count for all brokers, so none that comes back is ahead of it
    turns: int = 0  # counts changes of brokers' status
    due: set[str] = field(default_factory=set)  # brokers that should hear something new at once
    _lending: tuple[tuple[int, int], list[ManagedTopic]] = ((-1, -1), [])

    @property
    def lending(self) -> list[ManagedTopic]:
        """Topics whose contracts let brokers lend, found anew only when contracts have changed.

        Messages that are dropped do not wait, so their brokers have nothing to ask for.
        """
        key = self.version, len(self.topics)
        if self._lending[0] != key:
            found = [each for each in self.topics.values() if each.contract.lending != "off"]
            self._lending = key, [each for each in found if each.contract.overflow != "drop"]
        return self._lending[1]

    @property
    def alive(self) -> list[str]:
        """Brokers that answer."""
        return [name for name, member in self.members.items() if member.status == "alive"]

    @property
    def any_usable(self) -> bool:
        """Whether any broker can take publishers."""
        return any(member.usable for member in self.members.values())

    def topic(self, name: str) -> ManagedTopic:
        """The topic of that name; InputError if none is under contract."""
        if name not in self.topics:
            raise InputError(f"topic {name!r} is not under contract; create it first", topic=name)
        return self.topics[name]

    def member(self, name: str) -> Member:
        """The broker of that name; InputError if it is unknown."""
        if name not in self.members:
            known = ", ".join(sorted(self.members)) or "none"
            raise InputError(f"unknown broker {name!r}; known brokers: {known}", broker=name)
        return self.members[name]

    def changed(self, topic: ManagedTopic) -> None:
        """Tell watchers that a topic changed."""
        topic.journal.generation += 1
        self.on_change(topic.name)

    def hurry_all(self) -> None:
        """Let every broker hear the news at once."""
        self.due |= self.members.keys()
