"""The TB Adaptor at work: shares of topics follow their traffic. The rule itself is `srtm.model.tb_adaptor`.

In: topics with their layout and what brokers hold (`model.transfer`), once a second (`follow`) and at every change
(`share`). Out: the shares that brokers should hold, and grants, saved before they are sent. r is shared
by rates and b by bursts (`model.burst`), both as observed. Lending evens out the backlogs of brokers, which then say
nothing about bursts: b of such topics goes by declared bursts and observed rates. While a topic is new, or its
publishers move, and until brokers have seen enough of a round of a fitting, shares are as publishers declare, and what
waits counts.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING

from srtm.control.lending import lending
from srtm.control.liveness import unanswered
from srtm.errors import InputError
from srtm.model.declared import share_out
from srtm.model.placement import policy_named
from srtm.model.split import within
from srtm.model.tb_adaptor import EXPECTED_STEPS, Expected, adapt
from srtm.units import NANO_PER_TOKEN, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from srtm.control.state import ControllerState
    from srtm.control.topic import ManagedTopic
    from srtm.model.bucket import TokenBucket

_NOISE = 0.25  # relative change of a measured rate that shares do not follow
_EARLY_NS = NS_PER_S // 2  # `follow` is called once a second, or a little earlier
_LEAST_MPS = 0.001  # of a broker that has traffic
_FRESH_NS = 3 * NS_PER_S  # a broker without a newer second keeps its share


class TBAdaptor:
    """Decides which broker should hold how much of a topic's bucket."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state

    def follow(self, topic: ManagedTopic, alive: Set[str], now_ns: int) -> None:
        """Let shares follow the traffic once a period, or, if the contract says not to, the publishers."""
        contract, sharing = topic.contract, topic.sharing
        if not contract.adapt:
            # What nobody declared is known by measuring alone, and the first moments of it say little.
            sharing.stale = sharing.stale or bool(topic.layout.guessed()) or _elsewhere(topic, alive)
        elif _idle(topic):  # seconds without traffic say nothing of the traffic to come
            since = max(len(seen.history) for seen in topic.layout.seen.values())
            sharing.stale = sharing.stale or since > 1  # once: afterwards there is one such second at most
            topic.layout.forget_rates()
        # A broker with traffic and without a share does not wait for the period: its messages would.
        elif now_ns - sharing.adapted_ns >= contract.adapt_period_s * NS_PER_S - _EARLY_NS or _elsewhere(topic, alive):
            sharing.adapted_ns = now_ns
            _adapt(topic, alive, now_ns, lends=lending(self._state, topic) != "off")

    def share(self, topic: ManagedTopic, alive: Set[str], now_ns: int) -> None:
        """Decide what brokers should hold, and grant what is free now."""
        sharing, transfer = topic.sharing, topic.transfer
        settling = topic.settling(now_ns)
        fitting = topic.fitting.running is not None and not topic.established
        busy = sharing.stale or settling or fitting
        if not busy and sharing.planned == (transfer.changes, self._state.turns):
            return
        asked = unanswered(self._state, topic, now_ns)
        if asked.expected and not topic.layout.registered:  # they will say where there is traffic
            return
        alive -= asked.missing
        if busy:
            _share_out(topic, alive, flush=settling)
        elif alive and not _all_wanted(topic, alive):  # a part is assigned to no broker: find one that can use it
            if topic.contract.adapt:
                _adapt(topic, alive, now_ns, lends=lending(self._state, topic) != "off")
            if not _all_wanted(topic, alive):
                _share_out(topic, alive)
        grants = transfer.orders(asked.late)
        if grants:
            self._state.store.save_topic(topic)
            self._state.due |= {grant.broker for grant in grants}
        sharing.planned = (transfer.changes, self._state.turns)


