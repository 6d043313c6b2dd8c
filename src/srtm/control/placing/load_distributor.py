"""The Load Distributor at work: one topic's fitting, driven over live brokers.

A loop without IO. `model.fitting` says what to try; a `Fit` sends publishers there, waits until they have gone and
shares have followed, measures until `model.sequential` is certain, and tells the result. What takes long to compute (a
search by prediction) is handed out as `job`, to be run beside everything else, and `resume` goes on after it.

Publishers that the search leaves unplaced for a round are parked at the broker with most room that is not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from srtm.control.placing.expected import expected
from srtm.control.topic import Fitted, Round
from srtm.errors import SRTMError
from srtm.model.fitting import Fitting, Measure, Placed
from srtm.model.latency import SLO, Sketch
from srtm.model.placement import Broker, Roster, rcap
from srtm.model.sequential import TailTest
from srtm.model.service import Background
from srtm.sim.simulate import SimulatedBroker, SimulatedCluster
from srtm.sim.simulate import Topic as SimulatedTopic
from srtm.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from srtm.control.members import Declared
    from srtm.control.topic import Topic
    from srtm.model.broker_models import ServiceModel

MOVE_S = 15.0  # after that, who has not gone is not waited for
DRAIN_S = 20.0  # after that, messages that wait for tokens are what is measured
ROUND_S = 60.0  # the longest that is measured, as in the paper
PREDICTED_ROUND_S = 40.0  # where the model was asked, too
QUIET_S = 10.0  # without a message there is nothing to be measured
_SETTLE_S = 1.0


@dataclass(slots=True)
class _Measuring:
    """A round that is being measured at one broker."""

    test: TailTest
    after: int  # the last second that does not count
    sketch: Sketch = field(default_factory=Sketch)


class Fit:
    """A fitting of a topic's publishers, or of some of them, over brokers that may carry other things, too."""

    def __init__(
        self,
        topic: Topic,
        publishers: Sequence[Declared],
        brokers: Sequence[Broker],
        service: ServiceModel,
        now_ns: int,
        *,
        predicts: bool,
        confirms: bool = False,
        seed: int = 0,
    ) -> None:
        """`confirms`: the topic is on the fewest brokers already, so see first whether the SLO holds as things are."""
        self.brokers = tuple(brokers)
        self.begun_ns = now_ns
        self.size = len(publishers)
        self.outcome: Fitted | None = None
        self.given_up = ""  # why, if it ended without an outcome
        self.rounds: list[Round] = []
        self.job: Callable[[], None] | None = None if confirms else self._begin
        self.state = "settling" if confirms else "computing"
        self._confirms = confirms
        self._confirmed = False
        self._topic = topic
        self._publishers = tuple(publishers)
        self._service = service
        self._predicts = predicts
        self._seed = seed
        self._fitting: Fitting | None = None
        self._problem = ""
        self._since_ns = now_ns
        self._round_ns = now_ns
        self._measuring: dict[str, _Measuring] = {}

    @property
    def names(self) -> frozenset[str]:
        """The brokers that it may use."""
        return frozenset(broker.name for broker in self.brokers)

    def resume(self, now_ns: int) -> None:
        """The job was done: do what the fitting says next."""
        self.job = None
        if self.given_up:
            self.state = "done"
            return
        if self._confirmed:
            self._end(len(self.rounds[-1].latency_ns), now_ns, met=True)
            return
        if self._fitting is None:
            self._end(0, now_ns, self._problem)
            return
        order = self._fitting.order
        if isinstance(order, Measure):
            self._go(order)
            self.state, self._since_ns, self._round_ns = "moving", now_ns, now_ns
        elif isinstance(order, Placed):
            self._go(order)
            self._end(order.k, now_ns, met=True)
        else:
            if order.best:
                self._go(order.best)
            self._end(order.k, now_ns, order.reason)

    def tick(self, now_ns: int, *, shares_done: bool) -> None:
        """Go on if it is time to: `shares_done` says that brokers have put in force what they should hold."""
        waited_s = (now_ns - self._since_ns) / NS_PER_S
        if self.state == "moving":
            if (shares_done and not self._topic.misplaced()) or waited_s > MOVE_S:
                self.state, self._since_ns = "settling", now_ns
        elif self.state == "settling":
            # What publishers kept while they moved has to pass first: r is little more than their rate.
            calm = not any(self._topic.seen[name].waiting for name in self._to_measure())
            if waited_s >= (_SETTLE_S if calm else DRAIN_S):
                self._start_measuring(now_ns)
        elif self.state == "measuring":
            self._measure(now_ns, waited_s)

    def _begin(self) -> None:
        try:
            self._fitting = Fitting(
                Roster(publisher.publisher for publisher in self._publishers),
                self.brokers,
                self._topic.contract.policy,
                self._topic.contract.slo_ns,
                seed=self._seed,
                max_brokers=int(self._topic.contract.bucket.b),
                predict=self._prediction() if self._predicts else None,
            )
        except SRTMError as problem:
            self._problem = str(problem)

    def _prediction(self) -> Callable[[Measure], Mapping[int, int]]:
        contract = self._topic.contract
        traffic = SimulatedTopic(
            [publisher.publisher for publisher in self._publishers],
            expected(self._publishers, self._seed),
            contract.bucket,
        )
        simulated = [
            SimulatedBroker(
                broker.name,
                broker.mcap_mps,
                self._service,
                Background(broker.allocated_mps) if broker.allocated_mps else None,
            )
            for broker in self.brokers
        ]
        return SimulatedCluster(traffic, simulated, SLO(contract.slo_ns, contract.quantile), self._seed).measure

    def _go(self, order: Measure | Placed) -> None:
        """Say where publishers belong from now on."""
        measured = order.brokers if isinstance(order, Measure) else ()
        park = max(range(len(self.brokers)), key=lambda i: (i not in measured, rcap(self.brokers[i]), -i))
        for publisher, broker in zip(self._publishers, order.broker_of.tolist(), strict=True):
            if publisher.id in self._topic.publishers:  # it may have left meanwhile
                self._topic.place[publisher.id] = self.brokers[broker if broker >= 0 else park].name
        self._topic.moving_since_ns = self._since_ns

    def _start_measuring(self, now_ns: int) -> None:
        bursts = self._topic.bursts()
        self._measuring = {
            name: _Measuring(
                TailTest(self._topic.contract.quantile, bursts.get(name, 1)), self._topic.seen[name].last_number + 1
            )
            for name in self._to_measure()
        }
        self.state, self._since_ns = "measuring", now_ns

    def _to_measure(self) -> list[str]:
        if self._confirms:
            return sorted(set(self._topic.place.values()) & self.names)
        assert self._fitting is not None
        assert isinstance(self._fitting.order, Measure)
        return [self.brokers[number].name for number in self._fitting.order.brokers]

    def _measure(self, now_ns: int, waited_s: float) -> None:
        for name, measuring in self._measuring.items():
            for second in self._topic.seen[name].seconds:
                if second.number > measuring.after:
                    measuring.after = second.number
                    measuring.test.feed(second.sent, second.over)
                    measuring.sketch.add(Sketch.read(second.total))
        tests = [measuring.test for measuring in self._measuring.values()]
        undecided = [test for test in tests if test.decision is None]
        if waited_s < QUIET_S and undecided:
            return
        longest_s = PREDICTED_ROUND_S if self._predicts else ROUND_S
        if waited_s < longest_s and any(test.sent for test in undecided):
            return
        self._tell(now_ns)

    def _tell(self, now_ns: int) -> None:
        idle = {name for name, measuring in self._measuring.items() if not measuring.test.sent}
        stuck = {name for name in idle if self._topic.seen[name].waiting}  # it has no share, or next to nothing
        if silent := sorted(idle - stuck):
            self.given_up = f"nothing was sent by way of {', '.join(silent)}, so there is nothing to be measured"
            self.state, self.job = "computing", _nothing
            return
        contract, latencies = self._topic.contract, {}
        for name, measuring in self._measuring.items():
            test = measuring.test
            met = (test.likelier if test.decision is None else test.decision) and name not in stuck
            seen_ns = measuring.sketch.quantile_ns(contract.quantile)
            # Bins are coarse; whether the limit was kept was counted exactly.
            latencies[name] = min(seen_ns, contract.slo_ns) if met else max(seen_ns, contract.slo_ns + 1)
        within = all(latency <= contract.slo_ns for latency in latencies.values())
        certain = all(measuring.test.decision is not None for measuring in self._measuring.values())
        seconds = (now_ns - self._round_ns) / NS_PER_S
        self.rounds.append(Round(self._in_use(), latencies, within, certain, seconds))
        self.state, self._round_ns = "computing", now_ns
        if self._confirms:
            self._confirms, self._confirmed = False, within
            self.job = _nothing if within else self._begin
            return
        fitting = self._fitting
        assert fitting is not None
        heard = {number: latencies[each.name] for number, each in enumerate(self.brokers) if each.name in latencies}
        self.job = lambda: fitting.tell(heard, seconds)

    def _in_use(self) -> int:
        """How many brokers carry the topic in this round."""
        if self._confirms:
            return len(self._measuring)
        assert self._fitting is not None
        assert isinstance(self._fitting.order, Measure)
        broker_of = self._fitting.order.broker_of
        return len(np.unique(broker_of[broker_of >= 0]))

    def _end(self, k: int, now_ns: int, reason: str = "", *, met: bool = False) -> None:
        self.state = "done"
        self.outcome = Fitted(
            self._topic.contract.policy,
            met,
            k,
            sum(publisher.rate_mps for publisher in self._publishers),
            tuple(self.rounds),
            (now_ns - self.begun_ns) / NS_PER_S,
            reason,
        )


def _nothing() -> None:
    """There is nothing to be computed."""
