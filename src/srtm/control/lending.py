"""Lending, seen from the controller: which brokers of a topic lend each other tokens, with whom, and by which rule.

Brokers do the lending (docs/adr/0021-lending.md). The controller names the peers in every exchange. It names no broker
that does not answer, and no share that is not in force. A peer whose share has changed since is harmless: a borrower
takes no more than its own bucket has room for, whatever it believes about others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from srtm.control.choosing import Choosing
from srtm.model.law import LIMIT
from srtm.model.lending import known_term
from srtm.protocol.exchange import Lends, Peer, Share
from srtm.sim.simulate import Loans
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic
    from srtm.model.bucket import TokenBucket
    from srtm.model.lending import Rule
    from srtm.protocol.exchange import Lent

ROUND_TRIP_NS = 500_000  # between brokers, until they report theirs
_AGAIN_NS = 10 * NS_PER_S  # the least time between two choices: publishers that come one by one change the places often


def rule_of(topic: ManagedTopic) -> Rule:
    """The rule that a topic's contract asks for; the harmless one until `auto` is decided, or if it cannot be."""
    term = topic.contract.lending
    if term == "auto":
        return topic.lending.chosen or "when_waiting"
    return "when_waiting" if term == "when_waiting" else "early" if term == "early" else "off"


def lenders(state: ControllerState, topic: ManagedTopic) -> dict[str, TokenBucket]:
    """The shares of brokers that answer and have not lied, if there are two or more and the contract lets them lend."""
    if topic.contract.lending == "off" or topic.contract.overflow == "drop":
        return {}
    members, accused = state.members, topic.lending.accused
    held = topic.transfer.held
    usable = [name for name in sorted(held) if name in members and members[name].status == "alive"]
    found = {name: held[name] for name in usable if name not in accused}
    return found if len(found) > 1 else {}


def lending(state: ControllerState, topic: ManagedTopic) -> Rule:
    """The rule that brokers of a topic follow now."""
    return rule_of(topic) if lenders(state, topic) else "off"


def lends(state: ControllerState, broker: str) -> dict[str, Lends]:
    """With whom a broker lends and borrows, by topic."""
    found = {}
    for topic in state.lending:
        rule = rule_of(topic)
        shares = lenders(state, topic) if rule != "off" else {}
        if broker in shares:
            peers = [
                Peer(name, member.address, Share(share.r_mtps, share.b_ntok), member.incarnation)
                for name, share in shares.items()
                if name != broker and (member := state.members[name])
            ]
            found[topic.name] = Lends(topic.birth, rule, peers)
    return found


def round_trip_ns(topic: ManagedTopic) -> int:
    """The longest round trip of asks that a broker has measured."""
    measured = [seen.lent.round_trip_ns for seen in topic.layout.seen.values() if seen.lent and has_measured(seen.lent)]
    return max(measured, default=0) or ROUND_TRIP_NS


def has_measured(lent: Lent) -> bool:
    """Whether a broker's round trip is more than its first guess: an ask was answered."""
    return lent.asks > lent.unanswered + 1  # one may be on its way


def loans_of(topic: ManagedTopic, term: str | None = None) -> Loans | None:
    """Lending as the simulator knows it, by a topic's contract or another term; None if its brokers do not lend."""
    contract, asked = topic.contract, known_term(term or topic.contract.lending)
    lends = asked != "off" and contract.overflow != "drop" and contract.bucket.pico_law.burst <= LIMIT
    return Loans(asked, round_trip_ns(topic)) if lends else None


class Lending:
    """Chooses rules for topics whose contracts leave them to the controller."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state

    def watch(self, topic: ManagedTopic, now_ns: int) -> None:
        """Choose again if publishers, places or brokers have changed since the last choice. Call once a second."""
        kept, layout = topic.lending, topic.layout
        if topic.contract.lending != "auto":
            kept.chosen, kept.basis, kept.choosing = None, (), None
            return
        shares = lenders(self._state, topic)
        basis = (topic.contract, layout.roster, layout.place.changes, *shares)
        settled = topic.opened and topic.transfer.done and not topic.settling(now_ns)
        if not shares or not settled or basis == kept.basis or kept.choosing or now_ns < kept.next_ns:
            return
        kept.basis, kept.next_ns = basis, now_ns + _AGAIN_NS
        placed = [(layout.publishers[publisher], broker) for publisher, broker in layout.place.items()]
        if not placed or layout.undeclared or not layout.place.brokers <= shares.keys():  # nobody knows what is sent
            self._decide(topic, None, now_ns)
            return
        kept.choosing = Choosing(
            topic.name,
            placed,
            shares,
            round_trip_ns(topic),
            topic.contract.quantile,
            self._state.options.seed,
            topic.contract.slo_ns,
        )

    def jobs(self) -> list[Choosing]:
        """Predictions that wait for their `job` to run; call `done` after it."""
        choosing = (topic.lending.choosing for topic in self._state.topics.values())
        return [each for each in choosing if each and each.job]

    def done(self, choosing: Choosing, now_ns: int) -> None:
        """A prediction has run."""
        choosing.job = None
        topic = self._state.topics.get(choosing.topic)
        if topic is None or topic.lending.choosing is not choosing:  # removed or changed meanwhile
            return
        topic.lending.choosing = None
        self._decide(topic, choosing.rule, now_ns, choosing.given_up)

    def _decide(self, topic: ManagedTopic, rule: Rule | None, now_ns: int, problem: str = "") -> None:
        before, topic.lending.chosen = rule_of(topic), rule
        if problem:
            topic.journal.note(now_ns, "lending", f"{rule_of(topic)}: no prediction: {problem}")
        elif rule_of(topic) != before:
            topic.journal.note(now_ns, "lending", f"{rule_of(topic)}, was {before}")
        if rule_of(topic) != before:
            self._state.due |= lenders(self._state, topic).keys()
            self._state.changed(topic)
