"""Several controllers in virtual time: the real controller and the real lease, over a bucket that refuses stale writes.

In: a seed, faults of controllers: killed, paused, cut off from the store or from brokers. Out: the record of
`VirtualCluster`. Every controller has a clock of its own, which is off and runs a little too fast or too slow.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from srtm.control.controller import Controller
from srtm.control.keeping.keeper import Leader
from srtm.control.keeping.lease import Claim, Held, Observed
from srtm.control.store import Store
from srtm.protocol import exchange
from srtm.testing.virtual import VirtualCluster
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from srtm.control.options import ControllerOptions
    from srtm.model.broker_models import ServiceModel

_AGAIN_NS = 700 * NS_PER_MS  # until a write without an answer is sent again
_CLOCKS = 0.015  # by which part clocks run too fast or too slow

Changes = list[tuple[str, bytes | None]]


class VirtualBucket:
    """Values by key, and the leader's claim; a write names the last message, or it is refused."""

    def __init__(self, *, guarded: bool = True) -> None:
        """Without `guarded`, every write is taken, except a claim alone."""
        self.guarded = guarded
        self.last = 0
        self.values: dict[str, bytes] = {}
        self.claim: tuple[int, Claim | None] = (0, None)
        self._marks: dict[int, object] = {}

    def store(self, changes: Changes, claim: Claim | None, last: int, mark: object) -> int | None:
        """Take changes and a claim, all or none; the number of the last message then, or None if refused."""
        if (self.guarded or not changes) and last != self.last:
            sequence = last + len(changes) + (claim is not None)
            return sequence if self._marks.get(sequence) is mark else None
        for key, value in changes:
            self.last += 1
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value
        if claim is not None:
            self.last += 1
            self.claim = self.last, claim
        self._marks[self.last] = mark
        return self.last


