"""Runs with faults in which several topics share brokers that take processor time, and come, go, grow and shrink."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from srtm.control.members import DeclaredPublisher
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.model.broker_models import broker_model
from srtm.testing.virtual import VirtualCluster
from srtm.units import NS_PER_MS
from tests.control.faults import ACTIONS, FAULTS, LEASE_S, Outcome, Run

# A fast host, one that a few topics keep busy, and one that they fill.
MODELS = ("20000,10000,50000", "300000,100000,100000", "1000000,200000,100000")
WRONG = (0.8, 1.0, 1.25)  # what reads really cost, of what the controller believes
CHANGES = ("come", "go", "grow", "shrink", "surge")


@dataclass
class Crowded:
    """What a run came to."""

    outcome: Outcome
    lost: list[str]  # publishers that are neither connected nor refused
    refused: dict[str, str]  # publishers without a place, and why
    moves: dict[str, int]  # orders that each publisher followed
    late_moves: dict[str, int]  # those after the last fault

    @property
    def served(self) -> bool:
        """Whether every publisher sends, or was told which neighbour is in its way."""
        return not self.lost and all("would break the SLO" in reason for reason in self.refused.values())


class Crowd(Run):
    """A run with topics that come, go, grow and shrink."""

    def cluster(self, kind: type[VirtualCluster]) -> VirtualCluster:
        rng, model = self.rng, self.rng.choice(MODELS)
        costs = broker_model(model).service
        wrong = rng.choice(WRONG)
        real = dataclasses.replace(
            costs, read_ns=round(wrong * costs.read_ns), message_ns=round(wrong * costs.message_ns)
        )
        options = ControllerOptions(lease_s=LEASE_S, broker_model=model, mcap_mps=1_000.0, seed=rng.randrange(100))
        return kind(self.seed, options, Store(), rng.choice([2, 3, 4]), real)

    def slo_ns(self) -> int:
        return self.rng.choice([5, 20, 50]) * NS_PER_MS

    def actions(self) -> tuple[str, ...]:
        return FAULTS + ACTIONS + CHANGES * 2

    def crowd(self) -> Crowded:
        outcome = self.go()
        world, controller = self.world, self.world.controller
        assert controller
        lost, refused = [], {}
        for name, each in world.publishers.items():
            topic = controller.topics.get(each.topic)
            if each.gone or each.broker is not None or topic is None:
                continue
            if name in topic.layout.refused:
                refused[name] = topic.fitting.refusal
            else:
                lost.append(name)
        moves = {name: each.moves for name, each in world.publishers.items()}
        late = {name: number - self._moves.get(name, 0) for name, number in moves.items()}
        return Crowded(outcome, lost, refused, moves, late)

    def _heal(self) -> None:
        super()._heal()
        self._moves = {name: each.moves for name, each in self.world.publishers.items()}

    def _act(self, kind: str, broker: str) -> None:
        if kind not in CHANGES:
            super()._act(kind, broker)
        elif kind == "come":
            self._come()
        elif self.current:
            topic = self.rng.choice(sorted(self.current))
            getattr(self, f"_{kind}")(topic)

    def _come(self) -> None:
        name = f"crowd-{len(self.lives)}"
        self.publishers[name] = self._new(name, self.rng.randrange(4, 40), 0)
        self._create(name, self.rng.choice([20, 60, 200]))
        self.world.publish(name, self.publishers[name])

    def _go(self, topic: str) -> None:
        self._remove(topic)
        del self.publishers[topic]
        for name, each in self.world.publishers.items():
            if each.topic == topic and not each.gone:
                self.world.leave(name)

    def _grow(self, topic: str) -> None:
        known = len(self.world.publishers)
        more = self._new(f"{topic}-{known}", self.rng.randrange(2, 12), known)
        self.publishers[topic] = [*self.publishers[topic], *more]
        self.world.publish(topic, more)

    def _shrink(self, topic: str) -> None:
        """Some leave for good, and say so."""
        controller = self.world.controller
        assert controller
        here = [name for name, each in self.world.publishers.items() if each.topic == topic and not each.gone]
        for name in self.rng.sample(here, len(here) // 3):
            self.world.leave(name)
            if name in controller.topics[topic].layout.publishers:
                controller.unregister(topic, name)

    def _surge(self, topic: str) -> None:
        """Some send more than they declared, which shares that do not adapt would not follow."""
        if not self.lives[self.current[topic]].contract.adapt:
            return
        for each in self.world.publishers.values():
            if each.topic == topic and self.rng.random() < 0.5:
                each.declared = dataclasses.replace(each.declared, rate_mps=1.5 * each.declared.rate_mps)

    def _new(self, prefix: str, count: int, first: int) -> list[DeclaredPublisher]:
        rate, batch = self.rng.choice([2.0, 5.0, 10.0]), self.rng.choice([1, 3])
        numbers = range(first, first + count)
        return [DeclaredPublisher(f"{prefix}-{number}", rate, f"g{number // 4}", batch=batch) for number in numbers]
