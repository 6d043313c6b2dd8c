"""One run of a cluster in virtual time with faults and operators at work, all of it from one integer.

Two invariants are looked at every few milliseconds, at the brokers themselves: safety, that what they have in force of
a contract, and of those that had its name before, is never more than it allows; and liveness, that after the last fault
all of it is in force again within a lease and two exchanges, wherever messages wait (`model.shares`).
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from srtm.broker.message import Message
from srtm.control.controller import Controller
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.model.bucket import TokenBucket
from srtm.model.limiter import Limiter
from srtm.model.shares import patience_s, short
from srtm.model.split import within
from srtm.model.timeline import Timeline, largest_excess
from srtm.protocol import exchange
from srtm.protocol.exchange import Contract
from srtm.testing.virtual import VirtualCluster
from srtm.testing.virtual_broker import VirtualBroker
from srtm.units import NANO_PER_TOKEN, NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from srtm.model.lending import Term

LEASE_S = 3.0
LAST_S = 15.0
MOVING_NS = 2 * NS_PER_S  # that a share may be on its way: two exchanges
FAULTS = ("kill", "restart", "pause", "cut", "controller", "nothing", "shift")
ACTIONS = ("move", "drain", "forget", "change", "recreate", "remove", "rename", "hold", "fit")


@dataclass
class Outcome:
    """What a run came to; `worst_tokens` is how far the worst window of any contract was above what it allows."""

    seed: int
    faults: list[str]
    messages: int
    released: int
    contracts: int
    overdrawn: list[str]
    starved: list[str]
    worst_tokens: float
    served: dict[str, float]  # in the last seconds: released, of what one bucket that began empty would have released
    fits: int

    @property
    def holds(self) -> bool:
        """Whether both invariants held, and traffic flows again."""
        return (
            not self.overdrawn
            and not self.starved
            and self.worst_tokens <= 0
            and min(self.served.values(), default=1.0) >= 0.9
        )


class Nameless(VirtualCluster):
    """A cluster in which all contracts of a name are one to brokers, as if nobody had told their births apart."""

    def _exchange(self, controller: Controller, name: str, text: bytes) -> None:
        said = exchange.read(text, exchange.Exchange)
        listed = said.contracts and {topic: structs.replace(each, birth=1) for topic, each in said.contracts.items()}
        grants = {topic: structs.replace(each, birth=1) for topic, each in said.grants.items()}
        moves = [structs.replace(each, birth=1) for each in said.moves]
        alike = structs.replace(said, contracts=listed, grants=grants, moves=moves)
        super()._exchange(controller, name, exchange.write(alike))

    def _answered(self, controller: Controller, name: str, said: exchange.Exchange, text: bytes) -> None:
        answer = exchange.read(text, exchange.Answer)
        births = {topic.name: topic.birth for topic in controller.topics.values()}
        reports = {topic: structs.replace(each, birth=births.get(topic, 1)) for topic, each in answer.topics.items()}
        unlike = structs.replace(answer, topics=reports)
        super()._answered(controller, name, said, exchange.write(unlike))

    def released(self, topic: str, broker: str, message: Message, birth: int | None) -> None:
        """Brokers cannot say under which contract: under the one that is open."""
        del birth
        known = self.controller.topics.get(topic) if self.controller else None
        super().released(topic, broker, message, known.birth if known and known.opened else None)


class Life:
    """One contract, from its creation to its end."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.ceilings: list[tuple[int, TokenBucket]] = [(0, contract.bucket)]  # what may be out, and since when

    @property
    def most(self) -> TokenBucket:
        return self.ceilings[-1][1]


def options(rng: random.Random) -> ControllerOptions:
    return ControllerOptions(lease_s=LEASE_S, mcap_mps=rng.choice([60.0, 120.0, 400.0]), seed=rng.randrange(100))


