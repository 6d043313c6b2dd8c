"""The audit of lending, fed by brokers' reports (`model.audit`): who lied, and what follows from it.

A broker that lied is named to nobody as a peer of that topic, so it can neither ask nor lend; its own share stays, with
all that a share promises. It is judged by its present process only: one that was started again begins anew.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from srtm.model.audit import Book, Party
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from srtm.control.members import Member
    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic
    from srtm.model.bucket import TokenBucket
    from srtm.protocol.exchange import Lent

log = logging.getLogger(__name__)

_SETTLED_NS = 10 * NS_PER_S  # a broker that was silent works off what has come meanwhile, in this time


def book_of(lent: Lent | None) -> Book:
    """A broker's books as it reports them; empty if it never lent."""
    if lent is None:
        return Book({}, {}, 0)
    entries = [(Party(peer.name, number), given, got) for peer in lent.peers for number, given, got in peer.amounts]
    return Book(
        {party: given for party, given, _ in entries if given},
        {party: got for party, _, got in entries if got},
        lent.spent,
    )


class Auditor:
    """Audits every topic that lends."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state

    def hear(
        self,
        topic: ManagedTopic,
        member: Member,
        lent: Lent | None,
        asked: int,
        share: TokenBucket | None,
        gift_ntok: int,
        now_ns: int,
    ) -> None:
        """A broker's report, made after exchange `asked`; `share` is the most that it may have had until then."""
        kept = topic.lending
        if lent is None and not kept.audited:
            return
        kept.audited = True
        audit, broker = kept.audit, Party(member.name, member.incarnation)
        audit.hear(broker, book_of(lent), asked, self._state.number)
        if share is None or now_ns - member.since_ns < _SETTLED_NS:
            audit.lost_sight(member.name)
        else:
            audit.check_spending(broker, share, topic.contract.bucket, gift_ntok, now_ns)
        self._judge(topic, now_ns)
        self._watch_asks(topic, member, lent, now_ns)

    def restarted(self, member: Member, now_ns: int) -> None:
        """A broker was started again: its former process lied or did not, and is gone."""
        for topic in self._state.topics.values():
            if topic.lending.audited:
                topic.lending.audit.restarted(Party(member.name, member.incarnation))
                self._judge(topic, now_ns)

    def _judge(self, topic: ManagedTopic, now_ns: int) -> None:
        kept, members = topic.lending, self._state.members
        before = kept.accused
        kept.accused = {name: evidence for name, evidence in kept.audit.accused.items() if name in members}
        if before.keys() == kept.accused.keys():
            return
        for name in sorted(kept.accused.keys() - before.keys()):
            text = f"{name} is excluded from lending: {kept.accused[name]}"
            topic.journal.note(now_ns, "accused", text)
            log.warning("TOPIC(%s): %s", topic.name, text)
        for name in sorted(before.keys() - kept.accused.keys()):
            topic.journal.note(now_ns, "accused", f"{name} is no longer accused")
        self._state.due |= topic.transfer.held.keys() & self._state.members.keys()
        self._state.changed(topic)

    def _watch_asks(self, topic: ManagedTopic, member: Member, lent: Lent | None, now_ns: int) -> None:
        """Say once who asks without end; lenders have refused the asks already."""
        for peer in lent.peers if lent else ():
            pair = peer.name, member.name
            if peer.refused and pair not in topic.lending.flooded:
                topic.lending.flooded.add(pair)
                text = f"{peer.name} asks too often: {member.name} refused {peer.refused:,} of {peer.heard:,} asks"
                topic.journal.note(now_ns, "lending", text)
