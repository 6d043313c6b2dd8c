"""`python -m bench.opening [virtual|live]`: how soon all of r is in force after PUT, and how long messages wait.

Four brokers, 200 publishers that send 1,000 messages a second, under (1300/s, 200). In virtual time, exchanges take 0.1
to 5 ms each way. Each run has a seed, and PUT comes at any phase of the controller's second.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from bench import host
from bench.measure import show
from srtm.broker.message import Message
from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.control.topic import ManagedTopic
from srtm.model.bucket import TokenBucket
from srtm.model.split import within
from srtm.protocol.exchange import Contract
from srtm.testing.virtual import VirtualCluster
from srtm.units import NS_PER_MS, NS_PER_S

TOPIC = "traffic"
BROKERS, PUBLISHERS, RATE_MPS = 4, 200, 5.0
BUCKET = TokenBucket.of(1300, 200)
MCAP_MPS = 600.0  # so `srtm` needs two brokers
FIRST_S = 3.0  # after PUT, whose messages count
STEP_S = 0.0005  # between two looks
ENOUGH, PART = 0.99, 0.5  # of r at chosen brokers together, and of its part at each of them
POLICIES = ("srtm", "lb")


def publishers() -> list[DeclaredPublisher]:
    return [DeclaredPublisher(f"p{number}", RATE_MPS, f"g{number // 4}") for number in range(PUBLISHERS)]


@dataclass
class Opened:
    """What a run came to."""

    in_force_s: float | None = None  # since PUT
    dips_s: float = 0.0  # that less was in force afterwards
    exceeded: bool = False  # more than the contract was in force, ever
    delays_ms: list[float] = field(default_factory=list)  # of messages that arrived in the first seconds

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.delays_ms, 99)) if self.delays_ms else 0.0

    @property
    def worst_ms(self) -> float:
        return max(self.delays_ms, default=0.0)


class Opening(VirtualCluster):
    """A cluster in which a contract opens."""

    def __init__(self, seed: int, policy: str) -> None:
        super().__init__(seed, ControllerOptions(mcap_mps=MCAP_MPS), Store(), BROKERS)
        self.contract = Contract(BUCKET.r_mtps, BUCKET.b_ntok, policy=policy, fit="none")
        self.put_ns = 0
        self.stopped: set[str] = set()  # nothing there is usable
        self._delays_ms: list[float] = []
        self.run(2 + random.Random(seed).random())

    def put(self, *, declared: bool = False) -> ManagedTopic:
        """Put the topic under contract, perhaps with its publishers."""
        assert self.controller
        self.put_ns = self.now_ns
        topic = self.controller.create(TOPIC, self.contract, self.now_ns)
        if declared:
            self.controller.register(TOPIC, publishers(), self.now_ns)
            self.controller.gather(TOPIC, self.now_ns)
        return topic

    def released(self, topic: str, broker: str, message: Message, birth: int | None) -> None:
        super().released(topic, broker, message, birth)
        self._count(message.arrival_ns, message.release_ns)

    def _count(self, arrival_ns: int, release_ns: int) -> None:
        if self.put_ns and 0 <= arrival_ns - self.put_ns < FIRST_S * NS_PER_S:
            self._delays_ms.append((release_ns - arrival_ns) / NS_PER_MS)

    def look(self, topic: ManagedTopic, found: Opened, seconds: float) -> None:
        """Let time pass, and see what is in force."""
        for _ in range(round(seconds / STEP_S)):
            self.run(STEP_S)
            shares = self.in_force(topic)
            found.exceeded = found.exceeded or not within(BUCKET, shares.values())
            if self._serves(topic, shares):
                if found.in_force_s is None:
                    found.in_force_s = (self.now_ns - self.put_ns) / NS_PER_S
            elif found.in_force_s is not None:
                found.dips_s += STEP_S

    def in_force(self, topic: ManagedTopic) -> dict[str, TokenBucket]:
        """Shares of this contract, at the brokers themselves."""
        return {
            name: limiter.bucket
            for name, broker in self.brokers.items()
            if broker.control.birth(TOPIC) == topic.birth
            and TOPIC in broker.topics
            and (limiter := broker.topics[TOPIC].limiter)
        }

    def _serves(self, topic: ManagedTopic, shares: dict[str, TokenBucket]) -> bool:
        place, running = topic.layout.place, self.brokers.keys() - self.stopped
        chosen = place.brokers & running
        there = {name: shares[name].r if name in shares else 0.0 for name in chosen or running}
        return sum(there.values()) >= ENOUGH * BUCKET.r and all(
            there[name] >= PART * BUCKET.r * len(place.at(name)) / len(place) for name in chosen
        )

    def finish(self, found: Opened) -> Opened:
        """What still waits has waited until now."""
        for name, broker in self.brokers.items():
            if name not in self.stopped and TOPIC in broker.topics:
                for message in broker.topics[TOPIC].gate.waiting:
                    self._count(message.arrival_ns, self.now_ns)
        found.delays_ms = self._delays_ms
        return found


def named_before(world: Opening, found: Opened) -> None:
    """PUT names the publishers; they connect 50 ms later."""
    topic = world.put(declared=True)
    world.look(topic, found, 0.05)
    world.publish(TOPIC, publishers())
    world.look(topic, found, FIRST_S)


def sending_already(world: Opening, found: Opened) -> None:
    """Publishers send without a contract, wherever they like; PUT does not name them."""
    world.publish(TOPIC, publishers())
    world.run(3)
    world.look(world.put(), found, FIRST_S)


def sending_and_named(world: Opening, found: Opened) -> None:
    """The same, and PUT names them, so they are sent to other brokers."""
    world.publish(TOPIC, publishers())
    world.run(3)
    world.look(world.put(declared=True), found, FIRST_S)


def connect_at_once(world: Opening, found: Opened) -> None:
    """PUT names nobody; publishers ask for their places in the same instant, and connect."""
    topic = world.put()
    world.publish(TOPIC, publishers())
    world.look(topic, found, FIRST_S)


def created_again(world: Opening, found: Opened) -> None:
    """DELETE and PUT at once, while publishers send."""
    assert world.controller
    world.put(declared=True)
    world.publish(TOPIC, publishers())
    world.run(8)
    world.controller.remove(TOPIC, world.now_ns)
    world.look(world.put(), found, FIRST_S)


def register_later(world: Opening, found: Opened) -> None:
    """The contract is a second old when publishers register; they connect 1 ms later. Timed from there."""
    assert world.controller
    topic = world.put()
    world.run(1)
    world.put_ns = world.now_ns
    world.controller.register(TOPIC, publishers(), world.now_ns)
    world.look(topic, found, 0.001)
    world.publish(TOPIC, publishers())
    world.look(topic, found, FIRST_S)


def stopped(before_s: float, *, declared: bool = False) -> Callable[[Opening, Opened], None]:
    """A broker stands still, from so long before PUT; publishers connect 20 ms after it."""

    def case(world: Opening, found: Opened) -> None:
        world.stopped.add("broker-2")
        world.pause_broker("broker-2", 60 * NS_PER_S)
        world.run(before_s)
        topic = world.put(declared=declared)
        world.run(0.02)
        world.publish(TOPIC, publishers())
        world.look(topic, found, 2 * FIRST_S)

    return case


CASES: dict[str, Callable[[Opening, Opened], None]] = {
    "named by PUT, connect later": named_before,
    "sending before PUT": sending_already,
    "sending before PUT, which names them": sending_and_named,
    "connect at once after PUT": connect_at_once,
    "deleted and created again": created_again,
    "register when it is open, connect after 1 ms": register_later,
    "a broker stops at PUT": stopped(0.0),
    "a broker stopped 2 s before PUT": stopped(2.0),
    "a broker stopped 2 s before PUT, which names publishers": stopped(2.0, declared=True),
    "a broker stops at PUT, which names publishers": stopped(0.0, declared=True),
}


def opened(case: str, policy: str, seed: int) -> Opened:
    """One run."""
    world, found = Opening(seed, policy), Opened()
    CASES[case](world, found)
    return world.finish(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.opening", description=__doc__)
    parser.add_argument("part", nargs="?", choices=["virtual", "live"], default="virtual")
    parser.add_argument("--runs", type=int, help="of each case (default: 20 virtual, 5 live)")
    options = parser.parse_args()
    if options.part == "live":
        from bench import opening_live

        print(host.describe(0), flush=True)
        return report("with processes", opening_live.CASES, opening_live.measured, options.runs or 5)
    return report("in virtual time", CASES, opened, options.runs or 20)


def report(title: str, cases: Iterable[str], run: Callable[[str, str, int], Opened], runs: int) -> int:
    """Print the table; 1 if more than the contract was ever in force."""
    rows, exceeded = [], 0
    for case in cases:
        for policy in POLICIES:
            found = [run(case, policy, seed) for seed in range(runs)]
            times = [np.inf if each.in_force_s is None else 1000 * each.in_force_s for each in found]
            exceeded += sum(each.exceeded for each in found)
            numbers = [
                np.median(times),
                max(times),
                1000 * max(each.dips_s for each in found),
                np.median([each.p99_ms for each in found]),
                np.median([each.worst_ms for each in found]),
                max(each.worst_ms for each in found),
            ]
            rows.append([case, policy, *(f"{each:,.1f}" if np.isfinite(each) else "never" for each in numbers)])
    print(f"{runs} runs each, in ms. In force: from PUT until {ENOUGH:.0%} of r is where publishers are placed")
    print("dips: how long less was in force later")
    print(f"access: delay of messages of the first {FIRST_S:g} s, p99 and longest of each run")
    columns = ["case", "policy", "in force", "worst", "dips, worst", "p99 access", "longest", "worst"]
    show(f"Opening a contract, {title}", columns, rows)
    print(f"runs in which more than the contract was in force: {exceeded}")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
