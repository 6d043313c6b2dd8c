"""Brokers that share a topic, and a controller that a test plays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from srtm.protocol.exchange import (
    Answer,
    Contract,
    Exchange,
    Grant,
    Lends,
    Lent,
    Listed,
    Peer,
    Share,
    TopicReport,
    read,
    write,
)
from tests.broker.running import Running, in_memory, running

TOKEN = 10**9
BIRTH = 7
NOBODY = "127.0.0.1:1"  # a controller that is not there: it is played by the test


class Lending:
    """Brokers with equal shares of topic `t`, which lend each other tokens."""

    def __init__(self, brokers: Sequence[Running], r: int, b: int, rule: str, birth: int = BIRTH) -> None:
        self.brokers = list(brokers)
        self.contract = Contract(r * 1000 * len(brokers), b * TOKEN * len(brokers))
        self.share = Share(r * 1000, b * TOKEN)
        self.rule = rule
        self.birth = birth
        self.number = 0
        self.sequence = 0
        self.lease_ns = 10**12
        self.lives: list[ExitStack] = []  # each ends one broker
        for broker in brokers:
            self.tell(broker, contracts=True, full=True)

    def grant_again(self, broker: Running, birth: int) -> None:
        """The topic is created anew under another birth, and this broker knows."""
        self.birth = birth
        self.tell(broker, contracts=True, full=True)

    def end(self, number: int) -> None:
        """Close everything that a broker has open, as the kernel does when its process is killed."""
        self.brokers[number].broker.turn.recorder = None
        self.lives[number].close()

    def tell(
        self, broker: Running, *, contracts: bool = False, full: bool = False, lends: bool = True, lease: bool = False
    ) -> TopicReport:
        """An exchange with one broker; returns its report."""
        self.number += 1
        self.sequence += 1
        peers = [
            Peer(each.broker.options.name, f"127.0.0.1:{each.broker.tcp_port}", self.share) for each in self.brokers
        ]
        mono_ns = broker.do(broker.broker.clock.monotonic_ns)
        said = Exchange(
            epoch=1,
            number=self.number,
            incarnation=broker.broker.started_ns,
            echo=mono_ns if lease else None,
            lease_ns=self.lease_ns,
            safe_percent=50,
            version=self.number,
            contracts={"t": Listed(self.birth, self.contract)} if contracts else None,
            grants={"t": Grant(self.birth, self.sequence, self.share, self.share.b_ntok)} if full else {},
            lends={"t": Lends(self.birth, self.rule, peers)} if lends else {},
        )
        status, body = broker.post("/srtm/exchange", write(said))
        assert status == 200, body
        return read(body, Answer).topics["t"]

    def lent(self, broker: Running) -> Lent:
        """What a broker has lent and borrowed."""
        found = broker.get("/stats?format=json&topic=t")["topics"][0]["srtm"]["lent"]
        return Lent(**found | {"peers": []})

    def peers(self, broker: Running) -> dict[str, dict[str, Any]]:
        """The same by peer."""
        found = broker.get("/stats?format=json&topic=t")["topics"][0]["srtm"]["lent"]["peers"]
        return {each["peer"]: each for each in found}

    def meet(self) -> None:
        """Until all are connected to all."""
        for broker in self.brokers:
            broker.wait_until(
                lambda it: sum(link.greeted for link in links(it)._links.values()) == len(self.brokers) - 1
            )


def links(broker: Any) -> Any:
    """The connections of a broker to others."""
    return broker.control.lenders.wire


@contextmanager
def in_memory_lending(
    count: int = 2, *, r: int = 10, b: int = 10, rule: str = "when_waiting", **options: Any
) -> Iterator[Lending]:
    """So many brokers in memory, in virtual time, that know each other."""
    with ExitStack() as stack:
        brokers: list[Any] = []
        for number in range(count):
            beside = brokers[0] if brokers else None
            given = {"name": f"broker-{number}", "tcp_port": 5000 + 2 * number, "controller": NOBODY, **options}
            brokers.append(stack.enter_context(in_memory(beside, **given)))
        lending = Lending(brokers, r, b, rule)
        lending.meet()
        yield lending


@contextmanager
def running_lending(
    count: int = 2, *, r: int = 10, b: int = 10, rule: str = "when_waiting", **options: Any
) -> Iterator[Lending]:
    """So many brokers on real sockets, each in a thread of its own."""
    with ExitStack() as stack:
        lives = [stack.enter_context(ExitStack()) for _ in range(count)]
        brokers = [
            life.enter_context(running(name=f"broker-{number}", controller=NOBODY, **options))
            for number, life in enumerate(lives)
        ]
        lending = Lending(brokers, r, b, rule)
        lending.lives = lives
        lending.meet()
        yield lending
