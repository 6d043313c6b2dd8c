"""Clusters in virtual time whose brokers lend each other tokens, whatever else goes wrong."""

from __future__ import annotations

import random
from typing import Any

from msgspec import structs

from srtm.control.controller import Controller
from srtm.control.store import Store
from srtm.protocol import exchange
from srtm.protocol.exchange import Lends, Peer, Share
from srtm.testing.virtual import VirtualCluster
from tests.control.faults import Run, options

RULES = ("when_waiting", "early", "off")


class LendingCluster(VirtualCluster):
    """Every exchange names all brokers with a share as peers, as they are, or as they were a moment ago."""

    lent_ptok = borrowed_ptok = 0
    fixed_rule: str | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        self.accused: dict[str, str] = {}  # everybody is honest here
        super().__init__(*args, **more)

    def _exchange(self, controller: Controller, name: str, text: bytes) -> None:
        said = exchange.read(text, exchange.Exchange)
        lends = {}
        for topic in controller.topics.values():
            rule = self.fixed_rule or random.Random(topic.birth).choice(RULES[:2])
            if self.fixed_rule is None and self.rng.random() < 0.02:
                rule = self.rng.choice(RULES)
            peers = [
                Peer(other, f"127.0.0.1:{broker.options.tcp_port}", share)
                for other, broker in self.brokers.items()
                if topic.name in broker.topics and (share := self._share(other, topic.name))
            ]
            lends[topic.name] = Lends(topic.birth, rule, peers)
        super()._exchange(controller, name, exchange.write(structs.replace(said, lends=lends)))

    def _answered(self, controller: Controller, name: str, said: exchange.Exchange, text: bytes) -> None:
        super()._answered(controller, name, said, text)
        for topic in controller.topics.values():
            self.accused |= {f"{topic.name} of {topic.birth}": text for text in topic.lending.accused.values()}

    def _share(self, broker: str, topic: str) -> Share | None:
        limiter = self.brokers[broker].topics[topic].limiter
        return Share.of(limiter.bucket) if limiter else None

    def kill_broker(self, name: str, *, noticed: bool = True) -> None:
        """Count what it lent, too."""
        self._count(name)
        super().kill_broker(name, noticed=noticed)

    def count(self) -> tuple[int, int]:
        """Pico-tokens that brokers lent and borrowed; those of topics that were created again are not all counted."""
        for name in self.brokers:
            self._count(name)
        return self.lent_ptok, self.borrowed_ptok

    def _count(self, name: str) -> None:
        for lender in self.brokers[name].control.lenders._lenders.values():
            self.lent_ptok += lender._lending.counts.lent_ptok
            self.borrowed_ptok += lender._lending.counts.borrowed_ptok


class LendingRun(Run):
    """The same faults and actions as without lending."""

    world: LendingCluster

    def cluster(self, kind: type[VirtualCluster]) -> VirtualCluster:
        del kind
        return LendingCluster(self.seed, options(self.rng), Store(), brokers=self.rng.choice([2, 3, 4]))