class Run:
    """A cluster, its topics, what goes wrong, and what operators do meanwhile."""

    def __init__(self, seed: int, *, seconds: float = 25.0, identity: bool = True) -> None:
        """Without `identity`, brokers are not told which contract of a name is meant."""
        self.seed, self.rng = seed, random.Random(seed)
        self.seconds = seconds
        self.identity = identity
        self.world = self.cluster(VirtualCluster if identity else Nameless)
        self.lives: dict[int, Life] = {}  # by birth
        self.current: dict[str, int] = {}  # the birth of each topic that is under contract
        self.opened: dict[str, int] = {}  # the birth of each topic's last contract that opened
        self.publishers: dict[str, list[DeclaredPublisher]] = {}
        self.faults: list[str] = []
        self.overdrawn: list[str] = []
        self.starved: list[str] = []
        self.short_since: dict[str, int] = {}
        self._renamed = 0

    def cluster(self, kind: type[VirtualCluster]) -> VirtualCluster:
        return kind(self.seed, options(self.rng), Store(), brokers=self.rng.choice([2, 3, 4]))

    def slo_ns(self) -> int:
        """The SLO of the next contract."""
        return NS_PER_MS

    def lending(self) -> Term:
        """By which rule brokers of the next contract lend."""
        return "off"

    def actions(self) -> tuple[str, ...]:
        """What may happen next."""
        return FAULTS + ACTIONS

    def go(self) -> Outcome:
        world = self.world
        world.run(1.0)
        for number in range(self.rng.choice([1, 1, 2, 3])):
            self._begin(f"topic-{number}")
        self.faulty(True)
        end = world.now_ns + self.seconds * NS_PER_S
        while world.now_ns < end:
            self._one_fault()
            self._pass(self.rng.uniform(0.0, 2.5))
        self._heal()
        self._pass(patience_s(LEASE_S, world.options.exchange_s))
        self._pass(2 * LEASE_S, live=True)
        began_ns = world.now_ns
        self._pass(LAST_S, live=True)
        served = {name: self._served(name, began_ns) for name in self.current}
        return Outcome(
            self.seed,
            self.faults,
            sum(publisher.sent for publisher in world.publishers.values()),
            sum(len(times) for times in world.record.releases.values()),
            len(self.lives),
            self.overdrawn,
            self.starved,
            max(self._excess(birth) for birth in self.lives),
            served,
            sum(topic.fitting.last is not None for topic in world.controller.topics.values())
            if world.controller
            else 0,
        )

    def _begin(self, name: str) -> None:
        rng, world = self.rng, self.world
        count, rate = rng.randrange(4, 24), rng.choice([2.0, 5.0, 10.0])
        batch = rng.choice([1, 3])
        self.publishers[name] = [
            DeclaredPublisher(f"{name}-{i}", rate, f"g{i // 4}", batch=batch) for i in range(count)
        ]
        self._create(name, rng.choice([8, 20, 60]))
        self._pass(rng.choice([0.0, 1.0]))  # before it begins, messages pass freely
        world.publish(name, self.publishers[name])
        self._pass(1.0)
        if rng.random() < 0.5:
            assert world.controller
            world.controller.fit(name, world.now_ns)

    def _create(self, name: str, b: int) -> None:
        """Put a topic under contract, with its publishers named or not; some contracts are smaller than the traffic."""
        rng, world = self.rng, self.world
        assert world.controller
        r = max(1.0, sum(each.rate_mps for each in self.publishers[name]) * rng.choice([0.6, 1.1, 1.5]))
        contract = Contract(
            round(r * 1000),
            b * NANO_PER_TOKEN,
            slo_ns=self.slo_ns(),
            policy=rng.choice(["srtm", "lb", "max_min", "conc"]),
            fit=rng.choice(["measure", "none"]),
            adapt=rng.random() < 0.8,
            lending=self.lending(),
        )
        topic = world.controller.create(name, contract, world.now_ns)
        if rng.random() < 0.5:
            world.controller.register(name, self.publishers[name], world.now_ns)
            world.controller.gather(name, world.now_ns)
        self.lives[topic.birth] = Life(contract)
        self.current[name] = topic.birth

    def faulty(self, on: bool) -> None:
        world, rng = self.world, self.rng
        world.network.loss = rng.choice([0.0, 0.1, 0.4]) if on else 0.0
        world.network.doubling = rng.choice([0.0, 0.3]) if on else 0.0
        world.network.longest_delay_ns = rng.choice([5, 200, 4_000]) * NS_PER_MS if on else 5 * NS_PER_MS

    def _one_fault(self) -> None:
        rng = self.rng
        names = sorted(self.world.brokers)
        kind, name = rng.choice(self.actions()), rng.choice(names)
        self.faults.append(f"{self._at()} {kind} {name}")
        if kind in FAULTS:
            self._fault(kind, name, names)
        elif self.world.controller:
            self._act(kind, name)

    def _fault(self, kind: str, name: str, names: list[str]) -> None:
        world, rng = self.world, self.rng
        if kind in ("kill", "restart") and len(names) > 1:
            world.kill_broker(name, noticed=rng.random() < 0.5)
            world.at(rng.randrange(6 * NS_PER_S if kind == "kill" else NS_PER_S // 5), self._start, name)
        elif kind == "pause":
            world.pause_broker(name, rng.randrange(1, 6 * NS_PER_S))
        elif kind == "cut":
            world.network.cut.add(name)
            world.at(rng.randrange(1, 9 * NS_PER_S), world.network.cut.discard, name)
        elif kind == "controller" and world.controller:
            world.kill_controller()
            world.at(rng.randrange(1, 6 * NS_PER_S), self._start_controller)
        elif kind == "shift":
            for publisher in world.publishers.values():
                if rng.random() < 0.5:
                    world._connect(publisher, rng.choice(names))

    def _act(self, kind: str, broker: str) -> None:
        """What an operator may do at any moment."""
        world, rng, controller = self.world, self.rng, self.world.controller
        assert controller
        topic = rng.choice(sorted(self.current)) if self.current else None
        if kind == "drain" and broker in controller.members:
            controller.drain(broker, world.now_ns, on=not controller.members[broker].draining)
        elif kind == "forget":
            for name in sorted(controller.members.keys() - world.brokers.keys()):
                controller.forget(name, world.now_ns)
        elif topic is None:
            return
        elif kind == "move" and broker in controller.members and controller.members[broker].usable:
            known = sorted(controller.topics[topic].layout.publishers)
            controller.move(topic, rng.sample(known, min(2, len(known))), broker, world.now_ns)
        elif (
            kind == "fit"
            and controller.topics[topic].layout.publishers
            and any(m.usable for m in controller.members.values())
        ):
            controller.fit(topic, world.now_ns)
        elif kind == "hold":
            controller.pause(topic, world.now_ns, on=not controller.topics[topic].paused)
        elif kind == "change":
            self._change(topic)
        elif kind == "recreate":
            self._remove(topic)
            self._create(topic, rng.choice([4, 8, 20, 60]))
        elif kind == "remove":
            self._remove(topic)
            world.at(rng.randrange(3 * NS_PER_S), self._create_again, topic)
        elif kind == "rename":
            self._remove(topic)
            self._renamed += 1
            name = f"topic-{self._renamed}-renamed"
            self.publishers[name] = self.publishers[topic]
            for each in world.publishers.values():  # they go on under the new name, from where they are
                if each.topic == topic:
                    world.rename(each, name)
            self._create(name, rng.choice([8, 20, 60]))

    def _remove(self, name: str) -> None:
        assert self.world.controller
        self.world.controller.remove(name, self.world.now_ns)
        del self.current[name]

    def _create_again(self, name: str) -> None:
        if name in self.current:
            return
        if self.world.controller:
            self._create(name, self.rng.choice([4, 8, 20, 60]))
        else:
            self.world.at(NS_PER_S, self._create_again, name)

    def _change(self, name: str) -> None:
        """Another contract: what may be out is the larger of both until the controller says that all cuts are made."""
        assert self.world.controller
        life, now = self.lives[self.current[name]], self.rng.choice([0.5, 0.8, 1.5])
        before = life.contract
        contract = structs.replace(before, r_mtps=round(before.r_mtps * now), b_ntok=round(before.b_ntok * now))
        if contract.b_ntok < 4 * NANO_PER_TOKEN:
            return
        self.world.controller.change(name, contract, self.world.now_ns)
        life.contract, most = contract, life.most
        larger = TokenBucket(max(most.r_mtps, contract.r_mtps), max(most.b_ntok, contract.b_ntok))
        life.ceilings.append((self.world.now_ns, larger))

    def _settle(self, name: str) -> None:
        """See whether all cuts that a smaller contract takes are made."""
        topic = self.world.controller.topics.get(name) if self.world.controller else None
        life = self.lives[self.current[name]]
        bucket = life.contract.bucket
        if topic and life.most != bucket and within(bucket, topic.transfer.possible.values()):
            life.ceilings.append((self.world.now_ns, bucket))

    def _start(self, name: str) -> None:
        if name not in self.world.brokers:
            self.world.start_broker(name)

    def _start_controller(self) -> None:
        if self.world.controller is None:
            self.world.start_controller()

    def _heal(self) -> None:
        world = self.world
        self.faulty(False)
        world.network.cut.clear()
        for name in list(world.paused):
            world.resume_broker(name)
        self._start_controller()
        assert world.controller
        for name in list(world.controller.members):
            if name not in world.brokers:
                world.start_broker(name)
            world.controller.drain(name, world.now_ns, on=False)
        for name in self.publishers:
            if any(each.topic == name for each in world.publishers.values()):
                self._create_again(name)
        for name in self.current:
            world.controller.pause(name, world.now_ns, on=False)

    def _at(self) -> str:
        return f"{(self.world.now_ns - 10**12) / NS_PER_S:.2f}"

    def _pass(self, seconds: float, *, live: bool = False) -> None:
        """Let time pass, and look at what brokers have in force every few milliseconds."""
        steps = max(1, round(seconds / 0.05))
        for _ in range(steps):
            self.world.run(seconds / steps)
            for name in self.current:
                self._look(name, live=live)

    def _look(self, name: str, *, live: bool) -> None:
        self._settle(name)
        controller = self.world.controller
        held: defaultdict[int | None, dict[str, TokenBucket]] = defaultdict(dict)
        waiting = {}
        for broker in self.world.brokers.values():
            topic = broker.topics.get(name)
            if topic is not None and broker.name not in self.world.paused:
                waiting[broker.name] = len(topic.waiting)
                if topic.limiter:
                    held[self._birth(broker, name)][broker.name] = topic.limiter.bucket
        birth = self.current[name]
        for each, shares in held.items():
            if each is not None and each in self.lives and not within(self.lives[each].most, shares.values()):
                self.overdrawn.append(
                    f"{self._at()} s {name}, birth {each}: {_texts(shares)} of {self.lives[each].most}"
                )
        # While a contract opens, what may be out of it and of the one before is no more than the larger of them. Shares
        # of older ones do not count: when the one before opened, their brokers had been cut off for a lease (ADR 16).
        known = controller.topics.get(name) if controller else None
        if known and known.opened:
            self.opened[name] = known.birth
        oldest = self.opened.get(name, 0)
        counted = [each for each in held if each is not None and each in self.lives and each >= oldest]
        known_lives = [self.lives[each].most for each in counted]
        if known and not known.opened and known_lives:
            largest = TokenBucket(max(m.r_mtps for m in known_lives), max(m.b_ntok for m in known_lives))
            everything = [share for each in counted for share in held[each].values()]
            if not within(largest, everything):
                self.overdrawn.append(f"{self._at()} s {name}, all births: {[str(s) for s in everything]} of {largest}")
        missing = short(self.lives[birth].contract.bucket, held[birth], waiting)
        if missing is None or not live:
            self.short_since.pop(name, None)
        elif self.world.now_ns - self.short_since.setdefault(name, self.world.now_ns) > MOVING_NS:
            self.starved.append(f"{self._at()} s {name}: {missing}: {_texts(held[birth])}, waiting {waiting}")

    def _birth(self, broker: VirtualBroker, name: str) -> int | None:
        """Which contract a broker has a share of; whoever cannot tell has one of that which is meant now."""
        known = self.world.controller.topics.get(name) if self.world.controller else None
        if not self.identity:
            return self.current[name] if known and known.opened else None
        return broker.control.birth(name)

    def _served(self, name: str, began_ns: int) -> float:
        whole = Limiter(self.lives[self.current[name]].contract.bucket, began_ns, 0)
        ideal = [whole.admit(at) for at in self.world.record.arrivals.get(name, ()) if at >= began_ns]
        most = sum(release_ns <= self.world.now_ns for release_ns in ideal)
        released = sum(release_ns > began_ns for release_ns, _, _ in self.world.record.releases.get(name, ()))
        return released / most if most else 1.0

    def _excess(self, birth: int) -> float:
        times = np.array(sorted(self.world.record.released_under.get(birth, ())), np.int64)
        if not len(times):
            return -1.0
        (_, first), *changes = self.lives[birth].ceilings
        return float(largest_excess(times, Timeline(first, tuple(changes))).tokens)


def _texts(shares: dict[str, TokenBucket]) -> str:
    return str({name: str(share) for name, share in shares.items()})
