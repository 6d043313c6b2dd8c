"""One run of a cluster in virtual time with faults, all of it from one integer."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import numpy as np

from srtm.control.members import Declared
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.model.bucket import Limiter, TokenBucket
from srtm.model.split import within
from srtm.model.timeline import Timeline, largest_excess
from srtm.protocol.exchange import Contract
from srtm.testing.virtual import VirtualCluster
from srtm.units import NANO_PER_TOKEN, NS_PER_MS, NS_PER_S

LEASE_S = 3.0
LAST_S = 20.0


@dataclass
class Outcome:
    """What a run came to; `worst_tokens` is how far the worst window of any topic was above its contract."""

    seed: int
    faults: list[str]
    messages: int
    released: int
    overdrawn: list[str]
    worst_tokens: float
    served: dict[str, float]  # in the last seconds: released, of what one bucket that began empty would have released
    fits: int


def options(rng: random.Random) -> ControllerOptions:
    return ControllerOptions(lease_s=LEASE_S, mcap_mps=rng.choice([60.0, 120.0, 400.0]), seed=rng.randrange(100))


class Run:
    """A cluster, its topics, and what goes wrong."""

    def __init__(self, seed: int, *, seconds: float = 25.0) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.seconds = seconds
        self.world = VirtualCluster(seed, options(self.rng), Store(), brokers=self.rng.choice([2, 3, 4]))
        self.contracts: dict[str, Contract] = {}
        self.ceilings: dict[str, list[tuple[int, TokenBucket]]] = {}  # what may be out, and since when
        self.faults: list[str] = []
        self.overdrawn: list[str] = []

    def go(self) -> Outcome:
        world = self.world
        world.run(1.0)
        for number in range(self.rng.choice([1, 1, 2])):
            self._create(f"topic-{number}")
        self.faulty(True)
        end = world.now_ns + self.seconds * NS_PER_S
        while world.now_ns < end:
            self._one_fault()
            self._pass(self.rng.uniform(0.2, 3.0))
        self._heal()
        self._pass(3 * LEASE_S)
        began_ns = world.now_ns
        self._pass(LAST_S)
        served = {name: self._served(name, began_ns) for name in self.contracts}
        return Outcome(
            self.seed,
            self.faults,
            sum(publisher.sent for publisher in world.publishers.values()),
            sum(len(times) for times in world.releases.values()),
            self.overdrawn,
            max(self._excess(name) for name in self.contracts),
            served,
            sum(topic.fitted is not None for topic in world.controller.topics.values()) if world.controller else 0,
        )

    def _create(self, name: str) -> None:
        rng, world = self.rng, self.world
        count, rate = rng.randrange(4, 24), rng.choice([2.0, 5.0, 10.0])
        r = max(1.0, count * rate * rng.choice([0.6, 1.1, 1.5]))  # some send more than they may
        b = rng.choice([8, 20, 60])
        contract = Contract(
            round(r * 1000), b * NANO_PER_TOKEN, policy=rng.choice(["srtm", "lb", "max_min"]), fit="measure"
        )
        self.contracts[name] = contract
        self.ceilings[name] = [(0, contract.bucket)]
        assert world.controller
        world.controller.create(name, contract, world.now_ns)
        self._pass(1.0)  # before it begins, messages pass freely
        assert world.controller.topics[name].opened
        batch = rng.choice([1, 3])
        world.publish(name, [Declared(f"{name}-{i}", rate, f"g{i // 4}", batch=batch) for i in range(count)])
        self._pass(1.0)
        if rng.random() < 0.5:
            world.controller.fit(name, world.now_ns)

    def faulty(self, on: bool) -> None:
        world, rng = self.world, self.rng
        world.loss = rng.choice([0.0, 0.1, 0.4]) if on else 0.0
        world.doubling = rng.choice([0.0, 0.3]) if on else 0.0
        world.longest_delay_ns = rng.choice([5, 200, 4_000]) * NS_PER_MS if on else 5 * NS_PER_MS

    def _one_fault(self) -> None:
        world, rng = self.world, self.rng
        kinds = ["kill", "pause", "cut", "controller", "nothing", "shift", "move", "drain", "contract"]
        kind = rng.choice(kinds)
        names = sorted(world.brokers)
        name = rng.choice(names)
        self.faults.append(f"{(world.now_ns - 10**12) / NS_PER_S:.2f} {kind} {name}")
        if kind == "kill" and len(names) > 1:
            world.kill_broker(name, noticed=rng.random() < 0.5)
            world.at(rng.randrange(6 * NS_PER_S), self._start, name)
        elif kind == "pause":
            world.pause_broker(name, rng.randrange(1, 6 * NS_PER_S))
        elif kind == "cut":
            world.cut.add(name)
            world.at(rng.randrange(1, 9 * NS_PER_S), world.cut.discard, name)
        elif kind == "controller" and world.controller:
            world.kill_controller()
            world.at(rng.randrange(1, 6 * NS_PER_S), self._start_controller)
        elif kind == "shift":
            for publisher in world.publishers.values():
                if rng.random() < 0.5:
                    world._connect(publisher, rng.choice(names))
        elif world.controller and kind == "move":
            topic = rng.choice(sorted(world.controller.topics))
            if world.controller.members[name].usable:
                some = rng.sample(sorted(world.controller.topics[topic].publishers), 2)
                world.controller.move(topic, some, name, world.now_ns)
        elif world.controller and kind == "contract":
            self._change(rng.choice(sorted(self.contracts)))
        elif world.controller and kind == "drain" and name in world.controller.members:
            world.controller.drain(name, world.now_ns, on=not world.controller.members[name].draining)

    def _change(self, name: str) -> None:
        """Another contract: what may be out is the larger of both until the controller says that all cuts are made."""
        assert self.world.controller
        before, now = self.contracts[name], self.rng.choice([0.5, 0.8, 1.5])
        contract = msgspec.structs.replace(before, r_mtps=round(before.r_mtps * now), b_ntok=round(before.b_ntok * now))
        if contract.b_ntok < 4 * NANO_PER_TOKEN:
            return
        self.world.controller.change(name, contract, self.world.now_ns)
        self.contracts[name], (_, most) = contract, self.ceilings[name][-1]
        larger = TokenBucket(max(most.r_mtps, contract.r_mtps), max(most.b_ntok, contract.b_ntok))
        self.ceilings[name].append((self.world.now_ns, larger))

    def _settle(self, name: str) -> TokenBucket:
        """What may be out now."""
        topic = self.world.controller.topics.get(name) if self.world.controller else None
        (_, most), bucket = self.ceilings[name][-1], self.contracts[name].bucket
        if topic and most != bucket and within(bucket, topic.transfer.possible.values()):
            self.ceilings[name].append((self.world.now_ns, bucket))
            return bucket
        return most

    def _start(self, name: str) -> None:
        if name not in self.world.brokers:
            self.world.start_broker(name)

    def _start_controller(self) -> None:
        if self.world.controller is None:
            self.world.start_controller()

    def _heal(self) -> None:
        world = self.world
        self.faulty(False)
        world.cut.clear()
        for name in list(world.paused):
            world.resume_broker(name)
        self._start_controller()
        assert world.controller
        for name in list(world.controller.members):
            if name not in world.brokers:
                world.start_broker(name)
            world.controller.drain(name, world.now_ns, on=False)

    def _pass(self, seconds: float) -> None:
        """Let time pass, and look at what brokers have in force every few milliseconds."""
        steps = max(1, round(seconds / 0.05))
        for _ in range(steps):
            self.world.run(seconds / steps)
            for name in self.contracts:
                most = self._settle(name)
                held = [
                    topic.limiter.bucket
                    for broker in self.world.brokers.values()
                    if broker.name not in self.world.paused and (topic := broker.topics.get(name)) and topic.limiter
                ]
                if not within(most, held):
                    at = (self.world.now_ns - 10**12) / NS_PER_S
                    self.overdrawn.append(f"{at:.2f} s {name}: {[str(share) for share in held]} of {most}")

    def _served(self, name: str, began_ns: int) -> float:
        whole = Limiter(self.contracts[name].bucket, began_ns, 0)
        ideal = [whole.admit(at) for at in self.world.arrivals.get(name, ()) if at >= began_ns]
        most = sum(release_ns <= self.world.now_ns for release_ns in ideal)
        released = sum(release_ns > began_ns for release_ns, _, _ in self.world.releases.get(name, ()))
        return released / most if most else 1.0

    def _excess(self, name: str) -> float:
        times = np.array(sorted(time for time, _, _ in self.world.releases.get(name, ())), np.int64)
        if not len(times):
            return -1.0
        (_, first), *changes = self.ceilings[name]
        return float(largest_excess(times, Timeline(first, tuple(changes))).tokens)