def _adapt(topic: ManagedTopic, alive: Set[str], now_ns: int, *, lends: bool) -> None:
    """Let shares follow the observed traffic."""
    layout, transfer, contract = topic.layout, topic.transfer, topic.contract
    usable = alive - topic.sharing.refused.keys()
    kept = _kept(topic, usable)
    wanting = layout.brokers() & usable
    if not wanting:  # shares stay where they were useful last
        return
    shares = {name: transfer.wanted.get(name) for name in sorted(wanting)}
    left = _without(transfer.whole, kept.values())
    target = kept
    if left is not None:
        # Brokers number seconds by their own clocks, so our clock judges how old they are.
        fresh = {name for name in wanting if now_ns - layout.seen[name].heard_ns <= _FRESH_NS}
        histories = {name: layout.seen[name].history for name in fresh}
        waiting = {name: layout.seen[name].waiting for name in fresh}
        young = any(len(history) < EXPECTED_STEPS for history in histories.values())
        try:
            target = kept | adapt(
                left,
                shares,
                histories,
                number=0,
                quantile=contract.quantile,
                window=contract.adapt_window_s,
                waiting=waiting,
                expected=_expected(topic) if young else None,
                needs_ntok=_needs_ntok(topic, wanting, left) if lends else None,
            )
        except InputError:  # brokers without fresh seconds hold more than is left
            topic.sharing.stale = True
            return
    if target != transfer.wanted:
        transfer.retarget(target)


def _needs_ntok(topic: ManagedTopic, brokers: Set[str], whole: TokenBucket) -> dict[str, int]:
    """Bursts of brokers that lend, in parts of b: by what publishers declare, and by rates."""
    bursts = _bursts(topic, {name: max(topic.layout.seen[name].mean_mps, _LEAST_MPS) for name in brokers})
    b_each = whole.b_ntok / sum(bursts.values())
    return {name: int(need * b_each) for name, need in bursts.items()}


def _expected(topic: ManagedTopic) -> dict[str, Expected]:
    """What brokers should see by declarations; nothing of a broker with a publisher that declared nothing."""
    layout = topic.layout
    bursts = layout.expected_bursts(topic.contract.bucket, topic.contract.quantile)
    guessed = layout.guessed()
    return {
        broker: Expected(Fraction(rate), int(bursts[broker] * NANO_PER_TOKEN))
        for broker, rate in layout.rates().items()
        if broker not in guessed
    }


def _share_out(topic: ManagedTopic, alive: Set[str], *, flush: bool = False) -> None:
    """Share by declared traffic and, while publishers are on the move, by where they are still connected.

    With `flush`, tokens go first to waiting messages. A share without traffic stays, or goes where publishers will.
    """
    transfer = topic.transfer
    usable = alive - topic.sharing.refused.keys()
    weights, guessed = _weights(topic)
    wanting = {broker: weight for broker, weight in weights.items() if broker in usable}
    if not wanting and usable:
        idle = transfer.wanted.keys() & usable or _first(topic, usable)
        wanting = dict.fromkeys(idle, 1.0)
    flush = flush and any(seen.waiting for seen in topic.layout.seen.values())
    target = _split(topic, wanting, usable, flush=flush)
    # Measured rates always vary a little. Shares that follow every change are never in force: they are on their way.
    if flush or not guessed or _changed_much(transfer.wanted, target) or not _all_wanted(topic, usable):
        transfer.retarget(target)
    topic.sharing.stale = False


def _first(topic: ManagedTopic, usable: Set[str]) -> list[str]:
    """Where publishers of an empty topic will be: anywhere if its policy spreads them, else at one broker first."""
    most = 1 if policy_named(topic.contract.policy).concentrates else int(topic.contract.bucket.b)
    return sorted(usable)[: max(1, most)]


def _weights(topic: ManagedTopic) -> tuple[Mapping[str, float], set[str]]:
    """The rate of each broker, and the brokers whose rate is measured because a publisher declared nothing."""
    layout = topic.layout
    weights: defaultdict[str, float] = defaultdict(float)
    for broker, rate in layout.rates().items():
        weights[broker] += rate
    for broker, wrong in layout.misplaced().items():
        weights[broker] += sum(layout.publishers[name].rate_mps for name in wrong)
    guessed = layout.guessed()
    for broker, seen in layout.seen.items():
        if broker in guessed:
            weights[broker] = max(weights[broker], seen.mean_mps)
        elif broker not in weights and (seen.waiting or seen.carried_mps or seen.publishers):
            weights[broker] = max(seen.carried_mps, 0.01 * layout.rate_mps, _LEAST_MPS)
    return weights, guessed


