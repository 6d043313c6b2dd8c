"""Clusters in virtual time whose brokers lend each other tokens, whatever else goes wrong.

Beside the invariants of `faults`, two are looked at with every event: no contract's brokers have ever borrowed more
than they lent, and no waiting message leaves later than its broker's share alone lets it go.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec import structs

from srtm.broker.gate import Gate
from srtm.control.store import Store
from srtm.model.limiter import Limiter
from srtm.protocol import exchange
from srtm.protocol.exchange import Lends, Peer, Share
from srtm.testing.virtual import VirtualCluster
from srtm.units import NS_PER_S
from tests.control.faults import Outcome, Run, options

if TYPE_CHECKING:
    from srtm.broker.message import Message
    from srtm.control.controller import Controller
    from srtm.control.options import ControllerOptions
    from srtm.model.lending import Term
    from srtm.testing.traffic import VirtualPublisher

RULES = ("when_waiting", "early", "off")
TERMS: tuple[Term, ...] = ("auto", "when_waiting", "early")
_NEVER = 2**63


@dataclass
class _Kept:
    gate: Gate
    share: Any = None
    times: deque[int] = field(default_factory=deque)  # of the messages that wait, in order


class Promises:
    """When each waiting message leaves at the latest.

    The promise: from the moment at which a message begins to wait, its broker's share alone, from the state that it is
    in then. A change of the share makes a new promise, as it does without lending.
    """

    def __init__(self) -> None:
        self.made = 0
        self.broken: list[str] = []
        self._kept: dict[int, _Kept] = {}  # by the gate's identity, which stays its own while it is kept here

    def look(self, gate: Gate) -> None:
        """Note the promises to messages that wait since the last look, or whose share has changed since."""
        kept = self._of(gate)
        limiter, waiting, ready = gate.limiter, len(gate.waiting), len(gate._ready)
        if kept.share != _share(gate) or len(kept.times) > ready + waiting:
            kept.share = _share(gate)
            # Those that had their token before the change leave first, as promised.
            kept.times = deque([*kept.times, *[_NEVER] * ready][:ready])
        for ahead in range(len(kept.times) - ready, waiting):
            kept.times.append(limiter.next_release_ns(waiting - ahead) if limiter else _NEVER)
            self.made += 1

    def left(self, gate: Gate, messages: list[Message], where: str) -> None:
        """Messages leave, those that waited first."""
        kept = self._of(gate)
        changed = kept.share != _share(gate)
        for message in messages:
            if not kept.times:
                return
            promised_ns = kept.times.popleft()
            # What leaves after the share has changed leaves by the new one.
            if message.release_ns > promised_ns and not (changed and message.release_ns > gate._changed_ns):
                self.broken.append(f"{where}: {message.release_ns - promised_ns} ns after {promised_ns}")

    def _of(self, gate: Gate) -> _Kept:
        return self._kept.setdefault(id(gate), _Kept(gate))


def _share(gate: Gate) -> tuple[int, Any, int]:
    return id(gate.limiter), gate.limiter and gate.limiter.bucket, gate._changed_ns


class Ledger:
    """Pico-tokens that brokers of a contract have lent and borrowed, by its birth."""

    def __init__(self) -> None:
        self.lent: Counter[int | None] = Counter()
        self.borrowed: Counter[int | None] = Counter()
        self.created: list[str] = []

    def moved(self, birth: int | None, ptok: int) -> None:
        """Tokens leave a bucket, or come into one."""
        (self.borrowed if ptok > 0 else self.lent)[birth] += abs(ptok)
        if self.borrowed[birth] > self.lent[birth]:
            self.created.append(f"birth {birth}: {self.borrowed[birth]} borrowed, {self.lent[birth]} lent")


class LendingCluster(VirtualCluster):
    """Brokers that lend, watched.

    Peers are those that the controller names, or (`strange`) all brokers with a share, as they are or as they were a
    moment ago, under rules that change.
    """

    def __init__(self, seed: int, chosen: ControllerOptions, *, brokers: int, strange: bool) -> None:
        self.promises, self.ledger, self.strange = Promises(), Ledger(), strange
        self.accused: dict[str, str] = {}  # everybody is honest here
        super().__init__(seed, chosen, Store(), brokers=brokers)

    def shifted(self, limiter: Limiter, ptok: int) -> None:
        """Lending moves tokens into or out of a bucket."""
        for broker in self.brokers.values():
            for name, topic in broker.topics.items():
                if topic.limiter is limiter:
                    self.ledger.moved(broker.control.birth(name), ptok)

    def drained(self, topic: str, broker: str, released: list[Message], known: list[tuple[int, int | None]]) -> None:
        """See whether messages leave in time."""
        where = f"{(self.now_ns - 10**12) / NS_PER_S:.3f} s {topic} at {broker}"
        self.promises.left(self.brokers[broker].topics[topic].gate, released, where)
        super().drained(topic, broker, released, known)

    def _look(self) -> None:
        for broker in self.brokers.values():
            for topic in broker.topics.values():
                self.promises.look(topic.gate)

    def _send(self, publisher: VirtualPublisher, messages: int) -> None:
        super()._send(publisher, messages)
        if publisher.broker is not None and publisher.topic in publisher.broker.topics:
            self.promises.look(publisher.broker.topics[publisher.topic].gate)

    def _turn(self) -> None:
        super()._turn()
        self._look()

    def _exchange(self, controller: Controller, name: str, text: bytes) -> None:
        super()._exchange(controller, name, self._with_strangers(controller, text) if self.strange else text)
        self._look()

    def _with_strangers(self, controller: Controller, text: bytes) -> bytes:
        said = exchange.read(text, exchange.Exchange)
        lends = {}
        for topic in controller.topics.values():
            rule = random.Random(topic.birth).choice(RULES[:2])
            if self.rng.random() < 0.02:
                rule = self.rng.choice(RULES)
            peers = [
                Peer(other, f"127.0.0.1:{broker.options.tcp_port}", share)
                for other, broker in self.brokers.items()
                if topic.name in broker.topics and (share := self._share(other, topic.name))
            ]
            lends[topic.name] = Lends(topic.birth, rule, peers)
        return exchange.write(structs.replace(said, lends=lends))

    def _answered(self, controller: Controller, name: str, said: exchange.Exchange, text: bytes) -> None:
        super()._answered(controller, name, said, text)
        for topic in controller.topics.values():
            self.accused |= {f"{topic.name} of {topic.birth}": text for text in topic.lending.accused.values()}

    def _share(self, broker: str, topic: str) -> Share | None:
        limiter = self.brokers[broker].topics[topic].limiter
        return Share.of(limiter.bucket) if limiter else None


class LendingRun(Run):
    """The faults and actions of a run without lending; besides, brokers lose each other, and the network changes."""

    world: LendingCluster

    def cluster(self, kind: type[VirtualCluster]) -> VirtualCluster:
        del kind
        chosen, brokers = options(self.rng), self.rng.choice([2, 3, 4])
        return LendingCluster(self.seed, chosen, brokers=brokers, strange=self.seed % 2 == 1)

    def lending(self) -> Term:
        """Any that lends."""
        return self.rng.choice(TERMS)

    def go(self) -> Outcome:
        """Count what is lent meanwhile."""
        shift, limit, world = Limiter.shift, Gate.limit, self.world

        def limited(gate: Gate, *args: Any) -> int:
            """A share may change twice before anything leaves: a lease ends during a pause, and then the contract."""
            surrendered = limit(gate, *args)
            world.promises.look(gate)
            return surrendered

        def counted(limiter: Limiter, now_ns: int, ptok: int) -> None:
            world.shifted(limiter, ptok)
            shift(limiter, now_ns, ptok)

        with patch.object(Limiter, "shift", counted), patch.object(Gate, "limit", limited):
            return super().go()

    def _one_fault(self) -> None:
        kind = self.rng.choice(["network", "part", *["other"] * 6])
        if kind == "other":
            super()._one_fault()
            return
        self.faults.append(f"{self._at()} {kind}")
        if kind == "network":
            self.faulty(True)
        else:
            self._part()

    def _part(self) -> None:
        """Two brokers lose each other for a while, or one of them the other."""
        one, other = self.rng.sample(sorted(self.world.brokers), 2) if len(self.world.brokers) > 1 else ("", "")
        parted = self.world.network.parted
        for way in [(one, other), (other, one)][: self.rng.choice([1, 2])]:
            parted.add(way)
            self.world.at(self.rng.randrange(1, 6 * NS_PER_S), parted.discard, way)

    def _heal(self) -> None:
        self.world.network.parted.clear()
        super()._heal()
