"""Liveness of a topic's shares: whether all of (r, b) is in force, and which brokers hold that up.

The rule is `srtm.model.shares`. docs/adr/0016-identity-and-liveness.md has the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from srtm.model.shares import patience_s, short
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic

# After PUT, or after its last exchange was due.
_LATE_NS, _MISSING_NS = 15 * NS_PER_MS, 250 * NS_PER_MS


def unaware_of(state: ControllerState, topic: ManagedTopic) -> list[str]:
    """Brokers that have yet to learn of a contract."""
    return sorted(
        member.name
        for member in state.members.values()
        if member.status != "dead" and member.link.version < topic.version
    )


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Live brokers that have not answered a new contract: in time yet, late, or no longer waited for.

    What a broker was sent may be in force there for a lease, whether it answers or not. So one that is late gets its
    share when it answers. If it is very late, others get what it was never sent.
    """

    expected: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()


def unanswered(state: ControllerState, topic: ManagedTopic, now_ns: int) -> Unanswered:
    """Who has yet to answer a new contract."""
    waited_ns = {}
    for name in unaware_of(state, topic) if not topic.opened else ():
        overdue_ns = now_ns - state.members[name].link.stamp_heard_ns - round(state.options.exchange_s * NS_PER_S)
        if state.members[name].status == "alive":
            waited_ns[name] = max(now_ns - topic.since_ns, overdue_ns)
    return Unanswered(
        frozenset(name for name, waited in waited_ns.items() if waited <= _MISSING_NS),
        frozenset(name for name, waited in waited_ns.items() if waited > _LATE_NS),
        frozenset(name for name, waited in waited_ns.items() if waited > _MISSING_NS),
    )


def waited_for(state: ControllerState, topic: ManagedTopic) -> list[str]:
    """Brokers that hold up a topic: they have yet to learn of its contract, to answer, or to give up a share."""
    silent = topic.transfer.possible.keys() - set(state.alive)
    return sorted({*unaware_of(state, topic), *topic.transfer.awaited, *silent})


def missing(state: ControllerState, topic: ManagedTopic) -> str | None:
    """What a topic is short of by its brokers' reports; None if nothing is missing, or no broker is alive."""
    alive = set(state.alive)
    if not alive:
        return None
    waiting = {name: seen.waiting for name, seen in topic.layout.seen.items() if name in alive}
    return short(topic.contract.bucket, topic.transfer.held, waiting)


def watch(state: ControllerState, topic: ManagedTopic, now_ns: int) -> None:
    """Record an event if a topic is short for longer than any fault explains, and when that ends."""
    sharing, lacking = topic.sharing, missing(state, topic)
    patience_ns = patience_s(state.options.lease_s, state.options.exchange_s) * NS_PER_S
    if lacking is None:
        if sharing.told_short:
            topic.journal.note(now_ns, "shares", "all of (r, b) is in force again")
        sharing.short_since_ns, sharing.told_short = None, False
        return
    sharing.short_since_ns = now_ns if sharing.short_since_ns is None else sharing.short_since_ns
    if now_ns - sharing.short_since_ns > patience_ns and not sharing.told_short:
        sharing.told_short = True
        brokers = ", ".join(waited_for(state, topic))
        why = f"; waiting for {brokers}" if brokers else ""
        topic.journal.note(now_ns, "shares", f"{lacking}, for more than {patience_ns / NS_PER_S:g} s{why}")