def _split(topic: ManagedTopic, rates: Mapping[str, float], usable: Set[str], *, flush: bool) -> dict[str, TokenBucket]:
    """Shares by rates and expected bursts; with `flush`, what waits counts as a burst."""
    seen, kept = topic.layout.seen, _kept(topic, usable)
    left = _without(topic.transfer.whole, kept.values())
    if left is None:
        return kept
    waiting = {name: seen[name].waiting for name in rates if name in seen} if flush else {}
    return kept | share_out(left, rates, _bursts(topic, rates), topic.layout.batches(), waiting)


def _bursts(topic: ManagedTopic, rates: Mapping[str, float]) -> dict[str, float]:
    """The burst to expect at each broker: what its publishers declare, and more if it has more traffic than theirs.

    A broker whose traffic nobody declared counts by its rate.
    """
    declared_mps = topic.layout.rates()
    declared = topic.layout.expected_bursts(topic.contract.bucket, topic.contract.quantile)
    known = [name for name in rates if name in declared]
    typical = sum(declared[name] for name in known) / sum(declared_mps[name] for name in known) if known else 1.0
    return {
        name: declared[name] * max(1.0, rate / declared_mps[name]) if name in declared else rate * typical
        for name, rate in rates.items()
    }


def _kept(topic: ManagedTopic, usable: Set[str]) -> dict[str, TokenBucket]:
    """What other brokers may have in force, and keep; nothing if that is more than the whole bucket."""
    kept = {name: share for name, share in topic.transfer.possible.items() if name not in usable}
    return kept if within(topic.transfer.whole, kept.values()) else {}


def _all_wanted(topic: ManagedTopic, alive: Set[str]) -> bool:
    """Whether what live brokers should hold, and what others may still hold, is the whole bucket."""
    transfer = topic.transfer
    shares = [share for name, share in transfer.wanted.items() if name in alive]
    shares += [share for name, share in transfer.possible.items() if name not in alive]
    return (
        sum(share.r_mtps for share in shares) >= transfer.whole.r_mtps
        and sum(share.b_ntok for share in shares) >= transfer.whole.b_ntok
    )


def _idle(topic: ManagedTopic) -> bool:
    """Whether publishers of a topic have declared what they will send, and have not sent anything lately."""
    layout = topic.layout
    seen = [each for each in layout.seen.values() if len(each.history)]
    quiet = bool(seen) and not any(each.waiting or each.history.mean_messages for each in seen)
    return quiet and bool(layout.place) and not layout.guessed()


def _elsewhere(topic: ManagedTopic, alive: Set[str]) -> bool:
    """Whether other brokers should hold shares than those with publishers or traffic."""
    wanting = topic.layout.brokers() & alive - topic.sharing.refused.keys()
    return bool(wanting) and wanting != topic.transfer.wanted.keys() & alive


def _changed_much(old: Mapping[str, TokenBucket], new: Mapping[str, TokenBucket]) -> bool:
    if old.keys() != new.keys():
        return True
    return any(abs(old[name].r_mtps - new[name].r_mtps) > _NOISE * old[name].r_mtps for name in new)


def _without(whole: TokenBucket, shares: Iterable[TokenBucket]) -> TokenBucket | None:
    """What is left of a bucket; None if that is too little for a bucket."""
    r_mtps, b_ntok = whole.r_mtps, whole.b_ntok
    for share in shares:
        r_mtps, b_ntok = r_mtps - share.r_mtps, b_ntok - share.b_ntok
    return type(whole)(r_mtps, b_ntok) if r_mtps >= 1 and b_ntok >= NANO_PER_TOKEN else None
