"""Contracts: which topics are under one, when it begins, how it changes, and what is left of it when it ends.

A name is not an identity: a topic that is removed and created again is another contract with another birth. Until all
brokers know that a contract is over, what they may have in force of it (`model.transfer.Remains`) counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from srtm.control.liveness import unaware_of
from srtm.control.topic import ManagedTopic
from srtm.errors import InputError
from srtm.model.placement import policy_named
from srtm.model.transfer import Remains, Transfer
from srtm.protocol.engine import refusal
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.control.members import DeclaredPublisher
    from srtm.control.state import ControllerState
    from srtm.protocol.exchange import Contract

_OPENING_NS = 2 * NS_PER_S  # how long shares of a new contract follow its publishers to their places
_RECALL_NS = 10 * NS_PER_S  # brokers look for a controller every 4 s or more often


@dataclass(slots=True)
class _Former:
    """A contract that is over: what brokers may not know yet, and its publishers."""

    version: int  # of the first list without it
    remains: Remains
    publishers: Mapping[str, DeclaredPublisher]
    place: Mapping[str, str]
    until_ns: int


class Contracts:
    """Topics under contract, and contracts that are over."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._former: dict[str, _Former] = {}
        # One sequence for the grants of all topics: a topic that is created again must not reuse numbers.
        self._sequences = count(1)
        self._recalling_until_ns = 0

    def load(self, now_ns: int) -> None:
        """Take up what the last controller left in the store."""
        state = self._state
        for topic in state.store.topics(self._sequences):
            topic.version, topic.since_ns = state.version, now_ns
            state.topics[topic.name] = topic
        until_ns = now_ns + state.options.lease_ns
        for name, remains in state.store.remains().items():
            self._former[name] = _Former(state.version, remains, {}, {}, until_ns)

    def former_publishers(self, name: str) -> Mapping[str, DeclaredPublisher]:
        """Publishers that were connected when the last contract of that name ended; none if one is in force."""
        former = self._former.get(name) if name not in self._state.topics else None
        return former.publishers if former is not None else {}

    def check_possible(self, name: str, contract: Contract) -> None:
        """InputError if a broker cannot have such a topic, by its engine or for want of a disk."""
        members = self._state.members.values()
        for engine in {member.condition.engine for member in members if member.status != "dead"}:
            if problem := refusal(engine, name):
                raise InputError(problem, topic=name)
        unable = sorted(each.name for each in members if each.usable and not each.can_have(contract))
        if unable:
            raise InputError(
                f"cannot keep topic {name!r} on disk: {', '.join(unable)} {'has' if len(unable) == 1 else 'have'} no"
                " --data-path; start brokers with one (srtm up --data-path DIR), or use durability memory",
                topic=name,
            )

    def create(self, name: str, contract: Contract, now_ns: int, birth: int | None = None) -> ManagedTopic:
        """Put a topic under contract; changes nothing if it is under the same one."""
        policy_named(contract.policy)
        state, known = self._state, self._state.topics.get(name)
        if known is not None:
            if known.contract != contract:
                raise InputError(f"topic {name!r} is under another contract; change that one instead", topic=name)
            return known
        state.version += 1
        if birth is None:  # larger than that of any store that was lost, as epochs are
            birth = state.store.next_birth(state.epoch << 20)
        former = self._former.pop(name, None)
        remains = self._unaware(former) if former else Remains()
        transfer = Transfer.begun(contract.bucket, self._sequences, remains)
        topic = ManagedTopic(name, contract, birth, transfer, state.version, since_ns=now_ns)
        topic.layout.migration.settling_until_ns = now_ns + _OPENING_NS
        if former:
            for broker in state.members.keys() & former.place.values():  # they are there until a roll says otherwise
                here = frozenset(each for each, at in former.place.items() if at == broker)
                topic.layout.seen[broker].roll = here
        state.topics[name] = topic
        topic.journal.note(now_ns, "created", f"with {contract.bucket}, policy {contract.policy}")
        state.store.save_topic(topic)
        state.hurry_all()
        state.changed(topic)
        return topic

    def change(self, topic: ManagedTopic, contract: Contract, now_ns: int) -> None:
        """Change a topic's contract without interrupting it; its last fitting is void.

        A larger bucket is shared out at once. A smaller one is not granted until brokers have acknowledged the cuts
        that it takes; an unreachable broker keeps its share until its lease ends, and its safe share after that.
        """
        before, state = topic.contract, self._state
        policy_named(contract.policy)
        for what in ("durability", "overflow"):
            if getattr(contract, what) != getattr(before, what):
                raise InputError(
                    f"cannot change the {what} of topic {topic.name!r}; remove the topic and create it again",
                    topic=topic.name,
                )
        topic.contract = contract
        topic.transfer.resize(contract.bucket)
        state.version += 1
        topic.fitting.last, topic.fitting.flowing_s, topic.one_bucket = None, 0, None
        slo = f"p{100 * float(contract.quantile):g} within {contract.slo_ns / NS_PER_MS:g} ms"
        topic.journal.note(now_ns, "changed", f"to {contract.bucket}, {slo}, policy {contract.policy}")

    def remove(self, name: str, now_ns: int) -> None:
        """End a contract; brokers then let the topic's messages pass freely."""
        state = self._state
        topic = state.topics.pop(state.topic(name).name)
        state.version += 1
        remains, until_ns = topic.transfer.remains, now_ns + state.options.lease_ns
        layout, present = topic.layout, topic.layout.attendance.present
        publishers = {each: one.as_declared for each, one in layout.publishers.items() if each in present}
        self._former[name] = _Former(state.version, remains, publishers, layout.place, until_ns)
        state.store.delete_topic(name, remains)
        for other in state.topics.values():
            other.layout.refused.clear()  # whoever was in its way may come now
        state.hurry_all()
        state.on_change(name)

    def pause(self, topic: ManagedTopic, now_ns: int, *, on: bool = True) -> None:
        """Stop a topic's delivery to its channels while brokers keep taking messages; or resume it."""
        if topic.paused != on:
            topic.paused = on
            self._state.store.save_topic(topic)
            topic.journal.note(now_ns, "paused" if on else "resumed", "by an operator")
            self._state.changed(topic)
            self._state.hurry_all()

    def try_open(self, topic: ManagedTopic, now_ns: int) -> None:
        """Open a contract once every broker knows it, or has been silent for a lease."""
        there = [member for member in self._state.members.values() if member.status != "dead"]
        unaware = unaware_of(self._state, topic)
        overdue = now_ns - topic.since_ns > self._state.options.longest_lease_ns
        if not any(member.status == "alive" for member in there) or (unaware and not overdue):
            return
        topic.opened = True
        topic.transfer.forget_remains()
        number = len(there) - len(unaware)
        known = f"known to {number} broker{'s' * (number != 1)}"
        topic.journal.note(now_ns, "opened", f"{known}, but not to {', '.join(unaware)}" if unaware else known)
        self._state.store.save_topic(topic)
        self._state.changed(topic)

    def forget_remains(self, broker: str) -> None:
        """A broker is dead or restarted: it holds nothing of contracts that are over."""
        for former in self._former.values():
            former.remains = former.remains.only(set(former.remains.shares) - {broker})

    def forget_former(self, now_ns: int) -> None:
        """Drop contracts that are over everywhere, and have been for a lease."""
        for name, former in list(self._former.items()):
            if now_ns > former.until_ns and not self._unaware(former).shares:
                del self._former[name]
                self._state.store.delete_remains(name)

    def _unaware(self, former: _Former) -> Remains:
        """What brokers may have in force of a contract that is over because they do not know that yet."""
        members = self._state.members.values()
        return former.remains.only(
            {each.name for each in members if each.status != "dead" and each.link.version < former.version}
        )

    # A lost store.

    def recall(self, now_ns: int) -> None:
        """The store is lost: rebuild it from the contracts that brokers know.

        Nothing is granted for a lease, so that brokers which are not heard have cut their shares by then, nor before
        all brokers had time to find this controller.
        """
        self._recalling_until_ns = now_ns + max(self._state.options.lease_ns, _RECALL_NS)
        self._state.store.recalling = True  # another controller that takes over meanwhile begins anew with it

    @property
    def recalling(self) -> bool:
        """Whether brokers should report the contracts that they know."""
        return self._recalling_until_ns > 0

    def still_recalling(self, now_ns: int) -> bool:
        """Whether nothing may be granted yet; ends the recall when its time is over."""
        if now_ns < self._recalling_until_ns:
            return True
        if self._recalling_until_ns:
            self._recalling_until_ns = 0
            self._state.store.recalling = False
        return False

    def recover(self, name: str, birth: int, contract: Contract, broker: str, now_ns: int) -> ManagedTopic:
        """The topic as a broker knows it; of two contracts of one name, the later one is in force."""
        known = self._state.topics.get(name)
        if known is not None and birth > known.birth:
            self.remove(name, now_ns)
            known = None
        if known is None:
            known = self.create(name, contract, now_ns, birth)
            known.transfer.forget_pool()
            known.journal.note(now_ns, "recovered", f"from {broker}")
        return known