class VirtualKeeper:
    """The bucket as the leader has it."""

    place = "virtual"
    lasting = shared = True
    guarded = False

    def __init__(self, process: VirtualProcess, claim: Claim, last: int) -> None:
        self.claim = claim
        self.gone = False
        self.held = Held(claim.lease_ns)
        self.appended = self.stored = 0  # counts of changes
        self._process = process
        self._last = last
        self._kept = dict(process.world.bucket.values)
        self._queue: Changes = []
        self._busy = False
        self._beat_ns = 0

    @property
    def leads(self) -> bool:
        """Whether the process may act now."""
        return not self.gone and self.held.holds(self._process.clock_ns)

    def read(self, prefix: str = "") -> dict[str, bytes]:
        """All documents whose keys begin with `prefix`."""
        return {key: value for key, value in self._kept.items() if key.startswith(prefix)}

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Store these documents soon."""
        for key, value in changes.items():
            if value is not None:
                self._kept[key] = value
            else:
                self._kept.pop(key, None)
            self._queue.append((key, value))
            self.appended += 1
        self.send()

    async def committed(self) -> None:
        """Nothing waits in virtual time; `VirtualControllers` looks at `stored`."""
        raise AssertionError

    confirm = lost = release = committed

    def close(self) -> None:
        """Store nothing more."""
        self.gone = True

    def send(self) -> None:
        """Send what waits, and the lease if it is time."""
        now_ns = self._process.clock_ns
        due = now_ns - self._beat_ns >= self.held.beat_s * NS_PER_S
        if self._busy or self.gone or not (due or self._queue):
            return
        claim = replace(self.claim, beat=self.claim.beat + 1) if due else None
        if claim is not None:
            self.claim, self._beat_ns = claim, now_ns
        changes, self._queue, self._busy = self._queue, [], True
        self._attempt(changes, claim, now_ns, object())

    def _attempt(self, changes: Changes, claim: Claim | None, sent_ns: int, mark: object) -> None:
        world, process = self._process.world, self._process
        settled = False

        def arrive() -> None:
            if process.cut or self.gone:
                return
            found = world.bucket.store(changes, claim, self._last, mark)
            world.at(world.store_delay_ns(), answer, found)

        def answer(found: int | None) -> None:
            nonlocal settled
            if process.cut or self.gone or settled:
                return
            if process.paused:
                world.at(NS_PER_S // 10, answer, found)
                return
            settled = True
            if found is None:
                self.gone = True
                process.ended(self)
                return
            self._last, self._busy = found, False
            self.stored += len(changes)
            if claim is not None:
                self.held.written(sent_ns)
            process.progressed()
            self.send()

        def again() -> None:
            if not settled and not self.gone:
                if process.paused or not process.alive:
                    world.at(_AGAIN_NS, again)
                else:
                    arrive()
                    world.at(_AGAIN_NS, again)

        world.at(world.store_delay_ns(), arrive)
        world.at(_AGAIN_NS, again)


class VirtualProcess:
    """One controller process: ready, or leading."""

    def __init__(self, name: str, world: VirtualControllers) -> None:
        self.name = name
        self.world = world
        self.alive = True
        self.paused = False
        self.cut = False  # from the store
        self.mute = False  # from brokers
        self.keeper: VirtualKeeper | None = None
        self.controller: Controller | None = None
        self.outbox: list[tuple[int, str, exchange.Exchange]] = []  # after how many stored changes, to whom, what
        self._speed = 1 + random.Random(world.rng.random()).uniform(-_CLOCKS, _CLOCKS)
        self._skew_ns = world.rng.randrange(10**15)
        self._lease_ns = round(world.options.leader_lease_s * NS_PER_S)
        self._observed = Observed(self._lease_ns)

    @property
    def clock_ns(self) -> int:
        """Its own clock."""
        return round(self.world.now_ns * self._speed) + self._skew_ns

    @property
    def leads(self) -> bool:
        """Whether it leads, runs, and has a controller at work."""
        return (
            self.alive and not self.paused and self.controller is not None and bool(self.keeper and self.keeper.leads)
        )

    def step(self) -> None:
        """Time has passed."""
        if not self.alive or self.paused:
            return
        if self.keeper is not None:
            self.keeper.send()
        elif not self.cut:
            self.world.at(self.world.store_delay_ns(), self._saw, self.world.bucket.last, *self.world.bucket.claim)

    def _saw(self, last: int, revision: int, claim: Claim | None) -> None:
        if not self.alive or self.paused or self.cut or self.keeper is not None:
            return
        self._observed.see(revision, claim, self.clock_ns)
        if self._observed.ended(self.clock_ns):
            mine = Claim(Leader(self.name, ""), f"{self.name} {self.world.now_ns}", self._lease_ns)
            self.world.at(self.world.store_delay_ns(), self._claim, mine, last, self.clock_ns)

    def _claim(self, claim: Claim, last: int, sent_ns: int) -> None:
        if not self.alive or self.cut or self.keeper is not None:
            return
        found = self.world.bucket.store([], claim, last, object())
        if found is None or self.paused:
            return
        self.keeper = VirtualKeeper(self, claim, found)
        self.keeper.held.written(sent_ns)
        self.controller = Controller(self.world.options, Store(keeper=self.keeper), self.world.now_ns)
        self.controller.watch(lambda _: self.world.news(self))
        self.world.took_over(self)

    def ended(self, keeper: VirtualKeeper) -> None:
        """Another process leads."""
        if keeper is self.keeper:
            self.keeper = self.controller = None
            self.outbox.clear()
            self._observed = Observed(self._lease_ns)
            self.world.refresh()

    def progressed(self) -> None:
        """Something was stored: send what waited for it."""
        assert self.keeper is not None
        ready = [each for each in self.outbox if each[0] <= self.keeper.stored]
        self.outbox = [each for each in self.outbox if each[0] > self.keeper.stored]
        for _, name, said in ready:
            self.world.send(self, name, said)

    def kill(self) -> None:
        """End the process with all it had not stored."""
        self.alive = False
        if self.keeper is not None:
            self.keeper.close()
        self.keeper = self.controller = None
        self.outbox.clear()
        self.world.refresh()


class VirtualControllers(VirtualCluster):
    """Controllers, brokers and publishers; `controller` is that of the process that leads."""

    def __init__(
        self,
        seed: int,
        options: ControllerOptions,
        brokers: int = 3,
        service: ServiceModel | None = None,
        *,
        controllers: int = 3,
        guarded: bool = True,
    ) -> None:
        self.bucket = VirtualBucket(guarded=guarded)
        self.processes: list[VirtualProcess] = []
        self._controllers = controllers
        super().__init__(seed, options, Store(), brokers, service)

    def store_delay_ns(self) -> int:
        """How long a message to or from the store is under way."""
        return self.rng.randrange(NS_PER_MS // 2, 20 * NS_PER_MS)

    def start_controller(self, first_epoch: int = 1) -> None:
        """Start every process that does not run."""
        del first_epoch
        self.processes = [each for each in self.processes if each.alive]
        while len(self.processes) < self._controllers:
            self.processes.append(VirtualProcess(f"controller-{self.rng.randrange(10**9)}", self))

    def kill_controller(self) -> None:
        """End the process that leads."""
        for process in self.processes:
            if process.controller is not None and process.controller is self.controller:
                process.kill()

    def took_over(self, process: VirtualProcess) -> None:
        """A process leads: brokers are registered with all of them."""
        self.refresh()
        assert process.controller is not None
        for name in self.brokers:
            self._join(process.controller, name)

    def refresh(self) -> None:
        """Find the process that leads."""
        found = [process.controller for process in self.processes if process.leads]
        self.controller = found[-1] if found else None

    def news(self, process: VirtualProcess) -> None:
        """A controller has something to say."""
        if process.controller is self.controller:
            self._wake()

    def send(self, process: VirtualProcess, name: str, said: exchange.Exchange) -> None:
        """Send an exchange that the store knows all about."""
        assert process.controller is not None
        if not process.mute and not self.network.loses(name):
            for _ in range(self.network.copies()):
                self.at(self.network.delay_ns(), self._exchange, process.controller, name, exchange.write(said))

    def _join(self, controller: Controller, name: str) -> None:
        if name in self.brokers and name not in self.network.cut:
            options = self.brokers[name].options
            controller.joined(name, "127.0.0.1", options.tcp_port, options.http_port, self.now_ns)

    def _tick(self) -> None:
        for process in self.processes:
            process.step()
        self.refresh()
        super()._tick()

    def _speak(self, controller: Controller) -> None:
        """Compose all exchanges that are due; each is sent when the store has everything before it."""
        process = next((each for each in self.processes if each.controller is controller), None)
        if process is None or not process.leads:
            return
        assert process.keeper is not None
        for name in list(controller.members):
            if controller.due(name, self._last_sent.get(name, 0), self.now_ns):
                self._last_sent[name] = self.now_ns
                process.outbox.append((process.keeper.appended, name, controller.compose(name)))
        process.progressed()

    def _answered(self, controller: Controller, name: str, said: exchange.Exchange, text: bytes) -> None:
        process = next((each for each in self.processes if each.controller is controller), None)
        if process is None or process.mute or name in self.network.cut:
            return
        if process.paused:
            self.at(NS_PER_S // 10, self._answered, controller, name, said, text)
            return
        controller.heard(name, said, exchange.read(text, exchange.Answer), self.now_ns)
        if controller.urgent:
            self.news(process)
