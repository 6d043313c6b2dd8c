"""Three controllers in virtual time: killed, paused and cut off at seeded moments, with brokers failing, too."""

from __future__ import annotations

import os

import pytest

from srtm.control.keeping.lease import LEASE_S as LEADER_S
from srtm.control.options import ControllerOptions
from srtm.testing.controllers import VirtualControllers
from srtm.testing.virtual import VirtualCluster
from srtm.units import NS_PER_S
from tests.control.faults import FAULTS, LEASE_S, Run

SEEDS = int(os.environ.get("SRTM_SEEDS", "20"))
NEW_LEADER_S = 5.0
WAYS = ("kill", "pause", "store", "brokers", "store and brokers")


class RunControllers(Run):
    """A run in which most faults are of controllers."""

    world: VirtualControllers

    def __init__(self, seed: int, *, guarded: bool = True) -> None:
        self.guarded = guarded
        self.without_s = 0.0  # the longest time without a leader while two of three could lead
        self.leaders: set[str] = set()
        self._since_ns: int | None = None
        super().__init__(seed)

    def cluster(self, kind: type[VirtualCluster]) -> VirtualCluster:
        del kind
        chosen = ControllerOptions(lease_s=LEASE_S * 3, mcap_mps=self.rng.choice([60.0, 120.0, 400.0]))
        world = VirtualControllers(self.seed, chosen, self.rng.choice([2, 3, 4]), guarded=self.guarded)
        world.run(2.0)
        return world

    def actions(self) -> tuple[str, ...]:
        return (*FAULTS, "controller", "controller", "controller", "controller", "move", "drain", "hold", "fit")

    def _fault(self, kind: str, name: str, names: list[str]) -> None:
        if kind != "controller":
            super()._fault(kind, name, names)
            return
        world, rng = self.world, self.rng
        leads = [each for each in world.processes if each.leads]
        victim = leads[0] if leads and rng.random() < 0.8 else rng.choice(world.processes)
        way, until_ns = rng.choice(WAYS), rng.randrange(1, 8 * NS_PER_S)
        self.faults.append(f"  {way} {victim.name}")
        if way == "kill":
            victim.kill()
            world.at(until_ns, world.start_controller)
        elif way == "pause":
            victim.paused = True
            world.at(until_ns, setattr, victim, "paused", False)
        for what, part in (("store", "cut"), ("brokers", "mute")):
            if what in way:
                setattr(victim, part, True)
                world.at(until_ns, setattr, victim, part, False)
        world.refresh()

    def _pass(self, seconds: float, *, live: bool = False) -> None:
        steps = max(1, round(seconds / 0.05))
        for _ in range(steps):
            super()._pass(seconds / steps, live=live)
            able = [each for each in self.world.processes if each.alive and not each.paused and not each.cut]
            leads = [each for each in self.world.processes if each.leads]
            assert len(leads) <= 1 or not self.guarded, [each.name for each in leads]
            self.leaders |= {each.name for each in leads}
            if leads or len(able) < 2:
                self._since_ns = None
            else:
                self._since_ns = self._since_ns or self.world.now_ns
                self.without_s = max(self.without_s, (self.world.now_ns - self._since_ns) / NS_PER_S)

    def _heal(self) -> None:
        world = self.world
        for process in world.processes:
            process.paused = process.cut = process.mute = False
        world.start_controller()
        for _ in range(100):
            if world.controller is not None:
                break
            self._pass(0.05)
        super()._heal()

    def _start_controller(self) -> None:
        """They are started one by one."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_to_controllers_the_contract_holds_and_one_leads(seed: int) -> None:
    run = RunControllers(seed)
    outcome = run.go()
    assert outcome.holds, outcome
    assert run.without_s < NEW_LEADER_S, (run.without_s, outcome)


def test_most_runs_have_more_than_one_leader() -> None:
    """So they say something about taking over."""
    runs = [RunControllers(seed) for seed in range(5)]
    for each in runs:
        each.go()
    assert sum(len(each.leaders) > 1 for each in runs) >= 4
    assert max(each.without_s for each in runs) > LEADER_S / 2


@pytest.mark.parametrize("seed", [29, 64])
def test_without_the_condition_on_writes_a_contract_is_overdrawn(seed: int) -> None:
    """These runs can fail: a stale leader whose writes are stored spoils the books of the next one."""
    assert RunControllers(seed, guarded=False).go().overdrawn
    assert RunControllers(seed).go().holds
